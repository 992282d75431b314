"""A hand-written loop with no SDK at all: the request goes out through the standard library."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from budgetguard_cli.sections import PROMPT
from budgetguard_core import (
    Admit,
    Guard,
    ModelCall,
    Nudge,
    Outcome,
    TokenUsage,
    ToolCall,
    Trip,
    end_run,
    estimate_tokens,
    synthetic_text,
)

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
]


def run(base_url: str, guard: Guard, read_file: Callable[[str], str]) -> Outcome:
    """Run the classic while-loop until the guard stops it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": PROMPT}]
    trip: Trip | None = None
    while trip is None:
        prompt = estimate_tokens(json.dumps(messages))
        decision = guard.admit_model_call(ModelCall(model="gpt-4o", input_tokens=prompt))
        if not isinstance(decision, Admit):
            trip = decision.trip
            break
        if isinstance(decision, Nudge):
            messages.append({"role": "user", "content": decision.message})
        reply = _complete(base_url, messages)
        usage = reply["usage"]
        guard.settle_model_call(
            decision, TokenUsage(usage["prompt_tokens"], usage["completion_tokens"])
        )
        message = reply["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return end_run(guard, trip=None, messages=messages, final=message["content"])
        calls = [
            ToolCall(
                id=call["id"],
                name=call["function"]["name"],
                arguments=json.loads(call["function"]["arguments"]),
            )
            for call in message["tool_calls"]
        ]
        for call, answer in zip(calls, guard.admit_tool_calls(calls), strict=True):
            if isinstance(answer, Admit):
                result = read_file(call.arguments["path"])
                guard.settle_tool_call(answer, result)
            else:
                result = answer.message
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    final = synthetic_text(guard)
    messages.append({"role": "assistant", "content": final})
    return end_run(guard, trip=trip, messages=messages, final=final)


def _complete(base_url: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    url = urlsplit(base_url)
    connection = HTTPConnection(url.hostname or "", url.port, timeout=10)
    try:
        connection.request(
            "POST",
            f"{url.path}/chat/completions",
            json.dumps({"model": "gpt-4o", "messages": messages, "tools": _TOOLS}),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        msg = f"the server answered {answer.status}: {body[:200]!r}"
        raise ConnectionError(msg)
    reply: dict[str, Any] = json.loads(body)
    return reply
