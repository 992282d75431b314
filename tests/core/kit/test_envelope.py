"""What an adapter takes as its budget, checked in one place."""

import pytest

from budgetguard_core import (
    Budget,
    ConfigurationError,
    Guard,
    JsonLinesSink,
    MemoryStore,
    Mode,
    PriceBook,
)
from budgetguard_core.kit import Envelope, ModelCall, Stop, envelope_of
from budgetguard_core.testing import ManualClock


def test_a_budget_a_guard_and_an_envelope_are_taken():
    budget, guard = Budget(), Guard()
    envelope = Envelope(budget=budget)
    assert envelope_of(budget).budget is budget
    assert envelope_of(guard).budget is guard
    assert envelope_of(envelope) is envelope
    assert envelope_of(None, default=budget).budget is budget


@pytest.mark.parametrize(
    ("option", "match"),
    [
        (
            {"on_trip": "explode"},
            "on_trip must be 'return', 'raise', 'ask' or a function, got 'explode'",
        ),
        ({"mode": "loud"}, "mode must be one of"),
        ({"sinks": [5]}, "a sink must take events"),
        ({"on_warning": 5}, "on_warning must be callable"),
        ({"on_outcome": "print"}, "on_outcome must be callable"),
        ({"store": object()}, "store must save, load and delete snapshots"),
        ({"price_book": 5}, "price_book must be a PriceBook"),
        ({"clock": object()}, "clock must tell the time"),
        ({"on_tripp": "raise"}, "on_tripp is no option of an envelope"),
    ],
)
def test_options_are_checked(option, match):
    with pytest.raises(ConfigurationError, match=match):
        envelope_of(Budget(), **option)


@pytest.mark.parametrize(
    "option",
    [
        {"mode": "observe"},
        {"sinks": [print]},
        {"on_warning": print},
        {"price_book": PriceBook()},
        {"clock": ManualClock()},
    ],
)
def test_what_a_guard_has_itself_is_not_given_beside_it(option):
    with pytest.raises(ConfigurationError, match="must be left out with a Guard"):
        envelope_of(Guard(), **option)


def test_what_belongs_to_the_run_is_given_beside_a_guard():
    store = MemoryStore()
    envelope = envelope_of(Guard(), store=store, on_trip="raise", on_outcome=print)
    assert envelope.store is store


def test_an_envelope_has_its_own_options():
    with pytest.raises(ConfigurationError, match="on_trip must be left out with an Envelope"):
        envelope_of(Envelope(budget=Budget()), on_trip="raise")
    assert envelope_of(Envelope(budget=Budget()), on_trip="return").on_trip == "return"


def test_a_fresh_guard_has_the_options():
    told, clock, prices = [], ManualClock(), PriceBook()
    envelope = Envelope(
        budget=Budget(), mode="observe", sinks=[told.append], clock=clock, price_book=prices
    )
    first, second = envelope.open(run_id="first"), envelope.open()
    assert first.guard is not second.guard
    assert first.guard.mode is Mode.OBSERVE
    assert first.guard.tree.clock is clock
    assert first.guard.tree.price_book is prices
    assert first.guard.run_id == "first"
    assert told


def test_a_run_within_another_has_its_log():
    told = []
    outer = Envelope(budget=Budget(), sinks=[told.append]).open()
    with outer.entered():
        inner = Envelope(budget=Budget()).open()
    assert inner.guard.parent is outer.guard
    assert told[-1].run_id == inner.guard.run_id


def test_an_advisory_envelope_within_another():
    outer = Envelope(budget=Budget()).open()
    with outer.entered():
        inner = Envelope(budget=Budget(), mode="observe").open()
    assert inner.guard.mode is Mode.OBSERVE


def test_a_budget_within_an_observing_run_is_enforced():
    watching = Guard(Budget(max_iterations=1), mode="observe")
    with watching.activate():
        run = Envelope(budget=Budget(max_iterations=2)).open(user_spoke=True)
        calls = [run.model_call(ModelCall(model="gpt-4o")) for _ in range(3)]
    assert [isinstance(call, Stop) for call in calls] == [False, False, True]
    assert watching.trip is None
    assert watching.usage.model_calls == 2


def test_one_sink_in_place_of_a_list_is_told_so(tmp_path):
    with (
        JsonLinesSink(tmp_path / "log.jsonl") as sink,
        pytest.raises(ConfigurationError, match=r"sinks must be a list, got JsonLinesSink\. Use"),
    ):
        Envelope(budget=Budget(), sinks=sink)
