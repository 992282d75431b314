"""What the synthetic message says of the tool calls so far."""

import pytest

from budgetguard_core import Budget, Guard
from budgetguard_core.kit import ToolCall, synthetic_text


def done(guard, number=1, **facts):
    for place in range(number):
        ticket = guard.admit_tool_call(ToolCall(name="search", arguments={"n": place}, **facts))
        guard.settle_tool_call(ticket, f"result {place}")


@pytest.mark.parametrize("number", [1, 256, 1000])
def test_every_completed_call_counts_however_long_the_run(number):
    guard = Guard(Budget(loop_detection=None))
    done(guard, number)
    calls = "1 tool call was" if number == 1 else f"{number} tool calls were"
    assert f"So far {calls} completed" in synthetic_text(guard)


@pytest.mark.parametrize("kind", ["handoff", "output"])
def test_what_is_no_tool_call_does_not_count(kind):
    guard = Guard(Budget())
    done(guard, kind=kind)
    assert "no tool call was completed" in synthetic_text(guard)


def test_the_calls_of_a_run_that_goes_on_elsewhere_count():
    guard = Guard(Budget())
    done(guard, 3)
    done(guard, kind="handoff")
    again = Guard.restore(guard.snapshot())
    done(again, 2)
    assert "So far 5 tool calls were completed" in synthetic_text(again)
