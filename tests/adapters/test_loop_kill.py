"""A process that is killed in the middle of a call loses no count, and repeats no completed tool.

What was really done is read from files that the program writes beside the checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from budgetguard_core import Budget, Guard, SqliteStore
from budgetguard_core.kit import OUTCOME_UNKNOWN
from budgetguard_core.testing import check_history
from budgetguard_loop import run_bounded
from conformance.budgetguard_loop_driver import normal

PROGRAM = """
import asyncio, os, sys
from budgetguard_core import Budget, Guard, SqliteStore
from budgetguard_loop import run_bounded, run_bounded_async

folder, form, hang_at = sys.argv[1:]
NAMES = ["fetch", "write", "send"]


def done(what):
    with open(os.path.join(folder, "done"), "a") as file:
        file.write(what + "\\n")
        file.flush()
        os.fsync(file.fileno())


def maybe_hang(what):
    done("start " + what)
    if what == hang_at:
        print("hanging", flush=True)
        sys.stdin.readline()


def step(messages):
    turn = sum(message["role"] == "assistant" for message in messages)
    maybe_hang(f"model{turn}")
    function = {"name": NAMES[turn], "arguments": "{}"}
    return {
        "choices": [
            {
                "message": {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": f"c{turn}", "type": "function", "function": function}],
                }
            }
        ],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20},
    }


def tool(name):
    def call():
        maybe_hang(name)
        done("end " + name)
        return name + " is done"

    return call


facts = {
    "messages": "Go",
    "tools": {name: tool(name) for name in NAMES},
    "store": SqliteStore(os.path.join(folder, "checkpoints")),
}
guard = Guard(Budget(max_iterations=20), run_id="run")
if form == "sync":
    run_bounded(step, guard, **facts)
else:
    asyncio.run(run_bounded_async(step, guard, **facts))
"""

# Goes on in a process of its own, as after a crash.
RESUME = """
import json, os, sys
from budgetguard_core import Budget, SqliteStore
from budgetguard_loop import run_bounded

folder = sys.argv[1]


