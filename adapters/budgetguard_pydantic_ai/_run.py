"""One bounded run of an agent: the hooks of its capability."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from pydantic_ai import CallToolsNode, DeferredToolRequests, FunctionToolset, Tool, exceptions
from pydantic_ai import messages as chat
from pydantic_ai.capabilities import AbstractCapability, CapabilityOrdering
from pydantic_ai.result import FinalResult
from pydantic_graph import End

from budgetguard_core import kit
from budgetguard_core.kit import OUTCOME_UNKNOWN, ToolCall
from budgetguard_pydantic_ai import _seams
from budgetguard_pydantic_ai._history import DIALECT, InHistory, tool_call_of
from budgetguard_pydantic_ai._model import ModelCalls, last_question, metered, takes_text

_RESUME = "agent.run(message_history=result.all_messages()), under a fresh budget"
_DEFERRALS = (exceptions.CallDeferred, exceptions.ApprovalRequired)
_runs: WeakValueDictionary[str, BoundedRun] = WeakValueDictionary()


class OfBudget(AbstractCapability[Any]):
    """The place of a budget among other capabilities, and its tool."""

    envelope: kit.Envelope

    def get_ordering(self) -> CapabilityOrdering:
        """Return the place among other capabilities."""
        return CapabilityOrdering(position="outermost")

    def get_toolset(self) -> Any:
        """Return the tool `report_progress` where the budget asks for reports."""
        if not self.envelope.may_ask_for_progress:
            return None
        form = kit.PROGRESS_TOOL
        return FunctionToolset(
            [Tool(kit.report_progress, name=form.name, description=form.description)]
        )


class BoundedRun(OfBudget):
    """The capability of one run.

    Attributes:
        messages: The live history.
        is_passive: Another layer counts the calls of this run.
    """

    session: kit.Session
    _model: ModelCalls

    def __init__(self, envelope: kit.Envelope, output_type: Any, resume: Any = None) -> None:
        self.envelope = envelope
        self._resume = resume
        self.messages: list[Any] = []
        self.is_passive = False
        self._is_text = takes_text(output_type)
        self._output_type = str if self._is_text else output_type
        self._outputs: list[Any] = []
        self._requested: list[ToolCall] = []
        self._offering = asyncio.Lock()

    async def wrap_run(self, ctx: Any, *, handler: Any) -> Any:
        """Open the run, and end it."""
        self.messages = ctx.messages
        if (outer := _runs.get(ctx.run_id)) is not None:
            # Of two layers on one guard the outer one counts, else the inner one: it is a part.
            is_same = self.envelope.budget is outer.envelope.budget
            (self if is_same else outer).is_passive = True
        _runs[ctx.run_id] = self
        here = InHistory(lambda: self.messages)
        opening = kit.Session.open(
            self.envelope,
            DIALECT,
            here,
            user_input=ctx.prompt,
            history=ctx.messages,
            resume=self._resume,
            config=ctx,
            thread=ctx.conversation_id,
        )
        self.session = session = await kit.run_awaited(opening)
        self._model = ModelCalls(session)
        try:
            with session.run.entered():
                result = await handler()
        except BaseException as error:
            if not self._is_stop(error):
                finish = session.finish(self.messages, error=error, resume=_RESUME)
                await kit.run_awaited(finish)
                session.attach(error)
                raise
            if self.messages is ctx.messages and ctx.prompt is not None:
                # It ended before its first node, which would have taken the user's words.
                user_input = chat.ModelRequest([chat.UserPromptPart(ctx.prompt)])
                self.messages = [*ctx.messages, user_input]
            output = await self._end(ctx, self.messages)
            result = _seams.result_of(ctx, self.messages, output)
        self.messages = result.all_messages()
        waits = isinstance(result.output, DeferredToolRequests)
        finish = session.finish(self.messages, final=result.output, waits=waits, resume=_RESUME)
        await kit.run_awaited(finish)
        for message in self.messages:
            # Not to the last alone, which a stream makes anew.
            if message.run_id == ctx.run_id and not self.is_passive:
                session.attach(message)
        if (exceeded := session.exceeded) is not None:
            session.attach(exceeded)
            raise exceeded
        return result

    def _is_stop(self, error: BaseException) -> bool:
        """Return whether an exception is the run's stop, by a limit of ours or of the framework."""
        if isinstance(error, exceptions.UsageLimitExceeded):
            return self.session.framework_limit(str(error).split(". Consider")[0])
        return self.session.is_stop(error)

    async def _end(self, ctx: Any, messages: list[Any], partial: str = "") -> Any:
        """Close a history in its place, and return the output of its end."""
        for index, one in enumerate(messages):
            if one.state == "interrupted":
                messages[index] = replace(one, state="complete")
        question = last_question(ctx, messages, self._output_type, self._outputs.append)
        ending = await kit.run_awaited(self.session.close(messages, question, partial=partial))
        for one in ending.new:
            one.run_id = ctx.run_id
        messages[:] = ending.history
        if self._is_text:
            return ending.text or ""
        return self._outputs[-1] if self._outputs else None

    # The loop

    async def before_node_run(self, ctx: Any, *, node: Any) -> Any:
        """Ask for the model call of a turn, and end the run where it is refused."""
        self.messages = ctx.messages or self.messages
        if self.is_passive or not _seams.is_new_turn(node):
            return node
        if not await self._model.ask(ctx.model, [*ctx.messages, node.request]):
            ctx.messages.append(replace(node.request, run_id=ctx.run_id))
            return _seams.graph.SetFinalResult(FinalResult(await self._end(ctx, ctx.messages)))
        return node

    async def wrap_model_request(self, ctx: Any, *, request_context: Any, handler: Any) -> Any:
        """End a hung call at the deadline and at an abort."""
        if self.is_passive:
            return await handler(request_context)
        if self._model.turn is None:
            await self._ask_or_skip(ctx, request_context)
        try:
            with kit.Scope(self.session.run, once=True) as self._model.scope:
                return await handler(request_context)
        except Exception as error:
            if isinstance(error, exceptions.SkipModelRequest) or not self._is_stop(error):
                raise
        finally:
            whole = self._model.dropped()
        return await self._skip(ctx) if whole is None else whole

    async def prepare_model_request(self, ctx: Any, request_context: Any) -> Any:
        """Ask for another attempt."""
        if request_context.attempt > 1 and not self.is_passive:
            await self._ask_or_skip(ctx, request_context, retry=True)
        return request_context

    def get_wrapper_model(self, model: Any) -> Any:
        """Return the model with its calls counted."""
        return model if self.is_passive else metered(model, self._model)

    async def after_node_run(self, ctx: Any, *, node: Any, result: Any) -> Any:
        """End a run whose history is closed."""
        if self.is_passive:
            return result
        replies: Any = CallToolsNode
        if isinstance(result, replies) and self.session.is_over:
            result = End(FinalResult(await self._end(ctx, ctx.messages)))
        ends: Any = isinstance(result, End)
        if ends and self.session.trip is not None and ctx.pending_messages:
            del ctx.pending_messages[:]  # they would make another request of the end
        return result

    async def on_node_run_error(self, ctx: Any, *, node: Any, error: Exception) -> Any:
        """End a run whose error is a stop."""
        if self.is_passive or not self._is_stop(error):
            raise error
        return End(FinalResult(await self._end(ctx, ctx.messages)))

    async def _ask_or_skip(self, ctx: Any, request_context: Any, *, retry: bool = False) -> None:
        model, messages = request_context.model, request_context.messages
        if not await self._model.ask(model, messages, retry=retry):
            await self._skip(ctx)

    async def _skip(self, ctx: Any) -> NoReturn:
        """End the run in the place of a response; `after_node_run` does the rest."""
        turn, messages = self.session.turn, list(ctx.messages)
        await self._end(ctx, messages, "" if turn is None else "".join(turn.pieces))
        raise exceptions.SkipModelRequest(messages[-1])

    # Tools

    async def after_tool_validate(self, ctx: Any, *, call: Any, tool_def: Any, args: Any) -> Any:
        """Note a call that may start; all of a reply are validated before the first starts.

        Of one that a person has to approve nobody is asked where it will be refused.
        """
        if tool_def.kind == "function" or ctx.tool_call_approved:
            self._requested.append(tool_call_of(call))
        elif tool_def.kind == "unapproved" and not self.is_passive:
            calls = self.session.calls
            record = await kit.run_awaited(calls.taken(tool_call_of(call)))
            if record.refusal is not None:
                raise exceptions.ToolFailed(record.refusal)
            calls.postpone(record)
        return args

    async def wrap_tool_execute(
        self, ctx: Any, *, call: Any, tool_def: Any, args: Any, handler: Any
    ) -> Any:
        """Run a tool's body, or give its refusal in its place."""
        if self.is_passive:
            return await handler(args)
        calls = self.session.calls
        async with self._offering:
            # The bodies of a batch start together, and the first of them asks for all.
            requested, self._requested = self._requested, []
            await kit.run_awaited(calls.ask(requested))
        record = await kit.run_awaited(calls.begin(tool_call_of(call)))
        if record.refusal is not None:
            raise exceptions.ToolFailed(record.refusal)
        with calls.body(record, waits=_DEFERRALS) as body:
            body.result = await handler(args)
        if body.interrupted:
            raise exceptions.ToolFailed(OUTCOME_UNKNOWN)
        return body.result
