"""The hooks of an agent: each of its calls is admitted and settled, and its run ends in time."""

from __future__ import annotations

import asyncio
import json
from asyncio import current_task
from collections.abc import AsyncGenerator
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

from opentelemetry import trace
from strands import Agent
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolCallEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
)
from strands.types.exceptions import ContextWindowOverflowException

from budgetguard_core import (
    BudgetExceeded,
    Guard,
    ModelCall,
    Stop,
    TokenUsage,
    ToolCall,
    Trip,
)
from budgetguard_core.kit import OpenToolCall, Watch, is_stop, token_usage
from budgetguard_strands import _ending, _history, _seams
from budgetguard_strands._bounds import bounded, is_bounded_by
from budgetguard_strands._opening import KEY, Opener
from budgetguard_strands._run import AgentRun
from budgetguard_strands._seams import FIRST, LAST, ORDERED, Events
from budgetguard_strands._usage import model_name, with_status

_LOOK_EVERY = 64
"""Pieces of an answer after which the clock is looked at, where the loop gets no turn."""

# The hooks that are on an agent, of all providers.
_attached: WeakKeyDictionary[Agent, list[AgentHooks]] = WeakKeyDictionary()


class _Halt(BaseException):
    """Ends the event loop before a model call.

    Not an Exception, because Strands and its users' hooks retry and swallow those. It never
    leaves the run: the provider that raised it catches it around the event loop.
    """

    def __init__(self, at: AgentRun) -> None:
        super().__init__("the run was stopped")
        self.at = at


