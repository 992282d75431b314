"""A completion bound that the request carries already is not lowered: the call fits, or not."""

from __future__ import annotations

from budgetguard_core import Budget, Guard, StopReason, replay
from budgetguard_core.kit import ModelCall, Stop
from budgetguard_core.testing import ManualClock


def test_a_fixed_bound_that_does_not_fit_is_refused():
    guard = Guard(Budget(max_total_tokens=100))
    decision = guard.admit_model_call(
        ModelCall(input_tokens=60, max_output_tokens=50, output_is_fixed=True)
    )
    assert isinstance(decision, Stop)
    assert decision.trip.reason is StopReason.MAX_TOTAL_TOKENS


def test_a_fixed_bound_that_fits_is_reserved_and_replayed():
    events = []
    guard = Guard(Budget(max_total_tokens=100), sinks=[events.append], clock=ManualClock())
    call = ModelCall(input_tokens=60, max_output_tokens=40, output_is_fixed=True)
    guard.settle_model_call(guard.admit_model_call(call))
    guard.admit_model_call(call)
    replayed = replay(events)
    assert replayed.usage.total_tokens == guard.usage.total_tokens == 100
    assert replayed.trip == guard.trip


def test_a_bound_that_cannot_be_lowered_is_what_may_be_written_whatever_the_budget_says():
    guard = Guard(Budget(max_total_tokens=100, max_output_tokens_per_call=10))
    fixed = ModelCall(input_tokens=60, max_output_tokens=50, output_is_fixed=True)
    assert isinstance(guard.admit_model_call(fixed), Stop)
    guard = Guard(Budget(max_total_tokens=200, max_output_tokens_per_call=10))
    admitted = guard.admit_model_call(fixed)
    assert admitted.max_output_tokens == 50
    assert guard.usage.reserved_tokens == 110
