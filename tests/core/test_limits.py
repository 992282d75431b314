"""The built-in predicates: the fast answer is the long answer, at and around every cap."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetguard_core import Budget, FinalizeReserve, Guard, ModelCall, StopReason
from budgetguard_core.caps import Caps, Marks
from budgetguard_core.limits import (
    cut_answer,
    due_warnings,
    foreseen_warnings,
    in_order,
    model_call_violations,
    tool_call_violations,
)
from budgetguard_core.meter import (
    COUNTERS,
    Meter,
    far_from_caps,
    release,
    reserve,
)
from budgetguard_core.stop import PRECEDENCE

FEMTO = 10**15
fixed = settings(derandomize=True, deadline=None, max_examples=300, database=None)
near = st.integers(0, 6)
cap = st.none() | st.integers(1, 5)
capped = st.builds(
    Budget,
    max_iterations=cap,
    max_model_calls=cap,
    max_tool_calls=cap,
    max_total_tokens=cap,
    max_seconds=cap,
    max_cost_usd=cap,
)


def metered(budget, warned=(), **counters):
    """Make a meter that has counted this, and whose time began at 0."""
    meter = Meter(budget)
    meter.go_on_from(dict.fromkeys(COUNTERS, 0) | counters, {}, {}, warned, 0, 0, 0)
    return meter


counted = st.builds(
    lambda cost, reserved, **rest: {
        "cost": cost * FEMTO,
        "reserved_cost": reserved * FEMTO,
        **rest,
    },
    cost=near,
    reserved=near,
    iterations=near,
    model_calls=near,
    tool_calls=near,
    tokens=near,
    reserved_tokens=near,
)
elapsed = near.map(lambda seconds: seconds * 10**9)


@given(capped, counted, elapsed, st.booleans(), near, near)
@fixed
def test_a_model_call_fits_exactly_when_nothing_holds_against_it(
    budget, counters, ns, retry, tokens, dollars
):
    counters = metered(budget, **counters)
    found = model_call_violations(counters, ns, retry, tokens, dollars * FEMTO)
    assert counters.fits_model_call(ns, retry, tokens, dollars * FEMTO) is not bool(found)
    assert found == in_order(found)
    assert len({violation.reason for violation in found}) == len(found)

    def passed(used, cap, more=0):
        return cap is not None and (used >= cap or used + more > cap)

    expected = {
        "max_iterations": not retry and passed(counters.iterations, budget.max_iterations),
        "max_model_calls": passed(counters.model_calls, budget.max_model_calls),
        "max_seconds": passed(ns / 10**9, budget.max_seconds),
        "max_cost_usd": passed(
            Decimal(counters.cost) / FEMTO,
            budget.max_cost_usd,
            Decimal(counters.reserved_cost) / FEMTO + dollars,
        ),
        "max_total_tokens": passed(
            counters.tokens, budget.max_total_tokens, counters.reserved_tokens + tokens
        ),
        "max_tool_calls": budget.max_tool_calls is not None
        and counters.tool_calls > budget.max_tool_calls,
    }
    assert {str(v.reason) for v in found} == {name for name, held in expected.items() if held}
    for violation in found:
        assert violation.limit == getattr(budget, violation.reason)
        assert violation.detail.startswith(f"{violation.reason}={violation.limit} ")


@pytest.mark.parametrize("used", [0, 2, 3, 4])
@pytest.mark.parametrize(
    ("field", "counter", "first_held"),
    [
        ("max_iterations", "iterations", 3),
        ("max_model_calls", "model_calls", 3),
        ("max_total_tokens", "tokens", 3),
        ("max_total_tokens", "reserved_tokens", 4),
        ("max_cost_usd", "cost", 3),
        ("max_cost_usd", "reserved_cost", 4),
        ("max_tool_calls", "tool_calls", 4),
    ],
)
def test_each_cap_by_itself_holds_from_the_right_use_on(field, counter, first_held, used):
    used_now = {counter: used * FEMTO if "cost" in counter else used}
    meter = metered(Budget(**{field: 3}), **used_now)
    assert meter.fits_model_call(0, False, 0, 0) is (used < first_held)
    assert bool(model_call_violations(meter, 0, False, 0, 0)) is (used >= first_held)


@given(capped, counted, elapsed)
@fixed
def test_a_tool_call_fits_exactly_when_nothing_holds_against_it(budget, counters, ns):
    meter = metered(budget, **counters)
    found = tool_call_violations(meter, ns)
    assert meter.fits_tool_calls(ns) is not bool(found)
    reasons = {str(violation.reason) for violation in found}
    assert reasons <= {"max_seconds", "max_cost_usd", "max_total_tokens"}


@given(
    capped,
    counted,
    elapsed,
    st.sets(st.sampled_from([f"max_{name}" for name in ("iterations", "total_tokens", "seconds")])),
)
@fixed
def test_below_every_mark_nothing_holds_and_no_warning_is_due(budget, counters, ns, warned):
    counters = metered(budget, tuple(warned), **counters)
    marks = counters.marks
    below = (
        counters.iterations < marks.iterations
        and counters.model_calls < marks.model_calls
        and counters.tool_calls < marks.tool_calls
        and counters.tokens < marks.tokens
        and counters.cost < marks.cost
        and ns < marks.nanoseconds
    )
    if far_from_caps((counters,), ns, 0, 0):
        assert below
    if below:
        assert due_warnings(counters, ns) == []
        assert counters.fits_tool_calls(ns)
        assert counters.iterations < counters.caps.iterations
        assert counters.model_calls < counters.caps.model_calls


@given(
    st.builds(Budget, max_iterations=st.integers(1, 12), max_model_calls=st.integers(1, 12)),
    st.lists(st.sampled_from(["call", "retry", "back", "retry back", "restart"]), max_size=30),
)
@fixed
def test_one_mark_stands_for_iterations_and_model_calls(budget, steps):
    meter = metered(budget)
    flying = {"back": 0, "retry back": 0}
    for step in steps:
        if step in ("call", "retry"):
            reserve((meter,), step == "retry", 0, 0)
            flying["retry back" if step == "retry" else "back"] += 1
        elif step == "restart":
            meter.restart_iterations()
            flying["back"] = 0
        elif flying[step]:
            release((meter,), step == "retry back", 0, 0)
            flying[step] -= 1
        if far_from_caps((meter,), 0, 0, 0):
            assert meter.iterations + 1 < meter.marks.iterations
            assert meter.model_calls + 1 < meter.marks.model_calls


def test_a_warning_is_due_from_its_share_on_and_only_once():
    budget = Budget(max_iterations=10, max_cost_usd=1, max_seconds=10)
    assert due_warnings(metered(budget, iterations=7, cost=FEMTO * 79 // 100), 7 * 10**9) == []
    due = due_warnings(metered(budget, iterations=8, cost=FEMTO * 80 // 100), 8 * 10**9)
    assert [(str(v.reason), v.limit, v.used) for v in due] == [
        ("max_iterations", 10, 8),
        ("max_seconds", 10.0, 8.0),
        ("max_cost_usd", Decimal(1), Decimal("0.8")),
    ]
    assert due_warnings(metered(budget, ("max_iterations",), iterations=9), 0) == []


@pytest.mark.parametrize(
    ("used", "reserved", "projected", "foreseen"),
    [(9, 0, 1, False), (9, 0, 2, True), (8, 1, 1, False), (8, 1, 2, True), (10, 0, 1, False)],
)
def test_a_projection_is_warned_of_where_it_alone_would_pass_the_cap(
    used, reserved, projected, foreseen
):
    meter = metered(Budget(max_total_tokens=10), tokens=used, reserved_tokens=reserved)
    found = foreseen_warnings(meter, 0, projected, 0)
    assert [(str(v.reason), v.limit, v.used) for v in found] == [
        ("max_total_tokens", 10, used)
    ] * foreseen
    meter = metered(Budget(max_cost_usd=10), cost=used * FEMTO, reserved_cost=reserved * FEMTO)
    found = foreseen_warnings(meter, 0, 0, projected * FEMTO)
    assert [(str(v.reason), v.limit, v.used) for v in found] == [
        ("max_cost_usd", Decimal(10), Decimal(used))
    ] * foreseen
    warned = metered(Budget(max_total_tokens=10), ("max_total_tokens",), tokens=used)
    assert foreseen_warnings(warned, 0, projected, 0) == []


RESERVE = FinalizeReserve(tokens=100, cost_usd=Decimal("0.5"))


@pytest.mark.parametrize(
    ("counters", "limit", "used", "detail"),
    [
        (
            {"tokens": 900},
            1000,
            900,
            "max_total_tokens=1000 reached: 900 used, 100 kept back for a last answer",
        ),
        (
            {"tokens": 7, "reserved_tokens": 880},
            1000,
            7,
            "max_total_tokens=1000 would be passed: 7 used, 901 projected, "
            "100 kept back for a last answer",
        ),
        (
            {"cost": 2 * FEMTO, "reserved_cost": 2 * FEMTO},
            Decimal(4),
            Decimal(2),
            "max_cost_usd=4 would be passed: 2 used, 3 projected, 0.5 kept back for a last answer",
        ),
        ({"iterations": 3}, 3, 3, "max_iterations=3 reached: 3 used"),
    ],
)
def test_a_violation_says_what_was_used_and_what_is_kept_back(counters, limit, used, detail):
    budget = Budget(
        max_iterations=3, max_total_tokens=1000, max_cost_usd=4, finalize_reserve=RESERVE
    )
    meter = metered(budget, **counters)
    (found,) = model_call_violations(meter, 0, False, 21, FEMTO)
    assert (found.limit, found.used, found.detail) == (limit, used, detail)


@pytest.mark.parametrize(
    ("reason", "figure"),
    [(StopReason.MAX_OUTPUT_TOKENS_PER_CALL, 50), (StopReason.MAX_TOTAL_TOKENS, None)],
)
def test_a_cut_answer_says_what_its_bound_was_set_for(reason, figure):
    found = cut_answer(reason, 50)
    assert (found.reason, found.limit, found.used) == (reason, figure, figure)
    assert found.detail == f"an answer was cut short at its bound of 50 tokens, set for {reason}"


def test_what_cannot_be_charged_is_said_in_a_sentence():
    guard = Guard(Budget(max_cost_usd=1))
    stop = guard.admit_model_call(ModelCall(model="no-such-model"))
    assert stop.trip.detail == "no price is known for model 'no-such-model' and max_cost_usd is set"
    guard = Guard(Budget(max_total_tokens=1))
    guard.settle_model_call(guard.admit_model_call())
    assert guard.admit_model_call().trip.detail == (
        "a model call reported no usage and had no estimate; it cannot be charged"
    )


@pytest.mark.parametrize(
    ("dimension", "mark"),
    [
        ("max_iterations", "iterations"),
        ("max_model_calls", "model_calls"),
        ("max_tool_calls", "tool_calls"),
        ("max_total_tokens", "tokens"),
        ("max_seconds", "nanoseconds"),
        ("max_cost_usd", "cost"),
    ],
)
def test_a_dimension_that_was_warned_of_is_looked_at_from_its_cap_on(dimension, mark):
    caps = Caps(Budget(**{dimension: 10}))
    full = getattr(caps, mark)
    assert getattr(Marks(caps, ()), mark) == full * 4 // 5
    assert getattr(Marks(caps, {dimension: None}), mark) == full


@pytest.mark.parametrize(
    ("reserve", "tokens", "dollars"),
    [
        (FinalizeReserve(tokens=3), 7, 10),
        (FinalizeReserve(cost_usd=3), 10, 7),
        (FinalizeReserve(tokens=3, cost_usd=1), 7, 9),
    ],
)
def test_only_what_is_kept_back_is_taken_off_the_caps(reserve, tokens, dollars):
    caps = Caps(Budget(max_total_tokens=10, max_cost_usd=10, finalize_reserve=reserve))
    assert (caps.tokens, caps.cost) == (tokens, dollars * FEMTO)


@pytest.mark.parametrize("limit", [5, 10, 25, 100, 1000, 10**6])
def test_eighty_per_cent_are_not_missed_by_rounding(limit):
    assert Marks(Caps(Budget(max_iterations=limit)), ()).iterations == limit * 4 // 5


def test_no_cap_is_infinity():
    caps = Caps(Budget())
    marks = Marks(caps, ())
    for name in Marks.__slots__:
        assert getattr(caps, name) == getattr(marks, name) == math.inf
    assert caps.refuses_unpriced is False
    assert Caps(Budget(max_cost_usd=1)).refuses_unpriced is True
    assert Caps(Budget(max_cost_usd=1, on_unpriced="count_zero")).refuses_unpriced is False


def test_seconds_and_dollars_become_whole_numbers():
    caps = Caps(Budget(max_seconds=1.5, max_cost_usd=Decimal("0.30")))
    assert (caps.nanoseconds, caps.cost) == (1_500_000_000, 3 * 10**14)


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("search_web", {"search_*", "*", "search_web"}),
        ("Search_Web", {"*"}),
        ("delete_file", {"mutating/*", "*"}),
        ("delete_all", {"mutating/*", "mutating/delete_all", "*"}),
        ("mutating/x", {"mutating/*", "*"}),
        ("", {"*"}),
        ("../mutating/x", {"*"}),
    ],
)
def test_quotas_are_found_by_name_pattern_and_class(name, patterns):
    caps = Caps(
        Budget(
            tool_quotas=dict.fromkeys(
                ["search_web", "search_*", "mutating/*", "mutating/delete_all", "*"], 1
            ),
            tool_classes={"delete_*": "mutating", "delete_all": "harmless"},
        )
    )
    assert {quota.pattern for quota in caps.quotas_of(name)} == patterns
    assert caps.quotas_of(name) == caps.quotas_of(name)  # the same quotas, not copies of them


def test_a_tool_without_a_class_has_none():
    caps = Caps(Budget(tool_quotas={"*/read": 1, "files/*": 1}, tool_classes={"read_*": "files"}))
    assert [caps.class_of(name) for name in ("read_file", "write", "")] == ["files", "", ""]
    assert {quota.pattern for quota in caps.quotas_of("read_file")} == {"files/*"}


def test_every_reason_has_its_place():
    assert set(PRECEDENCE) == set(StopReason)
