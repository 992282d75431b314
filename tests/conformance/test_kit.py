"""The suite itself: what it finds in histories, scripts and drivers that break the contract."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from budgetguard_core import Budget, Guard, Mode
from budgetguard_core.testing import (
    CLAUSES,
    MODES,
    Call,
    Driver,
    ManualClock,
    Message,
    NonConformance,
    ProviderError,
    Reply,
    Script,
    Tool,
    calls,
    check_history,
    hang,
    run_in_loop,
    says,
)
from conformance.drivers import drivers_of, is_installed


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


class Unguarded(Driver):
    """A working driver whose guard does nothing. Its models come to an end at some time."""

    adapter = "budgetguard_nothing"
    patience = 0.5

    def __init__(self, driver):
        self.driver = driver
        self.name = f"{driver.name}, off"
        self.lacks = driver.lacks
        self.subagents = driver.subagents
        self.usage_records = driver.usage_records

    def run_sync(self, scenario):
        return self.driver.run_sync(self.off(scenario))

    async def run_async(self, scenario):
        return await self.driver.run_async(self.off(scenario))

    def off(self, scenario):
        # Two agents that talk to each other are never done: one of them has to fail.
        end(scenario.script, says("Done.") if scenario.dialogue is None else FAILS)
        for tool in scenario.tools:
            if tool.agent is not None:
                end(tool.agent.script)
        for agent in (*scenario.handoffs, scenario.graph, scenario.judge):
            if agent is not None:
                end(agent.script)
        guard = None if scenario.guard is None else Guard(Budget(), mode=Mode.OFF)
        return replace(scenario, guard=guard)


FAILS = Reply(error=ProviderError("nobody listens any more"))


def end(script, last=says("Done.")):  # noqa: B008 - never changed
    """Have a sticky model be done after a while."""
    replies = script._replies
    if not isinstance(replies, Ending):
        script._replies = Ending(replies, last)


class Ending:
    def __init__(self, replies, last):
        self.replies, self.last = replies, last

    def __call__(self, number):
        if number >= 30:
            return self.last
        replies = self.replies
        return replies(number) if callable(replies) else replies[min(number, len(replies) - 1)]


# How each clause fails where no guard holds anything: by its own words, and not by an accident.
MAX_ITERATIONS = "ended completed .* expected max_iterations"
REASONS = {
    2: MAX_ITERATIONS,
    3: "ended completed .* expected max_tool_calls",
    4: "tool bodies: .*'search', 'search'",
    5: "ended completed .* expected max_total_tokens",
    6: "ended completed .* expected max_seconds|did not end within",
    7: "ended completed .* expected aborted",
    8: "ended completed .* expected no_progress",
    9: "ended completed .* expected oscillation",
    10: MAX_ITERATIONS,
    11: "ended completed .* expected max_tool_calls",
    12: "tokens: 0, expected 1000",
    13: MAX_ITERATIONS,
    14: MAX_ITERATIONS,
    15: MAX_ITERATIONS,
    16: r"observed: \[\], expected",
    17: r"model calls: \(4, 0\)",
    18: "ended completed .* expected max_model_calls",
    19: "model calls of the child: 31",
    20: "ended completed .* expected max_model_calls",
    21: MAX_ITERATIONS,
    22: MAX_ITERATIONS,
    23: MAX_ITERATIONS,
    25: MAX_ITERATIONS,
    26: r"model calls around and inside: \(2, 31\)",
    27: "model calls in the block: 31",
    28: "status of a run that waits for a person: 'completed'",
    29: r"run_ended events: \[\]",
    30: "has read .* as an answer",
    31: r"model calls: \(2, 0\)",
    32: "nobody listens any more",
    33: "the request's bound is None",
    35: "input_tokens of .*: 0, expected 100",
    36: "stop reason: 'completed', expected 'max_iterations'",
}
# They ask that a guard leaves something alone, which one that does nothing does.
TRIVIAL = {
    1: "nothing is added within the caps",
    24: "nothing is said of the budget",
    34: "nothing is kept of a run",
}


def unguarded(clause):
    """A driver that has what the clause needs; the plain loop needs no framework."""
    adapters = ("budgetguard_loop", "budgetguard_openai_agents")
    found = [d for a in adapters if is_installed(a) for d in drivers_of(a)]
    return next((Unguarded(d) for d in found if clause.lacking(d) is None), None)


def test_every_clause_says_how_it_fails_or_why_it_cannot():
    assert sorted(REASONS | TRIVIAL) == [clause.number for clause in CLAUSES]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: f"{clause.number:02}")
def test_every_clause_fails_without_a_guard(clause, mode):
    driver = unguarded(clause)
    if driver is None or mode not in clause.modes:
        pytest.skip("no driver has what it needs")
    if clause.number in TRIVIAL:
        clause.check(driver, mode)
        return
    with pytest.raises(NonConformance, match=REASONS[clause.number]):
        clause.check(driver, mode)
