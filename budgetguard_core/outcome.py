"""The one shape in which every run ends, and the exception that carries it."""

from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from budgetguard_core.budget import ProfileId
from budgetguard_core.errors import BudgetGuardError, ConfigurationError
from budgetguard_core.stop import StopReason, Trip, Violation
from budgetguard_core.usage import Usage

Status: TypeAlias = Literal["completed", "terminated", "paused", "failed"]
"""The ending of a run: by itself, stopped by a limit, waiting for a person, or by an exception."""


class ToolCallRecord(BaseModel):
    """The record of one tool call."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    id: str | None
    """The call's id in the framework's history."""
    name: str
    """The tool's name, cut to 200 characters."""
    status: Literal["completed", "failed", "refused", "interrupted"]
    """`refused` never started; `interrupted` started and may have taken effect."""


class Outcome(BaseModel):
    """The result of a run. A terminated run is a result, not an error to retry."""

    model_config = ConfigDict(
        defer_build=True, frozen=True, extra="forbid", arbitrary_types_allowed=True
    )

    run_id: str
    """The run's id, as in its log and checkpoints."""
    status: Status
    """`completed`: the run ended by itself. `terminated`: a limit stopped it. `paused`: it waits
    for a person, and goes on under the same counters. `failed`: an exception or a cancellation
    left it."""
    stop_reason: StopReason | None
    """`completed`, or the first limit that held against the next step; None where the run is
    `paused` or `failed`, because no limit ended it."""
    detail: str = ""
    """One sentence for people: limit and use. It is never shown to the model."""
    error: str | None = None
    """The exception that ended a run: its type and text, cut to 500 characters."""
    next_step: str | None = None
    """The step that the run was about to take, or what it waits for, where the adapter knows."""
    violations: tuple[Violation, ...] = ()
    """Every limit that held, in order."""
    usage: Usage
    """The usage of the run, sub-agents included."""
    earlier_usage: Usage = Field(default_factory=Usage)
    """The usage of earlier attempts, where the run was resumed under a fresh budget."""
    tool_calls: tuple[ToolCallRecord, ...] = ()
    """The last tool calls (256 at most) and every one that is still open, oldest first."""
    messages: tuple[Any, ...] = ()
    """The history, closed: every tool call has a result. In the framework's own types."""
    final: Any = None
    """The final answer, or the text of the synthetic last message."""
    finalized: bool = False
    """The run was stopped, and `final` is the answer that the model gave from
    `finalize_reserve`."""
    warnings: tuple[str, ...] = ()
    """The dimensions that reached their warning share."""
    profile: ProfileId | None = None
    """The profile that the run's caps come from, if they do."""
    observed: tuple[Violation, ...] = ()
    """In OBSERVE: every limit that would have stopped the run."""
    resume: str | None = None
    """The way to go on, where the run can be resumed."""
    errors: tuple[str, ...] = ()
    """Failures on the way (sinks, stores, listeners) that did not change the ending."""


class BudgetExceeded(BudgetGuardError):
    """A run was stopped and the caller asked for an exception instead of a partial result.

    Raises:
        ConfigurationError: What is given as the trip is none.

    Attributes:
        trip: Why the run was stopped: reason, limits and what was used.
        outcome: The partial result, or None where the exception is raised before it is built
            (inside a hand-written loop that a `bounded` block will end).
    """

    def __init__(self, trip: Trip, outcome: Outcome | None = None) -> None:
        if not isinstance(trip, Trip):
            raise ConfigurationError(
                f"trip must be a Trip, got {type(trip).__name__}. Pass guard.trip; a run of your "
                "own is ended by guard.abort()."
            )
        super().__init__(f"{trip.reason}: {trip.detail}")
        self.trip = trip
        self.outcome = outcome

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.trip, self.outcome)
