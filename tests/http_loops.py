"""Agent loops on raw SDKs, written as users write them: each until its model asks for no tool."""

from __future__ import annotations

import json

TOOL = {"name": "read_file", "description": "Read a file."}
EMPTY = {"type": "object", "properties": {}}
CHAT_TOOLS = [{"type": "function", "function": {**TOOL, "parameters": EMPTY}}]
RESPONSES_TOOLS = [{"type": "function", **TOOL, "parameters": EMPTY, "strict": False}]
MESSAGES_TOOLS = [{**TOOL, "input_schema": EMPTY}]
CHAT_MODEL, MESSAGES_MODEL = "gpt-4o", "claude-sonnet-5"


class Loop:
    """What a loop did: the bodies that ran, and the last text."""

    def __init__(self, result="nothing new"):
        self.bodies = 0
        self.text = None
        self.result = result
        self.replies = []

    def run(self, number=0):
        self.bodies += 1
        return self.result if isinstance(self.result, str) else self.result(self.bodies)


def chat_ask(messages, **options):
    return {"model": CHAT_MODEL, "messages": messages, "tools": CHAT_TOOLS, **options}


def chat_step(loop, messages, message):
    """Take a chat message; tell whether the loop goes on."""
    calls = [json.loads(call.model_dump_json()) for call in message.tool_calls or ()]
    loop.text = message.content
    if not calls:
        messages.append({"role": "assistant", "content": message.content})
        return False
    messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
    for call in calls:
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": loop.run()})
    return True


class Whole:
    """The message that the chunks of a stream come to."""

    def __init__(self):
        self.content, self.parts = "", {}

    def take(self, chunk):
        for choice in chunk.choices:
            self.content += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                part = self.parts.setdefault(piece.index, ["", "", ""])
                part[0] = piece.id or part[0]
                part[1] = piece.function.name or part[1]
                part[2] += piece.function.arguments or ""

    @property
    def tool_calls(self):
        from types import SimpleNamespace

        def call(part):
            function = {"name": part[1], "arguments": part[2]}
            plain = json.dumps({"id": part[0], "type": "function", "function": function})
            return SimpleNamespace(model_dump_json=lambda: plain)

        return [call(self.parts[index]) for index in sorted(self.parts)]


def chat(client, loop=None, *, messages=None, **options):
    loop = loop or Loop()
    messages = [{"role": "user", "content": "go"}] if messages is None else messages
    while True:
        reply = client.chat.completions.create(**chat_ask(messages, **options))
        if options.get("stream"):
            message = Whole()
            for chunk in reply:
                message.take(chunk)
        else:
            message = reply.choices[0].message
            loop.replies.append(reply)
        if not chat_step(loop, messages, message):
            return loop


async def achat(client, loop=None, *, messages=None, **options):
    loop = loop or Loop()
    messages = [{"role": "user", "content": "go"}] if messages is None else messages
    while True:
        reply = await client.chat.completions.create(**chat_ask(messages, **options))
        if options.get("stream"):
            message = Whole()
            async for chunk in reply:
                message.take(chunk)
        else:
            message = reply.choices[0].message
        if not chat_step(loop, messages, message):
            return loop


def responses(client, loop=None, *, stream=False):
    loop = loop or Loop()
    items = [{"role": "user", "content": "go"}]
    while True:
        ask = {"model": CHAT_MODEL, "input": items, "tools": RESPONSES_TOOLS}
        if stream:
            with client.responses.stream(**ask) as events:
                reply = events.get_final_response()
        else:
            reply = client.responses.create(**ask)
        calls = [item for item in reply.output if item.type == "function_call"]
        loop.text = reply.output_text
        if not calls:
            return loop
        for call in calls:
            asked = {"type": "function_call", "call_id": call.call_id, "name": call.name}
            items.append({**asked, "arguments": call.arguments})
        for call in calls:
            output = {"type": "function_call_output", "call_id": call.call_id}
            items.append({**output, "output": loop.run()})


def messages_step(loop, turns, reply):
    uses = [block for block in reply.content if block.type == "tool_use"]
    loop.text = "".join(block.text for block in reply.content if block.type == "text")
    turns.append({"role": "assistant", "content": [json.loads(b.to_json()) for b in reply.content]})
    if not uses:
        return False
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": loop.run()} for use in uses
    ]
    turns.append({"role": "user", "content": results})
    return True


def messages_ask(turns):
    ask = {"model": MESSAGES_MODEL, "max_tokens": 1_000, "messages": turns}
    return {**ask, "tools": MESSAGES_TOOLS}


def messages(client, loop=None, *, stream=False):
    loop, turns = loop or Loop(), [{"role": "user", "content": "go"}]
    while True:
        if stream:
            with client.messages.stream(**messages_ask(turns)) as events:
                reply = events.get_final_message()
        else:
            reply = client.messages.create(**messages_ask(turns))
        if not messages_step(loop, turns, reply):
            return loop


async def amessages(client, loop=None, *, stream=False):
    loop, turns = loop or Loop(), [{"role": "user", "content": "go"}]
    while True:
        if stream:
            async with client.messages.stream(**messages_ask(turns)) as events:
                reply = await events.get_final_message()
        else:
            reply = await client.messages.create(**messages_ask(turns))
        if not messages_step(loop, turns, reply):
            return loop
