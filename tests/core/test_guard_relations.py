"""Guards of one tree: what they charge, what they take over, and that a log tells it again."""

import pytest

from budgetguard_core import Budget, Guard, Mode, StopReason, replay
from budgetguard_core.frame import current
from budgetguard_core.kit import (
    CheckpointError,
    ModelCall,
    Stop,
    TokenUsage,
    ToolCall,
    current_guard,
)

USAGE = TokenUsage(10, 5)


def logged(budget=None):
    events = []
    return Guard(budget, sinks=[events.append]), events


def spend(guard, **facts):
    ticket = guard.admit_model_call(ModelCall(**facts))
    if not isinstance(ticket, Stop):
        guard.settle_model_call(ticket, USAGE)
    return ticket


def same(one, other):
    """Both guards have counted the same; they were made in this order of events."""
    mine, others = one.snapshot(), other.snapshot()
    ignored = {"elapsed_ns": None, "seq": 0, "call_id": 0}
    return mine.model_copy(update=ignored) == others.model_copy(update=ignored)


class TestBeside:
    def test_a_child_of_two_charges_their_ancestor_once(self):
        root = Guard(Budget(max_model_calls=10))
        left, right = root.child(Budget(max_model_calls=3)), root.child()
        child = left.child(linked=[right])
        assert child.ancestry == (child, left, root, right)
        spend(child)
        assert [one.usage.model_calls for one in (root, left, right, child)] == [1, 1, 1, 1]

    def test_an_off_guard_in_between_is_of_the_line_and_counts_nothing(self):
        root = Guard()
        off = root.child(mode=Mode.OFF)
        child = off.child(mode=Mode.ENFORCE)
        spend(child)
        assert child.ancestry == (child, off, root)
        assert [one.usage.model_calls for one in (child, off, root)] == [1, 0, 1]

    def test_an_abort_of_either_ends_the_child(self):
        root = Guard()
        left, right = root.child(), root.child()
        child = left.child(linked=[right])
        right.abort()
        assert child.cancellation.cancelled
        assert isinstance(spend(child), Stop)


class TestWithdrawnModelCalls:
    def test_a_call_that_was_never_made_counts_as_nothing(self):
        root, events = logged(Budget(max_iterations=1, max_total_tokens=100))
        child = root.child()
        ticket = child.admit_model_call(ModelCall(input_tokens=90))
        assert child.withdraw(ticket)
        assert not child.withdraw(ticket)
        assert not child.settle_model_call(ticket, USAGE)
        for guard in (root, child):
            usage = guard.usage
            assert (usage.iterations, usage.model_calls, usage.reserved_tokens) == (0, 0, 0)
        assert not isinstance(spend(child, input_tokens=90), Stop)
        assert same(replay(events), root)

    def test_a_retry_takes_no_iteration_with_it(self):
        guard = Guard()
        spend(guard)
        guard.withdraw(guard.admit_model_call(ModelCall(retry=True)))
        assert guard.usage.iterations == guard.usage.model_calls == 1

    def test_iterations_that_began_anew_stay_at_zero(self):
        guard = Guard()
        ticket = guard.admit_model_call()
        guard.state.restart_iterations()
        guard.withdraw(ticket)
        assert guard.usage.iterations == 0

    def test_under_another_budget_the_call_may_never_have_been_admitted(self):
        guard, events = logged()
        spend(guard)
        guard.withdraw(guard.admit_model_call())
        assert replay(events, budget=Budget(max_model_calls=1)).usage.model_calls == 1


