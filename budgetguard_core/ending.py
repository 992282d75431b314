"""The order in which every run ends: history closed, checkpoint, incident record, result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from budgetguard_core.checkpoint import CheckpointStore
from budgetguard_core.events import CheckpointSaved, IncidentRecorded
from budgetguard_core.guard import Guard
from budgetguard_core.outcome import Outcome
from budgetguard_core.stop import StopReason, Trip


def synthetic_text(guard: Guard) -> str:
    """Return the text of the synthetic last message.

    It is neutral: a later turn shows it to the model, so reason and figures are in its metadata
    and in the outcome only.
    """
    done = sum(record.status == "completed" for record in guard.tool_calls)
    calls = "1 tool call was" if done == 1 else f"{done} tool calls were"
    return (
        f"This run was stopped before it finished. So far {calls} completed; see the results above."
    )


def synthetic_metadata(guard: Guard, trip: Trip) -> dict[str, Any]:
    """Return the machine-readable marker of the synthetic last message."""
    return {"synthetic": True, "stop_reason": str(trip.reason), "run_id": guard.run_id}


def end_run(
    guard: Guard,
    *,
    trip: Trip | None,
    messages: Sequence[Any] = (),
    final: Any = None,
    store: CheckpointStore | None = None,
    saved_messages: Sequence[Any] | None = None,
    next_step: str | None = None,
    resume: str | None = None,
) -> Outcome:
    """End a run whose history the adapter has closed: checkpoint, incident record, outcome.

    A store, sink or listener that fails is in `Outcome.errors` and in the log, and changes
    nothing else. Blocking: an async adapter runs it in a thread.

    Args:
        guard: The run's guard.
        trip: What stopped the run, or None when it ended by itself. A shared guard may have
            tripped for another run.
        messages: The closed history, in the framework's own types.
        final: The final answer, or the text of the synthetic last message.
        store: Where the checkpoint goes.
        saved_messages: The history as plain data for the checkpoint; `messages` if left out.
        next_step: What the run was about to do, for the incident record.
        resume: How to go on, for the outcome.
    """
    if store is not None:
        try:
            store.save(guard.snapshot(messages if saved_messages is None else saved_messages))
        except Exception as error:
            guard.report("checkpoint", error)
        else:
            guard.emit(CheckpointSaved)
    if trip is not None:
        guard.emit(
            IncidentRecorded,
            trip=trip,
            usage=guard.usage,
            next_step=next_step,
            price_book=guard.price_book.version,
            may_have_taken_effect=tuple(
                f"{ticket.call.name} {ticket.call.id or ''}".strip()
                for ticket in guard.open_tool_calls()
            ),
            errors=guard.errors,
        )
    guard.flush()
    observed = guard.observed_trip
    outcome = Outcome(
        run_id=guard.run_id,
        status="completed" if trip is None else "terminated",
        stop_reason=StopReason.COMPLETED if trip is None else trip.reason,
        detail="" if trip is None else trip.detail,
        violations=() if trip is None else trip.violations,
        usage=guard.usage,
        earlier_usage=guard.earlier_usage,
        tool_calls=guard.tool_calls,
        messages=tuple(messages),
        final=final,
        warnings=guard.warnings,
        observed=() if observed is None else observed.violations,
        resume=resume,
        errors=guard.errors,
    )
    guard.conclude(outcome)
    return outcome