class AgentHooks:
    """What one provider does on the agents that it is attached to."""

    def __init__(self, name: str, opener: Opener) -> None:
        self._name = name
        self._opener = opener
        self._runs: WeakKeyDictionary[Agent, AgentRun] = WeakKeyDictionary()
        self._watching: WeakSet[Agent] = WeakSet()

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
            (BeforeModelCallEvent, self._before_model_call, LAST),
            (AfterModelCallEvent, self._after_model_call, FIRST),
            (AfterModelCallEvent, self._after_answer, LAST),
            (BeforeToolCallEvent, self._before_tool_call, LAST),
            (AfterToolCallEvent, self._after_tool_call, LAST),
            (AfterInvocationEvent, self._after_leg, FIRST),
            (AfterInvocationEvent, self._after_invocation, LAST),
        ):
            _seams.add_hook(agent, event, callback, order)
        _seams.pass_on(agent, f"{self._name}-{id(self):x}", self._begin_inherited)

    def _begin_inherited(self, event: BeforeInvocationEvent) -> None:
        """Begin the first run of an agent that one of Strands' own tools made."""
        if self not in _attached.get(event.agent, ()):
            self.install(event.agent)
            self._before_invocation(event)

    def _going_on(self, agent: Any) -> AgentRun | None:
        """Return an agent's run; None where the budget came while it ran, and begins later."""
        at = self._runs.get(agent)
        return None if at is None or at.run.ended else at

    # One leg of a run

    def _before_invocation(self, event: BeforeInvocationEvent) -> None:
        agent = event.agent
        # A hook that resumes the agent stays in the same invocation.
        metrics = agent.event_loop_metrics
        number = len(metrics.agent_invocations)
        at = self._going_on(agent)
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
            and agent not in self._watching
            and _seams.watch_models(agent, self._model_called)
        ):
            self._watching.add(agent)
        node = self._opener.nodes.get(agent)
        correction = self._opener.corrections.pop(node, "") if node is not None else ""
        if correction and event.messages:
            event.messages[-1]["content"].append({"text": correction})

    def _begin(self, agent: Agent, event: BeforeInvocationEvent) -> AgentRun:
        before = self._runs.get(agent)
        kept: Any = agent.state.get(KEY)
        if before is not None and before.snapshot is not None:
            kept = {"unfinished": "paused", "snapshot": before.snapshot.to_json()}
        opened = self._opener.open(agent, event.invocation_state, kept, user_spoke=True)
        at = self._runs[agent] = AgentRun(opened)
        if _seams.is_interrupted(agent):
            for ticket in at.run.guard.open_tool_calls():
                call = OpenToolCall(ticket.call, (ticket,))
                call.frame = at.run.frame(call)
                at.waiting.append(call)
        _history.drop_overtaken(agent.messages, goes_on=not event.messages)
        return at

    def _model_called(self, agent: Agent, model: Any) -> Any:
        """Note which model a call goes to, and return it with the call's completion bound."""
        at = self._going_on(agent)
        if at is None:
            return model
        at.model = model
        bound = None if at.call is None else at.call.max_output_tokens
        return model if bound is None else bounded(model, bound)

    async def _around(
        self, agent: Agent, invocation_state: dict[str, Any], events: Events
    ) -> AsyncGenerator[Any, None]:
        at = self._going_on(agent)
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
                elif "stop" in event and self._is_stopped_at(at, event):
                    break
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
        except _Halt as halt:
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
        self._settle(at, agent, "the run was stopped", keep=True)
        yield await _ending.stop(agent, at, invocation_state)

    def _is_stopped_at(self, at: AgentRun, event: Any) -> bool:
        """Tell whether a run that would wait for a person has nothing left that may run."""
        return (
            event["stop"][0] == "interrupt"
            and at.trip is not None
            and not any(one.result is None and one.call.refusal is None for one in at.asked)
        )

    # Model calls

    def _before_model_call(self, event: BeforeModelCallEvent) -> None:
        if getattr(event, "cancel", False):
            return  # somebody refused the call already; younger releases only
        agent = event.agent
        at = self._going_on(agent)
        if at is None:
            return
        at.asked.clear()
        cycle = len(agent.event_loop_metrics.agent_invocations[-1].cycles)
        retry = at.overflowed or cycle == at.cycle
        at.cycle, at.overflowed = cycle, False
        projected = at.prompt.project(
            agent.messages,
            system=agent.system_prompt,
            tools=agent.tool_registry.get_all_tool_specs(),
        )
        opened = at.run.model_call(
            ModelCall(model=model_name(agent.model), retry=retry, input_tokens=projected)
        )
        at.note_warnings()
        at.span = trace.get_current_span()
        if isinstance(opened, Stop):
            raise _Halt(at)
        at.begin_call(opened)
        at.within(opened)
        if opened.nudge is not None and agent.messages[-1]["role"] == "user":
            agent.messages[-1]["content"].append({"text": opened.nudge})

    def _after_model_call(self, event: AfterModelCallEvent) -> None:
        at = self._going_on(event.agent)
        if at is None:
            return
        if at.streaming and not at.is_entered:
            at.enter()  # what other hooks start now belongs to the run
        if isinstance(event.exception, ContextWindowOverflowException):
            at.overflowed = True
            if not at.shared and not at.recovered:
                # As the reference does; but once a leg, because a loop that overflows again and
                # again would never end.
                at.recovered = True
                at.run.guard.restart_iterations()
        if event.stop_response is None or at.call is None:
            self._settle(at, event.agent, event.exception)
            return
        call, model = at.call, at.model or event.agent.model
        message: dict[str, Any] = {**event.stop_response.message}
        if at.usage is None:
            metadata: dict[str, Any] = message.get("metadata") or {}
            at.usage = metadata.get("usage")
        self._settle(at, event.agent, None, message=event.stop_response.message)
        bound = call.max_output_tokens
        if (
            str(event.stop_response.stop_reason) == "max_tokens"
            and bound is not None
            and not is_bounded_by(model, bound)
        ):
            at.cut_off = at.run.cut_short(call) is not None

    def _after_answer(self, event: AfterModelCallEvent) -> None:
        """End a run whose answer its own bound cut off, after the other hooks have seen it."""
        at = self._going_on(event.agent)
        if at is not None and at.cut_off and event.stop_response is not None:
            at.cut_off = False
            at.written = [_history.text_of(event.stop_response.message)]
            raise _Halt(at)

    def _settle(
        self,
        at: AgentRun,
        agent: Agent,
        error: BaseException | str | None,
        *,
        message: Any = None,
        keep: bool = False,
    ) -> None:
        """Charge the model call in flight, if there is one, with what it reported so far.

        Args:
            at: The run.
            agent: Its agent.
            error: What ended the call; None for an answer.
            message: The answer.
            keep: What was written is still needed.
        """
        call, written = at.call, at.written
        if call is None:
            return
        usage: Any = at.usage
        if usage is None and agent in self._watching and at.model is None:
            usage = TokenUsage()  # the user's own hook or middleware answered in the model's place
        other = None if at.model in (None, agent.model) else model_name(at.model)
        if error is None:
            content = [] if message is None else message["content"]
            final = message is not None and not any("toolUse" in block for block in content)
            # With the arguments of its tool calls, in case that they have to be estimated.
            text = _history.text_of(message) if final else json.dumps(content, default=str)
            at.run.answered(call, usage, text=text, model=other, speaker=agent.name, final=final)
            at.prompt.measured(token_usage(usage), reply=message)
        else:
            if usage is not None:
                call.measured = token_usage(usage)
            at.run.failed(call, with_status(error), written="".join(written))
        at.begin_call(None)
        if keep:
            at.written = written
        at.within()
        at.note_warnings()

    # Tool calls

    def _before_tool_call(self, event: BeforeToolCallEvent) -> None:
        at = self._going_on(event.agent)
        if at is None:
            return  # outside of a run it is the user's own code that calls the tool
        use = event.tool_use
        waited = next(
            (
                one
                for one in at.waiting
                if (one.call.id, one.call.name) == (use["toolUseId"], use["name"])
            ),
            None,
        )
        if waited is not None:
            at.waiting.remove(waited)
        if event.cancel_tool:
            if waited is not None:
                at.run.withdrawn(waited)
            return
        if waited is None and _seams.is_asking(event.agent, use):
            return  # it is asked for when the person has answered
        child = getattr(event.selected_tool, "agent", None)
        if isinstance(child, Agent) and not _attached.get(child):
            self.install(child)
        call = waited or at.run.tool_call(
            ToolCall(
                name=use["name"],
                arguments=use["input"],
                id=use["toolUseId"],
                kind=_kind(event.selected_tool, use["name"], at),
            )
        )
        at.note_warnings()
        at.asked.append(_history.Asked(use, call))
        refusal = at.run.start(call)
        if refusal is None:
            at.within(call)
        else:
            event.cancel_tool = refusal

    def _after_tool_call(self, event: AfterToolCallEvent) -> None:
        at = self._going_on(event.agent)
        if at is None:
            return
        asked = _history.find_call(at.asked, event.tool_use)
        child = getattr(event.selected_tool, "agent", None)
        result: Any = event.result
        failed = result.get("status") == "error"
        if (
            isinstance(child, Agent)
            and child.messages
            and _history.is_synthetic(child.messages[-1])
        ):
            failed = True
            result = _history.of_stopped(result, child.messages)
        elif failed and at.trip is not None and _says(at.trip, event):
            result = _history.error_result(result["toolUseId"], _history.STOPPED)
        if asked is not None and asked.result is None:
            content = result["content"]
            at.run.finished(
                asked.call,
                None if failed else content,
                error=event.exception or str(content) if failed else None,
            )
        message = at.run.nudge() if at.trip is None else None
        if message is not None:
            result = _history.with_text(result, message)
        event.result = result
        if asked is not None:
            asked.result = result
        at.within()

    # The end

    async def _after_leg(self, event: AfterInvocationEvent) -> None:
        """Settle what is open and keep the counters, before the session manager looks."""
        at = self._going_on(event.agent)
        if at is None:
            return
        self._settle(at, event.agent, at.error or "the run was left")
        outcome = await _ending.leg_over(at, event)
        if outcome is not None:
            self._opener.outcomes[event.agent] = outcome

    async def _after_invocation(self, event: AfterInvocationEvent) -> None:
        """End the run, after the session manager has kept it."""
        agent = event.agent
        at = self._runs.get(agent)
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


def _says(trip: Trip, event: AfterToolCallEvent) -> bool:
    """Tell whether a tool failed because a run inside of it was stopped."""
    return is_stop(event.exception) or trip.detail in str(event.result["content"])


def _kind(tool: Any, name: str, at: AgentRun) -> Literal["function", "handoff", "output"]:
    if tool is None or getattr(tool, "tool_type", None) == "structured_output":
        return "output"  # an unknown tool has no body that could start, and is looked at for loops
    return "handoff" if name == "handoff_to_agent" and at.of_node else "function"
