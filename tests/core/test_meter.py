"""The meter at its marks and caps exactly, as its guard shows it."""

from __future__ import annotations

from contextvars import copy_context
from decimal import Decimal

import pytest

from budgetguard_core import Budget, Guard, Price, PriceBook
from budgetguard_core.kit import Admit, ModelCall, Stop, TokenUsage, ToolCall
from budgetguard_core.testing import ManualClock

BOOK = PriceBook(
    {"m": Price(input=1, output=1, tiers=[(1_000, Price(input=1, output=10))])},
)
DOLLAR = Decimal(1)


@pytest.fixture
def clock():
    return ManualClock()


def spend(guard, usage=(0, 0), **facts):
    ticket = guard.admit_model_call(ModelCall(model="m"))
    assert isinstance(ticket, Admit)
    guard.settle_model_call(ticket, TokenUsage(*usage), **facts)


# Up to the mark, then up to the cap: what is reached exactly is reached.


@pytest.mark.parametrize("step", ["model", "tool", "settled"])
def test_time_that_has_reached_its_share_or_its_cap_exactly_counts(clock, step):
    guard = Guard(Budget(max_seconds=10), clock=clock)
    ticket = guard.admit_model_call()
    clock.advance(8)
    if step == "model":
        guard.admit_model_call()
    elif step == "tool":
        guard.admit_tool_call(ToolCall(name="read"))
    else:
        guard.settle_model_call(ticket, TokenUsage(1, 1))
    assert guard.warnings == ("max_seconds",)
    clock.advance(2)
    if step == "tool":
        assert isinstance(guard.admit_tool_call(ToolCall(name="read")), Stop)
    else:
        assert isinstance(guard.admit_model_call(), Stop)


@pytest.mark.parametrize("step", ["model", "tool"])
@pytest.mark.parametrize(
    ("budget", "share", "rest"),
    [
        (Budget(max_total_tokens=10), {"usage": (8, 0)}, {"usage": (2, 0)}),
        (Budget(max_cost_usd=10), {"cost_usd": 8 * DOLLAR}, {"cost_usd": 2 * DOLLAR}),
    ],
)
def test_spend_that_has_reached_its_share_or_its_cap_exactly_counts(budget, share, rest, step):
    guard = Guard(budget, price_book=BOOK)
    spend(guard, **share)
    (dimension,) = guard.warnings
    spend(guard, **rest)
    if step == "model":
        stop = guard.admit_model_call(ModelCall(model="m"))
    else:
        stop = guard.admit_tool_call(ToolCall(name="read"))
    assert isinstance(stop, Stop)
    assert stop.trip.reason == dimension


@pytest.mark.parametrize("batches", [[8], [3, 5], [7, 1]])
def test_a_batch_that_reaches_the_share_exactly_is_warned_of(batches):
    guard = Guard(Budget(max_tool_calls=10))
    for size in batches:
        assert guard.warnings == ()
        guard.admit_tool_calls([ToolCall(name="read")] * size)
    assert guard.warnings == ("max_tool_calls",)


# Counting


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        (TokenUsage(10, 10, cache_read_tokens=4), {"cache_read_tokens": 4}),
        (TokenUsage(10, 10, cache_write_tokens=4), {"cache_write_tokens": 4}),
        (
            TokenUsage(10, 10, cache_write_tokens=4, cache_write_1h_tokens=3),
            {"cache_write_tokens": 4, "cache_write_1h_tokens": 3},
        ),
        (TokenUsage(10, 10, reasoning_tokens=4), {"reasoning_tokens": 4}),
        (TokenUsage(10, 10, estimated=True), {"estimated_calls": 1}),
    ],
)
def test_each_kind_of_token_is_counted_by_itself(usage, counted):
    guard = Guard(Budget(), price_book=BOOK)
    for _ in range(2):
        ticket = guard.admit_model_call(ModelCall(model="m"))
        guard.settle_model_call(ticket, usage)
    expected = dict.fromkeys(
        [
            "cache_read_tokens",
            "cache_write_tokens",
            "cache_write_1h_tokens",
            "reasoning_tokens",
            "estimated_calls",
            "failed_calls",
            "unpriced_calls",
        ],
        0,
    )
    expected |= {name: 2 * count for name, count in counted.items()}
    total = guard.usage
    assert {name: getattr(total, name) for name in expected} == expected
    assert (total.input_tokens, total.output_tokens, total.total_tokens) == (20, 20, 40)


