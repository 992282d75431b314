"""The model calls of a run, bound and charged on the wire, and its last answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from copy import copy
from dataclasses import replace
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic_ai import Agent
from pydantic_ai import messages as chat
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.usage import UsageLimits
from pydantic_core import to_json

from budgetguard_core import kit
from budgetguard_pydantic_ai import _seams
from budgetguard_pydantic_ai._history import DIALECT, errors_of, instructions_of


class ModelCalls:
    """The model calls of one run.

    Attributes:
        turn: The call that was admitted and did not go out yet.
        scope: The block around the framework's call; deadline and abort end it.
        whole: The streamed answer that was read to its end before the block was.
    """

    def __init__(self, session: kit.Session) -> None:
        self.session = session
        self.turn: kit.ModelTurn | None = None
        self.scope: kit.Scope | None = None
        self.whole: Any = None

    async def ask(self, model: Any, messages: list[Any], *, retry: bool = False) -> bool:
        """Ask for a call; return whether it may go out."""
        known = {record.call.id for record in self.session.calls}
        for call, part in () if retry else errors_of(messages):
            if call.id not in known:
                # The framework or a person answered it: unknown, invalid, denied.
                self.session.calls.answered_without_body(call, part.content, kind=part.part_kind)
        last = messages[-2] if messages[1:] else None
        usage = kit.token_usage(last.usage) if isinstance(last, chat.ModelResponse) else None
        if usage is not None and usage.output_tokens:
            # Only now: what a stream gave is made anew for the history.
            self.session.prompt.replied(last, usage)
        name, provider = model.model_name, provider_of(model)
        request = kit.Request(
            messages=messages,
            model=name,
            provider=provider,
            retry=retry,
            may_fall_back=_seams.can_be_named(model),
        )
        turn = await kit.run_awaited(self.session.model(request))
        self.turn = None if isinstance(turn, kit.Stop) else turn
        return self.turn is not None

    def dropped(self) -> Any:
        """Give back a call that did not go out; return `whole`."""
        turn, self.turn, self.scope = self.turn, None, None
        whole, self.whole = self.whole, None
        if turn is not None:
            turn.take_back()
        return whole

    async def sent(self, model: Any, messages: list[Any], settings: Any) -> tuple[Any, ...]:
        """Return the turn of a call that goes out, its model, what to send, and its settings."""
        if self.turn is None:
            await self.ask(model, messages, retry=True)
        turn, self.turn = self.turn, None
        if turn is None:
            # Cut from above: the consumer of a stream must not meet an exception.
            if self.scope is not None:
                self.scope.cut()
            await asyncio.get_running_loop().create_future()
            raise AssertionError
        given: dict[str, Any] = {**(settings or {})}
        bound = turn.bound(given.get("max_tokens"))
        if bound is not None:
            settings = {**given, "max_tokens": bound}
        run = self.session.run
        messages = [*(run.pruned(messages, model.model_name, provider_of(model)) or messages)]
        if turn.nudge is not None:
            # For this call alone: a later turn has nothing to learn from it.
            nudge_part = chat.UserPromptPart(turn.nudge)
            messages[-1] = replace(messages[-1], parts=[*messages[-1].parts, nudge_part])
        if turn.fallback_model is not None:
            model = _seams.named(model, turn.fallback_model)
        return turn, model, messages, settings

    def answered(self, turn: kit.ModelTurn, response: Any, messages: Any, params: Any) -> None:
        """Charge a call that answered."""
        turn.answered(
            DIALECT.read(response),
            kit.token_usage(response.usage),
            model=response.model_name,
            is_cut=response.finish_reason == "length" and not response.tool_calls,
            sent=kit.Request(
                messages=messages,
                tools=[*params.function_tools, *params.output_tools],
                system=instructions_of(messages),
            ),
        )


class Metered(WrapperModel):
    """The model of a run, which sees every attempt, continuation and streamed call."""

    def __init__(self, wrapped: Any, calls: ModelCalls) -> None:
        super().__init__(wrapped)
        self._calls = calls

    async def request(
        self, messages: Any, model_settings: Any, model_request_parameters: Any
    ) -> chat.ModelResponse:
        """Send a request."""
        calls, params = self._calls, model_request_parameters
        turn, model, messages, settings = await calls.sent(self.wrapped, messages, model_settings)
        with turn:
            response: chat.ModelResponse = await model.request(messages, settings, params)
        calls.answered(turn, response, messages, params)
        return response

    @asynccontextmanager
    async def request_stream(
        self,
        messages: Any,
        model_settings: Any,
        model_request_parameters: Any,
        run_context: Any = None,
    ) -> AsyncGenerator[Any]:
        """Send a request whose answer is streamed."""
        calls, params = self._calls, model_request_parameters
        stream: Any = None
        turn, model, messages, settings = await calls.sent(self.wrapped, messages, model_settings)
        try:
            async with AsyncExitStack() as stack:
                with turn.entered():
                    opening = model.request_stream(messages, settings, params, run_context)
                    stream = await stack.enter_async_context(opening)
                yield stream
        except BaseException as error:
            if not _seams.is_whole(stream):
                turn.piece("" if stream is None else stream.get().text or "")
                turn.failed(error)
            raise
        finally:
            # Of a whole answer its consumer may have acted on it, whatever comes now.
            calls.whole = stream.get() if stream is not None and _seams.is_whole(stream) else None
            if calls.whole is not None:
                calls.answered(turn, calls.whole, messages, params)
        if calls.whole is None and stream is not None:
            calls.answered(turn, stream.get(), messages, params)


def metered(model: Any, calls: ModelCalls) -> Any:
    """Return a model whose calls are counted; each model of a `FallbackModel` by itself."""
    if not isinstance(model, FallbackModel):
        return Metered(model, calls)
    model = copy(model)
    model.models = [Metered(one, calls) for one in model.models]
    return model


def provider_of(model: Any) -> str | None:
    """Return the provider of a model; None for the framework's fakes."""
    return None if model.system in ("function", "test") else model.system


class Unbounded(Agent[Any, Any]):
    """An agent outside of all budgets: its one call has been admitted already."""

    iter = Agent.iter


def takes_text(output_type: Any) -> bool:
    """Return whether a text is an output of this type: it is `str`, or one of several is."""
    several: Any = get_args(output_type) if get_origin(output_type) in (Union, UnionType) else ()
    if isinstance(output_type, list | tuple):
        several = output_type  # pyright: ignore[reportUnknownVariableType]
    return output_type is str or any(map(takes_text, several))


def last_question(
    ctx: Any, messages: Sequence[Any], output_type: Any, keep: Callable[[Any], object]
) -> kit.LastQuestion:
    """Return how to ask for a last answer of a type; `keep` is given its output."""
    system = instructions_of(messages)

    async def ask(sent: list[Any], open_call: Any) -> kit.Answer:
        agent: Any = Unbounded(ctx.model, output_type=output_type, retries=0)
        settings: dict[str, Any] = ctx.model_settings or {}
        result = await agent.run(
            message_history=sent,
            instructions=system,
            deps=ctx.deps,
            model_settings={**settings, "max_tokens": open_call.max_output_tokens},
            usage_limits=UsageLimits(request_limit=1),
        )
        keep(result.output)
        is_text = output_type is str
        text = result.output if is_text else to_json(result.output, fallback=repr).decode()
        return kit.Answer(text=text, usage=kit.token_usage(result.usage))

    name, provider = ctx.model.model_name, provider_of(ctx.model)
    return kit.LastQuestion(ask_async=ask, model=name, provider=provider, system=system)
