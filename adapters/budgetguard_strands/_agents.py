"""The run of an agent: where it begins, what ends it in time, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from opentelemetry import trace
from strands import Agent, tool  # pyright: ignore[reportUnknownVariableType]
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolCallEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    MessageAddedEvent,
)
from strands.middleware import ExecuteToolStage, InvokeModelStage
from strands.types._events import ModelStreamChunkEvent, TextStreamEvent
from strands.types.events import TypedEvent

from budgetguard_core import Guard
from budgetguard_core.kit import (
    FRAME,
    PROGRESS_TOOL,
    Run,
    ToolCall,
    Watch,
    current,
    part,
    report_progress,
)
from budgetguard_strands import _ending, _seams
from budgetguard_strands._calls import Calls, Halt
from budgetguard_strands._messages import DIALECT
from budgetguard_strands._opening import KEY, ByIdentity, Opener, is_of_a_stop
from budgetguard_strands._run import AgentRun
from budgetguard_strands._seams import FIRST, LAST, Events

_GO_ON = "Please go on."

# The hooks that bound an agent, of all providers; and those that were ever registered with it.
_attached: ByIdentity[tuple[AgentHooks, ...]] = ByIdentity()
_registered: ByIdentity[tuple[AgentHooks, ...]] = ByIdentity()
_attaching = threading.Lock()


class AgentHooks:
    """One provider's hooks on the agents that it is attached to."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._calls = Calls()
        self._bodies: ByIdentity[_seams.Bodies] = ByIdentity()

    # Attaching

    def install(self, agent: Agent) -> None:
        """Bound an agent; a second time changes nothing."""
        with _attaching:
            others = _attached.get(agent) or ()
            if self in others:
                return
            known = _registered.get(agent) or ()
            if self not in known:
                self._register(agent)
                _registered.set(agent, (*known, self))
            _attached.set(agent, (*others, self))

    def remove(self, agent: Agent) -> None:
        """Bound an agent no more, from its next run on."""
        with _attaching:
            others = _attached.get(agent) or ()
            _attached.set(agent, tuple(one for one in others if one is not self))

    def _register(self, agent: Agent) -> None:
        _seams.probe(agent)
        _seams.wrap_runs(type(agent), _around)
        callbacks = (
            (BeforeInvocationEvent, self._before_invocation, FIRST),
            (MessageAddedEvent, self._before_added, FIRST),
            (BeforeModelCallEvent, self._calls.before_model_call, LAST),
            (AfterModelCallEvent, self._calls.after_model_call, FIRST),
            (AfterModelCallEvent, self._calls.after_answer, LAST),
            (BeforeToolCallEvent, self._calls.offer_tool_call, FIRST),
            (BeforeToolCallEvent, self._calls.before_tool_call, LAST),
            (AfterToolCallEvent, self._calls.after_tool_call, LAST),
            (AfterInvocationEvent, self._after_attempt, FIRST),
            (AfterInvocationEvent, self._after_invocation, LAST),
        )
        add: Any = agent.hooks.add_callback
        for event, callback, order in callbacks:
            add(event, callback, order=order)
        asks = self._opener.envelope.may_ask_for_progress
        if asks and PROGRESS_TOOL.name not in agent.tool_registry.registry:
            made: Any = tool(name=PROGRESS_TOOL.name, description=PROGRESS_TOOL.description)
            agent.tool_registry.process_tools([made(report_progress)])
        if _seams.has_background_tasks(agent):
            bodies = _seams.Bodies(agent)
            agent.add_middleware(ExecuteToolStage, bodies.around)
            self._bodies.set(agent, bodies)

    def _bounds(self, agent: Agent) -> bool:
        """Return whether the run of an agent that begins is this provider's to bound."""
        attached = _attached.get(agent) or ()
        guard = self._opener.envelope.budget
        if isinstance(guard, Guard):
            # Two providers with one guard would be two layers that see the same calls.
            attached = tuple(one for one in attached if one._opener.envelope.budget is guard)  # noqa: SLF001
            return attached[:1] == (self,)
        if self is _joining:
            return attached == (self,) and current() is not None
        return self in attached

    # The beginning

    async def _before_invocation(self, event: BeforeInvocationEvent) -> None:
        agent = event.agent
        # A hook that resumes the agent stays in the same invocation.
        metrics = agent.event_loop_metrics
        number = len(metrics.agent_invocations)
        at = self._calls.going_on(agent)
        if at is None and not self._bounds(agent):
            return
        if at is not None and at.metrics is metrics and at.invocation == number:
            at.begin_attempt()
            if at.resumed and not at.shared and at.trip is None:
                at.run.guard.state.restart_iterations()
        else:
            if at is not None:
                # Somebody's hook raised, and nothing told the end of the run.
                at.run.fail(RuntimeError("the run was left before it began"))
            at = await self._begin(agent, event)
        at.metrics, at.invocation = metrics, number
        # Not before the first run, so that this comes inside of the user's own middleware.
        prunes = at.run.envelope.prune is not None
        wanted = prunes or at.changes_requests or _seams.has_model_middleware(agent)
        if wanted and not self._calls.watching.get(agent):
            agent.add_middleware(InvokeModelStage, self._calls.watched)
            self._calls.watching.set(agent, True)
        node = self._opener.nodes.get(agent)
        correction = self._opener.corrections.pop(node, "") if node is not None else ""
        if correction and event.messages:
            event.messages[-1]["content"].append({"text": correction})

    async def _begin(self, agent: Agent, event: BeforeInvocationEvent) -> AgentRun:
        paused = self._calls.paused.get(agent)
        self._calls.paused.pop(agent)
        kept: Any = agent.state.get(KEY)
        answered, waits = _seams.is_interrupted(agent), False
        if paused is not None and paused.is_of(agent):
            kept = {"unfinished": "paused", "snapshot": paused.snapshot.to_json()}
            waits = answered
        opened = await self._opener.open(
            agent,
            event.invocation_state,
            kept,
            waits=waits,
            user_spoke=not answered,
            given=event.messages,
            layer_above=self._layer_above(agent),
        )
        at = AgentRun(opened, agent)
        self._calls.runs.set(agent, at)
        for use, result in _seams.results_before_interrupt(agent):
            at.session.calls.lost(ToolCall(name=use["name"], id=use["toolUseId"]), result)
        last = agent.messages[-1] if agent.messages else None
        if not event.messages and last is not None and last["role"] == "assistant":
            turn = DIALECT.read(last)
            stopped = part(kept, "unfinished") == "stopped" and not turn.calls
            if turn.synthetic or stopped:
                # No provider takes two assistant messages in a row, and what a session manager has
                # kept stays as it is: so somebody has to speak in between.
                event.messages = [{"role": "user", "content": [{"text": _GO_ON}]}]
        return at

    def _layer_above(self, agent: Agent) -> Run | None:
        """Return the run of the provider that has just begun one, where it is inside another."""
        found = None
        for other in _attached.get(agent) or ():
            at = None if other is self else other._calls.going_on(agent)  # noqa: SLF001
            if at is not None and at.inside:
                found = at.run
        return found

    def _before_added(self, event: MessageAddedEvent) -> None:
        """Make what other hooks do with the user's message before the loop a part of the run."""
        # An assistant's is that of a refused run, whose loop does not begin.
        at = self._calls.going_on(event.agent) if event.message["role"] == "user" else None
        if at is not None and not at.watched:
            at.enter()

    # The events

    def around(self, agent: Agent, invocation_state: dict[str, Any], events: Events) -> Events:
        """Watch over the events of a run, and end it in their place; once for each run."""
        at = self._calls.going_on(agent)
        if at is None or at.watched:
            return events
        at.watched = True
        return self._bounded(at, agent, invocation_state, events)

    async def _bounded(
        self, at: AgentRun, agent: Agent, state: dict[str, Any], events: Events
    ) -> AsyncGenerator[Any, None]:
        watch = Watch(at.run, at.cut)
        loop = asyncio.get_running_loop()
        may_wait, is_streaming = _seams.has_model_middleware(agent), False
        span = trace.get_current_span()
        try:
            async with aclosing(events):
                # Entered for each step, so that nothing of it shows in the consumer's context.
                at.enter()
                at.awaiting = asyncio.current_task(loop)
                async for event in events:
                    at.awaiting = None  # a stream that is left must not hold its consumer
                    kind: Any = type(event)  # pyright: ignore[reportUnknownVariableType]
                    is_text = kind is TextStreamEvent and at.turn is not None
                    if is_text or (
                        kind is ModelStreamChunkEvent and "metadata" not in event["event"]
                    ):
                        # Nearly all events are these two: a chunk of an answer, and its text.
                        # While they come no hook runs.
                        if not is_streaming:
                            at.leave()
                        elif at.token is not None:
                            FRAME.reset(at.token)
                            at.token = None
                        is_streaming = True
                        if is_text:
                            at.written.append(event["data"])
                            at.look()
                        yield event
                        if at.due:
                            break
                        # Strands makes the text of a chunk without any wait.
                        if may_wait or is_text or "contentBlockDelta" not in event["event"]:
                            at.token = FRAME.set(at.inner)
                            at.awaiting = asyncio.current_task(loop)
                        continue
                    is_streaming = False
                    at.note(event)
                    at.leave()
                    if "stop" in event:
                        event = await _ending.last_event(agent, at, state, event)
                        if event is None:
                            break
                    while at.notices:
                        yield TypedEvent({"budgetguard_warning": at.notices.pop(0)})
                    yield event
                    if at.due:
                        break
                    at.enter()
                    # The consumer may ask for each event in another task.
                    at.awaiting = asyncio.current_task(loop)
                else:
                    at.took_effect()
                    return
                at.took_effect()
                _seams.end_spans(span, at.contexts)
        except BaseException as error:
            if isinstance(error, Halt | asyncio.CancelledError):
                _seams.end_spans(span, at.contexts, error)
            if not self._is_stop(at, error):
                raise
            if at.error is not None:
                raise at.error from None
        finally:
            watch.close()
            at.leave()
            at.awaiting = None  # it holds the consumer and the agent
        self._calls.settle(at, "the run was stopped")
        ended = await _ending.stop(agent, at, state)
        # A reader of the texts alone sees the end of the run, too.
        message: Any = ended["stop"][1]
        yield TextStreamEvent({}, message["content"][-1]["text"])
        if at.run.finalized:
            yield TypedEvent({"message": message})
        yield ended

    def _is_stop(self, at: AgentRun, error: BaseException) -> bool:
        """Return whether what came up through the loop only ends it; note what leaves the run."""
        if isinstance(error, Halt):
            if error.at is not at and at.turn is not None:
                # Another provider's budget ended the run, and the admitted call was never made.
                at.turn.take_back()
            at.error = error.error if error.at is at else None
            return error.at is at
        if isinstance(error, asyncio.CancelledError) and at.took_effect():
            return True
        ends = at.trip is not None and is_of_a_stop(error)
        at.error = None if ends else error
        return ends

    # The end

    async def _after_attempt(self, event: AfterInvocationEvent) -> None:
        """Settle what is open and keep the counters, before the session manager looks."""
        at = self._calls.going_on(event.agent)
        if at is None:
            return
        at.leave()  # a hook of the user's message raised
        self._calls.settle(at, at.error or "the run was left")
        bodies = self._bodies.get(event.agent)
        if bodies is not None and at.trip is not None:
            await bodies.cancel()
        elif bodies is not None:
            at.unwatch = bodies.watch(at.run)
        outcome = await _ending.attempt_over(at, event)
        if at.paused is not None:
            self._calls.paused.set(event.agent, at.paused)
        if outcome is not None:
            self._opener.outcomes.set(event.agent, outcome)

    async def _after_invocation(self, event: AfterInvocationEvent) -> None:
        """End the run, after the session manager has kept it."""
        agent = event.agent
        at = self._calls.runs.get(agent)
        if at is None:
            return
        if at.unwatch is not None:
            at.unwatch()
        if _seams.goes_on(event):
            at.resumed = False
            return
        if at.trip is not None and event.resume is not None:
            _ending.LOG.info(
                "agent=<%s>, stop_reason=<%s> | a stopped run is not resumed by a hook",
                agent.name,
                at.trip.reason,
            )
            event.resume = None
        at.resumed = event.resume is not None
        if at.run.ended:
            self._calls.runs.pop(agent)  # it holds the conversation
        elif not at.resumed:
            self._calls.runs.pop(agent)
            self._opener.ended(agent, at, await _ending.concluded(at, event))


# What an agent without a provider spends is spent by the run around it, and by nothing else.
_joining = AgentHooks(Opener())


def _around(agent: Agent, invocation_state: dict[str, Any], events: Events) -> Events:
    """Wrap an agent's run in every provider that was registered with it, the first outermost.

    Also one that is detached: a run that is on its way ends as bounded.
    """
    for hooks in reversed(_registered.get(agent) or ()):
        events = hooks.around(agent, invocation_state, events)
    return events


def _join(agent: Agent) -> None:
    """Make the run of an agent that begins a part of the run around it, if there is one."""
    if current() is not None and not _attached.get(agent):
        _joining.install(agent)


def install() -> None:
    """Make every agent of this process a part of the run around it, if there is one.

    Importing the package does it.

    Raises:
        AdapterError: The installed release of Strands lacks what the adapter needs.
    """
    _seams.join_runs_around(_join)
