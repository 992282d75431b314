"""Anthropic's messages, as its SDK, Bedrock's `invoke` and Vertex speak them."""

from __future__ import annotations

import re
from typing import Any, Final

from budgetguard_core.kit import merge_usage, token_usage
from budgetguard_http.protocols.fields import Body, Event, at, record, records, text_or_none
from budgetguard_http.protocols.protocol import MARK, BlockReader, OfBlocks, Paths, usage_in

_HOSTED: Final = frozenset({"server_tool_use", "mcp_tool_use"})


class MessagesReader(BlockReader):
    """A message, whole or in events."""

    index_field = "index"

    def whole(self, body: Body) -> None:
        """Take a message."""
        self._begin(body, usage_in(body))
        for index, block in enumerate(records(body.get("content"))):
            self._take_block(index, block)
        self.is_cut, self.is_settled = body.get("stop_reason") == "max_tokens", True

    def take(self, name: str, data: Body) -> None:
        """Take an event."""
        kind = str(data.get("type"))
        index = self.index(kind, data)
        if kind == "message_start":
            message = record(data.get("message"))
            self._begin(message, token_usage(message.get("usage")))
        elif kind == "content_block_start":
            self._take_block(index, record(data.get("content_block")))
        elif kind == "content_block_delta":
            delta = record(data.get("delta"))
            self.says(delta.get("text"))
            self.writes(delta.get("thinking"))
            self.continues(index, delta.get("partial_json"))
        elif kind == "message_delta":
            self.usage = merge_usage(self.usage, token_usage(data.get("usage")))
            self.is_cut = at(data, "delta.stop_reason") == "max_tokens"
            self.is_settled = True

    def end(self) -> None:
        """Take an end without the last figures: those of the beginning are not the answer's."""
        super().end()
        if self.usage is not None and not self.is_settled:
            self.usage = self.usage._replace(estimated=True)

    def _begin(self, message: Body, usage: Any) -> None:
        self.usage, self.model = usage, text_or_none(message.get("model"))
        self.id = text_or_none(at(message, "thread.id id"))

    def _take_block(self, index: int, block: Body) -> None:
        kind = block.get("type")
        if kind == "tool_use" or kind in _HOSTED:
            self.begins(index, block, block.get("input"), hosted=kind != "tool_use")
        elif kind == "text":
            self.says(block.get("text"))
        self.writes(block.get("thinking"))


class AnthropicMessages(OfBlocks):
    """`/messages`, `/model/<model>/invoke` and `:rawPredict`."""

    provider = "anthropic"
    paths = Paths(
        messages="messages",
        system="system",
        tools="tools",
        schema="output_format output_config.format",
        bound="max_tokens",
        thinking="thinking.budget_tokens",
        tool_choice="tool_choice",
        forced_tool="tool_choice.name",
        follows="thread.id thread",
    )
    block = {"type": "text"}  # noqa: RUF012
    model_in_path = re.compile(r"/models?/([^/:]+)")
    reader_type = MessagesReader
    stream_paths = ("streamRawPredict", "response-stream")
    can_refuse = True

    def synthetic(self, body: Body, model: str, text: str, mark: Body) -> Body:
        """Return a message, one of no content where the model refuses; its usage is zero."""
        refuses = self.form(body) == "json"
        return {
            "id": "msg_synthetic",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [] if refuses else [{"type": "text", "text": text}],
            "stop_reason": "refusal" if refuses else "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
            MARK: mark,
        }

    def synthetic_stream(self, body: Body, model: str, text: str, mark: Body) -> list[Event]:
        """Return the events of such a message."""
        message = self.synthetic(body, model, text, mark)
        begun: Body = {**message, "content": [], "stop_reason": None}
        block: Body = {"content_block": {"type": "text", "text": ""}}
        events: list[Event] = [
            ("message_start", {"message": begun}),
            ("content_block_start", {"index": 0, **block}),
            ("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}}),
            ("content_block_stop", {"index": 0}),
        ]
        end = {"stop_reason": message["stop_reason"], "stop_sequence": None}
        events = events if message["content"] else events[:1]
        events.append(("message_delta", {"delta": end, "usage": {"output_tokens": 0}}))
        events.append(("message_stop", {}))
        return [(kind, {"type": kind, **data}) for kind, data in events]
