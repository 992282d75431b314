"""How a run of an agent ends: its history, its outcome, and what is kept for the next one."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Any

from strands import Agent
from strands.hooks import AfterInvocationEvent
from strands.types._events import EventLoopStopEvent
from strands.types.session import encode_bytes_values

from budgetguard_core import (
    AdapterError,
    Outcome,
    Trip,
    synthetic_metadata,
    synthetic_text,
)
from budgetguard_core.kit import Run, remember
from budgetguard_strands import _history, _last, _seams
from budgetguard_strands._opening import KEY
from budgetguard_strands._run import AgentRun

LOG = logging.getLogger("budgetguard.strands")
# Where it shows is the application's choice; without one it would go to standard error.
LOG.addHandler(logging.NullHandler())
LIMIT = "Strands' own limit ended the run"
_RESUME = "Call the agent again, or give its session to a new agent, under a fresh budget."
_ANSWER = "Answer the interrupts: call the agent, or a new one with its session, with the answers."
_PAUSES = ("interrupt", "checkpoint")


async def last_event(
    agent: Agent, at: AgentRun, invocation_state: dict[str, Any], event: Any
) -> Any | None:
    """Return the event that ends a run, given Strands' own; None where it was stopped before."""
    if _is_stopped_at(at, event):
        return None
    reason = str(event["stop"][0])
    if reason.startswith("limit_"):
        return await _limited(agent, at, invocation_state, event)
    if reason == "cancelled" and at.run.is_enforced:
        await _cancelled(agent, at)
    return event


def _is_stopped_at(at: AgentRun, event: Any) -> bool:
    """Tell whether a run that comes to an end, or waits for a person, was stopped before.

    Where it waits for a person's word, nothing may be left that could run.
    """
    reason = event["stop"][0]
    if at.trip is None or reason == "checkpoint":
        return False
    if reason == "interrupt" and any(
        one.result is None and one.call.refusal is None for one in at.asked
    ):
        return False
    at.output = event["stop"][5]
    return True


async def stop(agent: Agent, at: AgentRun, invocation_state: dict[str, Any]) -> Any:
    """Close the history of a stopped run, and make the event that ends it."""
    trip = at.trip or at.run.check()
    if trip is None:
        raise AdapterError("a stopped run must have a trip, got none. Please report this.")
    written = "".join(at.written)
    answers = _history.results_for_open_calls(
        agent.messages, at.asked, _seams.results_before_interrupt(agent)
    )
    _seams.forget_interrupt(agent)
    if answers is not None:
        await _history.append(agent, answers, at.run.guard.tree.report)
    return await _stopped(agent, at, invocation_state, trip, str(trip.reason), written)


async def _limited(agent: Agent, at: AgentRun, invocation_state: dict[str, Any], event: Any) -> Any:
    """Close the history of a run that Strands' own limit ended, and return the event for it."""
    reason = str(event["stop"][0])
    at.limit = at.run.framework_limit(f"{LIMIT}: {reason}")
    if not at.run.is_enforced:
        return event
    at.run.trip = at.limit
    if not agent.messages or agent.messages[-1]["role"] != "user":
        return event
    return await _stopped(agent, at, invocation_state, at.run.trip, reason, "")


async def _cancelled(agent: Agent, at: AgentRun) -> None:
    """Close the history of a run that a person has cancelled, where Strands leaves it open."""
    if agent.messages and agent.messages[-1]["role"] == "user":
        guard = at.run.guard
        marks = {"synthetic": True, "stop_reason": "cancelled", "run_id": guard.run_id}
        message = _history.synthetic_message("", synthetic_text(guard), marks)
        await _history.append(agent, message, guard.tree.report)


async def _stopped(
    agent: Agent, at: AgentRun, state: dict[str, Any], trip: Trip, reason: Any, written: str
) -> Any:
    guard = at.run.guard
    if agent.messages and agent.messages[-1]["role"] == "assistant":
        # Another provider's budget ended the run in the same moment, or an answer or the word of
        # a hook is there already: no provider takes two of them in a row.
        message: Any = agent.messages[-1]
    else:
        answer = await _last.answer_of(agent, at, trip)
        message = _history.synthetic_message(
            written,
            answer or synthetic_text(guard),
            synthetic_metadata(guard, trip, finalized=answer is not None),
        )
        await _history.append(agent, message, guard.tree.report)
    request_state = state.setdefault("request_state", {})
    return EventLoopStopEvent(
        reason, message, agent.event_loop_metrics, request_state, structured_output=at.output
    )


async def leg_over(at: AgentRun, event: AfterInvocationEvent) -> Outcome | None:
    """Pause where the run waits, and keep the counters, before the session manager looks."""
    agent = event.agent
    reason = None if event.result is None else str(event.result.stop_reason)
    outcome = None
    if reason in _PAUSES:
        if at.trip is None:
            # They are asked for anew after the answer. Where others of the batch were refused, they
            # hold their places, or no body of theirs would start any more.
            for one in at.asked:
                at.run.withdrawn(one.call, waits=True)
        kept = _kept(at.run, agent.messages)
        outcome = await at.run.in_thread(lambda: at.run.pause(resume=_ANSWER, **kept))
        at.pause(agent)
    elif at.trip is None and _seams.is_interrupted(agent):
        # It failed after the answer, and can be answered again. What had started counts.
        for one in at.asked:
            at.run.withdrawn(one.call)
            at.run.finished(one.call, error=str(at.error or "the run was left"))
        at.pause(agent)
    unfinished = None if at.trip is None else "stopped"
    if at.snapshot is not None:
        unfinished = "paused"
    if not at.inside:
        kept_for_next: dict[str, Any] = {"unfinished": unfinished}
        if unfinished is not None:
            snapshot = at.snapshot or at.run.guard.snapshot()
            # As text, because the state copies what it keeps each time that it is asked.
            kept_for_next["snapshot"] = snapshot.to_json()
        agent.state.set(KEY, kept_for_next)
    return outcome


async def concluded(at: AgentRun, event: AfterInvocationEvent) -> Outcome:
    """End a run, after the session manager has kept it."""
    agent, run = event.agent, at.run
    kept = _kept(run, agent.messages)
    error = at.error
    cancelled = event.result is not None and event.result.stop_reason == "cancelled"
    if cancelled and at.trip is None:
        error = asyncio.CancelledError("the agent was cancelled")
    elif event.result is None and at.trip is None:
        # A hook's before the loop, or of whoever closed the stream: on its way through a `finally`.
        error = error or sys.exception()
    if error is not None:
        outcome = await run.in_thread(lambda: run.fail(error, resume=_RESUME, **kept))
        remember(error, outcome)
        return outcome
    final = _history.text_of(agent.messages[-1]) if agent.messages else ""
    final = getattr(event.result, "structured_output", None) or final
    return await run.in_thread(
        lambda: run.end(
            final=final,
            trip=at.limit,
            next_step=None if at.trip is None else "model call",
            resume=_RESUME,
            **kept,
        )
    )


async def save(run: Run, messages: list[Any]) -> None:
    """Save where a run is, before its next model call.

    Raises:
        RunFencedError: The run was resumed elsewhere.
    """
    await asyncio.to_thread(run.save, tuple(messages), to_plain=_plain)


def _plain(messages: Sequence[Any]) -> list[Any]:
    return list(encode_bytes_values(list(messages)))


def _kept(run: Run, messages: list[Any]) -> dict[str, Any]:
    plain = None if run.envelope.store is None else _plain(messages)
    return {"messages": tuple(messages), "saved_messages": plain}
