"""The events of a run, as frozen records in the past tense.

The events that change a guard carry all that the guard was told, so that `replay` can tell
it again. Argument values are not among it unless the user asked for them; their hash is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from budgetguard_core.budget import ProfileId
from budgetguard_core.decision import (
    Admit,
    ModelCall,
    ToolCall,
    ToolDecision,
    ToolKind,
)
from budgetguard_core.outcome import Status
from budgetguard_core.stop import StopReason, Trip, Violation
from budgetguard_core.usage import TokenUsage, Usage

FORMAT_VERSION = 1
"""The version of the log.

Readers refuse a field that they do not know: from the first release on, a new field is a version.
"""


class EventBase(BaseModel):
    """The fields that every event has. A frozen record, validated when it is read."""

    model_config = ConfigDict(
        defer_build=True, frozen=True, extra="forbid", ser_json_inf_nan="strings"
    )

    seq: int
    """The event's number in its tree of guards, from 1, without gaps."""
    run_id: str
    """The guard that it happened to."""
    at_ns: int
    """Monotonic nanoseconds. For measuring between events of one process."""
    wall_ns: int
    """Nanoseconds since the Unix epoch."""

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """Make an event of what the engine says itself; `model_construct` takes five times that."""
        event = cls.__new__(cls)
        put = object.__setattr__
        put(event, "__dict__", _defaults(cls) | fields)
        put(event, "__pydantic_fields_set__", fields.keys() | {"event"})
        put(event, "__pydantic_extra__", None)
        put(event, "__pydantic_private__", None)
        return event


@cache
def _defaults(kind: type[EventBase]) -> dict[str, Any]:
    """Return the fields of a kind of event in their order, with their defaults."""
    return {
        name: None if field.is_required() else field.default
        for name, field in kind.model_fields.items()
    }


class RunStarted(EventBase):
    """A guard was made."""

    event: Literal["run_started"] = "run_started"
    format_version: int = FORMAT_VERSION
    budget: dict[str, Any]
    mode: str
    parent_run_id: str | None
    price_book: str
    stop_conditions: int
    """The number of the user's own conditions; they are code and not in the log."""
    tenant: tuple[str, ...] = ()
    """Whom the run's calls are charged to in a ledger, beside those above it."""
    linked: tuple[str, ...] = ()
    """Other runs of this log that are charged too, as its parent is."""


class RunRestored(EventBase):
    """A guard went on from a snapshot, in this process or another."""

    event: Literal["run_restored"] = "run_restored"
    format_version: int = FORMAT_VERSION
    snapshot: dict[str, Any]
    """The guard's counters; the conversation is left out."""


class TimeStarted(EventBase):
    """The run's time began to count before its first admission."""

    event: Literal["time_started"] = "time_started"


class ModelCallAsked(EventBase):
    """A model call was asked for."""

    call: ModelCall
    """The request, as the guard was given it."""


class ModelCallAdmitted(ModelCallAsked):
    """A model call was allowed to start."""

    event: Literal["model_call_admitted"] = "model_call_admitted"
    call_id: int
    """The number of the call within its tree of guards."""
    admitted_output_tokens: int | None
    """The completion bound of the answer; that of the request is in `call`."""
    nudge: str | None
    """The corrective message that was due."""
    holds: tuple[str, ...] = ()
    """Reservations in the ledgers of the run's tenants: they prove what a dead process spent."""


class ModelCallRefused(ModelCallAsked):
    """A model call was not allowed to start."""

    event: Literal["model_call_refused"] = "model_call_refused"
    reason: str
    """The stop reason."""


class ModelCallSettled(EventBase):
    """A model call ended and was charged."""

    event: Literal["model_call_settled"] = "model_call_settled"
    call_id: int
    model: str | None
    """The model that the provider says it called, where it says so."""
    usage: TokenUsage | None
    """The usage that the provider reported; None when it reported nothing."""
    cost_usd: str | None
    """The cost that was charged, or None for an unknown price."""
    given_cost_usd: str | None
    """The cost as the caller gave it, if it did."""
    error: str | None
    """The type of the error that ended it."""


class ModelCallWithdrawn(EventBase):
    """A model call that was admitted was never made: it counts as nothing."""

    event: Literal["model_call_withdrawn"] = "model_call_withdrawn"
    call_id: int
    """The number of the call."""