def step(messages):
    turn = sum(message["role"] == "assistant" for message in messages)
    if turn > 3:
        return "Done."
    name = ["fetch", "write", "send", "send"][turn]
    call = {"id": f"again{turn}", "type": "function", "function": {"name": name, "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tool(name):
    def call():
        with open(os.path.join(folder, "done"), "a") as file:
            file.write(f"start {name}\\nend {name}\\n")
        return name + " is done"

    return call


outcome = run_bounded(
    step,
    resume="run",
    tools={name: tool(name) for name in ("fetch", "write", "send")},
    store=SqliteStore(os.path.join(folder, "checkpoints")),
)
print(
    json.dumps(
        {
            "status": outcome.status,
            "iterations": outcome.usage.iterations,
            "model_calls": outcome.usage.model_calls,
            "tool_calls": outcome.usage.tool_calls,
            "messages": list(outcome.messages),
        }
    )
)
"""


def started(folder, form, hang_at):
    return subprocess.Popen(
        [sys.executable, "-I", "-c", PROGRAM, str(folder), form, hang_at],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def killed(folder, form, hang_at):
    program = started(folder, form, hang_at)
    try:
        assert program.stdout.readline() == "hanging\n"
    finally:
        os.kill(program.pid, signal.SIGKILL)
        program.communicate()


@pytest.mark.sample(11)
@pytest.mark.parametrize("form", ["sync", "async"])
@pytest.mark.parametrize("hang_at", ["model0", "model1", "fetch", "write"])
def test_killed_and_resumed(tmp_path, form, hang_at):
    killed(tmp_path, form, hang_at)
    done = (tmp_path / "done").read_text().splitlines()
    models = sum(line.startswith("start model") for line in done)
    tools = sum(line.startswith("start ") for line in done) - models
    completed = [line.removeprefix("end ") for line in done if line.startswith("end ")]

    saved = SqliteStore(tmp_path / "checkpoints").load("run")
    assert saved.counters["model_calls"] >= models
    assert saved.counters["iterations"] >= models
    assert saved.counters["tool_calls"] >= tools
    texts = [m["content"] for m in saved.messages if m["role"] == "tool"]
    assert texts == [f"{name} is done" for name in completed]

    run = subprocess.run(
        [sys.executable, "-I", "-c", RESUME, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
    )
    outcome = json.loads(run.stdout)
    after = (tmp_path / "done").read_text().splitlines()[len(done) :]
    for name in completed:
        assert f"start {name}" not in after
    if not hang_at.startswith("model"):
        # It may have taken effect, so it is left to the model to look.
        assert f"start {hang_at}" not in after
        assert OUTCOME_UNKNOWN in [m["content"] for m in outcome["messages"] if m["role"] == "tool"]
    check_history(normal(outcome["messages"]))
    again = sum(line.startswith("start ") for line in after)
    assert outcome["status"] == "completed"
    assert outcome["tool_calls"] >= tools + again
    assert outcome["model_calls"] == models + outcome_turns(outcome) - done_turns(saved)
    assert outcome["iterations"] >= models


def outcome_turns(outcome):
    return sum(m["role"] == "assistant" for m in outcome["messages"])


def done_turns(saved):
    return sum(m["role"] == "assistant" for m in saved.messages)


def test_a_fresh_budget_counts_from_zero_and_keeps_what_was_used(tmp_path):
    killed(tmp_path, "sync", "write")
    store = SqliteStore(tmp_path / "checkpoints")
    outcome = run_bounded(
        lambda messages: "Done.", Budget(max_iterations=1), resume="run", store=store
    )
    assert (outcome.status, outcome.usage.model_calls) == ("completed", 1)
    assert (outcome.earlier_usage.model_calls, outcome.earlier_usage.tool_calls) == (2, 2)


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", ["sync", "async"])
@pytest.mark.parametrize("hang_at", ["model1", "write"])
def test_a_process_whose_run_was_resumed_elsewhere_starts_nothing_more(tmp_path, form, hang_at):
    program = started(tmp_path, form, hang_at)
    try:
        assert program.stdout.readline() == "hanging\n"
        before = (tmp_path / "done").read_text().splitlines()
        store = SqliteStore(tmp_path / "checkpoints")
        outcome = run_bounded(lambda messages: "Done.", resume="run", tools={}, store=store)
        assert (outcome.status, outcome.errors) == ("completed", ())
    except BaseException:
        program.kill()
        raise
    finally:
        _, said = program.communicate("\n")
    assert program.returncode == 1
    assert "RunFencedError: run 'run' was resumed elsewhere" in said
    # It finished the call that it was in, and no more.
    after = (tmp_path / "done").read_text().splitlines()[len(before) :]
    assert [line for line in after if line.startswith("start ")] == []
    assert list(store.load("run").messages) == list(outcome.messages)
    store.close()


@pytest.mark.slow
def test_of_two_processes_that_resume_at_once_one_goes_on(tmp_path):
    killed(tmp_path, "sync", "write")
    done = (tmp_path / "done").read_text().splitlines()
    runs = [
        subprocess.Popen(
            [sys.executable, "-I", "-c", RESUME, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    ended = [(*run.communicate(), run.returncode) for run in runs]
    winners = [json.loads(out) for out, _, code in ended if code == 0]
    for _, said, code in ended:
        assert code == 0 or "RunFencedError: run 'run' was resumed elsewhere" in said
    # The one may be done before the other begins: then that one finds a run that has ended.
    assert winners
    assert all(outcome["status"] == "completed" for outcome in winners)
    after = (tmp_path / "done").read_text().splitlines()[len(done) :]
    assert "start write" not in after
    assert "start fetch" not in after


def test_an_earlier_checkpoint_is_gone_on_with(tmp_path):
    store = SqliteStore(tmp_path / "checkpoints")
    replies = iter(["one", "two"])
    run_bounded(lambda m: next(replies), Guard(Budget(), run_id="run"), messages="a", store=store)
    first = store.load("run")
    run_bounded(lambda m: next(replies), Budget(), messages="b", resume="run", store=store)
    outcome = run_bounded(lambda m: "other", Budget(), messages="c", resume=first, store=store)
    assert [m["content"] for m in outcome.messages] == ["a", "one", "c", "other"]
    assert store.load("run").messages == outcome.messages
    store.close()
