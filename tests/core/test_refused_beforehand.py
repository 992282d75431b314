"""Which tool calls a limit would refuse, before anybody is asked about them."""

from __future__ import annotations

import pytest

from budgetguard_core import Budget, Guard, Mode, StopReason
from budgetguard_core.kit import ToolCall
from budgetguard_core.testing import ManualClock
from budgetguard_core.tool_calls import ToolCalls


def names(*tools):
    return [ToolCall(name=tool) for tool in tools]


def test_the_calls_past_a_cap_or_a_quota_are_told_in_their_order():
    guard = Guard(Budget(max_tool_calls=3, tool_quotas={"pay*": 1}))
    assert ToolCalls(guard.state).refuses(["pay", "payout", "read", "read", "read"]) == [
        *(False, True, False, False, True)
    ]
    guard.admit_tool_calls(names("pay", "read"))
    assert ToolCalls(guard.state).refuses(["pay", "read", "read"]) == [True, False, True]


def test_nothing_is_counted_and_nothing_trips():
    guard = Guard(Budget(max_tool_calls=1))
    guard.admit_tool_call(ToolCall(name="read"))
    assert ToolCalls(guard.state).refuses(["read"]) == [True]
    assert (guard.usage.tool_calls, guard.tool_counts) == (1, {"read": 1})
    assert guard.trip is None


@pytest.mark.parametrize("child", [True, False])
def test_the_caps_of_the_guards_around_count(child):
    outer = Guard(Budget(max_tool_calls=1))
    guard = outer.child(Budget()) if child else outer
    guard.admit_tool_call(ToolCall(name="read"))
    assert ToolCalls(guard.state).refuses(["read"]) == [True]


def test_a_run_that_is_over_refuses_all():
    clock = ManualClock()
    guard = Guard(Budget(max_seconds=1), clock=clock)
    guard.start()
    assert ToolCalls(guard.state).refuses(["read"]) == [False]
    clock.advance(2)
    assert ToolCalls(guard.state).refuses(["read"]) == [True]
    assert guard.check().reason is StopReason.MAX_SECONDS
    assert ToolCalls(guard.state).refuses(["read", "pay"]) == [True, True]


def test_a_run_that_is_only_observed_refuses_nothing():
    guard = Guard(Budget(max_tool_calls=1, tool_quotas={"pay": 1}), mode=Mode.OBSERVE)
    guard.admit_tool_calls(names("pay", "pay"))
    assert ToolCalls(guard.state).refuses(["pay", "read"]) == [False, False]
