"""The calls of an agent: each is admitted before it starts, and settled after it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Literal

from opentelemetry.context import get_current
from strands import Agent
from strands.hooks import (
    AfterModelCallEvent,
    AfterToolCallEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
)
from strands.interrupt import InterruptException
from strands.types.exceptions import ContextWindowOverflowException

from budgetguard_core import (
    BudgetExceeded,
    ModelCall,
    RunFencedError,
    Stop,
    TokenUsage,
    ToolCall,
    Trip,
)
from budgetguard_core.kit import ToolCalls, answered_usage, is_stop, run_awaited, token_usage
from budgetguard_strands import _ending, _history, _seams
from budgetguard_strands._bounds import bounded, give_back, is_bounded_by
from budgetguard_strands._identity import ByIdentity
from budgetguard_strands._run import AgentRun
from budgetguard_strands._usage import model_name, with_status


class Halt(BaseException):
    """Ends the event loop before a model call.

    Not an Exception, because Strands and its users' hooks retry and swallow those. It never
    leaves the run: the provider that raised it catches it around the event loop.

    Args:
        at: The run that ends.
        error: What leaves the run in its place; none does where the run was stopped.
    """

    def __init__(self, at: AgentRun, error: RunFencedError | None = None) -> None:
        super().__init__("the run was stopped")
        self.at = at
        self.error = error


class Calls:
    """What one provider does at the calls of the agents that it is attached to.

    Attributes:
        runs: The last run of each agent.
        watching: The agents of which every model call tells which model it really goes to.
    """

    def __init__(self) -> None:
        self.runs: ByIdentity[AgentRun] = ByIdentity()
        self.watching: ByIdentity[bool] = ByIdentity()

    def going_on(self, agent: Any) -> AgentRun | None:
        """Return an agent's run; None where the budget came while it ran, and begins later."""
        at = self.runs.get(agent)
        return None if at is None or at.run.ended else at

    # Model calls

    def model_called(self, agent: Agent, model: Any) -> Any:
        """Note which model a call goes to, and return it with the call's completion bound."""
        at = self.going_on(agent)
        if at is None:
            return model
        at.model = model
        bound = None if at.call is None else at.call.max_output_tokens
        at.copied = model if bound is None else bounded(model, bound)
        return at.copied

    async def watched(self, context: Any, proceed: Callable[[Any], _seams.Events]) -> _seams.Events:
        """Choose the model of each call, inside of the user's own middleware.

        The middleware may keep its pieces: so the clock is looked at here, too.
        """
        context.model = self.model_called(context.agent, context.model)
        at = self.going_on(context.agent)
        async with aclosing(proceed(context)) as events:
            async for event in events:
                if at is not None:
                    at.look()
                    if at.due:
                        raise Halt(at)
                yield event

    async def before_model_call(self, event: BeforeModelCallEvent) -> None:
        """Admit a model call, or end the run."""
        if event.cancel:
            return  # somebody refused the call already
        agent = event.agent
        at = self.going_on(agent)
        if at is None:
            return
        at.forget_answered()
        cycle = len(agent.event_loop_metrics.agent_invocations[-1].cycles)
        retry = at.overflowed or cycle == at.cycle
        at.cycle, at.overflowed = cycle, False
        at.prune(agent)
        tools = agent.tool_registry
        projected = at.prompt.project(
            agent.messages,
            system=agent.system_prompt,
            # The tools and not their specs, which Strands makes anew each time.
            tools=[*tools.registry.values(), *tools.dynamic_tools.values()],
        )
        call = ModelCall(model=model_name(agent.model), retry=retry, input_tokens=projected)
        asked = await run_awaited(at.run.ask(lambda: at.run.model_call(call)))
        opened = await at.run.wait_async(asked)
        at.note_warnings()
        at.context = get_current()
        if isinstance(opened, Stop):
            at.give_back(agent)
            raise Halt(at)
        if at.run.is_saved:
            try:
                await _ending.save(at.run, at.whole(agent))
            except RunFencedError as error:
                at.give_back(agent)
                at.run.unmade(opened)
                raise Halt(at, error) from error
        if not retry:
            at.count_cycle()
        at.begin_call(opened)
        at.within(opened)
        if opened.nudge is not None and agent.messages[-1]["role"] == "user":
            agent.messages[-1]["content"].append({"text": opened.nudge})

    def after_model_call(self, event: AfterModelCallEvent) -> None:
        """Settle a model call, before other hooks see how it ended."""
        at = self.going_on(event.agent)
        if at is None:
            return
        at.give_back(event.agent)
        if at.streaming and not at.is_entered:
            at.enter()  # what other hooks start now belongs to the run
        if isinstance(event.exception, ContextWindowOverflowException):
            at.overflowed = True
            if not at.shared and not at.recovered:
                # As the reference does; but once a leg, because a loop that overflows again and
                # again would never end.
                at.recovered = True
                at.cycles = 0
                at.run.guard.restart_iterations()
        if event.stop_response is None or at.call is None:
            self.settle(at, event.agent, event.exception or "no answer")
            return
        call, model = at.call, at.model or event.agent.model
        if at.usage is None:
            message: dict[str, Any] = {**event.stop_response.message}
            metadata: dict[str, Any] = message.get("metadata") or {}
            at.usage = metadata.get("usage")
        self.settle(at, event.agent, None, message=event.stop_response.message)
        bound = call.max_output_tokens
        if (
            str(event.stop_response.stop_reason) == "max_tokens"
            and bound is not None
            and not is_bounded_by(model, bound)
        ):
            at.cut_off = at.run.cut_short(call) is not None

    def after_answer(self, event: AfterModelCallEvent) -> None:
        """End a run whose answer its own bound cut off, after the other hooks have seen it."""
        at = self.going_on(event.agent)
        if at is not None and at.cut_off and event.stop_response is not None:
            at.cut_off = False
            at.written = [_history.text_of(event.stop_response.message)]
            raise Halt(at)

    def settle(
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
        at.give_back(agent)
        call, written = at.call, at.written
        if call is None:
            return
        if at.copied not in (None, at.model):
            give_back(at.copied, at.model)
        usage: Any = at.usage
        if usage is None and self.watching.get(agent) and at.model is None:
            usage = TokenUsage()  # the user's own hook or middleware answered in the model's place
        other = None if at.model in (None, agent.model) else model_name(at.model)
        used = usage if isinstance(usage, TokenUsage) else token_usage(usage)
        if error is None:
            content: list[Any] = message["content"]
            text, final = "", not _history.has_tool_use(content)
            if final:
                text = _history.text_of(message)
            elif used is None or used.estimated or not used.output_tokens:
                # What it wrote has to be estimated, the arguments of its tool calls included.
                text = json.dumps(content, default=str)
            if final and at.unsaid:
                # Its reasoning is paid for, but is no part of what it says.
                used = answered_usage(
                    used, projected_input=call.call.input_tokens, written=text + "".join(at.unsaid)
                )
            at.run.answered(call, used, text=text, model=other, speaker=agent.name, final=final)
            at.prompt.measured(used, reply=message)
        elif isinstance(error, InterruptException) and not (at.usage or written or at.unsaid):
            at.run.unmade(call)  # a hook asks a person before it
        else:
            if usage is not None:
                call.measured = used
            at.run.failed(call, with_status(error), written="".join([*written, *at.unsaid]))
        at.begin_call(None)
        if keep:
            at.written = written
        at.within()
        at.note_warnings()

    # Tool calls

    def offer_tool_call(self, event: BeforeToolCallEvent) -> None:
        """Admit a tool call before a user's hook asks a person about it."""
        at = self.going_on(event.agent)
        if at is None or event.cancel_tool:
            return  # outside of a run it is the user's own code that calls the tool
        use = event.tool_use
        call = at.take_waiting(use) if at.waiting else None
        if call is None:
            at.leave_call()
            kind = _kind(event.selected_tool, use["name"], at)
            call = at.run.tool_call(_tool_call(use, kind))
        at.asked.append(_history.Asked(use, call, get_current()))
        if call.refusal is not None:
            event.cancel_tool = call.refusal
            _seams.ask_nobody(event)

    async def before_tool_call(self, event: BeforeToolCallEvent) -> None:
        """Start a tool call, or give a result in its place, after the other hooks."""
        at = self.going_on(event.agent)
        if at is None:
            return
        use = event.tool_use
        asked = _history.find_call(at.asked, use)
        if asked is not None and asked.call.refusal is not None:
            event.cancel_tool = asked.call.refusal
            return
        if event.cancel_tool:
            if asked is not None:
                at.asked.remove(asked)
                text = str(event.cancel_tool)
                ToolCalls(at.run).answered_without_body(asked.call, text, kind="cancelled")
            return
        if asked is None:
            return
        if _seams.is_asking(event.agent, use):
            return  # it waits for the answer
        call = await at.run.wait_async(asked.call)
        at.note_warnings()
        refusal = at.run.start(call)
        if refusal is None:
            at.within(call)
        else:
            event.cancel_tool = refusal

    def after_tool_call(self, event: AfterToolCallEvent) -> None:
        """Settle a tool call, with the result that the history gets."""
        at = self.going_on(event.agent)
        if at is None:
            return
        asked = _history.find_call(at.asked, event.tool_use)
        child = getattr(event.selected_tool, "agent", None)
        result: Any = event.result
        failed = result.get("status") == "error"
        if (
            child is not None
            and isinstance(child, Agent)
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
        if result is not event.result:
            event.result = result
        if asked is not None:
            asked.result = result
        at.within()


def _says(trip: Trip, event: AfterToolCallEvent) -> bool:
    """Tell whether a tool failed because a run inside of it was stopped."""
    # Strands and the agents below make a text of it. The detail alone may be a word of the user's.
    return is_stop(event.exception) or str(BudgetExceeded(trip)) in str(event.result["content"])


def _tool_call(use: Any, kind: Literal["function", "handoff", "output"]) -> ToolCall:
    return ToolCall(name=use["name"], arguments=use["input"], id=use["toolUseId"], kind=kind)


def _kind(tool: Any, name: str, at: AgentRun) -> Literal["function", "handoff", "output"]:
    if tool is None or getattr(tool, "tool_type", None) == "structured_output":
        return "output"  # an unknown tool has no body that could start, and is looked at for loops
    return "handoff" if name == "handoff_to_agent" and at.of_node else "function"
