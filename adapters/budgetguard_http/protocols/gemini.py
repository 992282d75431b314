"""Gemini's `generateContent` and its stream, of the Gemini API and of Vertex."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from budgetguard_core.kit import ToolCall, merge_usage, token_usage
from budgetguard_http.protocols.protocol import (
    SYNTHETIC_ID,
    ApiProtocol,
    Body,
    Event,
    Form,
    Paths,
    Reader,
    Result,
    Turn,
    at,
    count_or_none,
    items,
    record,
    records,
    repeated,
    text_or_none,
    written,
)

_NO_USAGE: Final = {"promptTokenCount": 0, "candidatesTokenCount": 0, "totalTokenCount": 0}
_JSON: Final = ("application/json", "text/x.enum")
_CALLING: Final = "toolConfig.functionCallingConfig"


class GeminiReader(Reader):
    """An answer, whole or in chunks, each an answer in itself with whole function calls."""

    def take(self, name: str, data: Body) -> None:
        """Take a chunk."""
        answer = self.answer
        answer.usage = merge_usage(answer.usage, token_usage(data))
        answer.model = text_or_none(data.get("modelVersion")) or answer.model
        answer.id = text_or_none(data.get("responseId")) or answer.id
        for candidate in records(data.get("candidates")):
            answer.is_cut |= candidate.get("finishReason") == "MAX_TOKENS"
            for part in records(at(candidate, "content.parts")):
                text = part.get("text")
                answer.writes(text) if part.get("thought") else answer.says(text)
                if function := record(part.get("functionCall")):
                    answer.writes(str(function.get("args")))
                    answer.calls.append(_tool_call(function))
        self.has_calls = bool(answer.calls)

    def closing(self, text: str) -> list[Event]:
        """Return the chunk that ends it."""
        said = "" if self.answer.said else text
        return [("", self.protocol.synthetic({}, self.answer.model or "", said, {}))]


class Gemini(ApiProtocol):
    """`:generateContent` and `:streamGenerateContent`."""

    name = "gemini"
    provider = "google"
    paths = Paths(
        messages="contents",
        system="systemInstruction system_instruction",
        tools="tools",
        schema="generationConfig.responseSchema generationConfig.responseJsonSchema",
        bound="generationConfig.maxOutputTokens",
        thinking="generationConfig.thinkingConfig.thinkingBudget",
    )
    model_in_path = re.compile(r"/models/([^/:]+):")
    reader_type = GeminiReader
    stream_paths = (":streamGenerateContent",)

    def choices(self, body: Body) -> int:
        """Return `candidateCount`."""
        return count_or_none(at(body, "generationConfig.candidateCount")) or 1

    def turn(self, message: Body) -> Turn:
        """Read a content."""
        parts = records(message.get("parts"))
        found = (record(at(part, "functionResponse function_response")) for part in parts)
        results = tuple(
            Result(
                text_or_none(one.get("id")),
                one.get("response"),
                "error" in record(one.get("response")),
                text_or_none(one.get("name")),
            )
            for one in found
            if one
        )
        asked = [record(at(part, "functionCall function_call")) for part in parts]
        calls = tuple(one.get("id") or one.get("name") for one in asked if one)
        role = {"model": "assistant", None: "user"}.get(message.get("role"), message.get("role"))
        return Turn(role, written(parts), calls, results)

    def answer_turn(self, text: str) -> Body:
        """Return a content of the model's."""
        return {"role": "model", "parts": [{"text": text}]}

    def add_nudge(self, body: Body, text: str) -> None:
        """Put it at the end of the last content, which is the user's."""
        record(body["contents"][-1]).setdefault("parts", []).append({"text": text})

    def must_call(self, body: Body) -> bool:
        """Return it by the mode of function calls."""
        return bool(at(body, f"{_CALLING}.mode") == "ANY")

    def form(self, body: Body) -> Form:
        """Return it by the mode of function calls and the type of the answer."""
        is_json = at(body, "generationConfig.responseMimeType") in _JSON
        form = super().form(body)
        return "json" if is_json and form == "text" else form

    def forced_tool(self, body: Body) -> str | None:
        """Return the only function that must be called."""
        names = items(at(body, f"{_CALLING}.allowedFunctionNames"))
        return names[0] if self.must_call(body) and len(names) == 1 else None

    def synthetic(self, body: Body, model: str, text: str, mark: Mapping[str, Any]) -> Body:
        """Return an answer whose usage is zero; the SDK's types take no field of ours."""
        candidate = {"content": self.answer_turn(text), "finishReason": "STOP", "index": 0}
        return {
            "candidates": repeated(candidate, self.choices(body)),
            "usageMetadata": dict(_NO_USAGE),
            "modelVersion": model,
            "responseId": SYNTHETIC_ID,
        }


def _tool_call(function: Body) -> ToolCall:
    return ToolCall(
        name=str(function.get("name") or ""),
        arguments=function.get("args"),
        id=text_or_none(function.get("id")),
    )
