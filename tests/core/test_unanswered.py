"""Rules of loop detection for refused calls, errors, and replies."""

from __future__ import annotations

import pytest

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.kit import Admit, Nudge, Stop, TokenUsage, ToolCall
from budgetguard_core.loop_detection import LoopDetection
from budgetguard_core.loops import LoopDetector


def turns(guard, arguments, most=50):
    """Ask for one call of `search` a turn until the run stops: the turns, and the nudges."""
    nudges = 0
    for turn in range(1, most + 1):
        decision = guard.admit_model_call()
        if isinstance(decision, Stop):
            return turn - 1, nudges, decision
        nudges += isinstance(decision, Nudge)
        guard.settle_model_call(decision, TokenUsage(1, 1))
        call = guard.admit_tool_call(ToolCall(name="search", arguments=arguments(turn)))
        if isinstance(call, Admit):
            guard.settle_tool_call(call, f"page {turn}")
    return most, nudges, None


@pytest.mark.parametrize("varied", [True, False])
def test_calls_past_a_quota_are_nudged_then_stopped_whatever_the_arguments(varied):
    guard = Guard(Budget(tool_quotas={"search": 1}))
    made, nudges, stop = turns(guard, lambda turn: {"q": turn if varied else 1})
    assert nudges >= 1
    assert made <= 12
    assert stop.trip.reason is StopReason.NO_PROGRESS


def test_a_row_of_errors_grows_once_a_reply_however_many_calls_it_makes():
    detector = LoopDetector(LoopDetection())
    for reply in range(2):
        detector.begin_reply()
        for call in range(7):
            detector.observe("download", f"{reply}.{call}", f"none left {call}", error="none left")
        assert detector.nudge() is None
    detector.begin_reply()
    detector.observe("download", "last", "none left", error="none left")
    assert "same error" in detector.nudge()
    for reply in range(5):
        assert not detector.tripped
        detector.begin_reply()
        detector.observe("download", f"more {reply}", "none left", error="none left")
    assert detector.tripped


def test_long_replies_that_differ_in_a_number_or_in_case_alone_repeat():
    guard = Guard(Budget())
    said = 0
    for turn in range(20):
        decision = guard.admit_model_call()
        if isinstance(decision, Stop):
            break
        guard.settle_model_call(decision, TokenUsage(1, 1))
        text = f"Round {turn}: I will ask the other agent for the figures."
        guard.report_reply(text.upper() if turn % 2 else text, speaker="writer")
        said += 1
    assert said == 5
    assert guard.trip.reason is StopReason.NO_PROGRESS


def test_short_replies_that_differ_in_a_number_are_new():
    guard = Guard(Budget())
    for turn in range(20):
        guard.report_reply(f"Total: {turn}", speaker="counter")
    assert isinstance(guard.admit_model_call(), Admit)
