"""`fallback_model`: from a share of a cap on tokens or dollars on, requests go to another model."""

from __future__ import annotations

import pytest

from budgetguard_core import Budget, ConfigurationError, Guard, Price, PriceBook
from budgetguard_core.kit import Envelope, ModelCall, Stop, TokenUsage, entered
from budgetguard_core.replay import replay

SMALL = "small"
BOOK = PriceBook(
    {"big": Price(input=10_000, output=10_000), SMALL: Price(input=1_000, output=1_000)}
)


def budget(**fields):
    return Budget(**{"fallback_at": 0.5, "fallback_model": SMALL, "loop_detection": None, **fields})


def called(run, *, may_fall_back=True, model="big") -> str | None:
    """Make one call of 20 tokens, and return the model that it went to; None for a stop."""
    opened = run.model_call(ModelCall(model=model), may_fall_back=may_fall_back)
    if isinstance(opened, Stop):
        return None
    run.answered(opened, TokenUsage(10, 10))
    assert opened.call.model == (opened.fallback_model or model)
    return opened.call.model


@pytest.mark.parametrize(
    ("caps", "calls"),
    [
        ({"max_total_tokens": 80}, ["big", "big", SMALL, SMALL, None]),
        ({"max_input_tokens": 40}, ["big", "big", SMALL, SMALL, None]),
        ({"max_output_tokens": 40}, ["big", "big", SMALL, SMALL, None]),
        # Ten calls of the small one for each of the big one.
        ({"max_cost_usd": 0.4}, ["big"] + [SMALL] * 10 + [None]),
        ({"max_total_tokens": 80, "max_iterations": 2}, ["big", "big", None]),
    ],
)
def test_each_cap_has_its_share_and_the_price_is_that_of_the_model(caps, calls):
    guard = Guard(budget(**caps), price_book=BOOK)
    run = Envelope(budget=guard).open()
    assert [called(run) for _ in calls] == calls


def test_it_is_an_event_and_a_replay_counts_the_same():
    events = []
    guard = Guard(budget(max_total_tokens=80), price_book=BOOK, sinks=[events.append])
    run = Envelope(budget=guard).open()
    while called(run):
        pass
    started = [one for one in events if one.event == "fallback_started"]
    assert [(one.model, one.dimension) for one in started] == [(SMALL, "max_total_tokens")]
    assert replay(events, price_book=BOOK).usage.cost_usd == guard.usage.cost_usd


def test_a_part_of_the_run_goes_to_it_too_and_the_next_run_begins_with_its_own():
    guard = Guard(budget(max_total_tokens=80), price_book=BOOK)
    run = Envelope(budget=guard).open()
    child = Envelope(budget=Budget(max_iterations=9))
    with run.entered():
        assert called(child.open()) == "big"
    assert called(run) == "big"
    with run.entered():
        assert called(child.open()) == SMALL
    run.end()
    assert called(Envelope(budget=budget(max_total_tokens=80)).open()) == "big"


def test_where_the_model_cannot_be_set_the_run_keeps_its_own_and_says_so_once():
    run = Envelope(budget=Guard(budget(max_total_tokens=100), price_book=BOOK)).open()
    assert [called(run, may_fall_back=False) for _ in range(4)] == ["big"] * 4
    (error,) = run.guard.tree.errors
    assert error.startswith("fallback_model: the model of a request cannot be set")


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_no_other_mode_changes_the_model(mode):
    run = Envelope(budget=Guard(budget(max_total_tokens=80), mode=mode, price_book=BOOK)).open()
    assert [called(run) for _ in range(5)] == ["big"] * 5


def test_a_layer_below_a_call_keeps_what_the_layer_above_has_decided():
    run = Envelope(budget=Guard(budget(max_total_tokens=200), price_book=BOOK)).open()
    assert [called(run) for _ in range(5)] == ["big"] * 5
    opened = run.model_call(ModelCall(model="big"), may_fall_back=True)
    below = Envelope(budget=Budget(max_iterations=9))
    with entered(opened.frame):
        assert called(below.open(), model=SMALL) == SMALL
    assert opened.fallback_model == SMALL


def test_more_budget_brings_the_models_own_back():
    guard = Guard(budget(max_total_tokens=80), price_book=BOOK)
    run = Envelope(budget=guard).open()
    assert [called(run) for _ in range(3)] == ["big", "big", SMALL]
    guard.extend(max_total_tokens=1000)
    assert called(run) == "big"


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"fallback_at": 0.8, "max_cost_usd": 1}, "given together with fallback_at"),
        ({"fallback_model": "m", "max_cost_usd": 1}, "given together with fallback_at"),
        ({"fallback_at": 0.8, "fallback_model": "", "max_cost_usd": 1}, "given together"),
        ({"fallback_at": 2, "fallback_model": "m", "max_cost_usd": 1}, "between 0 and 1"),
        ({"fallback_at": 0.8, "fallback_model": 5, "max_cost_usd": 1}, "must be a text"),
        ({"fallback_at": 0.8, "fallback_model": "m", "max_iterations": 9}, "needs a cap on tokens"),
    ],
)
def test_bad_input_is_refused(fields, rule):
    with pytest.raises(ConfigurationError, match=rule):
        Budget(**fields)
