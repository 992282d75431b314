"""The run of an agent: where it begins, what ends it in time, and how it ends."""

from __future__ import annotations

import asyncio
from asyncio import current_task
from collections.abc import AsyncGenerator
from typing import Any
from weakref import WeakKeyDictionary

from strands import Agent
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolCallEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
)

from budgetguard_core import BudgetExceeded, Guard
from budgetguard_core.kit import OpenToolCall, Watch, is_stop
from budgetguard_strands import _ending, _history, _seams
from budgetguard_strands._calls import Calls, Halt
from budgetguard_strands._opening import KEY, Opener
from budgetguard_strands._run import AgentRun
from budgetguard_strands._seams import FIRST, LAST, ORDERED, Events

_LOOK_EVERY = 64
"""Pieces of an answer after which the clock is looked at, where the loop gets no turn."""

# The hooks that are on an agent, of all providers.
_attached: WeakKeyDictionary[Agent, list[AgentHooks]] = WeakKeyDictionary()


class AgentHooks:
    """What one provider does on the agents that it is attached to."""

    def __init__(self, name: str, opener: Opener) -> None:
        self._name = name
        self._opener = opener
        self._calls = Calls(self._cover)

    # Attaching

    def install(self, agent: Agent) -> None:
        """Bound an agent; a second time changes nothing."""
        others = _attached.setdefault(agent, [])
        if self in others:
            return
        guard = self._opener.envelope.budget
        # Two providers with one guard would be two layers that see the same calls.
        if isinstance(guard, Guard) and any(
            one._opener.envelope.budget is guard  # noqa: SLF001
            for one in others
        ):
            others.append(self)
            return
        _seams.wrap_runs(agent, self._around)
        others.append(self)
        for event, callback, order in (
            (BeforeInvocationEvent, self._before_invocation, FIRST),
            (BeforeModelCallEvent, self._calls.before_model_call, LAST),
            (AfterModelCallEvent, self._calls.after_model_call, FIRST),
            (AfterModelCallEvent, self._calls.after_answer, LAST),
            (BeforeToolCallEvent, self._calls.before_tool_call, LAST),
            (AfterToolCallEvent, self._calls.after_tool_call, LAST),
            (AfterInvocationEvent, self._after_leg, FIRST),
            (AfterInvocationEvent, self._after_invocation, LAST),
        ):
            _seams.add_hook(agent, event, callback, order)
        _seams.pass_on(agent, f"{self._name}-{id(self):x}", self._begin_inherited)

    def _cover(self, child: Agent) -> None:
        """Bound an agent that is used as a tool, unless a provider of its own does."""
        if not _attached.get(child):
            self.install(child)

    def _begin_inherited(self, event: BeforeInvocationEvent) -> None:
        """Begin the first run of an agent that one of Strands' own tools made."""
        if self not in _attached.get(event.agent, ()):
            self.install(event.agent)
            self._before_invocation(event)

    # One leg of a run

    def _before_invocation(self, event: BeforeInvocationEvent) -> None:
        agent = event.agent
        # A hook that resumes the agent stays in the same invocation.
        metrics = agent.event_loop_metrics
        number = len(metrics.agent_invocations)
        at = self._calls.going_on(agent)
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
        # Not before the first run, so that this comes inside of the user's own middleware.
        wanted = at.is_bounded or _seams.has_model_middleware(agent)
        if (
            wanted
            and agent not in self._calls.watching
            and _seams.watch_models(agent, self._calls.model_called)
        ):
            self._calls.watching.add(agent)
        node = self._opener.nodes.get(agent)
        correction = self._opener.corrections.pop(node, "") if node is not None else ""
        if correction and event.messages:
            event.messages[-1]["content"].append({"text": correction})

    def _begin(self, agent: Agent, event: BeforeInvocationEvent) -> AgentRun:
        before = self._calls.runs.get(agent)
        kept: Any = agent.state.get(KEY)
        if before is not None and before.snapshot is not None:
            kept = {"unfinished": "paused", "snapshot": before.snapshot.to_json()}
        opened = self._opener.open(agent, event.invocation_state, kept, user_spoke=True)
        at = self._calls.runs[agent] = AgentRun(opened)
        if _seams.is_interrupted(agent):
            for ticket in at.run.guard.open_tool_calls():
                call = OpenToolCall(ticket.call, (ticket,))
                call.frame = at.run.frame(call)
                at.waiting.append(call)
        _history.drop_overtaken(agent.messages, goes_on=not event.messages)
        return at

    async def _around(
        self, agent: Agent, invocation_state: dict[str, Any], events: Events
    ) -> AsyncGenerator[Any, None]:
        at = self._calls.going_on(agent)
        if at is None or at.watched:
            async for event in events:
                yield event
            return
        at.watched = True
        run = at.run
        watch = Watch(run, at.cut)
        pieces = 0
        try:
            # Entered for each step, so that nothing of it shows in the consumer's context; but not
            # while a model answers: nothing else starts then, and its chunks are many. Without an
            # order of hooks nobody knows whose comes first at the answer's end.
            at.enter()
            at.awaiting = current_task()
            async for event in events:
                at.awaiting = None
                at.leave()
                if "data" in event:
                    at.written.append(event["data"])
                    at.streaming = ORDERED
                    pieces += 1
                    if not pieces % _LOOK_EVERY and (run.aborted or run.time_left() == 0):
                        at.due = run.check() is not None
                        at.streaming = not at.due and at.streaming
                elif "event" in event and "metadata" in event["event"]:
                    at.usage = event["event"]["metadata"].get("usage") or at.usage
                elif "stop" in event:
                    if self._is_stopped_at(at, event):
                        break
                    if str(event["stop"][0]).startswith("limit_"):
                        event = await _ending.limited(agent, at, invocation_state, event)
                yield event
                if not at.streaming:
                    if at.due:
                        break
                    for notice in at.take_notices():
                        yield _seams.StreamEvent({"budgetguard_warning": notice})
                    at.enter()
                at.awaiting = current_task()
            else:
                at.took_effect()
                return
            at.took_effect()
        except asyncio.CancelledError as error:
            if not at.took_effect():
                at.error = error
                raise
        except Halt as halt:
            if halt.at is not at:
                # Another provider's budget ended the run, and the admitted call was never made.
                if at.call is not None:
                    run.unmade(at.call)
                raise
        except BaseException as error:
            at.error = error
            if at.trip is None or not _is_of_a_stop(error):
                raise
            at.error = None
        finally:
            watch.close()
            at.leave()
            await events.aclose()
        self._calls.settle(at, agent, "the run was stopped", keep=True)
        yield await _ending.stop(agent, at, invocation_state)

    def _is_stopped_at(self, at: AgentRun, event: Any) -> bool:
        """Tell whether a run that would wait for a person has nothing left that may run."""
        return (
            event["stop"][0] == "interrupt"
            and at.trip is not None
            and not any(one.result is None and one.call.refusal is None for one in at.asked)
        )

    # The end

    async def _after_leg(self, event: AfterInvocationEvent) -> None:
        """Settle what is open and keep the counters, before the session manager looks."""
        at = self._calls.going_on(event.agent)
        if at is None:
            return
        self._calls.settle(at, event.agent, at.error or "the run was left")
        outcome = await _ending.leg_over(at, event)
        if outcome is not None:
            self._opener.outcomes[event.agent] = outcome

    async def _after_invocation(self, event: AfterInvocationEvent) -> None:
        """End the run, after the session manager has kept it."""
        agent = event.agent
        at = self._calls.runs.get(agent)
        if at is None:
            return
        if at.trip is not None and event.resume is not None:
            _ending.LOG.warning(
                "agent=<%s>, stop_reason=<%s> | a stopped run is not resumed by a hook",
                agent.name,
                at.trip.reason,
            )
            event.resume = None
        if at.run.ended:
            return
        at.resumed = event.resume is not None
        if at.resumed or (at.trip is None and _seams.goes_on(event)):
            return
        outcome = self._opener.outcomes[agent] = await _ending.concluded(at, event)
        trip = at.run.trip
        if trip is None or at.of_node:
            return
        goes_through = at.inside and at.run.is_of_the_run_around(trip)
        if goes_through or (at.run.is_to_raise and not at.inside):
            raise BudgetExceeded(trip, outcome)


def _is_of_a_stop(error: BaseException | None) -> bool:
    """Tell whether an exception, or what it was raised from, says only that a run was stopped."""
    while error is not None:
        if is_stop(error):
            return True
        error = error.__cause__
    return False
