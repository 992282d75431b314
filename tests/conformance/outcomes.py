"""What an exception that left a run says of the run's end."""

from __future__ import annotations

from budgetguard_core import BudgetExceeded
from budgetguard_core.kit import outcome_of


def ended_with(error):
    """Return the outcome that is on an exception, or None where there is none."""
    return error.outcome if isinstance(error, BudgetExceeded) else outcome_of(error)
