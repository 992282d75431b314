"""The exceptions: one root, facts as attributes, and they survive a process boundary."""

from __future__ import annotations

import copy
import pickle

import pytest

from budgetguard_core import (
    AdapterError,
    BudgetExceeded,
    BudgetGuardError,
    CheckpointError,
    ConfigurationError,
    Guard,
    StopReason,
    end_run,
)
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
