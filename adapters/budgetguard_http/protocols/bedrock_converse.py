"""Bedrock's `converse` and `converse_stream`, of whatever maker's model."""

from __future__ import annotations

import re
from typing import Final

from budgetguard_core.kit import token_usage
from budgetguard_http.protocols.fields import Body, Event, at, record, records
from budgetguard_http.protocols.protocol import BlockReader, OfBlocks, Paths

_FIELDS: Final = "additionalModelRequestFields"
_THINKING: Final = f"{_FIELDS}.thinking.budget_tokens {_FIELDS}.reasoning_config.budget_tokens"
_NO_USAGE: Final = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}


class ConverseReader(BlockReader):
    """An answer, whole or in events."""

    index_field = "contentBlockIndex"

    def whole(self, body: Body) -> None:
        """Take an answer."""
        for index, block in enumerate(records(at(body, "output.message.content"))):
            self.says(block.get("text"))
            self.writes(at(block, "reasoningContent.reasoningText.text"))
            self._begin(index, block)
        self.take("messageStop", body)
        self.take("metadata", body)

    def take(self, name: str, data: Body) -> None:
        """Take an event."""
        index = self.index(name, data)
        if name == "contentBlockStart":
            self._begin(index, record(data.get("start")))
        elif name == "contentBlockDelta":
            delta = record(data.get("delta"))
            self.says(delta.get("text"))
            self.writes(at(delta, "reasoningContent.text"))
            self.continues(index, at(delta, "toolUse.input"))
        elif name == "messageStop":
            self.is_cut = data.get("stopReason") == "max_tokens"
        elif name == "metadata":
            self.usage = token_usage(data.get("usage"))
            self.is_settled = True

    def _begin(self, index: int, block: Body) -> None:
        if use := record(block.get("toolUse")):
            is_hosted = use.get("type") == "server_tool_use"
            self.begins(index, use, use.get("input", {}), hosted=is_hosted)


class BedrockConverse(OfBlocks):
    """`/model/<model>/converse` and `/model/<model>/converse-stream`."""

    provider = "aws"
    paths = Paths(
        messages="messages",
        system="system",
        tools="toolConfig.tools",
        schema="outputConfig.textFormat",
        bound="inferenceConfig.maxTokens",
        thinking=_THINKING,
        tool_choice="toolConfig.toolChoice",
        forced_tool="toolConfig.toolChoice.tool.name",
    )
    model_in_path = re.compile(r"/model/(.+)/converse(-stream)?$")
    reader_type = ConverseReader
    stream_paths = ("/converse-stream",)

    def synthetic(self, body: Body, model: str, text: str, mark: Body) -> Body:
        """Return an answer; its type has to have a usage, which is zero, and takes no mark."""
        made = {"output": {"message": self.answer_turn(text)}, "stopReason": "end_turn"}
        return {**made, "usage": dict(_NO_USAGE), "metrics": {"latencyMs": 0}}

    def synthetic_stream(self, body: Body, model: str, text: str, mark: Body) -> list[Event]:
        """Return the events of such an answer."""
        return [
            ("messageStart", {"role": "assistant"}),
            ("contentBlockDelta", {"delta": {"text": text}, "contentBlockIndex": 0}),
            ("contentBlockStop", {"contentBlockIndex": 0}),
            ("messageStop", {"stopReason": "end_turn"}),
            ("metadata", {"usage": dict(_NO_USAGE), "metrics": {"latencyMs": 0}}),
        ]
