"""The demonstration: a real loop over HTTP, stopped, with every request accounted for."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from fractions import Fraction
from http.client import HTTPConnection
from importlib import import_module
from importlib.util import find_spec

import pytest
from rich.console import Console

import layout
from budgetguard_cli.demo import CALLS_PER_MINUTE, HOURS, by_morning, run_demo
from budgetguard_cli.sections import SECTIONS, Section
from budgetguard_cli.sticky_server import MODEL, StickyServer
from budgetguard_core import Price, PriceBook, TokenUsage, Usage, end_run
from budgetguard_loop import run_bounded

LOOP = Section("budgetguard_loop", "A plain Python loop")


def in_words(text):
    return " ".join(text.split())


# The command


@pytest.mark.slow
def test_the_demonstration_stops_every_runaway_and_the_server_agrees(budgetguard):
    done = budgetguard("demo")
    text = done.stdout.decode()
    assert done.returncode == 0, text
    assert done.stderr == b""
    shown = [section for section in SECTIONS if section.is_installed()]
    assert [section.title for section in shown if section.title not in text] == []
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
    assert all(re.search(r" \d+ \$0\.\d{4} +\$[\d,]{5,}", row) for row in table[: len(shown)])
    for section in shown:
        assert "\n".join(section.lines) in text
    assert "budget" not in words.partition("nudge to the model")[2].partition("max_iterations")[0]


def test_the_lines_to_paste_are_true_of_the_adapters():
    for section in SECTIONS:
        name = re.search(r"bg\.(\w+)\(", section.use)[1]
        assert name in import_module(section.adapter).__all__
        assert max(map(len, section.lines)) <= 40


# The one with the longest lines; the test above runs all of them.
@pytest.mark.slow
@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_without_a_terminal_the_output_is_plain_and_folded(budgetguard, columns):
    done = budgetguard(
        *("demo", "--quick", "--framework", "openai-agents"),
        COLUMNS=columns,
        PYTHONIOENCODING="ascii",
        TERM="xterm-256color",
        FORCE_COLOR="1",
    )
    text = done.stdout.decode("ascii")
    assert done.returncode == 0, done.stderr
    assert {char for char in text if not char.isprintable()} == {"\n"}
    assert max(map(len, text.splitlines())) <= int(columns)


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals here")
@pytest.mark.parametrize("columns", ["40", "100"])
def test_on_a_terminal_the_bars_move_and_the_cursor_comes_back(columns):
    master, slave = os.openpty()
    environment = {**os.environ, "COLUMNS": columns, "TERM": "xterm-256color"}
    with subprocess.Popen(
        [sys.executable, "-I", "-m", "budgetguard_cli", "demo", "--framework", "loop"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
    ) as process:
        os.close(slave)
        seen = b""
        while chunk := read_terminal(master):
            seen += chunk
    os.close(master)
    assert process.returncode == 0
    assert seen.count(b"max_cost_usd") > 6
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")
    assert b"4 of 25" in seen


def read_terminal(master):
    try:
        return os.read(master, 65536)
    except OSError:  # the other side is closed
        return b""


def test_a_framework_that_is_not_known_is_refused(budgetguard):
    done = budgetguard("demo", "--framework", "autogpt\x1b")
    assert done.returncode == 2
    assert done.stderr.decode().splitlines() == [
        "budgetguard: --framework must be one of langgraph, loop, openai-agents, "
        "pydantic-ai, strands, got autogpt\\x1b."
    ]


def test_quick_shows_one_runaway(budgetguard):
    done = budgetguard("demo", "--quick", "--framework", "loop")
    words = in_words(done.stdout.decode())
    assert done.returncode == 0
    assert words.count("outcome: terminated") == 1
    assert "A plain Python loop 4 $0.0074" in words
    assert "LangGraph" not in words


# The sections


def test_every_adapter_has_its_section():
    # Below the frameworks, the HTTP seam has no loop of its own to show.
    shown = [adapter for adapter in layout.adapters() if adapter != "budgetguard_http"]
    assert [section.adapter for section in SECTIONS] == shown
    names = [section.adapter.removeprefix("budgetguard_") for section in SECTIONS]
    assert [n for n in names if find_spec(f"budgetguard_cli.sections.{n}") is None] == []


class Planted(Section):
    """A section whose runaway is given."""

    __slots__ = ("runaway",)

    def __new__(cls, *_):
        return super().__new__(cls)

    def __init__(self, title, runaway):
        super().__init__("budgetguard_loop", title)
        object.__setattr__(self, "runaway", runaway)

    def load(self):
        return self.runaway


def shown(*sections):
    out = io.StringIO()
    worked = run_demo(Console(file=out, width=200), sections)
    return worked, in_words(out.getvalue())


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


def hides_a_call(base_url, guard, read_file):
    ask(base_url, [])
    return run_bounded(
        lambda messages: ask(base_url, messages),
        guard,
        messages="go",
        tools={"read_file": read_file},
        model=MODEL,
    )


def fails_on_the_way(base_url, guard, read_file):
    guard.tree.report("checkpoint: OSError: disk full")
    return run_bounded(
        lambda messages: ask(base_url, messages),
        guard,
        messages="go",
        tools={"read_file": read_file},
        model=MODEL,
    )


@pytest.mark.parametrize(
    ("runaway", "reason"),
    [
        (raises, r"FAILED: ConnectionError: \x1b[31mno such model"),
        (ignores_the_guard, "the runaway must be stopped, got completed after 201 requests."),
        (fails_on_the_way, "nothing may fail on the way, got checkpoint: OSError: disk full"),
        (hides_a_call, "the guard must count every request, got 4 of 5 that the server saw."),
    ],
)
def test_a_failing_section_is_reported_and_the_rest_goes_on(runaway, reason):
    worked, text = shown(Planted("Broken", runaway), LOOP)
    assert not worked
    assert reason in text
    assert "model calls: 4 counted by the guard, 4 by the server" in text
    assert text.endswith("FAILED: Broken.")


def test_a_section_that_cannot_be_imported_is_reported():
    worked, text = shown(Section("budgetguard_core", "Without a module"), LOOP)
    assert not worked
    assert "FAILED: ModuleNotFoundError" in text
    assert "4 by the server" in text


def test_what_is_not_installed_is_named_and_is_no_failure():
    worked, text = shown(Section("budgetguard_loop", "Rare", "no_such_framework"), LOOP)
    assert worked
    assert "Not installed here, so not shown: Rare." in text
    nothing, text = shown(Section("no_such_adapter", "Rare"))
    assert not nothing
    assert "No adapter is installed" in text


def test_a_failing_section_ends_the_command_with_1(monkeypatch):
    from typer.testing import CliRunner

    from budgetguard_cli import app

    monkeypatch.setattr(app, "SECTIONS", (Planted("Broken", raises),))
    done = CliRunner().invoke(app.app, ["demo"])
    assert done.exit_code == 1
    assert "FAILED: Broken." in done.output


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
    text = in_words(by_morning(calls, book, Usage()))
    assert f"{number:,} calls. Each adds 100 tokens" in text
    assert f"that is ${float(full):,.0f}; at best ${float(cached):,.0f}, with" in text


def test_nothing_is_claimed_from_a_single_call():
    assert "unknown" in by_morning([TokenUsage(10, 1)], PriceBook(), Usage())


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
    server.begin()
    assert server.requests == 0


def test_usage_grows_with_the_prompt(server):
    small, large = (
        json.loads(post(server, json.dumps({"messages": ["x" * size]}))[1])["usage"]
        for size in (100, 4100)
    )
    assert large["prompt_tokens"] - small["prompt_tokens"] == 1000
    assert small["total_tokens"] == small["prompt_tokens"] + small["completion_tokens"]


def test_a_stream_says_the_same_as_the_whole(server):
    whole = json.loads(post(server, '{"messages": [], "stream": false}')[1])
    server.begin()
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


@pytest.mark.parametrize(
    ("body", "options", "status"),
    [
        ("{", {}, 400),
        ("[]", {}, 400),
        ("{}", {"path": "/v1/responses"}, 404),
        ("", {"headers": {"Content-Length": str(2**40)}}, 413),
        ("", {"headers": {"Content-Length": "-1"}}, 413),
    ],
)
def test_what_is_no_chat_completion_is_refused_and_not_counted(server, body, options, status):
    assert post(server, body, **options)[0] == status
    assert server.requests == 0
    assert post(server, "{}")[0] == 200


def test_the_table_comes_first_and_the_log_folder_is_left_alone(budgetguard, tmp_path):
    done = budgetguard("demo", "--quick", "--framework", "loop", BUDGETGUARD_LOG=str(tmp_path))
    text = done.stdout.decode()
    assert done.returncode == 0, text
    assert text.index("runaway in") < text.index("The tool says the same thing every time")
    assert list(tmp_path.iterdir()) == []
