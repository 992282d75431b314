"""Bedrock's `converse` and `converse_stream`, of whatever maker's model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from budgetguard_core.kit import ToolCall, token_usage
from budgetguard_http.protocols.protocol import (
    ApiProtocol,
    Body,
    Event,
    Paths,
    Reader,
    Result,
    Turn,
    at,
    items,
    record,
    records,
    text_or_none,
    written,
)

_FIELDS: Final = "additionalModelRequestFields"
_THINKING: Final = f"{_FIELDS}.thinking.budget_tokens {_FIELDS}.reasoning_config.budget_tokens"
_NO_USAGE: Final = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}


class ConverseReader(Reader):
    """An answer, whole or in events."""

    _open: int | None = None
    _next = 0

    def whole(self, body: Body) -> None:
        """Take an answer."""
        for index, block in enumerate(records(at(body, "output.message.content"))):
            self.answer.says(block.get("text"))
            self.answer.writes(at(block, "reasoningContent.reasoningText.text"))
            self.answer.writes(str(at(block, "toolUse.input") or ""))
            self._begin(index, block)
        self.take("messageStop", body)
        self.take("metadata", body)

    def take(self, name: str, data: Body) -> None:
        """Take an event."""
        answer, index = self.answer, int(data.get("contentBlockIndex") or 0)
        if name.startswith("contentBlock"):
            self._open = None if name == "contentBlockStop" else index
            self._next = max(self._next, index + 1)
        if name == "contentBlockStart":
            self._begin(index, record(data.get("start")))
        elif name == "contentBlockDelta":
            delta = record(data.get("delta"))
            answer.says(delta.get("text"))
            answer.writes(at(delta, "reasoningContent.text"))
            piece = at(delta, "toolUse.input")
            answer.writes(piece)
            if index in self.parts and isinstance(piece, str):
                self.parts[index]["json"].append(piece)
        elif name == "messageStop":
            answer.is_cut = data.get("stopReason") == "max_tokens"
            calls = self.parts.values()
            answer.calls = [
                _tool_call(one, "".join(one["json"]) or one.get("input") or {}) for one in calls
            ]
        elif name == "metadata":
            answer.usage = token_usage(data.get("usage"))
            self.is_settled = True

    def closing(self, text: str) -> list[Event]:
        """Close the open block and the message."""
        events: list[Event] = []
        if self._open is not None:
            events.append(("contentBlockStop", {"contentBlockIndex": self._open}))
        if not self.answer.said:
            events += _text_block(self._next, text)
        return [*events, *_END]

    def _begin(self, index: int, block: Body) -> None:
        use = record(block.get("toolUse"))
        if _is_local(use):
            self.parts[index], self.has_calls = {**use, "json": []}, True
        elif use:
            self.answer.hosted.append(_tool_call(use, use.get("input")))


class BedrockConverse(ApiProtocol):
    """`/model/<model>/converse` and `/model/<model>/converse-stream`."""

    name = "bedrock_converse"
    provider = "aws"
    paths = Paths(
        messages="messages",
        system="system",
        tools="toolConfig.tools",
        schema="outputConfig.textFormat",
        bound="inferenceConfig.maxTokens",
        thinking=_THINKING,
        forced_tool="toolConfig.toolChoice.tool.name",
    )
    model_in_path = re.compile(r"/model/(.+)/converse(-stream)?$")
    reader_type = ConverseReader
    stream_paths = ("/converse-stream",)

    def turn(self, message: Body) -> Turn:
        """Read a message."""
        blocks = records(message.get("content"))
        uses = [record(one.get("toolUse")) for one in blocks]
        results = tuple(
            Result(one.get("toolUseId"), one.get("content"), one.get("status") == "error")
            for one in (record(block.get("toolResult")) for block in blocks)
            if one
        )
        calls = tuple(one.get("toolUseId") for one in uses if _is_local(one))
        is_users = message.get("role") == "user"
        return Turn(message.get("role"), written(blocks), calls, results if is_users else ())

    def answer_turn(self, text: str) -> Body:
        """Return a message of the assistant's."""
        return {"role": "assistant", "content": [{"text": text}]}

    def add_nudge(self, body: Body, text: str) -> None:
        """Put it at the end of the last result; not every model takes a text beside results."""
        blocks: list[Any] = record(body["messages"][-1]).setdefault("content", [])
        result = record(at(blocks[-1] if blocks else None, "toolResult"))
        (items(result.get("content")) if result else blocks).append({"text": text})

    def must_call(self, body: Body) -> bool:
        """Return it by `toolChoice`."""
        return not {"tool", "any"}.isdisjoint(record(at(body, "toolConfig.toolChoice")))

    def synthetic(self, body: Body, model: str, text: str, mark: Mapping[str, Any]) -> Body:
        """Return an answer; its type has to have a usage, which is zero, and takes no mark."""
        message = {"output": {"message": self.answer_turn(text)}, "stopReason": "end_turn"}
        return {**message, "usage": dict(_NO_USAGE), "metrics": {"latencyMs": 0}}

    def synthetic_stream(
        self, body: Body, model: str, text: str, mark: Mapping[str, Any]
    ) -> list[Event]:
        """Return the events of such an answer."""
        return [("messageStart", {"role": "assistant"}), *_text_block(0, text), *_END]


_END: Final[tuple[Event, ...]] = (
    ("messageStop", {"stopReason": "end_turn"}),
    ("metadata", {"usage": _NO_USAGE, "metrics": {"latencyMs": 0}}),
)


def _is_local(use: Body) -> bool:
    """Return whether the client has to run a call; what the provider has run says so."""
    return bool(use) and use.get("type") != "server_tool_use"


def _tool_call(use: Body, arguments: object) -> ToolCall:
    return ToolCall(
        name=str(use.get("name") or ""),
        arguments=arguments,
        id=text_or_none(use.get("toolUseId")),
        kind="function" if _is_local(use) else "hosted",
    )


def _text_block(index: int, text: str) -> list[Event]:
    delta = {"delta": {"text": text}, "contentBlockIndex": index}
    return [("contentBlockDelta", delta), ("contentBlockStop", {"contentBlockIndex": index})]
