"""A tool call that was admitted and did not start gives its place back."""

from __future__ import annotations

import pytest

from budgetguard_core import Budget, Guard, StopReason, replay
from budgetguard_core.kit import Admit, Refuse, Stop, ToolCall
from budgetguard_core.testing import ManualClock


def test_a_withdrawn_call_gives_back_its_place_everywhere():
    parent = Guard(Budget(max_tool_calls=1, tool_quotas={"send": 1}))
    child = parent.child()
    ticket = child.admit_tool_call(ToolCall(name="send", id="a"))
    assert isinstance(ticket, Admit)
    assert child.withdraw(ticket)
    assert parent.usage.tool_calls == child.usage.tool_calls == 0
    assert parent.tool_counts == child.tool_counts == {}
    assert child.open_tool_calls() == ()
    assert [(record.id, record.status) for record in child.tool_calls] == [("a", "refused")]
    assert isinstance(child.admit_tool_call(ToolCall(name="send", id="a")), Admit)
    assert isinstance(child.admit_tool_call(ToolCall(name="send", id="b")), Refuse | Stop)


def test_it_is_taken_back_once_and_not_after_it_was_settled():
    guard = Guard(Budget())
    first, second = guard.admit_tool_calls([ToolCall(name="a"), ToolCall(name="a")])
    assert guard.withdraw(first)
    assert not guard.withdraw(first)
    assert guard.settle_tool_call(second, "done")
    assert not guard.withdraw(second)
    assert guard.usage.tool_calls == 1
    assert guard.tool_counts == {"a": 1}


@pytest.mark.parametrize("kind", ["handoff", "output"])
def test_what_was_not_counted_is_not_given_back(kind):
    guard = Guard(Budget())
    ticket = guard.admit_tool_call(ToolCall(name="to_b", kind=kind))
    assert guard.withdraw(ticket)
    assert guard.usage.tool_calls == 0


def test_a_withdrawal_is_replayed():
    events = []
    guard = Guard(Budget(max_tool_calls=2), sinks=[events.append], clock=ManualClock())
    first, second = guard.admit_tool_calls([ToolCall(name="a"), ToolCall(name="b")])
    guard.withdraw(first)
    guard.settle_tool_call(second, "done")
    replayed = replay(events)
    assert replayed.usage.tool_calls == 1
    assert replayed.tool_counts == {"b": 1}
    assert replayed.tool_calls == guard.tool_calls


def test_a_call_that_never_starts_is_seen_as_a_repetition_all_the_same():
    guard = Guard(Budget())
    for _ in range(8):
        decision = guard.admit_tool_call(ToolCall(name="nosuch", arguments="{}"))
        if not isinstance(decision, Admit):
            break
        guard.withdraw(decision)
        guard.admit_model_call()
    assert guard.trip is not None
    assert guard.trip.reason is StopReason.NO_PROGRESS
    assert guard.usage.tool_calls == 0


def test_without_loop_detection_a_withdrawal_is_only_taken_back():
    guard = Guard(Budget(max_tool_calls=1, loop_detection=None))
    for _ in range(20):
        assert guard.withdraw(guard.admit_tool_call(ToolCall(name="a")))
    assert guard.trip is None


def test_a_withdrawal_of_a_call_that_another_budget_refused_is_passed_over():
    events = []
    guard = Guard(Budget(max_tool_calls=2), sinks=[events.append], clock=ManualClock())
    calls = guard.admit_tool_calls([ToolCall(name="a"), ToolCall(name="b")])
    guard.withdraw(calls[1])
    replayed = replay(events, budget=Budget(max_tool_calls=1))
    assert replayed.usage.tool_calls == 1


def test_a_call_that_waits_for_a_person_is_no_repetition_until_it_is_asked_for_again():
    events = []
    guard = Guard(Budget(max_tool_calls=20), sinks=[events.append], clock=ManualClock())
    for number in range(8):
        waiting = guard.admit_tool_call(ToolCall(name="send", arguments="{}"))
        assert guard.withdraw(waiting, waits=True)
        again = guard.admit_tool_call(ToolCall(name="send", arguments="{}"))
        assert isinstance(again, Admit)
        guard.settle_tool_call(again, f"sent {number}")
    assert guard.trip is None
    assert guard.usage.tool_calls == 8
    assert {record.status for record in guard.tool_calls} == {"completed"}
    assert replay(events).tool_calls == guard.tool_calls
