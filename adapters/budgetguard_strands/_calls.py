"""The calls of an agent: each is admitted before it starts, and settled after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from strands import Agent, hooks
from strands.interrupt import InterruptException
from strands.middleware import InvokeModelStage
from strands.types.content import ContentBlock
from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException

from budgetguard_core import BudgetExceeded, RunFencedError, kit
from budgetguard_core.kit import Request, Stop, TokenUsage, ToolCall
from budgetguard_strands import _bounds, _seams
from budgetguard_strands import _messages as messages
from budgetguard_strands._messages import DIALECT
from budgetguard_strands._opening import ByIdentity
from budgetguard_strands._run import AgentRun, going_on

# The provider turned the call away before it did any work.
_REFUSALS = (ContextWindowOverflowException, ModelThrottledException)


class Halt(BaseException):
    """Ends the event loop before a model call.

    Not an Exception, because Strands and its users' hooks retry and swallow those. It never
    leaves the run: it is caught around the event loop. Its cause leaves the run in its place, if
    it has one.
    """


# The agents of which every model call tells which model it really goes to.
_watched: ByIdentity[bool] = ByIdentity()

# Model calls


def watch(agent: Agent, at: AgentRun) -> None:
    """Put `watched` around the model calls of an agent, where it makes any difference."""
    # Not before the first run, so that this comes inside of the user's own middleware.
    changes = at.run.envelope.prune is not None or any(
        one.budget.max_output_tokens_per_call or one.budget.fallback_model for one in at.ancestry
    )
    if (changes or _seams.has_model_middleware(agent)) and not _watched.get(agent):
        agent.add_middleware(InvokeModelStage, watched)
        _watched.set(agent, True)


async def watched(context: Any, proceed: Callable[[Any], _seams.Events]) -> _seams.Events:
    """Send a call to its model, inside of the user's own middleware: bounded, and pruned.

    The middleware may keep its pieces: so the clock is looked at here, too.
    """
    at = going_on(context.agent)
    turn = None if at is None else at.turn
    model = copied = context.model
    if at is not None and turn is not None:
        bound = turn.bound()
        at.model = model
        if turn.fallback_model is not None:
            copied = _bounds.named(copied, turn.fallback_model)
        if bound is not None:
            copied = _bounds.with_bound(copied, bound)
        sent = copy.deepcopy(list(turn.messages)) if turn.is_pruned else context.messages
        context = context.replace(model=copied, messages=sent)
    try:
        async with aclosing(proceed(context)) as events:
            async for event in events:
                if at is not None:
                    at.piece()
                    if at.due:
                        raise Halt
                yield event
    finally:
        if copied is not model:
            _bounds.give_back(copied, model)


async def before_model_call(event: hooks.BeforeModelCallEvent) -> None:
    """Admit a model call, or end the run."""
    agent = event.agent
    at = going_on(agent)
    if at is None or event.cancel:
        return
    at.requested = [one for one in at.requested if one[1].state == "started"]
    cycle = len(agent.event_loop_metrics.agent_invocations[-1].cycles)
    tools = agent.tool_registry
    request = Request(
        messages=agent.messages,
        system=agent.system_prompt,
        # The tools and not their specs, which Strands makes anew each time.
        tools=[*tools.registry.values(), *tools.dynamic_tools.values()],
        model=_bounds.model_name(agent.model),
        retry=at.overflowed or cycle == at.cycle,
        may_fall_back=bool(_watched.get(agent)) and _bounds.can_be_set(agent.model),
    )
    at.cycle, at.overflowed = cycle, False
    at.cycle_span = event.invocation_state.get("event_loop_cycle_span")
    try:
        turn = await kit.run_awaited(at.session.model(request))
    except RunFencedError as error:
        raise Halt from error
    if isinstance(turn, Stop):
        raise Halt
    at.begin_call(turn)
    at.within(turn.call)
    if turn.nudge is not None and agent.messages[-1]["role"] == "user":
        words: ContentBlock = {"text": turn.nudge}
        at.nudged = agent.messages[-1]["content"], words
        at.nudged[0].append(words)


def after_model_call(event: hooks.AfterModelCallEvent) -> None:
    """Settle a model call, before other hooks see how it ended."""
    agent, response = event.agent, event.stop_response
    at = going_on(agent)
    if at is None:
        return
    if isinstance(event.exception, ContextWindowOverflowException):
        at.overflowed = True
        if not at.shared and not at.recovered:
            # As the reference does; but once an attempt: a loop that overflows again and again
            # would never end.
            at.recovered = True
            at.run.guard.state.restart_iterations()
    if response is None or at.turn is None:
        settle(at, event.exception or "no answer")
        return
    message: Any = response.message
    at.usage = at.usage or kit.part(message.get("metadata"), "usage")
    _answered(at, agent, message, str(response.stop_reason) == "max_tokens")


def after_answer(event: hooks.AfterModelCallEvent) -> None:
    """End a run whose answer its own bound cut off, after the other hooks have seen it."""
    at = going_on(event.agent)
    if at is not None and at.cut_off and event.stop_response is not None:
        at.cut_off = False
        at.written = [messages.text_of(event.stop_response.message)]
        raise Halt


def _answered(at: AgentRun, agent: Agent, message: Any, is_cut: bool) -> None:
    turn = at.turn
    if turn is None:
        return
    reply, model, bound = DIALECT.read(message), at.model or agent.model, turn.bound()
    used = kit.token_usage(at.usage)
    if at.usage is None and at.model is None and _watched.get(agent):
        used = TokenUsage()  # the user's own hook or middleware answered in the model's place
    turn.pieces += at.written
    written = "".join(turn.pieces)
    if not reply.calls and len(written) > len(reply.text):
        # Its reasoning is paid for, but is no part of what it says.
        size = turn.call.call.input_tokens
        known = used or turn.call.measured
        used = kit.answered_usage(known, projected_input=size, written=written)
    trip = turn.answered(
        reply,
        used,
        message=message,
        model=None if model is agent.model else _bounds.model_name(model),
        speaker=agent.name,
        # Where the model's own settings are the bound, it is none of the budget's.
        is_cut=is_cut and bound is not None and _bounds.with_bound(model, bound) is not model,
    )
    at.cut_off = trip is not None
    _ended(at)


def settle(at: AgentRun, error: BaseException | str) -> None:
    """Charge the model call in flight, if there is one: it did not end with an answer.

    Its text is kept, for the history.
    """
    turn, written = at.turn, at.written
    if turn is None:
        return
    if isinstance(error, InterruptException) and not (at.usage or written or turn.pieces):
        turn.take_back()  # a hook asks a person before it
    else:
        turn.pieces += written
        turn.call.measured = kit.token_usage(at.usage) or turn.call.measured
        turn.failed(error, turned_away=isinstance(error, _REFUSALS))
    _ended(at)
    at.written = written


def _ended(at: AgentRun) -> None:
    at.begin_call(None)
    at.within()


# Tool calls


async def offer_tool_call(event: hooks.BeforeToolCallEvent) -> None:
    """Admit a tool call before a user's hook asks a person about it."""
    at = going_on(event.agent)
    if at is None or event.cancel_tool:
        return  # outside of a run it is the user's own code that calls the tool
    use, tool = event.tool_use, event.selected_tool
    kind: kit.ToolKind = "function"
    if tool is None or getattr(tool, "tool_type", None) == "structured_output":
        kind = "output"  # an unknown tool has no body that could start; loops of it are seen
    elif use["name"] == "handoff_to_agent" and at.node is not None:
        kind = "handoff"
    call = ToolCall(name=use["name"], arguments=use["input"], id=use["toolUseId"], kind=kind)
    at.within()  # one that went to the background ends elsewhere
    async with at.admitting:  # in the model's order, also where a store is waited for
        try:
            record = await kit.run_awaited(at.session.calls.taken(call))
        except InterruptException as error:
            _seams.interrupts_of(event.agent)[error.interrupt.id] = error.interrupt
            raise
    for before in [one for one in at.requested if one[0] is use]:
        # Another attempt at it takes the place of the first.
        at.session.calls.postpone(before[1])
        at.requested.remove(before)
    at.requested.append((use, record))
    if record.refusal is not None:
        event.cancel_tool = record.refusal
        _seams.ask_nobody(event)


