"""The run of an agent: where it begins, what ends it in time, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
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
from strands.middleware import InvokeModelStage
from strands.types._events import ModelStreamChunkEvent, TextStreamEvent
from strands.types.events import TypedEvent

from budgetguard_core import BudgetExceeded, Guard
from budgetguard_core.kit import (
    PROGRESS_TOOL,
    OpenToolCall,
    Run,
    Watch,
    current,
    report_progress,
)
from budgetguard_strands import _ending, _history, _seams, _spans
from budgetguard_strands._background import Bodies
from budgetguard_strands._calls import Calls, Halt
from budgetguard_strands._identity import ByIdentity
from budgetguard_strands._opening import KEY, Opener
from budgetguard_strands._run import CYCLES, AgentRun, current_task
from budgetguard_strands._seams import FIRST, LAST, Events

_GO_ON = "Please go on."

# The hooks that bound an agent, of all providers; and those that were ever registered with it.
_attached: ByIdentity[tuple[AgentHooks, ...]] = ByIdentity()
_registered: ByIdentity[tuple[AgentHooks, ...]] = ByIdentity()
_attaching = threading.Lock()


class AgentHooks:
    """What one provider does on the agents that it is attached to."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._calls = Calls()
        self._bodies: ByIdentity[Bodies] = ByIdentity()
        # The agents whose answers a bound of ours may have cut off.
        self._cutting: ByIdentity[bool] = ByIdentity()

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
        _seams.join_runs_around(_join)
        _seams.wrap_runs(type(agent), _around)
        callbacks = (
            (BeforeInvocationEvent, self._before_invocation, FIRST),
            (MessageAddedEvent, self._before_added, FIRST),
            (BeforeModelCallEvent, self._calls.before_model_call, LAST),
            (AfterModelCallEvent, self._calls.after_model_call, FIRST),
            (BeforeToolCallEvent, self._calls.offer_tool_call, FIRST),
            (BeforeToolCallEvent, self._calls.before_tool_call, LAST),
            (AfterToolCallEvent, self._calls.after_tool_call, LAST),
            (AfterInvocationEvent, self._after_leg, FIRST),
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
            self._bodies.set(agent, Bodies(agent))

    def _bounds(self, agent: Agent) -> bool:
        """Tell whether the run of an agent that begins is this provider's to bound."""
        attached = _attached.get(agent) or ()
        guard = self._opener.envelope.budget
        if isinstance(guard, Guard):
            # Two providers with one guard would be two layers that see the same calls.
            attached = tuple(one for one in attached if one._opener.envelope.budget is guard)  # noqa: SLF001
            return attached[:1] == (self,)
        if self is _joining:
            return attached == (self,) and current() is not None
        return self in attached

    # One leg of a run

    def _before_invocation(self, event: BeforeInvocationEvent) -> None:
        agent = event.agent
        # A hook that resumes the agent stays in the same invocation.
        metrics = agent.event_loop_metrics
        number = len(metrics.agent_invocations)
        at = self._calls.going_on(agent)
        if at is None and not self._bounds(agent):
            return
        if at is not None and at.metrics is metrics and at.invocation == number:
            at.begin_leg()
            if at.resumed and not at.shared and at.trip is None:
                at.run.guard.restart_iterations()
        else:
            if at is not None:
                # Somebody's hook raised, and nothing told the end of the run.
                at.run.fail(RuntimeError("the run was left before it began"))
            at = self._begin(agent, event)
        at.metrics, at.invocation = metrics, number
        if at.is_bounded and not self._cutting.get(agent):
            # Only where it is needed: each hook costs every model call a little.
            agent.hooks.add_callback(AfterModelCallEvent, self._calls.after_answer, order=LAST)
            self._cutting.set(agent, True)
        # Not before the first run, so that this comes inside of the user's own middleware.
        wanted = at.is_bounded or _seams.has_model_middleware(agent)
        if wanted and not self._calls.watching.get(agent):
            agent.add_middleware(InvokeModelStage, self._calls.watched)
            self._calls.watching.set(agent, True)
        node = self._opener.nodes.get(agent)
        correction = self._opener.corrections.pop(node, "") if node is not None else ""
        if correction and event.messages:
            event.messages[-1]["content"].append({"text": correction})

    def _begin(self, agent: Agent, event: BeforeInvocationEvent) -> AgentRun:
        before = self._calls.runs.get(agent)
        kept: Any = agent.state.get(KEY)
        waits = False
        if before is not None and before.snapshot is not None and before.is_of(agent):
            kept = {"unfinished": "paused", "snapshot": before.snapshot.to_json()}
            waits = _seams.is_interrupted(agent)
        opened = self._opener.open(
            agent,
            event.invocation_state,
            kept,
            waits=waits,
            user_spoke=not _seams.is_interrupted(agent),
            given=event.messages,
            layer_above=self._layer_above(agent),
        )
        at = AgentRun(opened, agent)
        self._calls.runs.set(agent, at)
        if _seams.is_interrupted(agent):
            for ticket in at.run.guard.open_tool_calls():
                call = OpenToolCall(ticket.call, (ticket,))
                call.frame = at.run.frame(call)
                at.waiting.append(call)
        if not event.messages and agent.messages and _history.is_of_stop(agent.messages[-1], kept):
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
        """Let what other hooks do with the user's message before the loop be of the run."""
        # An assistant's is that of a refused run, whose loop does not begin.
        if event.message["role"] != "user":
            return
        at = self._calls.going_on(event.agent)
        if at is not None and not at.watched and not at.is_entered:
            at.enter()

    def around(self, agent: Agent, invocation_state: dict[str, Any], events: Events) -> Events:
        """Watch over the events of a run, and end it in their place; once for each run."""
        at = self._calls.going_on(agent)
        if at is None or at.watched:
            return events
        at.watched = True
        at.invocation_state = invocation_state
        invocation_state[CYCLES] = 0
        return self._bounded(at, agent, events)

    async def _bounded(
        self, at: AgentRun, agent: Agent, events: Events
    ) -> AsyncGenerator[Any, None]:
        run, invocation_state = at.run, at.invocation_state
        watch = Watch(run, at.cut)
        loop = asyncio.get_running_loop()
        write = at.written.append
        may_wait = _seams.has_model_middleware(agent)
        span = trace.get_current_span()
        try:
            # Entered for each step, so that nothing of it shows in the consumer's context; but not
            # while a model answers: nothing else starts then, and its chunks are many.
            if not at.is_entered:
                at.enter()
            at.awaiting = current_task(loop)
            async for event in events:
                at.awaiting = None  # a stream that is left must not hold its consumer
                if at.streaming:
                    # Nearly all are these two: what an answer says comes in a chunk, and then,
                    # without any wait of Strands' own, as an event.
                    kind: Any = type(event)  # pyright: ignore[reportUnknownVariableType]
                    if kind is TextStreamEvent:
                        write(event["data"])
                        at.look()
                        yield event
                        if at.due:
                            break
                        at.awaiting = current_task(loop)
                        continue
                    if kind is ModelStreamChunkEvent and "contentBlockDelta" in event["event"]:
                        yield event
                        if at.due:
                            break
                        if may_wait:
                            at.awaiting = current_task(loop)
                        continue
                if "stop" in event:
                    at.leave()
                    event = await _ending.last_event(agent, at, invocation_state, event)
                    if event is None:
                        break
                else:
                    at.look()
                    if at.call is not None:  # else a tool's, or of an agent delegated to
                        at.note(event)
                        write = at.written.append
                if at.is_entered:
                    at.leave()
                if at.notices:
                    for notice in at.take_notices():
                        yield TypedEvent({"budgetguard_warning": notice})
                yield event
                if not at.streaming:
                    if at.due:
                        break
                    at.enter()
                # The consumer may ask for each event in another task.
                at.awaiting = current_task(loop)
            else:
                at.took_effect()
                return
            at.took_effect()
            _spans.end_left(span, at.contexts)
        except asyncio.CancelledError as error:
            _spans.end_left(span, at.contexts, error)
            if not at.took_effect():
                at.error = error
                raise
        except Halt as halt:
            if halt.at is not at:
                # Another provider's budget ended the run, and the admitted call was never made.
                if at.call is not None:
                    run.unmade(at.call)
                raise
            _spans.end_left(span, at.contexts, halt)
            if halt.error is not None:
                at.error = halt.error
                raise halt.error from None
        except BaseException as error:
            at.error = error
            if at.trip is None or not _history.is_of_a_stop(error):
                raise
            at.error = None
        finally:
            watch.close()
            at.leave()
            at.awaiting, at.invocation_state = None, {}  # hold the consumer and the agent
            await events.aclose()
        self._calls.settle(at, agent, "the run was stopped", keep=True)
        ended = await _ending.stop(agent, at, invocation_state)
        # A reader of the texts alone sees the end of the run, too.
        message: Any = ended["stop"][1]
        yield TypedEvent({"data": message["content"][-1]["text"]})
        if run.finalized:
            yield TypedEvent({"message": message})
        yield ended

    # The end

    async def _after_leg(self, event: AfterInvocationEvent) -> None:
        """Settle what is open and keep the counters, before the session manager looks."""
        at = self._calls.going_on(event.agent)
        if at is None:
            return
        if at.is_entered:
            at.leave()  # a hook of the user's message raised
        self._calls.settle(at, event.agent, at.error or "the run was left")
        bodies = self._bodies.get(event.agent)
        if bodies is not None and at.trip is not None:
            await bodies.cancel()
        elif bodies is not None:
            at.unwatch = bodies.watch(at.run)
        outcome = await _ending.leg_over(at, event)
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
        if at.run.ended:
            return
        at.resumed = event.resume is not None
        if at.resumed:
            return
        outcome = await _ending.concluded(at, event)
        self._opener.outcomes.set(agent, outcome)
        trip = at.run.trip
        if trip is None:
            return
        self._opener.trips.set(agent, trip)
        if at.of_node:
            return
        goes_through = at.inside and at.run.is_of_the_run_around(trip)
        if goes_through or (at.run.is_to_raise and not at.inside):
            raise BudgetExceeded(trip, outcome)


# What an agent without a provider spends is spent by the run around it, and by nothing else.
_joining = AgentHooks(Opener())


def _around(agent: Agent, invocation_state: dict[str, Any], events: Events) -> Events:
    """Let every provider that was registered with an agent watch over its run, the first outermost.

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

    The first provider that is attached does it as well. Needed where no agent has a provider, and
    the run around is another adapter's or a `guard.activate()` block.

    Raises:
        AdapterError: The installed release of Strands lacks what the adapter needs.
    """
    _seams.join_runs_around(_join)
