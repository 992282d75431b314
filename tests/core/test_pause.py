"""A run that waits for a person: its time stands still, and everything else goes on counting."""

from __future__ import annotations

import pytest

from budgetguard_core import Budget, Guard, Snapshot, StopReason, read_events, replay
from budgetguard_core.events import CheckpointSaved
from budgetguard_core.kit import Admit, ModelCall, TokenUsage, ToolCall
from budgetguard_core.testing import ManualClock


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def lines():
    return []


@pytest.fixture
def guard(clock, lines):
    return Guard(
        Budget(max_seconds=10, max_iterations=20),
        run_id="r",
        clock=clock,
        sinks=[lambda event: lines.append(event.model_dump_json() + "\n")],
    )


def step(guard):
    ticket = guard.admit_model_call()
    assert isinstance(ticket, Admit)
    guard.settle_model_call(ticket, TokenUsage(1, 1))


def test_a_persons_time_is_not_run_time(guard, clock):
    step(guard)
    clock.advance(4)
    guard.pause()
    assert guard.paused
    clock.advance(1_000)
    assert (guard.usage.seconds, guard.time_left()) == (4, 6)
    assert guard.check() is None
    guard.go_on()
    assert not guard.paused
    clock.advance(1)
    assert (guard.usage.seconds, guard.time_left()) == (5, 5)
    step(guard)
    clock.advance(5)
    assert guard.admit_model_call().trip.reason is StopReason.MAX_SECONDS


def test_an_approval_is_not_refused_because_of_the_wait(guard, clock):
    step(guard)
    guard.pause()
    clock.advance(1_000)
    guard.go_on()
    assert isinstance(guard.admit_tool_call(ToolCall(name="send")), Admit)


def test_during_a_pause_time_counts_while_a_call_is_in_flight(guard, clock):
    step(guard)
    guard.pause()
    clock.advance(100)
    ticket = guard.admit_model_call()
    clock.advance(2)
    assert (guard.usage.seconds, guard.time_left()) == (2, 8)
    guard.settle_model_call(ticket, TokenUsage(1, 1))
    clock.advance(100)
    tool = guard.admit_tool_call(ToolCall(name="a"))
    clock.advance(3)
    guard.settle_tool_call(tool, "x")
    clock.advance(100)
    withdrawn = guard.admit_tool_call(ToolCall(name="a"))
    clock.advance(1)
    guard.withdraw(withdrawn)
    clock.advance(100)
    assert guard.usage.seconds == 6
    hung = guard.admit_model_call()
    clock.advance(4)
    assert guard.time_left() == 0
    assert guard.check().reason is StopReason.MAX_SECONDS
    guard.settle_model_call(hung, error="timeout")


def test_a_call_that_waits_too_is_not_run_time(guard, clock):
    asking, other = guard.admit_tool_calls([ToolCall(name="ask"), ToolCall(name="other")])
    clock.advance(1)
    guard.pause([asking])
    clock.advance(2)
    guard.settle_tool_call(other, "x")
    clock.advance(100)
    assert guard.usage.seconds == 3
    guard.go_on([asking])
    clock.advance(1)
    guard.settle_tool_call(asking, "yes")
    assert guard.usage.seconds == 4


def test_runs_that_share_a_guard_are_paused_each(guard, clock):
    step(guard)
    first = guard.admit_tool_call(ToolCall(name="ask"))
    guard.pause([first])
    guard.pause()
    clock.advance(100)
    guard.go_on([first])
    clock.advance(2)
    guard.settle_tool_call(first, "x")
    clock.advance(100)
    assert guard.paused
    assert guard.usage.seconds == 2
    guard.go_on()
    guard.go_on()
    clock.advance(1)
    assert guard.usage.seconds == 3
    assert not guard.paused


def test_each_guard_of_a_tree_is_paused_by_itself(guard, clock):
    child = guard.child(Budget(max_seconds=5), run_id="c")
    step(child)
    asking = child.admit_tool_call(ToolCall(name="ask"))
    child.pause([asking])
    clock.advance(3)
    assert (child.usage.seconds, guard.usage.seconds) == (0, 3)
    assert child.time_left() == 5
    guard.pause()
    clock.advance(100)
    assert (child.usage.seconds, guard.usage.seconds) == (0, 3)
    guard.go_on()
    child.go_on([asking])
    clock.advance(1)
    assert (child.usage.seconds, guard.usage.seconds) == (1, 4)


def test_a_step_below_counts_above(guard, clock):
    child = guard.child(run_id="c")
    step(child)
    guard.pause()
    clock.advance(100)
    ticket = child.admit_model_call()
    clock.advance(2)
    child.settle_model_call(ticket, TokenUsage(1, 1))
    clock.advance(100)
    assert guard.usage.seconds == 2
    assert child.usage.seconds == 202


def test_a_run_that_is_paused_before_it_begins(guard, clock):
    guard.pause()
    clock.advance(5)
    guard.start()
    clock.advance(5)
    assert guard.usage.seconds == 0
    guard.go_on()
    clock.advance(5)
    assert guard.usage.seconds == 5


def test_a_pause_outlives_the_process(guard, clock):
    step(guard)
    ticket = guard.admit_tool_call(ToolCall(name="ask", id="1"))
    clock.advance(4)
    guard.pause([ticket])
    clock.advance(50)
    text = guard.snapshot([{"role": "user"}]).to_json()
    later = ManualClock()
    later.advance(12_345)
    again = Guard.restore(Snapshot.from_json(text), clock=later)
    later.advance(1_000)
    assert again.paused
    assert again.snapshot() == guard.snapshot()
    assert (again.usage.seconds, again.time_left()) == (4, 6)
    (open_call,) = again.open_calls()
    again.go_on([open_call])
    later.advance(1)
    assert again.settle_tool_call(open_call, "yes")
    assert again.usage.seconds == 5


def test_under_a_fresh_budget_nothing_waits(guard, clock):
    step(guard)
    guard.pause()
    again = Guard.restore(guard.snapshot(), Budget(max_seconds=5), clock=clock)
    assert not again.paused
    step(again)
    clock.advance(2)
    assert again.usage.seconds == 2


def test_the_replay_waits_as_the_run_did(guard, clock, lines):
    other = guard.child(run_id="c")
    step(other)
    asking = other.admit_tool_call(ToolCall(name="ask"))
    model = guard.admit_model_call(ModelCall(input_tokens=1))
    guard.pause([asking])
    other.pause()
    clock.advance(3)
    guard.settle_model_call(model, TokenUsage(1, 1))
    clock.advance(50)
    other.go_on()
    guard.go_on([asking])
    clock.advance(2)
    guard.pause()
    clock.advance(7)
    guard.emit(CheckpointSaved)
    replayed = replay(read_events(lines), clock=clock)
    assert replayed.snapshot() == guard.snapshot()
    assert guard.usage.seconds == 5 + 7
    assert replay(read_events(lines), budget=Budget(max_model_calls=1), clock=clock).trip


def test_what_waits_is_forgotten_when_it_has_ended(guard):
    for _ in range(100):
        ticket = guard.admit_tool_call(ToolCall(name="ask"))
        guard.pause([ticket])
        guard.settle_tool_call(ticket, object())
        guard.go_on()
        guard.user_turn()
    guard.pause()
    assert guard.tree.waiting == set()
