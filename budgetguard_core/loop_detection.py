"""The settings by which a run that brings nothing new is corrected, and stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self, TypeAlias

from pydantic import model_validator

from budgetguard_core.settings import Settings, are_names, rule, whole

_OFF = "Use loop_detection=None to turn the detection off."
_Count: TypeAlias = Annotated[int, whole(end=_OFF)]
_Window: TypeAlias = Annotated[int, whole(8, 4096, "Leave it out for 64.")]
_Names: TypeAlias = Annotated[
    Sequence[str],
    rule(are_names, 'must be a list of names, got {}. Use ["a_name"] for one name.', tuple),
]


class LoopDetection(Settings):
    """The settings by which a run that brings nothing new is corrected, and stopped.

    Seven kinds of rows are counted, each by itself. At their `nudge_after` the model gets a
    corrective message before its next call; at their `stop_after` the run ends before its next
    call, and at least one call or reply comes between the two, so a batch that passes both
    numbers at once is corrected first. The calls that crossed the number are billed.

    The numbers are measured: of 706 recorded runs of tool-calling agents none of the 441
    successful ones is corrected or cut, and all 5 runaways are stopped at the fourth or fifth
    execution of their call (`tests/benchmarks/test_detection.py`).
    """

    nudge_after: _Count = 2
    """Stale calls in a row after which the model is corrected: at an identical call's third time.

    A call is stale when its tool, its arguments and its result were all seen at or after the
    latest new call. A call that is new or was seen only before that ends the row. So does the
    user's next turn, which counts as new: only the call right before it can be stale at once.
    """
    stop_after: _Count = 3
    """Stale calls in a row after which the run is stopped: at an identical call's fourth time."""
    nudge_after_same_error: _Count = 3
    """Times in a row that the same call ends with the same error, after which the model is
    corrected. Any other call ends the row, and a turn of the user does not. A repetition of this
    kind is stale too, and `stop_after` ends the run first where no user speaks in between."""
    stop_after_same_error: _Count = 5
    """Times in a row that the same call ends with the same error, until the run is stopped."""
    nudge_after_errors: _Count = 3
    """Calls of one tool in a row, whatever their arguments, that end with the same error but for
    numbers, quoted parts, paths and hexadecimal, after which the model is corrected. The calls of
    one reply count once. A call that was refused is such an error, too. Any other call ends the
    row, and so does the user's next turn."""
    stop_after_errors: _Count = 8
    """Replies in a row whose calls of one tool end with the same error, until the run is
    stopped."""
    nudge_after_repeats: _Count = 6
    """Times in a row that the same call, made again at once, brings a result like the one before
    but for times, durations, ids and line numbers of the shell, after which the model is
    corrected. Any other call ends the row, and so does the user's next turn."""
    stop_after_repeats: _Count = 12
    """Results in a row that differ in times and ids alone, until the run is stopped."""
    nudge_after_waits: _Count = 6
    """Times that a call is answered again with the same "not yet", after which the model is
    corrected: a result of at most 600 characters that says running, pending, queued, processing,
    in progress, waiting for or not ready. Such a call is to stale calls what the user's turn is,
    and what was called before, as a sleep, does not end its row. Progress does, which is any new
    call or result, and so does the user's next turn."""
    stop_after_waits: _Count = 24
    """Times that a call is answered again with the same "not yet", until the run is stopped."""
    nudge_after_replies: _Count = 2
    """Replies in a row without a tool call, of 40 characters or more and each made before by its
    speaker, after which the model is corrected. Numbers and case do not tell them apart. A new
    reply or a new call ends the row, and so does the user's next turn."""
    stop_after_replies: _Count = 4
    """Repeated replies in a row after which the run is stopped."""
    nudge_after_short_replies: _Count = 6
    """Replies in a row without a tool call, short ones included and those to the letter, each made
    before by its speaker, after which the model is corrected."""
    stop_after_short_replies: _Count = 12
    """Repeated replies in a row, short ones included, after which the run is stopped."""
    window: _Window = 64
    """Different calls, with their results, that are remembered, and different replies; the least
    recent goes first."""
    exempt: _Names = ()
    """Tools and speakers that are not looked at, by name or pattern (`poll_*`, `sleep`, `think`).

    For tools that are meant to be called again with nothing new to say, and for agents or nodes
    that answer with one of a few words. What is exempt neither adds to a row nor ends it.
    """
    ignore_arguments: _Names = (
        "request_id",
        "requestId",
        "correlation_id",
        "correlationId",
        "trace_id",
        "traceId",
        "span_id",
        "spanId",
        "idempotency_key",
        "idempotencyKey",
        "nonce",
    )
    """Arguments that change with every call and mean nothing, by exact name, at the top only."""
    ignore_results: _Names = ()
    """Names in a result that change with every call and mean nothing (`elapsed_ms`, `served_by`),
    by exact name, at the top only, of a mapping or of text that holds a JSON object.

    None unless you say so: what changes in a result is progress, and an id may be what the tool
    was called for.
    """

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        for field in type(self).model_fields:
            row = field.removeprefix("nudge_after")
            if row == field:
                continue
            nudge, stop = getattr(self, field), getattr(self, f"stop_after{row}")
            if stop <= nudge:
                raise ValueError(
                    f"stop_after{row} must be > nudge_after{row}={nudge}, got {stop}. "
                    "The model needs one more call to adapt."
                )
        return self
