"""Proposed caps against closed forms and against a bootstrap that really draws."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetguard_core import Budget
from budgetguard_core.profiles.audit import audit
from budgetguard_core.profiles.calibration import (
    propose,
    quantiles,
    rank,
)

COUNTS = [10, 29, 30, 299, 300, 1000]


def one_to(count):
    return list(range(1, count + 1))


@pytest.mark.parametrize(
    ("count", "basis", "cap", "provisional"),
    [
        (10, "maximum", 3 * 10, True),
        (29, "maximum", 3 * 29, True),
        (30, "maximum", 2 * 30, False),
        (299, "maximum", 2 * 299, False),
        (300, "p99", 446, False),  # 297 x 1.5 = 445.5, up
        (1000, "p99", 1485, False),
    ],
)
def test_the_rule_by_the_number_of_runs(count, basis, cap, provisional):
    found = propose("max_iterations", one_to(count), labelled=True)
    assert (found.basis, found.cap, found.provisional) == (basis, cap, provisional)


@pytest.mark.parametrize("count", range(10))
def test_with_fewer_than_ten_runs_nothing_is_proposed(count):
    assert propose("max_iterations", one_to(count), labelled=True) is None


@pytest.mark.parametrize("dimension", ["max_total_tokens", "max_cost_usd"])
def test_tokens_and_dollars_get_twice_the_99th_percentile(dimension):
    assert propose(dimension, one_to(1000), labelled=True).cap == 2 * 990


@pytest.mark.parametrize("count", COUNTS)
def test_of_runs_that_nobody_looked_at_the_95th_percentile_counts(count):
    found = propose("max_tool_calls", one_to(count), labelled=False)
    assert found.basis == "p95"
    assert found.cap == -(-rank(count, 0.95) * 5 // 2)
    assert found.provisional is (count < 30)


def test_one_runaway_does_not_move_the_cap_of_unlabelled_runs():
    calm = [*one_to(99), 100]
    wild = [*one_to(99), 10_000]
    caps = [propose("max_iterations", runs, labelled=False).cap for runs in (calm, wild)]
    assert caps[0] == caps[1]


def test_what_was_never_used_gets_no_cap():
    assert propose("max_tool_calls", [0] * 50, labelled=True) is None
    assert propose("max_tool_calls", [0] * 49 + [1], labelled=False) is None


def test_dollars_stay_exact_and_are_rounded_up():
    assert propose("max_cost_usd", [Decimal("0.1")] * 30, labelled=True).cap == Decimal("0.20")
    assert propose("max_cost_usd", [Decimal("0.00123")] * 30, labelled=True).cap == Decimal(
        "0.0025"
    )


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=200))
def test_quantiles_are_figures_that_were_seen(figures):
    found, ordered = quantiles(figures), sorted(figures)
    for name, percent in (("p50", 50), ("p95", 95), ("p99", 99)):
        assert getattr(found, name) == ordered[-(-len(figures) * percent // 100) - 1]
    assert found.maximum == max(figures)


@pytest.mark.parametrize("draw", ["exponential", "lognormal", "pareto"])
@pytest.mark.parametrize("count", [10, 30, 300])
def test_the_next_run_exceeds_the_cap_at_most_as_often_as_it_says(draw, count):
    random = Random(16)
    exceeded, said = 0, 0.0
    trials = 2_000 if count < 300 else 300
    for _ in range(trials):
        one = {
            "exponential": lambda: random.expovariate(0.01),
            "lognormal": lambda: random.lognormvariate(3, 1),
            "pareto": lambda: (random.paretovariate(1.5) - 1) * 100,
        }[draw]
        sample = [one() for _ in range(count + 1)]
        found = propose("max_seconds", sample[:-1], labelled=True)
        exceeded += sample[-1] > found.cap
        said += found.exceeds
    # Four standard errors of a share this small.
    assert exceeded / trials <= said / trials + 4 * (said / trials / trials) ** 0.5


def findings(budget, figures, runs=None, stopped=()):
    runs = len(figures) if runs is None else runs
    return [
        (one.problem, one.dimension)
        for one in audit(budget, {"max_iterations": figures}, runs=runs, stopped=Counter(stopped))
    ]


def test_a_cap_below_the_99th_percentile_truncates_real_work():
    assert findings(Budget(max_iterations=98), one_to(100), stopped=["x"]) == [
        ("truncates", "max_iterations")
    ]
    assert findings(Budget(max_iterations=99), one_to(100), stopped=["x"]) == []


def test_a_cap_above_five_times_the_99th_percentile_never_fires():
    assert findings(Budget(max_iterations=5 * 99), one_to(100), stopped=["x"]) == []
    assert findings(Budget(max_iterations=5 * 99 + 1), one_to(100), stopped=["x"]) == [
        ("never_fires", "max_iterations")
    ]


def test_the_share_of_work_that_is_cut_is_said():
    (found,) = audit(
        Budget(max_iterations=90), {"max_iterations": one_to(100)}, runs=101, stopped=Counter("x")
    )
    assert (found.share, found.p99, found.runs) == (0.10, 99, 100)


def test_limits_that_never_or_always_fire_are_said():
    fits = Budget(max_iterations=20)
    assert findings(fits, one_to(10)) == [("limits_never_fire", None)]
    assert findings(fits, [], runs=10, stopped=["x"] * 10) == [("limits_always_fire", None)]
    assert findings(fits, one_to(10), runs=11, stopped=["x"]) == []


def test_few_runs_are_not_judged():
    assert findings(Budget(max_iterations=1), one_to(9)) == []
