"""How the run of an agent ends: its history, its outcome, and what is kept for the next one."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import replace
from typing import Any, TypeAlias

from strands import Agent
from strands.hooks import AfterInvocationEvent
from strands.types._events import EventLoopStopEvent

from budgetguard_core import AdapterError, Outcome, Snapshot
from budgetguard_core.kit import part, remember, run_awaited, synthetic_text
from budgetguard_strands import _seams
from budgetguard_strands._messages import DIALECT, append, last_question, text_of
from budgetguard_strands._opening import KEY
from budgetguard_strands._run import AgentRun

State: TypeAlias = dict[str, Any]
LOG = logging.getLogger("budgetguard.strands")
# Where it shows is the application's choice; without one it would go to standard error.
LOG.addHandler(logging.NullHandler())
LIMIT = "Strands' own limit ended the run"
_RESUME = "Call the agent again, or give its session to a new agent, under a fresh budget."
_ANSWER = "Answer the interrupts: call the agent, or a new one with its session, with the answers."
_PAUSES = ("interrupt", "checkpoint")


async def last_event(agent: Agent, at: AgentRun, state: State, event: Any) -> Any | None:
    """Return the event that ends a run, given Strands' own; None where it was stopped before."""
    reason = str(event["stop"][0])
    # Where a run waits for a person's word, nothing may be left that could run.
    waits = reason == "interrupt" and any(one.record.state == "waiting" for one in at.asked)
    if at.trip is not None and reason != "checkpoint" and not waits:
        at.output = event["stop"][5]
        return None
    role = agent.messages[-1]["role"] if agent.messages else None
    if reason.startswith("limit_"):
        at.limit = at.run.framework_limit(f"{LIMIT}: {reason}")
        if at.run.is_enforced:
            at.session.stop(at.limit)
            return await _stopped(agent, at, state, reason) if role == "user" else event
    elif reason == "cancelled" and at.run.is_enforced and role == "user":
        # Strands leaves the history of a run open that a person has cancelled.
        guard = at.run.guard
        marks = {"synthetic": True, "stop_reason": "cancelled", "run_id": guard.run_id}
        message = DIALECT.ending(synthetic_text(guard), marks, None)
        await append(agent, message, guard.tree.report)
    return event


async def stop(agent: Agent, at: AgentRun, state: State) -> Any:
    """Close the history of a stopped run, and return the event that ends it.

    Raises:
        AdapterError: Nothing has stopped it.
    """
    trip = at.trip or at.run.check()
    if trip is None:
        raise AdapterError("a stopped run must have a trip, got none. Please report this.")
    _seams.forget_interrupt(agent)
    return await _stopped(agent, at, state, str(trip.reason), "".join(at.written))


async def _stopped(agent: Agent, at: AgentRun, state: State, reason: Any, written: str = "") -> Any:
    last = DIALECT.read(agent.messages[-1]) if agent.messages else None
    if last is not None and last.role == "assistant" and not last.calls:
        # Another provider's budget ended the run in the same moment, or an answer or the word of
        # a hook is there already: no provider takes two of them in a row.
        message: Any = agent.messages[-1]
    else:
        ending = await run_awaited(at.session.close(agent.messages, last_question(agent)))
        message = ending.message
        if written:
            message["content"].insert(0, {"text": written})
        for one in ending.new:
            await append(agent, one, at.run.guard.tree.report)
    request_state = state.setdefault("request_state", {})
    return EventLoopStopEvent(
        reason, message, agent.event_loop_metrics, request_state, structured_output=at.output
    )


def entry(status: str, snapshot: Snapshot) -> dict[str, Any]:
    """Return what is kept of a run, as the kit reads it."""
    # As text, because the state copies what it keeps each time that it is asked.
    return {"status": status, "snapshot": snapshot.to_json()}


def is_stopped(agent: Agent) -> bool:
    """Return whether the last word of an agent's history is the assistant's, of a stopped run."""
    last = agent.messages[-1] if agent.messages else None
    if last is None or last["role"] != "assistant":
        return False
    turn = DIALECT.read(last)
    return turn.synthetic or (part(agent.state.get(KEY), "status") == "stopped" and not turn.calls)


async def attempt_over(at: AgentRun, event: AfterInvocationEvent) -> Outcome | None:
    """Pause where the run waits, and keep the counters, before the session manager looks."""
    agent, calls, run = event.agent, at.session.calls, at.run
    reason = None if event.result is None else str(event.result.stop_reason)
    outcome = None
    if reason in _PAUSES:
        if at.trip is None:
            # They are asked for anew after the answer. Where others of the batch were refused, they
            # hold their places, or no body of theirs would start any more.
            calls.close(waits=True)
        messages = tuple(agent.messages)
        plain = None if run.envelope.store is None else DIALECT.plain(messages)
        outcome = await run.in_thread(
            lambda: run.pause(messages, saved_messages=plain, resume=_ANSWER)
        )
        at.pause(agent)
    elif at.trip is None and _seams.is_interrupted(agent):
        # It failed after the answer, and can be answered again. What had started counts.
        calls.close()
        for one in calls:
            calls.finished(one, error=str(at.error or "the run was left"))
        at.pause(agent)
    if not at.inside:
        kept = None
        if at.paused is not None:
            kept = entry("paused", at.paused.snapshot)
        elif at.trip is not None:
            kept = entry("stopped", run.guard.snapshot())
        if kept or agent.state.get(KEY) is not None:
            agent.state.set(KEY, kept)
    return outcome


async def concluded(at: AgentRun, event: AfterInvocationEvent) -> Outcome:
    """End a run, after the session manager has kept it."""
    agent, session, result = event.agent, at.session, event.result
    error = at.error
    if at.limit is not None:
        session.stop(at.limit)
    elif at.trip is None and result is None:
        # A hook's before the loop, or of whoever closed the stream: on its way through a `finally`.
        error = error or sys.exception()
    elif at.trip is None and result is not None and result.stop_reason == "cancelled":
        error = asyncio.CancelledError("the agent was cancelled")
    if session.ending is not None:
        # Its conversation manager may have shortened it since.
        session.ending = replace(session.ending, history=list(agent.messages))
    final = getattr(result, "structured_output", None)
    if final is None and error is None:
        final = text_of(agent.messages[-1]) if agent.messages else ""
    ended = session.finish(
        agent.messages,
        final=final,
        error=error,
        next_step=None if session.trip is None else "model call",
        resume=_RESUME,
    )
    outcome = await run_awaited(ended)
    if error is not None:
        remember(error, outcome)
    return outcome
