"""Bedrock's `converse` and `converse_stream`, of whatever maker's model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

from budgetguard_core.kit import ToolCall, token_usage
from budgetguard_http.protocols.protocol import (
    Answer,
    ApiProtocol,
    Body,
    Event,
    Form,
    Prompted,
    Reader,
    Result,
    count_or_none,
    items,
    record,
    text_or_none,
    written,
)

_MODEL: Final = re.compile(r"/model/(.+)/converse(-stream)?$")
_NO_USAGE: Final = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}


class BedrockConverse(ApiProtocol):
    """`/model/<model>/converse` and `/model/<model>/converse-stream`."""

    name = "bedrock_converse"
    provider = "aws"

    def model(self, path: str, body: Body) -> str | None:
        """Return the model in the address: an id or an ARN."""
        del body
        named = _MODEL.search(unquote(path))
        return named[1] if named else None

    def is_streamed(self, path: str, body: Body) -> bool:
        """Recognise it by the address."""
        del body
        return path.endswith("/converse-stream")

    def bound(self, body: Body) -> int | None:
        """Return `maxTokens`."""
        return count_or_none(record(body.get("inferenceConfig")).get("maxTokens"))

    def set_bound(self, body: Body, tokens: int) -> None:
        """Write it."""
        body["inferenceConfig"] = {**record(body.get("inferenceConfig")), "maxTokens": tokens}

    def least_bound(self, body: Body) -> int:
        """Return one token more than thinking may take, where the request says how much."""
        fields = record(body.get("additionalModelRequestFields"))
        own = record(fields.get("thinking") or fields.get("reasoning_config"))
        thinking = count_or_none(own.get("budget_tokens"))
        return self.min_output_tokens if thinking is None else thinking + 1

    def prompt(self, body: Body) -> Prompted:
        """Return messages, system prompt, tools and the form of the answer."""
        return Prompted(
            body.get("messages"),
            system=body.get("system"),
            tools=items(record(body.get("toolConfig")).get("tools")),
            output_schema=_form(body),
        )

    def results(self, body: Body) -> list[Result]:
        """Return the results in the last message."""
        turns = items(body.get("messages"))
        blocks = items(record(turns[-1]).get("content")) if turns else []
        found = [record(record(block).get("toolResult")) for block in blocks]
        return [
            Result(one.get("toolUseId"), one.get("content"), one.get("status") == "error")
            for one in found
            if one
        ]

    def reply_mark(self, turn: Any) -> tuple[str | None, ...] | None:
        """Return the ids of an assistant message's calls, or its text."""
        message = record(turn)
        if message.get("role") != "assistant":
            return None
        uses = [_use(one) for one in items(message.get("content"))]
        ids = tuple(use.get("toolUseId") for use in uses if _is_local(use))
        return ids or (written(message.get("content")).strip(),)

    def answer_turn(self, text: str) -> Body:
        """Return a message of the assistant's."""
        return {"role": "assistant", "content": [{"text": text}]}

    def user_text(self, turn: Any) -> str | None:
        """Return the text of a user message that is no bundle of results."""
        message = record(turn)
        if message.get("role") != "user":
            return None
        blocks = items(message.get("content"))
        text = written(blocks)
        return None if not text and any("toolResult" in record(one) for one in blocks) else text

    def add_nudge(self, body: Body, text: str) -> None:
        """Put it at the end of the last result; not every model takes a text beside results."""
        blocks: list[Any] = record(body["messages"][-1]).setdefault("content", [])
        result = record(record(blocks[-1] if blocks else None).get("toolResult"))
        (items(result.get("content")) if result else blocks).append({"text": text})

    def form(self, body: Body) -> Form:
        """Return it by `toolChoice` and `textFormat`."""
        choice = record(record(body.get("toolConfig")).get("toolChoice"))
        if "tool" in choice or "any" in choice:
            return "tool"
        return "text" if _form(body) is None else "json"

    def forced_tool(self, body: Body) -> str | None:
        """Return the name in `toolChoice`."""
        choice = record(record(body.get("toolConfig")).get("toolChoice"))
        return text_or_none(record(choice.get("tool")).get("name"))

    def read(self, body: Body, answer: Answer) -> None:
        """Read the blocks and the usage."""
        answer.usage = token_usage(body.get("usage"))
        answer.is_cut = body.get("stopReason") == "max_tokens"
        for block in items(record(record(body.get("output")).get("message")).get("content")):
            fields = record(block)
            answer.says(fields.get("text"))
            answer.writes(_reasoning(fields))
            use = _use(fields)
            if use:
                answer.writes(str(use.get("input")))
                calls = answer.calls if _is_local(use) else answer.hosted
                calls.append(_tool_call(use, use.get("input")))

    def reader(self, answer: Answer, *, body: Body, hides_usage: bool) -> Reader:
        """Return the reader of the events."""
        del body, hides_usage
        return ConverseReader(answer)

    def synthetic(self, body: Body, model: str, text: str, mark: Mapping[str, Any]) -> Body:
        """Return an answer; its type has to have a usage, which is zero, and takes no mark."""
        del body, model, mark
        return {
            "output": {"message": self.answer_turn(text)},
            "stopReason": "end_turn",
            "usage": dict(_NO_USAGE),
            "metrics": {"latencyMs": 0},
        }

    def synthetic_stream(
        self, body: Body, model: str, text: str, mark: Mapping[str, Any]
    ) -> list[Event]:
        """Return the events of such an answer."""
        del body, model, mark
        start: Event = ("messageStart", {"role": "assistant"})
        return [start, *_text_block(0, text), *_end(_NO_USAGE)]


class ConverseReader(Reader):
    """The events of an answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._calls: dict[int, Body] = {}
        self._open: int | None = None
        self._next = 0

    def take(self, name: str, data: Body) -> None:
        """Take an event."""
        answer, index = self.answer, int(data.get("contentBlockIndex") or 0)
        if name.startswith("contentBlock"):
            self._open = None if name == "contentBlockStop" else index
            self._next = max(self._next, index + 1)
        if name == "contentBlockStart":
            use = _use(data.get("start"))
            if _is_local(use):
                self._calls[index], self.has_calls = {**use, "json": []}, True
            elif use:
                answer.hosted.append(_tool_call(use, None))
        elif name == "contentBlockDelta":
            delta = record(data.get("delta"))
            answer.says(delta.get("text"))
            answer.writes(record(delta.get("reasoningContent")).get("text"))
            piece = record(delta.get("toolUse")).get("input")
            if isinstance(piece, str):
                answer.writes(piece)
                if index in self._calls:
                    self._calls[index]["json"].append(piece)
        elif name == "messageStop":
            answer.is_cut = data.get("stopReason") == "max_tokens"
            calls = self._calls.values()
            answer.calls = [_tool_call(one, "".join(one["json"]) or {}) for one in calls]
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
        return [*events, *_end(_NO_USAGE)]


def _use(block: object) -> Body:
    return record(record(block).get("toolUse"))


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


def _reasoning(block: Body) -> object:
    return record(record(block.get("reasoningContent")).get("reasoningText")).get("text")


def _form(body: Body) -> Any:
    return record(body.get("outputConfig")).get("textFormat") or None


def _text_block(index: int, text: str) -> list[Event]:
    at = {"contentBlockIndex": index}
    return [
        ("contentBlockDelta", {"delta": {"text": text}, **at}),
        ("contentBlockStop", at),
    ]


def _end(usage: Mapping[str, int]) -> list[Event]:
    return [
        ("messageStop", {"stopReason": "end_turn"}),
        ("metadata", {"usage": dict(usage), "metrics": {"latencyMs": 0}}),
    ]