@pytest.mark.parametrize("facts", [{}, {"reasoning_tokens": 1}])
@pytest.mark.parametrize("outputs", [(7_000, 2_000), (2_000, 7_000)])
def test_a_completion_without_a_bound_is_expected_to_be_as_large_as_the_largest(outputs, facts):
    guard = Guard(Budget(max_total_tokens=100_000), price_book=BOOK)
    for output in outputs:
        ticket = guard.admit_model_call(ModelCall(model="m", input_tokens=1))
        guard.settle_model_call(ticket, TokenUsage(1, output, **facts))
    guard.admit_model_call(ModelCall(model="m", input_tokens=1))
    assert guard.usage.reserved_tokens == 1 + 7_000


def test_a_withdrawn_call_gives_back_its_own_reservation():
    guard = Guard(Budget(max_cost_usd=10, max_total_tokens=100))
    bound = {"max_output_tokens": 1}
    kept = guard.admit_model_call(ModelCall(cost_usd=2 * DOLLAR, input_tokens=19, **bound))
    taken_back = guard.admit_model_call(ModelCall(cost_usd=3 * DOLLAR, input_tokens=30, **bound))
    assert guard.withdraw(taken_back)
    assert (guard.usage.reserved_usd, guard.usage.reserved_tokens) == (2 * DOLLAR, 20)
    assert (guard.usage.model_calls, guard.usage.iterations) == (1, 1)
    guard.settle_model_call(kept, TokenUsage(1, 1), cost_usd=DOLLAR)
    assert (guard.usage.reserved_usd, guard.usage.reserved_tokens) == (0, 0)


def test_a_raised_budget_goes_on_with_what_was_counted_of_each_tool():
    guard = Guard(Budget(max_tool_calls=5, tool_quotas={"read": 3}))
    for name in ("read", "read", "write"):
        guard.admit_tool_call(ToolCall(name=name))
    guard.extend(max_tool_calls=9)
    assert guard.tool_counts == {"read": 2, "write": 1}
    assert isinstance(guard.admit_tool_call(ToolCall(name="read")), Admit)
    assert not isinstance(guard.admit_tool_call(ToolCall(name="read")), Admit)
    assert guard.tool_counts == {"read": 3, "write": 1}


def test_time_stands_still_until_the_last_of_two_housekeepings_is_over(clock):
    guard = Guard(Budget(max_seconds=10), clock=clock)
    spend(guard)
    first, second = guard.housekeeping(seconds=60), guard.housekeeping(seconds=60)
    # As in two tasks of the run, each with a context of its own.
    there = copy_context()
    there.run(first.__enter__)
    with second:
        clock.advance(3)
        there.run(first.__exit__, None, None, None)
        clock.advance(3)
    clock.advance(3)
    assert guard.usage.seconds == 3


# The completion bound


@pytest.mark.parametrize(
    ("input_tokens", "cap", "admitted"),
    [
        (1_000, "0.001300", 300),
        (1_001, "0.001301", 30),
        (1_000, "0.001001", 1),
    ],
)
def test_dollars_cut_a_completion_at_the_price_of_the_calls_own_tier(input_tokens, cap, admitted):
    guard = Guard(Budget(max_cost_usd=Decimal(cap)), price_book=BOOK)
    ticket = guard.admit_model_call(
        ModelCall(model="m", input_tokens=input_tokens, max_output_tokens=500)
    )
    assert isinstance(ticket, Admit)
    assert (ticket.max_output_tokens, ticket.clamped_by) == (admitted, "max_cost_usd")


@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_a_run_that_only_looks_on_leaves_the_bounds_of_those_above_it(mode):
    outer = Guard(Budget(max_total_tokens=100), mode=mode)
    advisory = outer.child(Budget(max_model_calls=1), mode="observe")
    for _ in range(3):
        spend(advisory)
    assert advisory.observed_trip is not None
    ticket = advisory.admit_model_call(ModelCall(input_tokens=10, max_output_tokens=500))
    assert isinstance(ticket, Admit)
    assert outer.usage.reserved_tokens == 100
    assert outer.observed_trip is None
