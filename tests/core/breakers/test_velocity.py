"""Velocity, against a naive list of time stamps."""

from __future__ import annotations

import random
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetguard_core.breakers import VelocityLimits
from budgetguard_core.breakers.velocity import VelocityMeter
from budgetguard_core.stop import StopReason
from budgetguard_core.testing import ManualClock

SECOND = 1_000_000_000
MINUTE = 60 * SECOND
DOLLAR = 10**15


def book_model_call(meter, now, tokens, cost):
    """Admit a model call, as a guard does: its start."""
    start = meter.start_of_model_call(now)
    meter.book(start, tokens, cost)
    return start


def book_tool_call(meter, now):
    start = meter.start_of_tool_call(now)
    meter.book(start, tool_calls=1)
    return start


fixed = settings(derandomize=True, deadline=None, max_examples=100, database=None)


def most_in_a_minute(entries):
    """The largest sum over any 60 seconds: a window that is best begins at an entry."""
    return max(
        (
            sum(amount for at, amount in entries if begin <= at < begin + MINUTE)
            for begin, _ in entries
        ),
        default=0,
    )


class Naive:
    """A list of what was used and when."""

    def __init__(self, ceiling, share):
        self.ceiling = ceiling
        self.band = -int(-share * ceiling // 1)
        self.entries = []

    def used(self, second):
        return sum(entry[1] for entry in self.entries if entry[0] >= second - 60)

    def start(self, now):
        second = now // SECOND
        for later in range(second, second + 61):
            if self.used(later) < self.band:
                return now if later == second else later * SECOND
        return (second + 61) * SECOND


@fixed
@given(
    ceiling=st.integers(1, 40),
    share=st.sampled_from([0.3, 0.5, 0.8, 0.99]),
    traffic=st.lists(
        st.tuples(
            st.sampled_from([0, 0.2, 1, 7, 31, 59, 60, 61, 100, 500]),
            st.integers(0, 20),
            st.sampled_from([-20, -3, 0, 5]),
            st.booleans(),
        ),
        max_size=50,
    ),
)
def test_it_knows_what_a_list_knows(ceiling, share, traffic):
    clock = ManualClock()
    limits = VelocityLimits(max_tokens_per_minute=ceiling, throttle_at=share)
    meter, naive = VelocityMeter(limits), Naive(ceiling, share)
    running = []
    for pause, tokens, more, ends in traffic:
        clock.advance(pause)
        now = clock.monotonic_ns()
        fits = naive.used(now // SECOND) < ceiling
        assert bool(meter.model_call_violations(now)) != fits
        if fits:
            start = book_model_call(meter, now, tokens, 0)
            assert start == naive.start(now)
            assert 0 <= start - now <= 61 * SECOND
            entry = [start // SECOND, tokens]
            naive.entries.append(entry)
            running.append((start, entry))
        if ends and running:
            start, entry = running.pop(0)
            meter.correct(start, now, max(more, -entry[1]), 0)
            if more > 0:
                naive.entries.append([now // SECOND, more])
            else:
                entry[1] = max(entry[1] + more, 0)


@pytest.mark.parametrize("seed", range(20))
def test_on_random_traffic_never_above_the_ceiling_plus_one_call(seed):
    random_ = random.Random(seed)
    clock = ManualClock()
    ceiling, largest = 1000, random_.choice([50, 400, 3000])
    meter = VelocityMeter(VelocityLimits(max_tokens_per_minute=ceiling))
    entries = []
    refused = 0
    for _ in range(300):
        clock.advance(random_.choice([0, 0.01, 0.5, 2, 20]))
        now = clock.monotonic_ns()
        if meter.model_call_violations(now):
            refused += 1
            continue
        reserved = random_.randint(1, largest)
        start = book_model_call(meter, now, reserved, 0)
        used = random_.randint(0, reserved)
        clock.advance((start - now) / SECOND)
        entries.append((clock.monotonic_ns(), used))
        clock.advance(random_.choice([0, 1, 90]))
        meter.correct(start, clock.monotonic_ns(), used - reserved, 0)
    assert most_in_a_minute(entries) < ceiling + largest
    assert len(entries) > 50
    # A call that is smaller than the band is delayed, and nothing is ever refused for it.
    assert refused == 0 or largest > 50


@pytest.mark.parametrize("seed", range(10))
def test_parallel_calls_are_held_as_well_for_reservations_count(seed):
    random_ = random.Random(seed)
    clock = ManualClock()
    meter = VelocityMeter(VelocityLimits(max_tokens_per_minute=1000, throttle_at=0.9))
    entries = []
    for _ in range(300):
        clock.advance(random_.choice([0, 0, 0, 5]))
        now = clock.monotonic_ns()
        if not meter.model_call_violations(now):
            entries.append((book_model_call(meter, now, 70, 0), 70))
    assert 900 <= most_in_a_minute(entries) < 1000 + 70


def test_exactly_as_many_tool_calls_start_in_a_minute():
    meter = VelocityMeter(VelocityLimits(max_tool_calls_per_minute=5, throttle_at=0.99))
    started = 0
    for _ in range(200):
        if not meter.tool_call_violations(0):
            assert book_tool_call(meter, 0) == 0
            started += 1
    assert started == 5
    assert meter.tool_call_violations(60 * SECOND)
    assert not meter.tool_call_violations(61 * SECOND)
    assert not meter.model_call_violations(0)


def test_in_the_band_a_call_waits_until_enough_is_a_minute_ago():
    meter = VelocityMeter(VelocityLimits(max_tool_calls_per_minute=10))
    for at in range(8):
        assert book_tool_call(meter, at * SECOND) == at * SECOND
    assert book_tool_call(meter, 8 * SECOND) == 61 * SECOND
    assert book_tool_call(meter, 8 * SECOND) == 62 * SECOND
    # What is delayed counts already, so a third that asks at the same time is too much.
    assert meter.tool_call_violations(8 * SECOND)
    assert book_tool_call(meter, 62 * SECOND) == 63 * SECOND


def test_a_tool_call_that_did_not_start_is_taken_out():
    meter = VelocityMeter(VelocityLimits(max_tool_calls_per_minute=1))
    second = book_tool_call(meter, 0)
    assert meter.tool_call_violations(0)
    meter.correct(second, SECOND, tool_calls=-1)
    meter.correct(second, SECOND, tool_calls=-1)
    assert not meter.tool_call_violations(0)


def test_dollars_are_exact():
    meter = VelocityMeter(VelocityLimits(max_cost_usd_per_minute=0.3))
    for _ in range(2):
        book_model_call(meter, 0, 10**9, DOLLAR // 10)
    assert meter.model_call_violations(0) == []
    book_model_call(meter, 0, 0, DOLLAR // 10 - 1)
    assert not meter.model_call_violations(0)
    meter.correct(0, 0, 0, 1)
    (violation,) = meter.model_call_violations(0)
    assert (violation.reason, violation.limit, violation.used, violation.detail) == (
        StopReason.VELOCITY,
        Decimal("0.3"),
        Decimal("0.3"),
        "max_cost_usd_per_minute=0.3 is reached: 0.3 in the last minute",
    )


def test_everything_that_is_reached_is_named():
    meter = VelocityMeter(
        VelocityLimits(
            max_tokens_per_minute=5, max_cost_usd_per_minute=1, max_tool_calls_per_minute=1
        )
    )
    meter.book(0, 5, DOLLAR)
    meter.book(0, tool_calls=1)
    assert [violation.limit for violation in meter.model_call_violations(0)] == [5, 1]
    assert [violation.limit for violation in meter.tool_call_violations(0)] == [1]
    assert meter.model_call_violations(0)


def test_without_a_ceiling_nothing_is_held():
    meter = VelocityMeter(VelocityLimits())
    for _ in range(100):
        assert book_model_call(meter, 0, 10**9, DOLLAR) == book_tool_call(meter, 0) == 0
    meter.correct(0, 0, 1, 1)
    meter.correct(0, 0, tool_calls=-1)
    assert not meter.model_call_violations(0)
    assert not meter.tool_call_violations(0)
    assert meter.model_call_violations(0) == meter.tool_call_violations(0) == []


def test_what_is_kept_does_not_grow_with_the_run():
    limits = VelocityLimits(max_tokens_per_minute=10**12, max_tool_calls_per_minute=10**12)
    meter = VelocityMeter(limits)
    for number in range(20_000):
        book_model_call(meter, number * SECOND // 50, 7, 0)
        book_tool_call(meter, number * SECOND // 50)
    now = 19_999 * SECOND // 50
    meter.start_of_model_call(now)
    assert [len(window.ring) for window in meter._windows] == [122] * 3
    assert meter._windows[2].total == 50 * 61
