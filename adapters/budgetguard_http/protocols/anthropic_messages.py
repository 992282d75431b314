"""Anthropic's messages, as its SDK, Bedrock's `invoke` and Vertex speak them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from budgetguard_core.kit import ToolCall, merge_usage, token_usage
from budgetguard_http.protocols.protocol import (
    MARK,
    SYNTHETIC_ID,
    ApiProtocol,
    Body,
    Event,
    Paths,
    Reader,
    Result,
    Turn,
    at,
    record,
    records,
    text_or_none,
    usage_in,
    written,
)

_HOSTED: Final = frozenset({"server_tool_use", "mcp_tool_use"})


class MessagesReader(Reader):
    """A message, whole or in events."""

    _open: int | None = None
    _next = 0

    def whole(self, body: Body) -> None:
        """Take a message."""
        self._begin(body, usage_in(body))
        for index, block in enumerate(records(body.get("content"))):
            self._take_block(index, block)
        self._finish(body.get("stop_reason"))

    def take(self, name: str, data: Body) -> None:
        """Take an event."""
        kind, index = data.get("type"), int(data.get("index") or 0)
        if kind == "message_start":
            message = record(data.get("message"))
            self._begin(message, token_usage(message.get("usage")))
        elif kind == "content_block_start":
            self._open, self._next = index, index + 1
            self._take_block(index, record(data.get("content_block")))
        elif kind == "content_block_delta":
            delta = record(data.get("delta"))
            self.answer.says(delta.get("text"))
            self.answer.writes(delta.get("thinking"))
            self.answer.writes(delta.get("partial_json"))
            if index in self.parts and isinstance(delta.get("partial_json"), str):
                self.parts[index]["json"].append(delta["partial_json"])
        elif kind == "content_block_stop":
            self._open = None
        elif kind == "message_delta":
            self.answer.usage = merge_usage(self.answer.usage, token_usage(data.get("usage")))
            self._finish(at(data, "delta.stop_reason"))

    def end(self) -> None:
        """Take an end without the last figures: those of the beginning are not the answer's."""
        if not self.is_settled:
            self._finish(None)
            if self.answer.usage is not None:
                self.answer.usage = self.answer.usage._replace(estimated=True)

    def closing(self, text: str) -> list[Event]:
        """Close the open block and the message."""
        events: list[Event] = []
        if self._open is not None:
            events.append(_event("content_block_stop", index=self._open))
        if not self.answer.said:
            events += _text_block(self._next, text)
        usage = self.answer.usage
        return [*events, *_end({"output_tokens": 0 if usage is None else usage.output_tokens})]

    def _begin(self, message: Body, usage: Any) -> None:
        answer = self.answer
        answer.usage, answer.model = usage, text_or_none(message.get("model"))
        answer.id = text_or_none(at(message, "thread.id")) or text_or_none(message.get("id"))

    def _take_block(self, index: int, block: Body) -> None:
        answer, kind = self.answer, block.get("type")
        if kind == "tool_use":
            self.parts[index], self.has_calls = {**block, "json": []}, True
            answer.writes(str(block.get("input") or ""))
        elif kind in _HOSTED:
            answer.hosted.append(_tool_call(block, block.get("input")))
        else:
            answer.says(block.get("text") if kind == "text" else None)
            answer.writes(block.get("thinking"))

    def _finish(self, reason: object) -> None:
        self.answer.is_cut = reason == "max_tokens"
        if not self.is_settled:
            self.is_settled = True
            for block in self.parts.values():
                arguments = "".join(block["json"]) or block.get("input")
                self.answer.calls.append(_tool_call(block, arguments))


class AnthropicMessages(ApiProtocol):
    """`/messages`, `/model/<model>/invoke` and `:rawPredict`."""

    name = "anthropic_messages"
    provider = "anthropic"
    paths = Paths(
        messages="messages",
        system="system",
        tools="tools",
        schema="output_format output_config.format",
        bound="max_tokens",
        thinking="thinking.budget_tokens",
        forced_tool="tool_choice.name",
    )
    model_in_path = re.compile(r"/models?/([^/:]+)")
    reader_type = MessagesReader
    stream_paths = ("streamRawPredict", "response-stream")
    can_refuse = True

    def follows(self, body: Body) -> str | None:
        """Return the thread that the provider keeps."""
        return text_or_none(body.get("thread")) or text_or_none(at(body, "thread.id"))

    def turn(self, message: Body) -> Turn:
        """Read a message."""
        blocks = records(message.get("content"))
        calls = tuple(one.get("id") for one in blocks if one.get("type") == "tool_use")
        results = tuple(
            Result(one.get("tool_use_id"), one.get("content"), bool(one.get("is_error")))
            for one in blocks
            if one.get("type") == "tool_result"
        )
        return Turn(message.get("role"), written(message.get("content")), calls, results)

    def add_nudge(self, body: Body, text: str) -> None:
        """Put it at the end of the last message, which is the user's."""
        last = record(body["messages"][-1])
        if isinstance(last.get("content"), list):
            last["content"].append({"type": "text", "text": text})
        else:
            last["content"] = f"{last.get('content') or ''}\n\n{text}"

    def must_call(self, body: Body) -> bool:
        """Return it by `tool_choice`."""
        return at(body, "tool_choice.type") in ("tool", "any")

    def synthetic(self, body: Body, model: str, text: str, mark: Mapping[str, Any]) -> Body:
        """Return a message, one of no content where the model refuses; its usage is zero."""
        refuses = self.form(body) == "json"
        return {
            "id": f"msg_{SYNTHETIC_ID}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [] if refuses else [{"type": "text", "text": text}],
            "stop_reason": "refusal" if refuses else "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
            MARK: dict(mark),
        }

    def synthetic_stream(
        self, body: Body, model: str, text: str, mark: Mapping[str, Any]
    ) -> list[Event]:
        """Return the events of such a message."""
        message = self.synthetic(body, model, text, mark)
        begun: Body = {**message, "content": [], "stop_reason": None}
        start = _event("message_start", message=begun)
        block = _text_block(0, text) if message["content"] else []
        return [start, *block, *_end({"output_tokens": 0}, message["stop_reason"])]


def _tool_call(block: Body, arguments: object) -> ToolCall:
    return ToolCall(
        name=str(block.get("name") or ""),
        arguments=arguments,
        id=text_or_none(block.get("id")),
        kind="hosted" if block.get("type") in _HOSTED else "function",
    )


def _event(kind: str, **fields: Any) -> Event:
    return kind, {"type": kind, **fields}


def _text_block(index: int, text: str) -> list[Event]:
    return [
        _event("content_block_start", index=index, content_block={"type": "text", "text": ""}),
        _event("content_block_delta", index=index, delta={"type": "text_delta", "text": text}),
        _event("content_block_stop", index=index),
    ]


def _end(usage: Body, reason: str = "end_turn") -> list[Event]:
    delta = {"stop_reason": reason, "stop_sequence": None}
    return [_event("message_delta", delta=delta, usage=usage), _event("message_stop")]
