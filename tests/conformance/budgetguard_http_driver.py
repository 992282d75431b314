"""The way in of the HTTP adapter: a hand-written loop on OpenAI's SDK in a `bounded_clients` block.

The provider is a transport below the SDK, which answers as the script says.
"""

from __future__ import annotations

import json
import warnings
from contextlib import AsyncExitStack, ExitStack
from typing import ClassVar

import httpx2
import openai

from budgetguard_core import Budget
from budgetguard_core.kit import outcome_of
from budgetguard_core.testing import MODEL, Driver, Message, Ran, arguments_value, hang
from budgetguard_http import bounded_clients, report_progress
from budgetguard_http.protocols.protocol import MARK
from conformance.budgetguard_loop_driver import USAGE_RECORDS, chunks_of, completion, normal

_ON_TRAFFIC = (
    "The seam sees requests and answers, not the loop: tool calls are counted as the answer brings "
    "them, and a batch over a cap or a quota is stopped at the next call of a model."
)
_TOOL_HANGS = (
    "A tool of the user's that hangs is the user's own code: the deadline and an abort end the "
    "calls of a model in flight, and the block goes on."
)
_NO_RESUME = (
    "The loop is the user's own and goes on with the history that it has: one that ends with the "
    "synthetic answer needs new words of the user's first."
)


class Provider(httpx2.BaseTransport, httpx2.AsyncBaseTransport):
    """The scripted model at the other end of the wire."""

    def __init__(self, script):
        self.script = script

    def handle_request(self, request):
        reply, body = self._next(request)
        return self._response(reply, body)

    async def handle_async_request(self, request):
        reply, body = self._next(request)
        if reply.hang:
            await hang()
        return self._response(reply, body)

    def _next(self, request):
        body = json.loads(request.content)
        bound = body.get("max_completion_tokens")
        messages = body["messages"]
        sent = json.dumps([messages, body.get("tools")])
        reply = self.script.next(sent, request=normal(messages), bound=bound, model=body["model"])
        return reply, body

    def _response(self, reply, body):
        if reply.error is not None:
            error = {"error": {"message": str(reply.error)}}
            return httpx2.Response(500, json=error, headers={"retry-after-ms": "1"})
        base = {"id": "chatcmpl-1", "created": 0}
        if not body.get("stream"):
            whole = {**base, "object": "chat.completion", **completion(reply)}
            whole["choices"][0]["index"] = 0
            return httpx2.Response(200, json=whole)
        events = [
            {**base, "object": "chat.completion.chunk", **_indexed(chunk)}
            for chunk in chunks_of(reply)
        ]
        if not reply.cut:
            finish = "tool_calls" if reply.tool_calls else "stop"
            last = {"index": 0, "delta": {}, "finish_reason": finish}
            done = {**base, "object": "chat.completion.chunk", "model": reply.model}
            done["choices"] = [last]
            places = [n for n, one in enumerate(events) if not one["choices"]]
            events.insert(places[0] if places else len(events), done)
        text = "".join(f"data: {json.dumps(one)}\n\n" for one in events) + "data: [DONE]\n\n"
        headers = {"content-type": "text/event-stream"}
        return httpx2.Response(200, content=text.encode(), headers=headers)


def _indexed(chunk):
    choices = [{"index": 0, "finish_reason": None, **one} for one in chunk["choices"]]
    return {**chunk, "choices": choices}


class Marked(dict):
    """An assistant message with the marker that its completion carried."""

    metadata = None


