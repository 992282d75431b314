"""The suite itself: what it finds in histories, scripts and drivers that break the contract."""

from __future__ import annotations

import asyncio

import pytest

from budgetguard_core.testing import (
    CLAUSES,
    Call,
    ManualClock,
    Message,
    NonConformance,
    Ran,
    Reply,
    Script,
    Tool,
    calls,
    check_history,
    hang,
    run_in_loop,
    says,
)
from conformance.budgetguard_loop_driver import RunBounded


def asks(*ids):
    return Message(role="assistant", tool_calls=tuple((id_, "search") for id_ in ids))


def answer(id_):
    return Message(role="tool", tool_call_id=id_)


USER = Message(role="user", text="Go.")
END = Message(role="assistant", text="Done.")


@pytest.mark.parametrize(
    "history",
    [
        [],
        [USER, END],
        [Message(role="system"), Message(role="system"), USER, END],
        [USER, asks("a", "b"), answer("b"), answer("a"), END, USER, END],
    ],
)
def test_a_history_that_a_provider_takes(history):
    check_history(history)


@pytest.mark.parametrize(
    ("history", "problem"),
    [
        ([USER, asks("a")], "no result for"),
        ([USER, asks("a"), USER], "before the results"),
        ([USER, asks("a"), answer("a"), answer("a")], "is not open"),
        ([USER, answer("a")], "is not open"),
        ([USER, END, END], "follows another one"),
        ([USER, USER], "follows another one"),
    ],
)
def test_a_history_that_a_provider_refuses(history, problem):
    with pytest.raises(NonConformance, match=problem):
        check_history(history)


def test_a_script_repeats_its_last_reply_under_new_call_ids():
    script = Script([calls("a", Call("b", id="fixed")), calls("c")])
    first, second, third = (script.next(f"prompt {n}") for n in range(3))
    assert first.tool_calls[1].id == "fixed"
    assert {call.name for call in (*second.tool_calls, *third.tool_calls)} == {"c"}
    assert second.tool_calls[0].id != third.tool_calls[0].id
    assert (script.calls, script.sent) == (3, ["prompt 0", "prompt 1", "prompt 2"])


def test_a_script_moves_its_clock():
    clock = ManualClock()
    Script([Reply(text="slow", seconds=2.5)], clock=clock).next("")
    assert clock.monotonic_ns() == 2_500_000_000


def test_a_tool_fails_as_told_and_knows_its_number():
    with pytest.raises(ValueError, match="broken"):
        Tool("search", error=ValueError("broken")).run("")
    tool = Tool("search", lambda number, value: f"{number} {value}")
    assert [tool.run("x"), tool.run("y")] == ["0 x", "1 y"]


def test_tasks_that_are_left_behind_are_named():
    tasks = []

    async def leak():
        tasks.append(asyncio.create_task(hang(), name="left"))

    assert run_in_loop(leak()) == (None, ("left",))


class Unguarded(RunBounded):
    """A driver whose adapter does nothing."""

    name = "unguarded"

    def run(self, scenario):
        scenario.script._replies = [*[calls("search", "read", "a")] * 12, says("Done.")]
        try:
            return super().run(
                type(scenario)(
                    script=scenario.script,
                    mode=scenario.mode,
                    guard=None,
                    tools=scenario.tools,
                    started=scenario.started,
                )
            )
        except Exception as error:
            return Ran(history=[], raised=error)


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: f"{clause.number:02}")
def test_every_clause_fails_without_a_guard(clause):
    mode = clause.modes[0]
    with pytest.raises(NonConformance):
        clause.check(Unguarded(), mode)