class TestReplies:
    def test_replies_that_repeat_end_the_run(self):
        guard, events = logged()
        for _ in range(6):
            spend(guard)
            guard.report_reply(
                "One more analysis of the figures, please, and a longer one.", speaker="Analyzer"
            )
            guard.report_reply(
                " One more check of the analysis, please, and soon.\n", speaker="Verifier"
            )
        assert guard.trip is not None
        assert guard.trip.reason in (StopReason.OSCILLATION, StopReason.NO_PROGRESS)
        assert same(replay(events), guard)

    def test_new_replies_do_not(self):
        guard = Guard()
        for number in range(30):
            spend(guard)
            guard.report_reply(f"Step {number} is done.")
        assert guard.trip is None

    def test_replies_without_text_are_not_looked_at(self):
        guard, events = logged()
        for _ in range(9):
            guard.report_reply(" \n")
        assert guard.check() is None
        assert [event.event for event in events] == ["run_started"]

    def test_without_loop_detection_nothing_is_reported(self):
        guard, events = logged(Budget(loop_detection=None))
        guard.report_reply("again")
        assert len(events) == 1


class TestTakingOver:
    def test_a_part_of_a_run_goes_on_within_it(self):
        root, events = logged(Budget(max_model_calls=5))
        part = root.child(Budget(max_model_calls=3))
        spend(part)
        tool = part.admit_tool_call(ToolCall(name="ask"))
        model = part.admit_model_call(ModelCall(input_tokens=7))
        snapshot = part.snapshot()
        again = Guard.restore(snapshot, within=[root])
        assert again.parent is root
        assert again.run_id == part.run_id
        assert again.usage.model_calls == 2
        assert root.usage.model_calls == 2
        first, second = again.open_calls()
        assert first.call_id > tool.call_id
        assert second.call_id > model.call_id
        again.settle_tool_call(first, "answer")
        again.settle_model_call(second, USAGE)
        assert not isinstance(spend(again), Stop)
        assert isinstance(spend(again), Stop)
        assert root.usage.reserved_tokens == 0
        assert same(replay(events), root)

    def test_in_another_process_what_was_in_flight_is_reserved_above_too(self):
        first = Guard()
        part = first.child()
        part.admit_model_call(ModelCall(input_tokens=7))
        root = Guard(Budget(max_total_tokens=20))
        again = Guard.restore(part.snapshot(), within=[root])
        assert root.usage.reserved_tokens == again.usage.reserved_tokens == 7
        again.settle_model_call(*again.open_calls(), USAGE)
        assert root.usage.reserved_tokens == 0
        assert root.usage.total_tokens == 15

    def test_a_guard_that_counted_nothing_goes_on_from_an_earlier_one(self):
        guard, events = logged(Budget(max_model_calls=2))
        spend(guard)
        fresh, told = logged(Budget(max_model_calls=2))
        assert Guard.restore(guard.snapshot(), onto=fresh) is fresh
        assert fresh.usage.model_calls == 1
        assert isinstance(spend(fresh), type(spend(Guard())))
        assert isinstance(spend(fresh), Stop)
        assert same(replay(told), fresh)
        assert events

    def test_a_guard_that_counts_already_takes_nothing_over(self):
        guard, fresh = Guard(), Guard()
        spend(guard)
        spend(fresh)
        Guard.restore(guard.snapshot(), onto=fresh)
        assert fresh.usage.model_calls == 1

    def test_what_does_not_fit_together_is_not_taken_over(self):
        snapshot = Guard().snapshot().model_copy(update={"counters": {"iterations": 3}})
        with pytest.raises(CheckpointError, match="does not fit together"):
            Guard.restore(snapshot, onto=Guard())


def test_activate_blocks_are_found_and_left():
    outer, inner = Guard(), Guard()
    assert current_guard() is None
    with outer.activate(), inner.activate():
        assert current_guard() is inner
        assert current().parent.guard is outer
    assert current() is None


def test_a_guard_that_was_aborted_stays_so_when_it_goes_on_from_an_earlier_one():
    first = Guard(Budget(max_iterations=5))
    first.settle_model_call(first.admit_model_call(), TokenUsage(1, 1))
    guard = Guard(Budget(max_iterations=5))
    guard.abort("no")
    Guard.restore(first.snapshot(), onto=guard)
    assert guard.check().reason is StopReason.ABORTED
