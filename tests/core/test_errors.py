"""The exceptions: one root, facts as attributes, and they survive a process boundary."""

from __future__ import annotations

import copy
import pickle

import pytest

from budgetguard_core import (
    AdapterError,
    Budget,
    BudgetExceeded,
    BudgetGuardError,
    ConfigurationError,
    Guard,
    StopReason,
    Trip,
)
from budgetguard_core.kit import CheckpointError, ToolCall, end_run
from budgetguard_core.testing import ManualClock


def test_one_root():
    for error in (AdapterError, BudgetExceeded, CheckpointError, ConfigurationError):
        assert issubclass(error, BudgetGuardError)
    assert issubclass(ConfigurationError, ValueError)
    assert not issubclass(BudgetGuardError, ValueError)


@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy])
@pytest.mark.parametrize("with_outcome", [False, True])
def test_a_stopped_run_as_an_exception(again, with_outcome):
    guard = Guard(run_id="r", clock=ManualClock())
    guard.abort("user pressed stop")
    trip = guard.check()
    outcome = end_run(guard, trip=trip, final="so far") if with_outcome else None
    error = BudgetExceeded(trip, outcome)
    assert str(error) == "aborted: user pressed stop"
    copied = again(error)
    assert type(copied) is BudgetExceeded
    assert (copied.trip, copied.outcome) == (trip, outcome)
    assert copied.trip.reason is StopReason.ABORTED
    assert str(copied) == str(error)


@pytest.mark.parametrize(
    "kind", [AdapterError, BudgetGuardError, CheckpointError, ConfigurationError]
)
def test_the_others_are_picklable(kind):
    copied = pickle.loads(pickle.dumps(kind("rule, value, way out")))
    assert type(copied) is kind
    assert str(copied) == "rule, value, way out"


@pytest.mark.parametrize("trip", ["too much", None, 3])
def test_an_exception_of_a_stop_needs_the_trip(trip):
    with pytest.raises(ConfigurationError, match=r"trip must be a Trip, got .*Pass guard\.trip"):
        BudgetExceeded(trip)


def test_a_trip_without_violations_can_be_raised():
    error = BudgetExceeded(Trip(reason="aborted", violations=(), run_id="r"))
    assert str(error) == "aborted: "


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def refuse(*_):
    raise Unspeakable


def test_an_exception_whose_text_raises_changes_nothing_wherever_it_is_raised():
    guard = Guard(
        Budget(stop_when=[refuse], max_iterations=1),
        sinks=[refuse],
        on_warning=refuse,
        clock=ManualClock(),
    )
    guard.cancellation.on_cancel(lambda: refuse())
    ticket = guard.admit_model_call()
    assert guard.settle_model_call(ticket, error=Unspeakable())
    call = guard.admit_tool_call(ToolCall(name="a"))
    assert guard.settle_tool_call(call, error=Unspeakable())
    guard.abort(Unspeakable())
    trip = guard.check()
    assert trip.reason is StopReason.ABORTED
    outcome = end_run(guard, trip=trip, error=Unspeakable())
    assert {text.partition(":")[0] for text in outcome.errors} == {
        "sink Listener",
        "stop_when",
        "on_warning",
        "on_cancel",
    }
    assert all(text.endswith(": Unspeakable: Unspeakable") for text in outcome.errors)
