"""The order in which every run ends: history closed, checkpoint, incident record, result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from budgetguard_core.events import CheckpointSaved, IncidentRecorded
from budgetguard_core.guard import Guard
from budgetguard_core.outcome import Outcome, Status
from budgetguard_core.stop import StopReason, Trip

if TYPE_CHECKING:
    from budgetguard_core.stores import SnapshotWriter

_ERROR_LENGTH = 500


def synthetic_text(guard: Guard) -> str:
    """Return the text of the synthetic last message.

    It is neutral: a later turn shows it to the model, so reason and figures are in its metadata
    and in the outcome only.
    """
    done = guard.state.completed_tool_calls
    calls = "1 tool call was" if done == 1 else f"{done} tool calls were"
    so_far = f"{calls} completed; see the results above" if done else "no tool call was completed"
    return f"This run was stopped before it finished. So far {so_far}."


def synthetic_metadata(guard: Guard, trip: Trip, *, finalized: bool = False) -> dict[str, Any]:
    """Return the machine-readable marker of the synthetic last message.

    Args:
        guard: The run's guard.
        trip: Why the run was stopped.
        finalized: The message's text is the model's last answer, from `finalize_reserve`.
    """
    marker = {"synthetic": True, "stop_reason": str(trip.reason), "run_id": guard.run_id}
    return {**marker, "finalized": True} if finalized else marker


def end_run(
    guard: Guard,
    *,
    trip: Trip | None,
    messages: Sequence[Any] = (),
    final: Any = None,
    store: SnapshotWriter | None = None,
    saved_messages: Sequence[Any] | None = None,
    next_step: str | None = None,
    resume: str | None = None,
    paused: bool = False,
    error: BaseException | None = None,
    finalized: bool = False,
) -> Outcome:
    """End a run whose history the adapter has closed: checkpoint, incident record, outcome.

    A store, sink or listener that fails is in `Outcome.errors` and in the log, and changes
    nothing else. Blocking: an async adapter runs it in a thread.

    Args:
        guard: The run's guard.
        trip: What stopped the run, or None when no limit did. A shared guard may have tripped for
            another run. Where a limit stopped it, the run is `terminated` whatever else is given:
            the stop came first, is final, and tells that another try under this budget is of no
            use. `failed` has no stop reason, and would lose it.
        messages: The closed history, in the framework's own types.
        final: The final answer, or the text of the synthetic last message.
        store: Where the checkpoint goes.
        saved_messages: The history as plain data for the checkpoint; `messages` if left out.
        next_step: What the run was about to do, or what it waits for.
        resume: How to go on, for the outcome.
        paused: The run waits for a person. Call `Guard.pause` before, so that the checkpoint says
            so too.
        error: The exception or the cancellation that left the run: it has `failed`, or was stopped
            before. `Outcome.error` tells of it in either case.
        finalized: `final` is the model's last answer, from `finalize_reserve`.
    """
    if store is not None:
        try:
            store.save(guard.snapshot(messages if saved_messages is None else saved_messages))
        except Exception as problem:
            guard.tree.report("checkpoint", problem)
        else:
            guard.emit(CheckpointSaved)
    if trip is not None:
        guard.emit(
            IncidentRecorded,
            trip=trip,
            usage=guard.usage,
            next_step=next_step,
            price_book=guard.tree.price_book.version,
            profile=guard.budget.profile,
            may_have_taken_effect=tuple(
                f"{ticket.call.name} {ticket.call.id or ''}".strip()
                for ticket in guard.open_tool_calls()
            ),
            errors=guard.tree.errors,
        )
    guard.tree.flush()
    status: Status = "completed"
    if trip is not None:
        status = "terminated"
    elif error is not None:
        status = "failed"
    elif paused:
        status = "paused"
    reason = StopReason.COMPLETED if status == "completed" else None
    observed, usage = guard.observed_trip, guard.usage
    detail = "" if trip is None else trip.detail
    earlier = guard.outcome
    before = None if earlier is None or earlier.status == "paused" else earlier.usage.model_calls
    if detail and before == usage.model_calls:
        detail += "; an earlier run on this guard has used it up: give each run a Budget of its own"
    outcome = Outcome(
        run_id=guard.run_id,
        status=status,
        stop_reason=reason if trip is None else trip.reason,
        detail=detail,
        error=None if error is None else _text(error),
        next_step=next_step,
        violations=() if trip is None else trip.violations,
        usage=usage,
        earlier_usage=guard.earlier_usage,
        tool_calls=guard.tool_calls,
        messages=tuple(messages),
        final=final,
        finalized=finalized,
        warnings=guard.warnings,
        profile=guard.budget.profile,
        observed=() if observed is None else observed.violations,
        resume=resume,
        errors=guard.tree.errors,
    )
    guard.conclude(outcome)
    return outcome


def _text(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # the error's own code runs here, and the run has to end
        return name
    return f"{name}: {text}"[:_ERROR_LENGTH] if text else name
