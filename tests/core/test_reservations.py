"""What calls in flight have set aside: the next call's bound, and what a withdrawal gives back."""

from __future__ import annotations

from decimal import Decimal

import pytest

from budgetguard_core import Budget, Guard, Mode, Price, PriceBook, StopReason
from budgetguard_core.kit import ModelCall, TokenUsage, ToolCall

BOOK = PriceBook({"m": Price(input=1_000, output=2_000)})  # $0.001 and $0.002 a token


def guard_of(**caps):
    return Guard(Budget(loop_detection=None, **caps), price_book=BOOK)


def asked(guard, given=10, bound=100):
    return guard.admit_model_call(ModelCall(model="m", input_tokens=given, max_output_tokens=bound))


def test_the_bound_is_cut_to_what_used_and_open_calls_leave_of_the_tokens():
    guard = guard_of(max_total_tokens=300)
    guard.settle_model_call(asked(guard), TokenUsage(40, 10))
    first = asked(guard)
    assert (first.max_output_tokens, first.reserved_tokens) == (100, 110)
    second = asked(guard)
    assert (second.max_output_tokens, second.clamped_by) == (100, None)
    third = asked(guard)
    # 300 less 50 used, 220 set aside and its own prompt of 10.
    assert (third.max_output_tokens, third.clamped_by) == (20, StopReason.MAX_TOTAL_TOKENS)
    assert asked(guard).trip.reason is StopReason.MAX_TOTAL_TOKENS


def test_the_bound_is_cut_to_what_used_and_open_calls_leave_of_the_dollars():
    guard = guard_of(max_cost_usd=Decimal("0.6"))
    guard.settle_model_call(asked(guard), TokenUsage(30, 10))
    assert guard.usage.cost_usd == Decimal("0.05")
    first, second, third = asked(guard), asked(guard), asked(guard)
    assert guard.usage.reserved_usd == Decimal("0.55")
    assert [one.max_output_tokens for one in (first, second)] == [100, 100]
    # $0.60 less 0.05 used, 0.42 set aside and 0.01 for its own prompt, at $0.002 a token.
    assert (third.max_output_tokens, third.clamped_by) == (60, StopReason.MAX_COST_USD)
    assert asked(guard).trip.reason is StopReason.MAX_COST_USD


def test_an_advisory_guard_that_has_recorded_its_trip_cuts_nothing_and_the_one_above_does():
    outer = guard_of(max_total_tokens=150)
    inner = outer.child(Budget(max_total_tokens=5, loop_detection=None), mode=Mode.OBSERVE)
    assert asked(inner, bound=20).max_output_tokens == 20
    assert inner.observed_trip is not None
    assert asked(inner).max_output_tokens == 100
    assert asked(inner).trip.run_id == outer.run_id


def test_a_withdrawn_tool_call_gives_its_place_in_the_quota_back_once():
    guard = guard_of(tool_quotas={"read": 2}, max_tool_calls=5)
    first, second = guard.admit_tool_calls([ToolCall(name="read"), ToolCall(name="read")])
    guard.withdraw(second)
    assert guard.snapshot().quotas == {"read": 1}
    assert guard.tool_counts == {"read": 1}
    guard.settle_tool_call(first, "x")


@pytest.mark.parametrize("attempts", [1, 2])
def test_what_open_calls_of_earlier_legs_set_aside_adds_up(attempts):
    guard = guard_of(max_total_tokens=10_000, max_cost_usd=100)
    for _ in range(2):
        asked(guard)
    before = guard.usage
    assert before.reserved_tokens == 220
    for _ in range(attempts):
        fresh = Budget(max_total_tokens=10_000, max_cost_usd=100, loop_detection=None)
        guard = Guard.restore(guard.snapshot(), fresh, price_book=BOOK)
        assert guard.usage.reserved_tokens == before.reserved_tokens
        assert guard.usage.reserved_usd == before.reserved_usd
