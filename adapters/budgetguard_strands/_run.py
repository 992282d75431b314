"""One run of one agent: what is remembered between two of Strands' hooks, and how it ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextvars import Token
from dataclasses import replace
from typing import Any

from strands.hooks import AfterInvocationEvent
from strands.types._events import EventLoopStopEvent

from budgetguard_core import Outcome, Snapshot, Trip, kit
from budgetguard_core.kit import FRAME, Frame, ModelTurn, OpenModelCall, OpenToolCall
from budgetguard_strands import _seams
from budgetguard_strands._messages import DIALECT, last_question, text_of, thought
from budgetguard_strands._opening import KEY, ByIdentity, OpenedRun, entry

LOOK_EVERY = 64
LIMIT = "Strands' own limit ended the run"
_RESUME = "Call the agent again, or give its session to a new agent, under a fresh budget."
_ANSWER = "Answer the interrupts: call the agent, or a new one with its session, with the answers."
RUNS: ByIdentity[AgentRun] = ByIdentity()
"""The run of each agent that has one."""
# The agents that shorten the conversations of others, and when they did last: in which run, and
# how many turns it had made.
_summarizers: ByIdentity[tuple[str, int] | tuple[()]] = ByIdentity()


class AgentRun:
    """One run of one agent, on one session of the kit.

    A run has several attempts where a hook resumes the agent within one invocation.

    Attributes:
        session, inside, shared, node: As in `Opened`.
        invocation: Strands' metrics, and the number of the invocation in them.
        nudged: What was added to a message for the model call in flight, and the words.
        resumed: A hook has resumed the agent: the next attempt begins its iterations anew.
        requested: The tool calls of the batch in flight. Uses are told apart by identity.
        ancestry: Every guard that its calls are charged to.
        bodies: What runs in the background, with its loop; it ends with the run (`is_left`).
        cycle_span: The span of the cycle in flight.
        error: What left the run.
        paused: Its counters where it waits; None while it does not.
        inner: The frame of the run's code, between two of its steps.
        token: Undoes that the running code is inside of the run; None while it is not.
        task: The task that waits for the next event of the loop; None while none does.
        due: The run is to be left as soon as it can be.
    """

    def __init__(self, opening: OpenedRun, agent: Any, invocation: tuple[Any, int]) -> None:
        self.session, self.inside, self.shared, self.node = opening
        self.run = self.session.run
        self.invocation = invocation
        self.nudged: tuple[list[Any], object] = [], None
        self.resumed = self.is_abandoned = False
        self.paused: Snapshot | None = None
        self.error: BaseException | None = None
        self.frame: Frame = self.run.frame()
        self.cycle_span: Any = None
        self.requested: list[tuple[Mapping[str, Any], OpenToolCall]] = []
        self.bodies: set[tuple[asyncio.AbstractEventLoop, kit.Scope]] = set()
        self.admitting = asyncio.Lock()
        self.ancestry = [one for nearest in self.run.guards for one in nearest.ancestry]
        self._warned = {one.run_id: len(one.warnings) for one in self.ancestry}
        self.begin_attempt()
        summarizer = getattr(agent.conversation_manager, "summarization_agent", None)
        if summarizer is not None:
            _summarizers.set(summarizer, ())
        if self._is_summary(agent):
            self.cycle = 1  # its first model call is no turn

    def _is_summary(self, agent: Any) -> bool:
        """Return whether it begins with a summary of the conversation of the run around it.

        A second one, without a turn between the two, is an agent's that goes round: it counts.
        """
        before, parent = _summarizers.get(agent), self.run.parent
        own = self.run.guard.budget.max_iterations
        if before is None or parent is None or not self.inside or own is not None:
            return False
        now = (parent.guard.run_id, parent.guard.usage.iterations)
        _summarizers.set(agent, now)
        return before != now

    @property
    def trip(self) -> Trip | None:
        """Why the run has to end."""
        return self.session.trip

    # An attempt, and the calls in flight

    def begin_attempt(self) -> None:
        """Forget what only the last attempt was about."""
        self.cycle = -1
        self.overflowed = self.recovered = self.cut_off = False
        self._output: Any = None
        self.inner: Frame = self.frame
        self.token: Token[Frame | None] | None = None
        self.task: asyncio.Task[Any] | None = None
        self._cancelled = self.due = False
        self._earlier = self.pieces = 0
        self.begin_call(None)

    def begin_call(self, turn: ModelTurn | None) -> None:
        """Forget what the last model call brought, and was sent for it alone."""
        content, words = self.nudged
        content[:] = [one for one in content if one is not words]
        self.nudged = [], None
        self.turn = turn
        self.model: Any = None
        self.usage: Any = None
        self.written: list[str] = []

    def find(self, use: Mapping[str, Any]) -> OpenToolCall | None:
        """Find the open call of a tool use: that very one, or else one of the same id."""
        going_on = [one for one in self.requested if one[1].result is None]
        same = [one for one in going_on if one[0]["toolUseId"] == use["toolUseId"]]
        exact = [one for one in same if one[0] is use]
        return next((record for _, record in exact or same), None)

    def within(self, call: OpenModelCall | OpenToolCall | None = None) -> None:
        """Make the code that follows in this step the body of a call, or of none."""
        FRAME.set(self.frame if call is None else call.frame)

    # The events

    def enter(self) -> None:
        """Make the running code a part of the run, for one step."""
        # The consumer may ask for each event in another task.
        self.task = asyncio.current_task()
        if self.token is None:
            self.token = FRAME.set(self.inner)

    def leave(self) -> None:
        """Undo that: nothing of it shows in the consumer's context."""
        self.task = None  # a stream that is left must not hold its consumer
        if self.token is not None:
            self.inner = FRAME.get() or self.inner
            FRAME.reset(self.token)
            self.token = None

    def note(self, event: Any) -> None:
        """Note what an event of the model call in flight says of it, and look at the clock.

        Else it is an event of a tool's, or of an agent delegated to.
        """
        turn = self.turn
        if turn is not None:
            if "data" in event:
                self.written.append(event["data"])
            elif "delta" in event:
                turn.piece(thought(event["delta"]))
            elif "event" in event and "metadata" in event["event"]:
                self.usage = event["event"]["metadata"].get("usage") or self.usage
        self.piece()

    def piece(self) -> None:
        """Look at the clock once for many pieces.

        An answer that is all there when it is late is paid, and kept.
        """
        self.pieces += 1
        if self.pieces % LOOK_EVERY == 0:
            self.look()

    def look(self) -> None:
        """Look at the clock and for an abort, where the loop gets no turn to tell of them."""
        if self.run.has_to_end and not self.run.has_children:
            self.due = self.run.check() is not None

    def cut(self) -> None:
        """End what the run awaits; between two events of a stream it awaits nothing."""
        self.due = True
        if self.task is not None and not self._cancelled:
            self._cancelled = True
            self._earlier = self.task.cancelling()
            self.task.cancel()

    def took_effect(self) -> bool:
        """Return whether a cancellation that came up was the watch's, and take it back if so."""
        if not self._cancelled:
            return False
        self._cancelled = False
        task = asyncio.current_task()
        # Somebody else may have cancelled the task as well: then it has to stay cancelled.
        return task is not None and task.uncancel() <= self._earlier

    def warnings(self) -> list[dict[str, Any]]:
        """Return the warnings that were given since the last time, for the stream."""
        found: list[dict[str, Any]] = []
        for guard in self.ancestry:
            given, known = guard.warnings, self._warned[guard.run_id]
            for name in given[known:]:
                limit = getattr(guard.budget, name, None)
                used = getattr(guard.usage, name.removeprefix("max_"), None)
                facts = {"dimension": name, "limit": limit, "used": used}
                found.append({"run_id": guard.run_id, **facts})
            self._warned[guard.run_id] = len(given)
        return found

    # The end

    async def last_event(self, agent: Any, state: dict[str, Any], event: Any) -> Any | None:
        """Return the event that ends an attempt, given Strands' own; None where it was stopped."""
        reason = str(event["stop"][0])
        # Where a run waits for a person's word, nothing may be left that could run.
        waits = reason == "interrupt" and any(one.state == "waiting" for _, one in self.requested)
        if self.trip is not None and reason != "checkpoint" and not waits:
            self._output = event["stop"][5]
            return None
        role = agent.messages[-1]["role"] if agent.messages else None
        if reason.startswith("limit_"):
            if self.session.framework_limit(f"{LIMIT}: {reason}") and role == "user":
                return await self._stopped(agent, state, reason)
        elif reason == "cancelled" and self.run.is_enforced and role == "user":
            # Strands leaves the history of a run open that a person has cancelled.
            guard = self.run.guard
            marks = {"synthetic": True, "stop_reason": "cancelled", "run_id": guard.run_id}
            message = DIALECT.ending(kit.synthetic_text(guard), marks, None)
            await _seams.append(agent, message, guard.tree.report)
        return event

    async def stop(self, agent: Any, state: dict[str, Any]) -> Any:
        """Close the history of a stopped run, and return the event that ends it."""
        trip: Any = self.trip or self.run.check()
        if _seams.is_interrupted(agent):
            _seams.forget_interrupt(agent)
        return await self._stopped(agent, state, str(trip.reason), "".join(self.written))

    async def _stopped(
        self, agent: Any, state: dict[str, Any], reason: Any, written: str = ""
    ) -> Any:
        last = DIALECT.read(agent.messages[-1]) if agent.messages else None
        if last is not None and last.role == "assistant" and not last.calls:
            # Another provider's budget ended the run in the same moment, or an answer or the word
            # of a hook is there already: no provider takes two of them in a row.
            message: Any = agent.messages[-1]
        else:
            ending = await kit.run_awaited(self.session.close(agent.messages, last_question(agent)))
            message = ending.message
            if written:
                message["content"].insert(0, {"text": written})
            for one in ending.new:
                await _seams.append(agent, one, self.run.guard.tree.report)
        request_state = state.setdefault("request_state", {})
        return EventLoopStopEvent(
            reason, message, agent.event_loop_metrics, request_state, structured_output=self._output
        )

    async def attempt_over(self, event: AfterInvocationEvent) -> Outcome | None:
        """Pause where the run waits, and keep the counters, before the session manager looks."""
        agent, calls, run = event.agent, self.session.calls, self.run
        reason = None if event.result is None else str(event.result.stop_reason)
        outcome = None
        if reason in ("interrupt", "checkpoint"):
            if self.trip is None:
                # They are asked for anew after the answer. Where others of the batch were refused,
                # they hold their places, or no body of theirs would start any more.
                calls.close(waits=True)
            messages = tuple(agent.messages)
            plain = None if run.envelope.store is None else DIALECT.plain(messages)
            outcome = await run.in_thread(
                lambda: run.pause(messages, saved_messages=plain, resume=_ANSWER)
            )
            self.paused = run.guard.snapshot()
        elif self.trip is None and _seams.is_interrupted(agent):
            # It failed after the answer, and can be answered again. What had started counts.
            calls.close()
            for one in calls:
                calls.finished(one, error=str(self.error or "the run was left"))
            self.paused = run.guard.snapshot()
        if not self.inside:
            kept = None
            if self.paused is not None:
                kept = entry("paused", self.paused)
            elif self.trip is not None:
                kept = entry("stopped", run.guard.snapshot())
            if kept or agent.state.get(KEY) is not None:
                agent.state.set(KEY, kept)
        return outcome

    async def concluded(self, event: AfterInvocationEvent) -> Outcome:
        """End the run, after the session manager has kept it."""
        messages, session, result = event.agent.messages, self.session, event.result
        reason, error = "" if result is None else str(result.stop_reason), self.error
        if reason.startswith("limit_"):
            session.stop(self.run.framework_limit(f"{LIMIT}: {reason}"))
        elif self.trip is None and result is None:
            # A hook's before the loop, or of whoever closed the stream: on its way through a
            # `finally`.
            error = error or sys.exception()
        elif self.trip is None and reason == "cancelled":
            error = asyncio.CancelledError("the agent was cancelled")
        if session.ending is not None:
            # Its conversation manager may have shortened it since.
            session.ending = replace(session.ending, history=list(messages))
        final = getattr(result, "structured_output", None)
        if final is None and error is None:
            final = text_of(messages[-1]) if messages else ""
        step = None if session.trip is None else "model call"
        outcome = await kit.run_awaited(
            session.finish(messages, final=final, error=error, next_step=step, resume=_RESUME)
        )
        if error is not None:
            kit.remember(error, outcome)
        return outcome


def going_on(agent: Any) -> AgentRun | None:
    """Return an agent's run; None where the budget came while it ran, and begins later."""
    at = RUNS.get(agent)
    return None if at is None or at.run.ended else at


def is_stopped(agent: Any) -> bool:
    """Return whether the last word of an agent's history is the assistant's, of a stopped run."""
    last = agent.messages[-1] if agent.messages else None
    if last is None or last["role"] != "assistant":
        return False
    turn = DIALECT.read(last)
    kept = agent.state.get(KEY)
    return turn.synthetic or (kit.part(kept, "status") == "stopped" and not turn.calls)
