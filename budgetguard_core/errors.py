"""The exceptions of BudgetGuard.

BudgetGuardError                 catch this to catch everything
|-- BudgetExceeded               a run was stopped; carries the trip and the outcome
|-- ConfigurationError           a budget, price or setting makes no sense (also a ValueError)
|-- CheckpointError              a snapshot or log is damaged, or of a newer format
`-- AdapterError                 a guard cannot attach to a framework, or is used against its rules
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from budgetguard_core.outcome import Outcome
    from budgetguard_core.stop import Trip


class BudgetGuardError(Exception):
    """The root of every exception that BudgetGuard raises."""


class BudgetExceeded(BudgetGuardError):
    """A run was stopped and the caller asked for an exception instead of a partial result.

    Attributes:
        trip: Why the run was stopped: reason, limits and what was used.
        outcome: The partial result, or None where the exception is raised before it is built
            (inside a hand-written loop that a `bounded` block will end).
    """

    def __init__(self, trip: Trip, outcome: Outcome | None = None) -> None:
        super().__init__(f"{trip.reason}: {trip.detail}")
        self.trip = trip
        self.outcome = outcome

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.trip, self.outcome)


class ConfigurationError(BudgetGuardError, ValueError):
    """A value makes no sense. The sentence gives the rule, the value and the way out."""


class CheckpointError(BudgetGuardError):
    """A snapshot or a recorded log cannot be used: damaged, incomplete or of a newer format."""


class AdapterError(BudgetGuardError):
    """The guard cannot be attached, or was used against its rules; the run is not protected."""