class ReplyReported(EventBase):
    """The model said something without asking for a tool."""

    event: Literal["reply_reported"] = "reply_reported"
    fingerprint: str
    """The fingerprint of the reply's text."""
    speaker: str | None
    """The speaker, where there are several; cut to 200 characters."""


@dataclass(frozen=True, kw_only=True)
class ToolCallRequested:
    """One call of a batch, with the answer it got."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    call_id: int | None
    """The number of the admitted call; None when it was refused."""
    id: str | None
    name: str
    kind: ToolKind
    fingerprint: str
    arguments: Any = None
    """The arguments themselves, only when the user asked for them to be logged."""
    decision: Literal["admit", "refuse", "stop"]
    reason: StopReason | None = None
    """Why it may not start; None for a call that may, and in logs of before it was written."""

    @classmethod
    def of_batch(
        cls, calls: Sequence[ToolCall], decisions: Sequence[ToolDecision], log_arguments: bool
    ) -> tuple[Self, ...]:
        """Describe the calls of a batch with their answers."""
        return tuple(
            cls(
                call_id=decision.call_id if isinstance(decision, Admit) else None,
                id=call.id,
                name=call.name,
                kind=call.kind,
                fingerprint=call.fingerprint or "",
                arguments=call.arguments if log_arguments else None,
                decision=type(decision).__name__.lower(),  # type: ignore[arg-type]
                reason=None if isinstance(decision, Admit) else decision.reason,
            )
            for call, decision in zip(calls, decisions, strict=True)
        )


class ToolCallsRequested(EventBase):
    """A batch of tool calls was asked for and answered."""

    event: Literal["tool_calls_requested"] = "tool_calls_requested"
    calls: tuple[ToolCallRequested, ...]


class ToolCallSettled(EventBase):
    """A tool call ended."""

    event: Literal["tool_call_settled"] = "tool_call_settled"
    call_id: int
    fingerprint: str
    """The fingerprint of the result, or of the error's text."""
    error: str | None
    """The type of the error that ended it."""
    error_fingerprint: str | None = None
    """Of what kind the error was: the fingerprint of its text without numbers, quoted parts,
    paths and hexadecimal."""
    alike: str | None = None
    """The fingerprint of the result without times, durations and ids, where the detection of loops
    asked for it; with `~` before it where the result says "not yet"."""


class ToolCallWithdrawn(EventBase):
    """An admitted tool call did not start after all, and is not counted any more."""

    event: Literal["tool_call_withdrawn"] = "tool_call_withdrawn"
    call_id: int
    waits: bool = False
    """A person is asked, and the call is asked for again after the answer."""


class CallDelayed(EventBase):
    """A call that was admitted has to wait before it starts: for the pace, or a rate limit."""

    event: Literal["call_delayed"] = "call_delayed"
    call_id: int
    delay_ns: int


class ToolCallTurnedAway(EventBase):
    """A breaker did not let a tool call start; in OBSERVE it would not have."""

    event: Literal["tool_call_turned_away"] = "tool_call_turned_away"
    name: str
    reason: str
    """The stop reason that is next to it: `circuit_open`, or `velocity` for a limit or bulkhead."""
    detail: str


class CircuitBreakerChanged(EventBase):
    """A circuit breaker changed its state, brought about by this run."""

    event: Literal["circuit_breaker_changed"] = "circuit_breaker_changed"
    breaker: str
    """The tool that it is for."""
    from_state: str
    to_state: str
    detail: str


class ToolMixUnusual(EventBase):
    """The run's tools are unlike those of the recorded runs. Once for each run."""

    event: Literal["tool_mix_unusual"] = "tool_mix_unusual"
    calls: int
    p_value: float
    detail: str


class ProgressReported(EventBase):
    """The model said how far it is."""

    event: Literal["progress_reported"] = "progress_reported"
    subgoal: str
    """A digest of the next subgoal."""
    estimate: int
    """Steps that the model thinks are left."""


class UserTurned(EventBase):
    """The user spoke: what was seen before no longer counts as repetition."""

    event: Literal["user_turned"] = "user_turned"


class NudgeTaken(EventBase):
    """An adapter took the corrective message to deliver it by itself."""

    event: Literal["nudge_taken"] = "nudge_taken"
    message: str


class IterationsRestarted(EventBase):
    """A new attempt of the run began its iterations anew."""

    event: Literal["iterations_restarted"] = "iterations_restarted"


class BudgetExtended(EventBase):
    """Caps were raised."""

    event: Literal["budget_extended"] = "budget_extended"
    budget: dict[str, Any]


