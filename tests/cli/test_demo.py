"""The demonstration: a real loop over HTTP, stopped, with every request accounted for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fractions import Fraction

import pytest

import layout
from budgetguard_cli import demo as command
from budgetguard_cli.demo import (
    AGENTS,
    CALLS_PER_MINUTE,
    HOURS,
    MODEL,
    Agent,
    run_agents,
    until_morning,
)
from budgetguard_cli.quickstart import NEEDS
from budgetguard_core import Price, PriceBook
from budgetguard_core.kit import TokenUsage, end_run
from budgetguard_loop import run_bounded
from budgetguard_loop.scripted import scripted_model

(LOOP,) = (agent for agent in AGENTS if agent.name == "loop")


def in_words(text):
    return " ".join(text.split())


# The command


@pytest.mark.slow
def test_the_demonstration_stops_every_runaway_and_the_model_agrees(budgetguard_process):
    done = budgetguard_process("demo")
    text = done.stdout.decode()
    assert done.returncode == 0, text
    shown = [agent for agent in AGENTS if agent.is_installed()]
    words = in_words(text)
    assert words.count("nudge to the model: You have called search") >= len(shown)
    assert words.count("stopped: no_progress") == len(shown)
    assert words.count("stopped: max_cost_usd") == len(shown)
    assert words.count("outcome: terminated") == 2 * len(shown)
    assert words.count("model calls: 4 counted by the guard, 4 by the model") == len(shown)
    assert "By 08:00: from 23:00 on" in words
    assert "FAILED" not in words
    table = text.partition("runaway in ")[2].splitlines()[1:]
    assert [row.split("  ")[0] for row in table[: len(shown)]] == [one.title for one in shown]
    assert all(re.search(r" \d+ +\$0\.\d{4} +\$[\d,]{5,}", row) for row in table[: len(shown)])
    assert f"budgetguard quickstart {shown[0].name} -o agent.py" in words


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["40", "200"])
def test_without_a_terminal_the_output_is_plain_and_folded(budgetguard_process, columns):
    done = budgetguard_process(
        *("demo", "--quick", "--framework", "loop"),
        COLUMNS=columns,
        PYTHONIOENCODING="ascii",
        TERM="xterm-256color",
        FORCE_COLOR="1",
    )
    text = done.stdout.decode("ascii")
    assert done.returncode == 0, done.stderr
    assert {char for char in text if not char.isprintable()} == {"\n"}
    assert max(map(len, text.splitlines())) <= int(columns)


def test_a_framework_that_is_not_known_is_refused(budgetguard):
    done = budgetguard("demo", "--framework", "autogpt\x1b")
    assert done.returncode == 2
    assert done.stderr.decode().splitlines() == [
        "budgetguard: --framework must be one of langgraph, loop, openai-agents, "
        "pydantic-ai, strands, got autogpt\\x1b."
    ]


def test_quick_shows_one_runaway_after_the_table_and_leaves_the_log_folder_alone(
    budgetguard, tmp_path
):
    done = budgetguard("demo", "--quick", "--framework", "loop", BUDGETGUARD_LOG=str(tmp_path))
    text = done.stdout.decode()
    assert done.returncode == 0
    assert text.count("outcome: terminated") == 1
    assert re.search(r"A plain Python loop 4 \$0\.0043 \$", in_words(text))
    assert "LangGraph" not in text
    assert text.index("runaway in") < text.index("The tool says the same thing every time")
    assert list(tmp_path.iterdir()) == []


def test_json_is_for_machines(budgetguard):
    done = budgetguard("demo", "--quick", "--framework", "loop", "--json")
    (record,) = map(json.loads, done.stdout.splitlines())
    assert (record["framework"], record["calls"], record["failed"]) == ("loop", 4, None)
    assert float(record["by_morning_usd"]) > 1000 > float(record["spent_usd"])


# The agents


def test_every_adapter_has_its_agent():
    # Below the frameworks, the HTTP seam has no loop of its own to show.
    shown = [adapter for adapter in layout.adapters() if adapter != "budgetguard_http"]
    assert [f"budgetguard_{agent.name.replace('-', '_')}" for agent in AGENTS] == shown


def raises(model, guard, search):
    msg = "\x1b[31mno such model"
    raise ConnectionError(msg)


def ignores_the_guard(model, guard, search):
    while True:
        message = model([])["choices"][0]["message"]
        if "tool_calls" not in message:
            return end_run(guard, trip=None)


def bounded_loop(model, guard, search):
    return run_bounded(model, guard, messages="go", tools={"search": search}, model=MODEL)


def hides_a_call(model, guard, search):
    model([])
    return bounded_loop(model, guard, search)


def fails_on_the_way(model, guard, search):
    guard.tree.report("checkpoint: OSError: disk full")
    return bounded_loop(model, guard, search)


@dataclass(frozen=True)
class Broken(Agent):
    runaway: object = raises

    def run_away(self, answers, guard):
        return self.runaway(scripted_model(answers), guard, answers.search)


@pytest.mark.parametrize(
    ("runaway", "reason"),
    [
        (raises, "ConnectionError: \x1b[31mno such model"),
        (ignores_the_guard, "the runaway must be stopped, got completed after 201 calls."),
        (fails_on_the_way, "nothing may fail on the way, got checkpoint: OSError: disk full"),
        (hides_a_call, "the guard must count every call, got 4 of 5 that the model answered."),
        (lambda *_: None, "the run ended without an outcome."),
    ],
)
def test_a_failing_agent_is_reported_and_the_rest_goes_on(runaway, reason):
    broken, sound = run_agents([Broken("loop", "Broken", runaway), LOOP], quick=True)
    assert broken.failed == reason
    assert (sound.failed, sound.calls) == ("", 4)


def test_what_is_missing_is_named_and_what_fails_ends_with_1(monkeypatch, budgetguard):
    monkeypatch.setitem(NEEDS, "strands", ("no_such_framework", ""))
    rare = Agent("strands", "Rare")
    monkeypatch.setattr(command, "AGENTS", (rare, Broken("loop", "Broken")))
    done = budgetguard("demo")
    assert done.returncode == 1
    assert b"Not installed here, so not shown: Rare." in done.stdout
    assert b"FAILED: ConnectionError: \\x1b[31mno such model" in done.stdout
    assert b"FAILED: Broken." in done.stdout
    monkeypatch.setattr(command, "AGENTS", (rare,))
    assert b"No adapter is installed" in budgetguard("demo").stdout


# What it would have cost


def test_the_cost_by_the_morning_is_the_naive_sum():
    book = PriceBook({MODEL: Price(input=10, output=20, context_window=5000)})
    calls = [TokenUsage(1000, 30), TokenUsage(1100, 30), TokenUsage(1200, 30)]
    number = HOURS * 60 * CALLS_PER_MINUTE
    prompts = [min(1000 + 100 * place, 5000 - 30) for place in range(number)]
    full = sum(Fraction(prompt * 10 + 30 * 20, 10**6) for prompt in prompts)
    assert float(until_morning(calls, book)) == pytest.approx(float(full))


def test_nothing_is_claimed_from_a_single_call():
    assert until_morning([TokenUsage(10, 1)], PriceBook()) is None
