"""The demonstration: a real loop over HTTP, stopped, with every request accounted for."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from http.client import HTTPConnection
from importlib import import_module

import pytest

import layout
from budgetguard_cli.demo import command
from budgetguard_cli.demo.agents import AGENTS, Agent
from budgetguard_cli.demo.command import CALLS_PER_MINUTE, HOURS, run_agents, until_morning
from budgetguard_cli.demo.server import MODEL, StickyServer
from budgetguard_core import Price, PriceBook
from budgetguard_core.kit import TokenUsage, end_run
from budgetguard_loop import run_bounded

(LOOP,) = (agent for agent in AGENTS if agent.name == "loop")


def in_words(text):
    return " ".join(text.split())


# The command


@pytest.mark.slow
def test_the_demonstration_stops_every_runaway_and_the_server_agrees(budgetguard_process):
    done = budgetguard_process("demo")
    text = done.stdout.decode()
    assert done.returncode == 0, text
    shown = [agent for agent in AGENTS if agent.is_installed()]
    words = in_words(text)
    assert words.count("nudge to the model: You have called read_file") >= len(shown)
    assert words.count("stopped: no_progress") == len(shown)
    assert words.count("stopped: max_cost_usd") == len(shown)
    assert words.count("outcome: terminated") == 2 * len(shown)
    assert words.count("model calls: 4 counted by the guard, 4 by the server") == len(shown)
    assert words.count("By the morning: from 23:00 to 08:00") == len(shown)
    assert "FAILED" not in words
    table = text.partition("runaway in ")[2].splitlines()[1:]
    assert [row.split("  ")[0] for row in table[: len(shown)]] == [one.title for one in shown]
    assert all(re.search(r" \d+ +\$0\.\d{4} +\$[\d,]{5,}", row) for row in table[: len(shown)])
    for agent in shown:
        assert f"import {agent.adapter} as bg\n{agent.use}\n" in text


def test_the_lines_to_paste_are_true_of_the_adapters():
    for agent in AGENTS:
        name = re.search(r"bg\.(\w+)\(", agent.use)[1]
        assert name in import_module(agent.adapter).__all__
        assert len(agent.use) <= 40


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
    assert re.search(r"A plain Python loop 4 \$0\.007\d \$", in_words(text))
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
    assert [agent.adapter for agent in AGENTS] == shown


def ask(base_url, messages):
    address = base_url.removeprefix("http://").removesuffix("/v1")
    connection = HTTPConnection(address, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": messages}))
    reply = json.loads(connection.getresponse().read())
    connection.close()
    return reply


def raises(base_url, guard, read_file):
    msg = "\x1b[31mno such model"
    raise ConnectionError(msg)


def ignores_the_guard(base_url, guard, read_file):
    messages = [{"role": "user", "content": "go"}]
    while True:
        message = ask(base_url, messages)["choices"][0]["message"]
        messages.append(message)
        if "tool_calls" not in message:
            return end_run(guard, trip=None, messages=messages)


def bounded_loop(base_url, guard, read_file):
    return run_bounded(
        lambda messages: ask(base_url, messages),
        guard,
        messages="go",
        tools={"read_file": read_file},
        model=MODEL,
    )


def hides_a_call(base_url, guard, read_file):
    ask(base_url, [])
    return bounded_loop(base_url, guard, read_file)


def fails_on_the_way(base_url, guard, read_file):
    guard.tree.report("checkpoint: OSError: disk full")
    return bounded_loop(base_url, guard, read_file)


@pytest.mark.parametrize(
    ("runaway", "reason"),
    [
        (raises, "ConnectionError: \x1b[31mno such model"),
        (ignores_the_guard, "the runaway must be stopped, got completed after 201 requests."),
        (fails_on_the_way, "nothing may fail on the way, got checkpoint: OSError: disk full"),
        (hides_a_call, "the guard must count every request, got 4 of 5 that the server saw."),
        (lambda *_: None, "the run ended without an outcome."),
    ],
)
def test_a_failing_agent_is_reported_and_the_rest_goes_on(runaway, reason):
    broken, sound = run_agents([Agent("budgetguard_loop", "Broken", runaway), LOOP], quick=True)
    assert broken.failed == reason
    assert (sound.failed, sound.calls) == ("", 4)


def test_what_is_missing_is_named_and_what_fails_ends_with_1(monkeypatch, budgetguard):
    rare = Agent("budgetguard_loop", "Rare", raises, needs=("no_such_framework",))
    broken = Agent("budgetguard_loop", "Broken", raises)
    monkeypatch.setattr(command, "AGENTS", (rare, broken))
    done = budgetguard("demo")
    assert done.returncode == 1
    assert b"Not installed here, so not shown: Rare." in done.stdout
    assert b"FAILED: ConnectionError: \\x1b[31mno such model" in done.stdout
    assert b"FAILED: Broken." in done.stdout
    monkeypatch.setattr(command, "AGENTS", (rare,))
    assert b"No adapter is installed" in budgetguard("demo").stdout


# What it would have cost


def test_the_cost_by_the_morning_is_the_naive_sum():
    book = PriceBook({MODEL: Price(input=10, output=20, cache_read=1, context_window=5000)})
    calls = [TokenUsage(1000, 30), TokenUsage(1100, 30), TokenUsage(1200, 30)]
    number = HOURS * 60 * CALLS_PER_MINUTE
    prompts = [min(1000 + 100 * place, 5000 - 30) for place in range(number)]
    full = sum(Fraction(prompt * 10 + 30 * 20, 10**6) for prompt in prompts)
    cached = sum(
        Fraction((prompt - before) * 10 + before + 30 * 20, 10**6)
        for prompt, before in zip(prompts, [0, *prompts], strict=False)
    )
    found = until_morning(calls, book)
    assert (found.calls, found.growth) == (number, 100)
    assert (float(found.full), float(found.cached)) == pytest.approx((float(full), float(cached)))


def test_nothing_is_claimed_from_a_single_call():
    assert until_morning([TokenUsage(10, 1)], PriceBook()) is None


# The server


@pytest.fixture
def server():
    with StickyServer() as server:
        yield server


def post(server, body, *, path="/v1/chat/completions", headers=None):
    address = server.base_url.removeprefix("http://").removesuffix("/v1")
    connection = HTTPConnection(address, timeout=60)
    connection.request("POST", path, body, headers or {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_server_never_changes_its_mind_and_counts(server):
    replies = [json.loads(post(server, '{"messages": []}')[1]) for _ in range(3)]
    calls = [reply["choices"][0]["message"]["tool_calls"][0] for reply in replies]
    assert len({json.dumps(call["function"]) for call in calls}) == 1
    assert len({call["id"] for call in calls}) == 3
    assert server.requests == 3


def test_usage_grows_with_the_prompt(server):
    small, large = (
        json.loads(post(server, json.dumps({"messages": ["x" * size]}))[1])["usage"]
        for size in (100, 4100)
    )
    assert large["prompt_tokens"] - small["prompt_tokens"] == 1000
    assert small["total_tokens"] == small["prompt_tokens"] + small["completion_tokens"]


def test_a_stream_says_the_same_as_the_whole(server):
    whole = json.loads(post(server, '{"messages": [], "stream": false}')[1])
    server.requests = 0
    status, text = post(server, '{"messages": [], "stream": true }')
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert (status, lines.pop()) == (200, "[DONE]")
    first, last, usage = map(json.loads, lines)
    (call,) = first["choices"][0]["delta"]["tool_calls"]
    assert call.pop("index") == 0
    assert [call] == whole["choices"][0]["message"]["tool_calls"]
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
