"""The run of an agent: where it begins, what ends it in time, and how it ends."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from opentelemetry import trace
from strands import Agent, hooks, tool  # pyright: ignore[reportUnknownVariableType]
from strands.middleware import ExecuteToolStage
from strands.types._events import ModelStreamChunkEvent, TextStreamEvent, ToolResultEvent
from strands.types.events import TypedEvent

from budgetguard_core import Snapshot, kit
from budgetguard_core.kit import FRAME, ToolCall
from budgetguard_strands import _calls as calls
from budgetguard_strands import _seams
from budgetguard_strands._calls import Halt
from budgetguard_strands._messages import STOPPED, error_result
from budgetguard_strands._opening import (
    JOINING,
    KEY,
    NODES,
    OPENERS,
    ByIdentity,
    Opener,
    entry,
    is_of_a_stop,
    note,
    note_end,
)
from budgetguard_strands._run import LOOK_EVERY, RUNS, AgentRun, going_on, is_stopped
from budgetguard_strands._seams import FIRST, LAST, Events

_GO_ON = "Please go on."

_attaching = threading.Lock()
# The counters of an agent's last run that waits inside of another one.
_paused: ByIdentity[Snapshot] = ByIdentity()

# Attaching


def attach(agent: Agent, opener: Opener) -> None:
    """Bound an agent; a second time changes nothing.

    Raises:
        ConfigurationError: Another provider bounds it already.
    """
    with _attaching:
        if opener.take(agent):
            _register(agent)
    if opener.envelope.may_ask_for_progress:
        offer_reports(agent)


def offer_reports(agent: Agent) -> None:
    """Give an agent the tool `report_progress`."""
    form = kit.PROGRESS_TOOL
    if form.name not in agent.tool_registry.registry:
        made: Any = tool(name=form.name, description=form.description)
        agent.tool_registry.process_tools([made(kit.report_progress)])


def _register(agent: Agent) -> None:
    _seams.probe(agent)
    callbacks = (
        (hooks.BeforeInvocationEvent, _before_invocation, FIRST),
        (hooks.BeforeModelCallEvent, calls.before_model_call, LAST),
        (hooks.AfterModelCallEvent, calls.after_model_call, FIRST),
        (hooks.AfterModelCallEvent, calls.after_answer, LAST),
        (hooks.BeforeToolCallEvent, calls.offer_tool_call, FIRST),
        (hooks.BeforeToolCallEvent, calls.before_tool_call, LAST),
        (hooks.AfterToolCallEvent, calls.after_tool_call, LAST),
        (hooks.AfterInvocationEvent, _after_attempt, FIRST),
        (hooks.AfterInvocationEvent, _after_invocation, LAST),
    )
    add: Any = agent.hooks.add_callback
    for event, callback, order in callbacks:
        add(event, callback, order=order)
    agent.add_middleware(_seams.AgentStreamStage, _enclosing)
    if _seams.has_background_tasks(agent):
        agent.add_middleware(ExecuteToolStage, _in_background)


# The beginning


async def _before_invocation(event: hooks.BeforeInvocationEvent) -> None:
    """Begin a run, or another attempt of one: hooks that resume it stay in its invocation."""
    agent = event.agent
    metrics = agent.event_loop_metrics
    invocation = metrics, len(metrics.agent_invocations)
    at = going_on(agent)
    if at is not None and at.invocation == invocation:
        at.begin_attempt()
        if at.resumed and not at.shared and at.trip is None:
            at.run.guard.state.restart_iterations()
    else:
        if at is not None:
            # Somebody's hook raised, and nothing told the end of the run.
            at.run.fail(RuntimeError("the run was left before it began"))
        opener = OPENERS.get(agent)
        has_parent = kit.current() is not None or NODES.get(agent) is not None
        if opener is None or (opener is JOINING and not has_parent):
            return
        at = await _begin(event, opener, invocation)
    calls.watch(agent, at)
    if at.node is not None and at.node.correction and event.messages:
        event.messages[-1]["content"].append({"text": at.node.correction})
        at.node.correction = ""


async def _begin(
    event: hooks.BeforeInvocationEvent, opener: Opener, invocation: tuple[Any, int]
) -> AgentRun:
    agent = event.agent
    paused = _paused.get(agent)
    _paused.pop(agent)
    answered = _seams.is_interrupted(agent)
    kept: Any = agent.state.get(KEY) if paused is None else entry("paused", paused)
    opening = await opener.open(
        agent,
        event.invocation_state,
        kept,
        waits=answered and paused is not None,
        user_spoke=not answered,
        given=event.messages,
    )
    at = AgentRun(opening, agent, invocation)
    if not agent.messages:
        agent.messages.extend(at.run.earlier_messages)
    RUNS.set(agent, at)
    for use, result in _seams.results_before_interrupt(agent):
        at.session.calls.lost(ToolCall(name=use["name"], id=use["toolUseId"]), result)
    return at


# The events


async def _enclosing(context: Any, proceed: Callable[[Any], Events]) -> Events:
    """Watch over the events of an attempt, and end it in their place."""
    at = going_on(context.agent)
    if at is None:
        async with aclosing(proceed(context)) as events:
            async for event in events:
                yield event
        return
    agent, state = context.agent, context.invocation_state
    if not context.messages and not at.resumed and is_stopped(agent):
        # No provider takes two assistant messages in a row, and what a session manager has
        # kept stays as it is: so somebody has to speak in between.
        context = replace(context, messages=[{"role": "user", "content": [{"text": _GO_ON}]}])
    span = trace.get_current_span()
    watch = kit.Watch(at.run, at.cut)
    may_wait, is_streaming = _seams.has_model_middleware(agent), False
    try:
        async with aclosing(proceed(context)) as events:
            at.enter()
            async for event in events:
                kind: Any = type(event)  # pyright: ignore[reportUnknownVariableType]
                is_text = kind is TextStreamEvent and at.turn is not None
                if is_text or (kind is ModelStreamChunkEvent and "metadata" not in event["event"]):
                    # Nearly all events are these two: a piece of an answer, and its text, which
                    # Strands makes without any wait. While they come no hook runs.
                    if not is_streaming:
                        at.leave()
                    elif at.token is not None:
                        FRAME.reset(at.token)
                    at.task = at.token = None
                    is_streaming = True
                    if is_text:
                        at.written += (event["data"],)
                        at.pieces += 1
                        if at.pieces % LOOK_EVERY == 0:
                            at.look()
                    yield event
                    if at.due:
                        break
                    if is_text or may_wait or "contentBlockDelta" not in event["event"]:
                        at.task, at.token = asyncio.current_task(), FRAME.set(at.inner)
                    continue
                is_streaming = False
                at.note(event)
                at.leave()
                if "stop" in event:
                    event = await at.last_event(agent, state, event)
                    if event is None:
                        break
                for warning in at.warnings():
                    yield TypedEvent({"budgetguard_warning": warning})
                yield event
                if at.due:
                    break
                at.enter()
            else:
                at.took_effect()
                return
        at.took_effect()
        _seams.end_spans(span, at.cycle_span, None)
    except BaseException as error:
        if isinstance(error, Halt | asyncio.CancelledError):
            _seams.end_spans(span, at.cycle_span, error)
        if not _is_stop(at, error):
            raise
        if at.error is not None:
            raise at.error from None
    finally:
        watch.close()
        at.leave()
    calls.settle(at, "the run was stopped")
    ended = await at.stop(agent, state)
    # A reader of the texts alone sees the end of the run, too.
    message: Any = ended["stop"][1]
    yield TextStreamEvent({}, message["content"][-1]["text"])
    if at.run.finalized:
        yield TypedEvent({"message": message})
    yield ended


def _is_stop(at: AgentRun, error: BaseException) -> bool:
    """Return whether what came up through the loop only ends it; note what leaves the run."""
    if isinstance(error, Halt):
        at.error = error.__cause__
        return True
    if isinstance(error, asyncio.CancelledError) and at.took_effect():
        return True
    ends = at.trip is not None and is_of_a_stop(error)
    at.error = None if ends else error
    return ends


async def _in_background(context: Any, proceed: Callable[[Any], Events]) -> Events:
    """End a body that runs in the background with its run; Strands would wait for it."""
    at = going_on(context.agent)
    async with aclosing(proceed(context)) as events:
        if at is None or not hasattr(context, "_background_interrupt"):
            async for event in events:
                yield event
            return
        scope = kit.Scope(at.run)
        body = asyncio.get_running_loop(), scope
        at.bodies.add(body)
        try:
            while scope.trip is None and not at.is_abandoned:
                event = None
                with scope:
                    event = await anext(events, None)
                if event is None and scope.trip is None:
                    return
                if event is not None:
                    yield event
        finally:
            scope.close()
            at.bodies.discard(body)
        yield ToolResultEvent(error_result(context.tool_use["toolUseId"], STOPPED))


# The end


async def _after_attempt(event: hooks.AfterInvocationEvent) -> None:
    """Settle what is open and keep the counters, before the session manager looks."""
    at = going_on(event.agent)
    if at is None:
        return
    calls.settle(at, at.error or "the run was left")
    if at.trip is not None:
        at.is_abandoned = True
        for loop, scope in list(at.bodies):
            loop.call_soon_threadsafe(scope.cut)
    outcome = await at.attempt_over(event)
    if at.paused is not None and at.inside:
        _paused.set(event.agent, at.paused)
    if outcome is not None:
        note(event.agent, outcome)


async def _after_invocation(event: hooks.AfterInvocationEvent) -> None:
    """End the run, after the session manager has kept it."""
    agent = event.agent
    at = RUNS.get(agent)
    if at is None:
        return
    if _seams.goes_on(event):
        at.resumed = False
        return
    if at.trip is not None:
        event.resume = None  # a stopped run is not resumed by a hook
    at.resumed = event.resume is not None
    if at.run.ended:
        RUNS.pop(agent)  # it holds the conversation
    elif not at.resumed:
        RUNS.pop(agent)
        note_end(agent, at, await at.concluded(event))


def install() -> None:
    """Make every agent of this process a part of the run around it, if there is one.

    Importing the package does it. Strands 1.62 and before have no hook of all agents, and the
    tools that make agents give them none: the class is wrapped, once.
    """
    own = Agent.stream_async
    if hasattr(own, "joins_enclosing_runs"):
        return

    @functools.wraps(own)
    def stream_async(self: Agent, *args: Any, **kwargs: Any) -> Any:
        if kit.current() is not None and OPENERS.get(self) is None:
            attach(self, JOINING)
        return own(self, *args, **kwargs)

    agents: Any = Agent
    wrapped: Any = stream_async
    wrapped.joins_enclosing_runs = True
    agents.stream_async = wrapped