class Aborted(EventBase):
    """Somebody asked for the run to end."""

    event: Literal["aborted"] = "aborted"
    detail: str


class StopHeld(EventBase):
    """A stop condition of the user's own, or a framework's own limit, was found to hold."""

    event: Literal["stop_held"] = "stop_held"
    violation: Violation


class Checked(EventBase):
    """The run was asked whether it has to end, and it had to."""

    event: Literal["checked"] = "checked"


class LimitNearlyReached(EventBase):
    """A dimension reached its warning share. Once per dimension and run."""

    event: Literal["limit_nearly_reached"] = "limit_nearly_reached"
    dimension: str
    limit: int | float | str
    used: int | float | str


class FallbackStarted(EventBase):
    """Requests go to a cheaper model from here on (`fallback_model`). Once a run."""

    event: Literal["fallback_started"] = "fallback_started"
    model: str
    dimension: str
    """The cap that has come to its share."""


class Tripped(EventBase):
    """The run was stopped."""

    event: Literal["tripped"] = "tripped"
    trip: Trip


class TripObserved(EventBase):
    """A guard in OBSERVE would have stopped the run here."""

    event: Literal["trip_observed"] = "trip_observed"
    trip: Trip


class CheckpointSaved(EventBase):
    """The guard's counters and the conversation were saved."""

    event: Literal["checkpoint_saved"] = "checkpoint_saved"


class IncidentRecorded(EventBase):
    """The record of a stopped run. It is on the disk before the result is returned."""

    event: Literal["incident_recorded"] = "incident_recorded"
    trip: Trip
    usage: Usage
    next_step: str | None
    """The step that the run was about to take."""
    price_book: str
    profile: ProfileId | None = None
    may_have_taken_effect: tuple[str, ...]
    """The tool calls that were started and never reported: name and id."""
    errors: tuple[str, ...]


class RunPaused(EventBase):
    """A run waits for a person; the guard's time stands still while nothing else is in flight."""

    event: Literal["run_paused"] = "run_paused"
    waiting: tuple[int, ...]
    """The numbers of the calls that are open and wait with it."""


class RunResumed(EventBase):
    """A person's answer arrived, and the run goes on."""

    event: Literal["run_resumed"] = "run_resumed"
    waiting: tuple[int, ...]
    """The numbers of the open calls that go on with it."""


class HousekeepingBegan(EventBase):
    """A sub-agent's guard is one for housekeeping; it is recorded under that guard's name.

    The time of the run around it stands still while nothing else of it is in flight.
    """

    event: Literal["housekeeping_began"] = "housekeeping_began"
    waiting: tuple[int, ...]
    """The numbers of the calls in whose bodies it is done."""
    answers_for: str | None = None
    """The run above whose last answer it is; None for any other housekeeping."""


class HousekeepingEnded(EventBase):
    """The housekeeping is over."""

    event: Literal["housekeeping_ended"] = "housekeeping_ended"
    waiting: tuple[int, ...]
    """The numbers of the calls that go on with their own work."""


class RunEnded(EventBase):
    """The run's result was built."""

    event: Literal["run_ended"] = "run_ended"
    status: Status
    stop_reason: str | None
    """None where the run is `paused` or `failed`."""
    error: str | None = None
    """The type of the error that left the run."""
    finalized: bool = False
    """The model gave a last answer, from `finalize_reserve`."""
    profile: ProfileId | None = None
    usage: Usage


Event: TypeAlias = Annotated[
    RunStarted
    | RunRestored
    | TimeStarted
    | ModelCallAdmitted
    | ModelCallRefused
    | ModelCallSettled
    | ModelCallWithdrawn
    | ReplyReported
    | ToolCallsRequested
    | ToolCallSettled
    | ToolCallWithdrawn
    | CallDelayed
    | ToolCallTurnedAway
    | CircuitBreakerChanged
    | ToolMixUnusual
    | ProgressReported
    | UserTurned
    | NudgeTaken
    | IterationsRestarted
    | BudgetExtended
    | Aborted
    | StopHeld
    | Checked
    | LimitNearlyReached
    | FallbackStarted
    | Tripped
    | TripObserved
    | CheckpointSaved
    | IncidentRecorded
    | RunPaused
    | RunResumed
    | HousekeepingBegan
    | HousekeepingEnded
    | RunEnded,
    Field(discriminator="event"),
]
"""The events of a run, each one line of its log, distinguished by `event`."""
