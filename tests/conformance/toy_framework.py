"""A small agent framework as others write them: it knows nothing of budgets and is never changed.

An agent asks its model, runs the tools of the reply at the same time, and goes on until a reply has
none. Middleware is wrapped around each model call and each tool. What is kept of a conversation is
JSON, so that it can be stored, and opened again while it waits for a person.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Conversation:
    messages: list[dict[str, Any]] = field(default_factory=list)
    waiting: bool = False
    """The calls of the last message wait for a person."""
    data: dict[str, Any] = field(default_factory=dict)
    """What middleware keeps with it."""


@dataclass
class Request:
    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    attempt: int = 0
    max_tokens: int | None = None


@dataclass
class Reply:
    message: dict[str, Any]
    usage: Any = None
    finish_reason: str = "stop"


class Middleware:
    """What users subclass. `proceed` does what it is wrapped around."""

    async def model(
        self, request: Request, proceed: Callable[[Request], Awaitable[Reply]]
    ) -> Reply:
        return await proceed(request)

    def batch(self, calls: Sequence[dict[str, Any]]) -> None:
        """Be told of the calls that are about to run at the same time."""

    async def tool(
        self, call: dict[str, Any], proceed: Callable[[dict[str, Any]], Awaitable[str]]
    ) -> str:
        return await proceed(call)


@dataclass
class Tool:
    name: str
    function: Callable[[str], Any]
    description: str = ""
    approval: bool = False


@dataclass
class Agent:
    model: Callable[[Request], Awaitable[Reply]]
    tools: Sequence[Tool] = ()
    name: str = "scripted-model"
    middleware: Sequence[Middleware] = ()
    retries: int = 0
    check: Callable[[Conversation], Awaitable[None]] | None = None
    """Looks at the conversation before the first model call; raises to refuse it."""

    def run(self, conversation: Conversation, text: str | None = None, **options: Any) -> str:
        return asyncio.run(self.run_async(conversation, text, **options))

    async def run_async(
        self, conversation: Conversation, text: str | None = None, **options: Any
    ) -> str:
        async for _ in self.stream(conversation, text, **options):
            pass
        return conversation.messages[-1].get("text", "")

    async def stream(
        self,
        conversation: Conversation,
        text: str | None = None,
        *,
        answer: bool | None = None,
        middleware: Sequence[Middleware] = (),
    ):
        """Yield each new message. `answer` is what the person says to the calls that wait."""
        layers = (*middleware, *self.middleware)
        messages = conversation.messages
        if text is not None:
            messages.append({"role": "user", "text": text})
        if self.check is not None and not conversation.waiting:
            await self.check(conversation)
        while True:
            if answer is None:
                reply = await self._ask(conversation, layers)
                messages.append(reply.message)
                yield reply.message
                if not reply.message.get("calls"):
                    return
            calls = messages[-1]["calls"]
            asking = {tool.name for tool in self.tools if tool.approval}
            conversation.waiting = answer is None and any(c["name"] in asking for c in calls)
            if conversation.waiting:
                return
            refused = [c for c in calls if answer is False and c["name"] in asking]
            allowed = [call for call in calls if call not in refused]
            answer = None
            for layer in layers:
                layer.batch(allowed)
            results = await asyncio.gather(*(self._call(call, layers) for call in allowed))
            texts = dict(zip(map(id, allowed), results, strict=True))
            for call in calls:
                user_input = texts.get(id(call), "The person said no.")
                messages.append({"role": "tool", "id": call["id"], "text": user_input})
                yield messages[-1]

    async def _ask(self, conversation: Conversation, layers: Sequence[Middleware]) -> Reply:
        tools = [{"name": tool.name, "description": tool.description} for tool in self.tools]
        # What is written about a message is nothing for the model.
        sent = [{k: v for k, v in m.items() if k != "meta"} for m in conversation.messages]
        ask = self.model
        for layer in reversed(layers):
            ask = _wrapped(layer.model, ask)
        for attempt in range(self.retries + 1):
            try:
                return await ask(Request(self.name, list(sent), tools, attempt))
            except Exception:
                if attempt == self.retries:
                    raise
        raise AssertionError

    async def _call(self, call: dict[str, Any], layers: Sequence[Middleware]) -> str:
        async def body(call: dict[str, Any]) -> str:
            function = next(tool.function for tool in self.tools if tool.name == call["name"])
            if inspect.iscoroutinefunction(function):
                return await function(call["value"])
            return await asyncio.to_thread(function, call["value"])

        for layer in reversed(layers):
            body = _wrapped(layer.tool, body)
        try:
            return await body(call)
        except Exception as error:
            return f"Error: {error}"


def _wrapped(outer: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda given: outer(given, inner)