class Loop:
    """The loop of one agent, as its user wrote it."""

    def __init__(self, scenario, script, tools, messages, *, retries=0):
        self.scenario = scenario
        self.tools = {tool.name: tool for tool in tools}
        self.messages = messages
        self.chunks = []
        provider = Provider(script)
        options = {"api_key": "key", "max_retries": retries, "base_url": "http://provider/v1"}
        if scenario.mode == "sync":
            http = openai.DefaultHttpxClient(transport=provider)
            self.client = openai.OpenAI(http_client=http, **options)
        else:
            http = openai.DefaultAsyncHttpxClient(transport=provider)
            self.client = openai.AsyncOpenAI(http_client=http, **options)
        self.schemas = [
            {"type": "function", "function": {"name": one.name, "description": one.description}}
            for one in tools
        ]

    def ask(self):
        tools = {"tools": self.schemas} if self.schemas else {}
        return {"model": MODEL, "messages": [dict(one) for one in self.messages], **tools}

    def run(self):
        while True:
            reply = self.client.chat.completions.create(**self.ask())
            calls = self.take(reply.choices[0].message.model_dump(exclude_none=True), reply)
            if not calls:
                return self.messages[-1]["content"]
            for call in calls:
                self.answer(call, self.body(call))

    async def run_async(self):
        while True:
            calls = await self.turn()
            if not calls:
                return self.messages[-1]["content"]
            for call in calls:
                self.answer(call, await self.abody(call))

    async def turn(self):
        if self.scenario.mode == "async":
            reply = await self.client.chat.completions.create(**self.ask())
            return self.take(reply.choices[0].message.model_dump(exclude_none=True), reply)
        whole = {"role": "assistant", "content": ""}
        mark = None
        stream = await self.client.chat.completions.create(
            **self.ask(), stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            self.chunks.append(chunk)
            mark = (chunk.model_extra or {}).get(MARK) or mark
            for choice in chunk.choices:
                whole["content"] += choice.delta.content or ""
                for piece in choice.delta.tool_calls or ():
                    calls = whole.setdefault("tool_calls", [])
                    if len(calls) <= piece.index:
                        function = {"name": piece.function.name, "arguments": ""}
                        calls.append({"id": piece.id, "type": "function", "function": function})
                    calls[piece.index]["function"]["arguments"] += piece.function.arguments or ""
            if self.scenario.break_after and len(self.chunks) >= self.scenario.break_after:
                await stream.close()
                return None
        return self.keep(whole, mark)

    def take(self, message, reply):
        return self.keep(message, (reply.model_extra or {}).get(MARK))

    def keep(self, message, mark):
        kept = Marked(message)
        kept.metadata = mark
        self.messages.append(kept)
        return message.get("tool_calls")

    def answer(self, call, text):
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    def body(self, call):
        tool, value = self.called(call)
        if tool.reports:
            return report_progress(**value)
        try:
            text = self.scenario.call(tool, value)
            if tool.agent is not None:
                text = self.scenario.read(self.inner(tool, value).run())
        except Exception as error:
            return f"Error: {error}"
        return text

    async def abody(self, call):
        tool, value = self.called(call)
        if tool.reports:
            return report_progress(**value)
        try:
            text = await self.scenario.acall(tool, value)
            if tool.agent is not None:
                text = self.scenario.read(await self.inner(tool, value).run_async())
        except Exception as error:
            return f"Error: {error}"
        return text

    def inner(self, tool, value):
        agent = tool.agent
        messages = [{"role": "user", "content": value or "Go."}]
        return Part(Loop(self.scenario, agent.script, agent.tools, messages), agent.budget)

    def called(self, call):
        function = call["function"]
        tool, arguments = self.tools[function["name"]], json.loads(function["arguments"])
        return tool, arguments if tool.reports else arguments_value(arguments)


class Part:
    """A loop inside a tool, with an envelope of its own if it has one."""

    def __init__(self, loop, budget):
        # A block of its own, so that a stop of the run around leaves it as an exception.
        self.loop, self.budget = loop, budget or Budget()

    def run(self):
        with bounded_clients(self.budget):
            return self.loop.run()

    async def run_async(self):
        async with bounded_clients(self.budget):
            return await self.loop.run_async()


class BoundedClients(Driver):
    """`with bounded_clients(...)` around a loop on OpenAI's SDK."""

    adapter = "budgetguard_http"
    name = "bounded_clients"
    usage_records = USAGE_RECORDS
    lacks: ClassVar = {
        "at_last": "A seam makes no requests of its own: a loop that is stopped asks for itself.",
        "approval": "A loop on a provider's client has no approvals: it asks its user itself.",
        "new_process": "A loop on a provider's client writes nothing down to go on elsewhere.",
        "structured": "The structured output of a client is one call, and no loop ends with it.",
        "judge": "A loop on a provider's client has no guardrails: its checks are its own code.",
        "dialogue": "A loop on a provider's client has no second speaker of its own.",
        "own_limit": "A loop on a provider's client ends where its own code says so.",
        "imported": "The seam wraps clients in `bounded_clients` or after `install()`.",
        "swallowing": "There are no hooks or callables around the calls that could swallow a stop.",
    }
    deviations: ClassVar = {
        3: _ON_TRAFFIC,
        4: _ON_TRAFFIC,
        (6, "sync"): _ON_TRAFFIC,
        (7, "sync"): _ON_TRAFFIC,
        (6, "async"): _TOOL_HANGS,
        (6, "streamed"): _TOOL_HANGS,
        (7, "async"): _TOOL_HANGS,
        (7, "streamed"): _TOOL_HANGS,
        (12, "async"): _TOOL_HANGS,
        (12, "streamed"): _TOOL_HANGS,
        13: _NO_RESUME,
        31: _ON_TRAFFIC,
        37: _ON_TRAFFIC,
        47: _ON_TRAFFIC,
        49: _ON_TRAFFIC,
        50: _ON_TRAFFIC,
        51: _ON_TRAFFIC,
        54: _ON_TRAFFIC,
    }

    def run_sync(self, scenario):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            loop, block = self._prepared(scenario)
            if block is None:
                loop.run()
                return self._ran(scenario, loop, None, None)
            try:
                with block:
                    loop.run()
            except Exception as error:
                return self._ran(scenario, loop, block, error)
            return self._ran(scenario, loop, block, None)

    async def run_async(self, scenario):
        loop, block = self._prepared(scenario)
        if block is None:
            await loop.run_async()
            return self._ran(scenario, loop, None, None)
        try:
            async with block:
                await loop.run_async()
        except Exception as error:
            return self._ran(scenario, loop, block, error)
        return self._ran(scenario, loop, block, None)

    def _prepared(self, scenario):
        messages = []
        if scenario.after is not None:
            messages = list(scenario.after.session)
        if scenario.user_input is not None:
            messages.append({"role": "user", "content": scenario.user_input})
        loop = Loop(scenario, scenario.script, scenario.tools, messages, retries=scenario.retries)
        if scenario.guard is None:
            return loop, None
        options = {"on_trip": scenario.on_trip, "store": scenario.store}
        options["conversation_id"] = scenario.conversation
        if scenario.twice:
            outer = bounded_clients(scenario.guard)
            return loop, Twice(outer, bounded_clients(**options))
        return loop, bounded_clients(scenario.guard, **options)

    def _ran(self, scenario, loop, block, error):
        outcome = None
        if block is not None:
            outcome = outcome_of(error) if error is not None else None
            outcome = outcome or block.outcome
        history = [_message(one) for one in loop.messages]
        return Ran(
            history=history,
            returned=history if scenario.stored and error is None else None,
            outcome=outcome,
            raised=error,
            chunks=loop.chunks,
            session=loop.messages,
        )


class Twice:
    """Two blocks that both see every call."""

    def __init__(self, outer, inner):
        self.outer, self.inner = outer, inner

    @property
    def outcome(self):
        return self.outer.outcome

    def __enter__(self):
        with ExitStack() as stack:
            stack.enter_context(self.outer)
            stack.enter_context(self.inner)
            self.stack = stack.pop_all()

    def __exit__(self, *error):
        return self.stack.__exit__(*error)

    async def __aenter__(self):
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.outer)
            await stack.enter_async_context(self.inner)
            self.stack = stack.pop_all()

    async def __aexit__(self, *error):
        return await self.stack.__aexit__(*error)


def _message(message):
    (plain,) = normal([message])
    mark = getattr(message, "metadata", None)
    return Message(
        role=plain.role,
        text=plain.text,
        tool_calls=plain.tool_calls,
        tool_call_id=plain.tool_call_id,
        synthetic=mark,
    )


DRIVERS = (BoundedClients(),)
