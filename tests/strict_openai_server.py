"""A server on loopback that answers as OpenAI does, and refuses what OpenAI refuses.

Both interfaces, plain and streamed. Its log is an independent count of model calls.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

from werkzeug import Response

NAME = "gpt-4o"
USAGE = (200, 30)

_MESSAGE = {"type", "role", "content", "id", "status", "phase"}
_FIELDS = {
    "message": _MESSAGE,
    "function_call": {"type", "id", "call_id", "name", "arguments", "status", "namespace"},
    "function_call_output": {"type", "id", "call_id", "output", "status"},
    "reasoning": {"type", "id", "summary", "content", "encrypted_content", "status"},
}
_PREFIXES = {"message": "msg_", "function_call": "fc_", "reasoning": "rs_"}
_OUTPUTS = "_output"


class Refused(Exception):
    """The request is one that the provider answers with an error 400."""


def check_responses_input(items: list[Any], known: Iterable[Any] = ()) -> None:
    """Refuse an input that the Responses API refuses.

    Args:
        items: The input of the request.
        known: What the server keeps of the conversation.

    Raises:
        Refused: It says why, in the provider's words.
    """
    stored = list(known)
    ids = [item["id"] for item in items if item.get("id") is not None]
    for item_id, times in Counter([*ids, *(one["id"] for one in stored if one.get("id"))]).items():
        if times > 1:
            raise Refused(f"Duplicate item found with id {item_id}.")
    for item in items:
        _check_item(item)
    _check_pairs([*stored, *items])
    for reasoning, after in itertools.pairwise([*items, {}]):
        if reasoning.get("type") == "reasoning" and after.get("type") in (None, "reasoning"):
            raise Refused(
                f"Item '{reasoning['id']}' of type 'reasoning' was provided without its required "
                "following item."
            )


def _check_item(item: Any) -> None:
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") not in ("user", "assistant", "system", "developer"):
        raise Refused(f"Invalid role: {item.get('role')!r}.")
    unknown = set(item) - _FIELDS.get(kind, set(item))
    if unknown:
        raise Refused(f"Unknown parameter: 'input.{sorted(unknown)[0]}'.")
    prefix = _PREFIXES.get(kind)
    if prefix and item.get("id") is not None and not str(item["id"]).startswith(prefix):
        raise Refused(f"Invalid id {item['id']!r}. Expected an ID that begins with '{prefix}'.")
    if kind == "message" and not item.get("content"):
        raise Refused("Missing required parameter: 'input.content'.")


def _check_pairs(items: list[Any]) -> None:
    waiting: Counter[str] = Counter()
    for item in items:
        kind = str(item.get("type", "message"))
        if kind.endswith(_OUTPUTS):
            if not waiting[item["call_id"]]:
                raise Refused(
                    f"No tool call found for function call output with call_id {item['call_id']}."
                )
            waiting[item["call_id"]] -= 1
        elif item.get("call_id") is not None:
            waiting[item["call_id"]] += 1
    for call_id in +waiting:
        raise Refused(f"No tool output found for function call {call_id}.")


def check_chat_messages(messages: list[Any], *, alternating: bool = False) -> None:
    """Refuse messages that the Chat Completions API refuses.

    Args:
        messages: Those of the request.
        alternating: Two users or two assistants in a row are refused as well, as by some servers
            that speak this interface.

    Raises:
        Refused: It says why, in the provider's words.
    """
    if not messages:
        raise Refused("Invalid 'messages': empty array.")
    waiting: Counter[str] = Counter()
    before = None
    for message in messages:
        role = message["role"]
        if role == "tool":
            if not waiting[message["tool_call_id"]]:
                raise Refused(
                    "messages with role 'tool' must be a response to a preceeding message with "
                    "'tool_calls'."
                )
            waiting[message["tool_call_id"]] -= 1
            continue
        if +waiting:
            raise Refused(
                "An assistant message with 'tool_calls' must be followed by tool messages "
                f"responding to each 'tool_call_id': {sorted(+waiting)}"
            )
        if alternating and role == before and role in ("user", "assistant"):
            raise Refused("Conversation roles must alternate user/assistant/user/assistant/...")
        before = role
        calls = message.get("tool_calls") or ()
        if role == "assistant" and not calls and not message.get("content"):
            raise Refused("Invalid value for 'content': expected a string, got null.")
        waiting.update(call["id"] for call in calls)
    if +waiting:
        raise Refused(f"tool_call_ids did not have response messages: {sorted(+waiting)}")


class StrictServer:
    """Answers both interfaces with the tool calls or texts that it was told to.

    Attributes:
        calls: The tool calls of each answer: name and arguments.
        ids: The ids of these calls; each its own if left out.
        texts: The answers that are a text instead, by the number of the request.
        faults: Responses that are given first, one for each request; None answers normally.
        usage: Whether usage is reported: in streams only where it is asked for.
        refusals: What was refused, and why.
        conversations: What the server keeps, by the id of a conversation or a response.
        alternating: Two roles in a row are refused in chats.
    """

    def __init__(self, server: Any) -> None:
        self.server = server
        self.calls: list[tuple[str, str]] = [("search", "{}")]
        self.ids: list[str] | None = None
        self.texts: dict[int, str] = {}
        self.faults: list[Any] = []
        self.usage = True
        self.refusals: list[str] = []
        self.conversations: dict[str, list[Any]] = {}
        self.alternating = False
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        server.expect_request("/v1/chat/completions").respond_with_handler(self._chat)
        server.expect_request("/v1/responses").respond_with_handler(self._responses)

    @property
    def requests(self) -> list[Any]:
        """The bodies of all requests."""
        return [request.get_json() for request, _ in self.server.log]

    def asked(self, number: int) -> list[tuple[str, str, str]]:
        """Return the tool calls of an answer: id, name, arguments."""
        if number in self.texts:
            return []
        ids = self.ids or [f"call_{number}_{place}" for place in range(len(self.calls))]
        return [(id_, *call) for id_, call in zip(ids, self.calls, strict=True)]

    def _next(self) -> tuple[int, Any]:
        with self._lock:
            return next(self._numbers), self.faults.pop(0) if self.faults else None

    def _refuse(self, why: Refused) -> Response:
        self.refusals.append(str(why))
        return error(400, str(why), "invalid_request_error")

    def _chat(self, request: Any) -> Response:
        body = request.get_json()
        try:
            check_chat_messages(body["messages"], alternating=self.alternating)
        except Refused as why:
            return self._refuse(why)
        number, fault = self._next()
        if fault is not None:
            return fault
        tool_calls = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": a}, "index": place}
            for place, (i, n, a) in enumerate(self.asked(number))
        ]
        message: dict[str, Any] = {"role": "assistant", "content": self.texts.get(number)}
        if tool_calls:
            message["tool_calls"] = tool_calls
        head: dict[str, Any] = {"id": f"c{number}", "created": 0, "model": NAME}
        usage = {
            "prompt_tokens": USAGE[0],
            "completion_tokens": USAGE[1],
            "total_tokens": sum(USAGE),
            "prompt_tokens_details": {"cached_tokens": 150},
        }
        reason = "tool_calls" if tool_calls else "stop"
        if not body.get("stream"):
            choice = {"index": 0, "finish_reason": reason, "message": message}
            whole = {**head, "object": "chat.completion", "choices": [choice]}
            return answer(whole | ({"usage": usage} if self.usage else {}))
        head["object"] = "chat.completion.chunk"
        chunks: list[Any] = [{"choices": [{"index": 0, "delta": message}]}]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        if self.usage and (body.get("stream_options") or {}).get("include_usage"):
            chunks.append({"choices": [], "usage": usage})
        return stream([*({**head, **chunk} for chunk in chunks), "[DONE]"])

    def _known(self, body: Any) -> list[Any]:
        before, conversation = body.get("previous_response_id"), body.get("conversation")
        if before is not None and conversation is not None:
            raise Refused("Mutually exclusive parameters: previous_response_id and conversation.")
        if before is not None:
            if before not in self.conversations:
                raise Refused(f"Previous response with id '{before}' not found.")
            return self.conversations[before]
        if conversation is None:
            return []
        name = conversation if isinstance(conversation, str) else conversation["id"]
        return self.conversations.setdefault(name, [])

    def _responses(self, request: Any) -> Response:
        body = request.get_json()
        given = body["input"]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        try:
            known = self._known(body)
            check_responses_input(items, known)
        except Refused as why:
            return self._refuse(why)
        number, fault = self._next()
        if fault is not None:
            return fault
        output: list[Any] = [
            {
                "type": "function_call",
                "id": f"fc_{number}_{place}",
                "call_id": id_,
                "name": name,
                "arguments": arguments,
                "status": "completed",
            }
            for place, (id_, name, arguments) in enumerate(self.asked(number))
        ]
        if number in self.texts:
            text = {"type": "output_text", "text": self.texts[number], "annotations": []}
            output.append(
                {
                    "type": "message",
                    "id": f"msg_{number}",
                    "role": "assistant",
                    "status": "completed",
                    "content": [text],
                }
            )
        if body.get("conversation") is not None:
            known += [*items, *output]
        self.conversations[f"resp_{number}"] = [*known, *items, *output]
        whole = {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": 0,
            "model": NAME,
            "status": "completed",
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": USAGE[0],
                "output_tokens": USAGE[1],
                "total_tokens": sum(USAGE),
                "input_tokens_details": {"cached_tokens": 150, "cache_write_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 10},
            }
            if self.usage
            else None,
        }
        if not body.get("stream"):
            return answer(whole)
        done = [
            {"type": "response.output_item.done", "output_index": n, "item": item}
            for n, item in enumerate(output)
        ]
        events = [*done, {"type": "response.completed", "response": whole}]
        return stream([{**event, "sequence_number": n} for n, event in enumerate(events)])


def answer(body: Any, status: int = 200, **headers: str) -> Response:
    """Answer with JSON."""
    return Response(json.dumps(body), status=status, mimetype="application/json", headers=headers)


def stream(events: list[Any]) -> Response:
    """Answer with server-sent events."""
    lines = (f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n" for e in events)
    return Response(lines, mimetype="text/event-stream")


def error(status: int, message: str, kind: str, **headers: str) -> Response:
    """Answer with an error in the provider's form."""
    body = {"message": message, "type": kind, "code": None, "param": None}
    return answer({"error": body}, status, **headers)


def too_many() -> Response:
    """Answer 429."""
    return error(429, "slow down", "rate_limit_error", **{"Retry-After": "0"})
