"""The one shape in which every run ends, completed or terminated."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from budgetguard_core.stop import StopReason, Violation
from budgetguard_core.usage import Usage


class ToolCallRecord(BaseModel):
    """What became of one tool call."""

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
    status: Literal["completed", "terminated"]
    """Whether the run ended by itself or was stopped."""
    stop_reason: StopReason
    """`completed`, or the first limit that held against the next step."""
    detail: str = ""
    """One sentence for people: limit and use. It is never shown to the model."""
    violations: tuple[Violation, ...] = ()
    """Every limit that held, in order."""
    usage: Usage
    """What was used, sub-agents included."""
    earlier_usage: Usage = Field(default_factory=Usage)
    """What earlier legs used, where the run was resumed under a fresh budget."""
    tool_calls: tuple[ToolCallRecord, ...] = ()
    """The last tool calls (256 at most) and every one that is still open, oldest first."""
    messages: tuple[Any, ...] = ()
    """The history, closed: every tool call has a result. In the framework's own types."""
    final: Any = None
    """The final answer, or the text of the synthetic last message."""
    warnings: tuple[str, ...] = ()
    """The dimensions that reached their warning share."""
    observed: tuple[Violation, ...] = ()
    """In OBSERVE: every limit that would have stopped the run."""
    resume: str | None = None
    """How to go on, where the run can be resumed."""
    errors: tuple[str, ...] = ()
    """What failed on the way (sinks, stores, listeners) without changing the ending."""
