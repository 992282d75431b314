"""A last answer of a stopped loop, from the step that makes its model calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from budgetguard_core import ModelCall
from budgetguard_core.kit import Answer, LastAnswer, OpenModelCall, Run
from budgetguard_loop._history import Message, message_text
from budgetguard_loop._reply import ModelReply, StreamedReply, read_reply
from budgetguard_loop._settings import Settings, is_async


class AskStep:
    """Asks a step for a last answer.

    Args:
        run: The stopped run.
        step: Makes one model call, as the step of `run_bounded` does.
        settings: What it takes beside the messages.
    """

    def __init__(self, run: Run, step: Callable[..., Any], settings: Settings) -> None:
        self._run = run
        self._step = step
        self._settings = settings

    def ask(self, last: LastAnswer, call: ModelCall, messages: list[Message]) -> str | None:
        """Ask where no event loop runs."""

        def model(opened: OpenModelCall) -> Answer:
            return _answer(read_reply(self._step(messages, **self._given(opened))))

        return last.ask(call, model)

    async def ask_async(
        self, last: LastAnswer, call: ModelCall, messages: list[Message]
    ) -> str | None:
        """Ask on an event loop; a step that streams is read to its end."""

        async def model(opened: OpenModelCall) -> Answer:
            given = self._given(opened)
            # A step that is not async would hold up the event loop.
            if is_async(self._step) or inspect.isasyncgenfunction(self._step):
                result = self._step(messages, **given)
            else:
                result = await asyncio.to_thread(self._step, messages, **given)
            if inspect.isawaitable(result):
                result = await result
            if not hasattr(result, "__aiter__"):
                return _answer(read_reply(result))
            reply = StreamedReply()
            try:
                async for chunk in result:
                    reply.add(chunk)
            finally:
                close = getattr(result, "aclose", None) or getattr(result, "close", None)
                closed = None if close is None else close()
                if inspect.isawaitable(closed):
                    await closed
            return _answer(reply.reply())

        return await last.ask_async(call, model)

    def _given(self, opened: OpenModelCall) -> dict[str, Any]:
        given = self._settings.for_call(self._run, opened)
        return {**given, "without_tools": True} if self._settings.knows_of_tools else given


def _answer(reply: ModelReply) -> Answer:
    return Answer(
        text=message_text(reply.message),
        usage=reply.usage,
        model=reply.model,
        cost_usd=reply.cost_usd,
    )