async def before_tool_call(event: hooks.BeforeToolCallEvent) -> None:
    """Start a tool call, or give a result in its place, after the other hooks."""
    at = going_on(event.agent)
    record = None if at is None else at.find(event.tool_use)
    if at is None or record is None:
        return
    calls = at.session.calls
    if record.refusal is None and event.cancel_tool:
        at.requested = [one for one in at.requested if one[1] is not record]
        calls.answered_without_body(record, str(event.cancel_tool), kind="cancelled")
        return
    if record.refusal is None and not _seams.is_asking(event.agent, event.tool_use):
        await kit.run_awaited(calls.begin(record))
        at.within(record)
    if record.refusal is not None:
        event.cancel_tool = record.refusal


def after_tool_call(event: hooks.AfterToolCallEvent) -> None:
    """Settle a tool call, with the result that the history gets."""
    at = going_on(event.agent)
    if at is None:
        return
    record = at.find(event.tool_use)
    child = getattr(event.selected_tool, "agent", None)
    result: Any = event.result
    failed = result.get("status") == "error"
    shown = child.messages if isinstance(child, Agent) else ()
    if shown and messages.is_synthetic(shown[-1]):
        failed = True
        result = messages.of_stopped(result, shown)
    elif failed and _is_of_the_stop(at, event):
        result = messages.error_result(result["toolUseId"], messages.STOPPED)
    if record is not None:
        content = result["content"]
        error = event.exception or str(content) if failed else None
        at.session.calls.finished(record, None if failed else content, error=error)
    nudge = at.run.nudge() if at.trip is None else None
    if nudge is not None:
        result = messages.with_text(result, nudge)
    if result is not event.result:
        event.result = result
    if record is not None:
        record.result = result
    at.within()


def _is_of_the_stop(at: AgentRun, event: hooks.AfterToolCallEvent) -> bool:
    """Return whether a tool failed because a run inside of it was stopped."""
    # Strands and the agents below make a text of it. The detail alone may be a word of the user's.
    shown = None if at.trip is None else str(BudgetExceeded(at.trip))
    return shown is not None and (
        kit.is_stop(event.exception) or shown in str(event.result["content"])
    )
