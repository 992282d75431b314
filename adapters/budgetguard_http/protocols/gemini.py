"""Gemini's `generateContent` and its stream, of the Gemini API and of Vertex."""

from __future__ import annotations

import re
from typing import Final

from budgetguard_core.kit import merge_usage, token_usage
from budgetguard_http.protocols.fields import Body, at, record, records, text_or_none
from budgetguard_http.protocols.openai_chat import Embeddings
from budgetguard_http.protocols.protocol import OfBlocks, Paths, Reader, repeated

_NO_USAGE: Final = {"promptTokenCount": 0, "candidatesTokenCount": 0, "totalTokenCount": 0}
_CALLING: Final = "toolConfig.functionCallingConfig"
_CONFIG: Final = "generationConfig"


class GeminiReader(Reader):
    """An answer, whole or in chunks, each an answer in itself with whole function calls."""

    def take(self, name: str, data: Body) -> None:
        """Take a chunk."""
        self.usage = merge_usage(self.usage, token_usage(data))
        self.model = text_or_none(data.get("modelVersion")) or self.model
        self.id = text_or_none(data.get("responseId")) or self.id
        for candidate in records(data.get("candidates")):
            self.is_cut |= candidate.get("finishReason") == "MAX_TOKENS"
            for part in records(at(candidate, "content.parts")):
                text = part.get("text")
                self.writes(text) if part.get("thought") else self.says(text)
                if function := record(part.get("functionCall")):
                    self.begins(len(self.begun), function, function.get("args"))


class GeminiEmbeddings(Embeddings):
    """`:embedContent` and `:batchEmbedContents`; their usage is estimated where none is told."""

    provider = "google"
    model_in_path = re.compile(r"([^/:]+):\w+$")
    paths = Paths(prompt="requests content")


class Gemini(OfBlocks):
    """`:generateContent` and `:streamGenerateContent`."""

    provider = "google"
    paths = Paths(
        messages="contents",
        system="systemInstruction system_instruction",
        tools="tools",
        schema=f"{_CONFIG}.responseSchema {_CONFIG}.responseJsonSchema {_CONFIG}.responseMimeType",
        bound=f"{_CONFIG}.maxOutputTokens",
        thinking=f"{_CONFIG}.thinkingConfig.thinkingBudget",
        choices=f"{_CONFIG}.candidateCount",
        tool_choice=_CALLING,
        forced_tool=f"{_CALLING}.allowedFunctionNames",
    )
    blocks_of = ("model", "parts")
    model_in_path = re.compile(r"/models/([^/:]+):")
    reader_type = GeminiReader
    stream_paths = (":streamGenerateContent",)

    def synthetic(self, body: Body, model: str, text: str, mark: Body) -> Body:
        """Return an answer whose usage is zero; the SDK's types take no field of ours."""
        candidate = {"content": self.answer_turn(text), "finishReason": "STOP", "index": 0}
        return {
            "candidates": repeated(candidate, self.choices(body)),
            "usageMetadata": dict(_NO_USAGE),
            "modelVersion": model,
            "responseId": "synthetic",
        }
