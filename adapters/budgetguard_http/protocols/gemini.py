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


def _config(*names: str) -> str:
    """Return the paths of settings of the answer, under the two names of their place."""
    places = ("generationConfig", "generation_config")
    return " ".join(f"{place}.{name}" for place in places for name in names)


_COUNT: Final = _config("candidateCount")
_KIND: Final = _config("responseMimeType")


class GeminiReader(Reader):
    """An answer, whole or in chunks, each an answer in itself with whole function calls."""

    def take(self, name: str, data: Body) -> None:
        """Take a chunk."""
        del name
        answer = self.answer
        answer.usage = merge_usage(answer.usage, token_usage(data))
        answer.model = text_or_none(data.get("modelVersion")) or answer.model
        answer.id = text_or_none(data.get("responseId")) or answer.id
        for candidate in records(data.get("candidates")):
            answer.is_cut |= candidate.get("finishReason") == "MAX_TOKENS"
            for part in records(at(candidate, "content.parts")):
                text = part.get("text")
                answer.writes(text) if part.get("thought") else answer.says(text)
                if function := _function(part):
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
        schema=_config("responseSchema", "responseJsonSchema"),
        bound=_config("maxOutputTokens"),
        thinking=_config("thinkingConfig.thinkingBudget"),
    )
    model_in_path = re.compile(r"/models/([^/:]+):")
    reader_type = GeminiReader
    stream_paths = (":streamGenerateContent",)

    def set_bound(self, body: Body, tokens: int) -> None:
        """Write it."""
        name = "generation_config" if "generation_config" in body else "generationConfig"
        body[name] = {**record(body.get(name)), "maxOutputTokens": tokens}

    def choices(self, body: Body) -> int:
        """Return `candidateCount`."""
        return count_or_none(at(body, _COUNT)) or 1

    def turn(self, message: Body) -> Turn:
        """Read a content."""
        parts = records(message.get("parts"))
        found = (record(_either(part, "function", "Response")) for part in parts)
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
        calls = tuple(one.get("id") or one.get("name") for one in map(_function, parts) if one)
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
        return _calling(body).get("mode") == "ANY"

    def form(self, body: Body) -> Form:
        """Return it by the mode of function calls and the type of the answer."""
        is_json = at(body, _KIND) in ("application/json", "text/x.enum")
        form = super().form(body)
        return "json" if is_json and form == "text" else form

    def forced_tool(self, body: Body) -> str | None:
        """Return the only function that must be called."""
        names = items(_calling(body).get("allowedFunctionNames"))
        return names[0] if self.must_call(body) and len(names) == 1 else None

    def synthetic(self, body: Body, model: str, text: str, mark: Mapping[str, Any]) -> Body:
        """Return an answer whose usage is zero; the SDK's types take no field of ours."""
        del mark
        candidate = {"content": self.answer_turn(text), "finishReason": "STOP", "index": 0}
        return {
            "candidates": repeated(candidate, self.choices(body)),
            "usageMetadata": dict(_NO_USAGE),
            "modelVersion": model,
            "responseId": SYNTHETIC_ID,
        }


def _either(body: Body, first: str, second: str) -> Any:
    """Return what has a name of two words, in camel case or in snake case."""
    return body.get(first + second) or body.get(f"{first}_{second.lower()}")


def _calling(body: Body) -> Body:
    choice = record(_either(body, "tool", "Config"))
    return record(choice.get("functionCallingConfig") or choice.get("function_calling_config"))


def _function(part: Body) -> Body:
    return record(_either(part, "function", "Call"))


def _tool_call(function: Body) -> ToolCall:
    return ToolCall(
        name=str(function.get("name") or ""),
        arguments=function.get("args"),
        id=text_or_none(function.get("id")),
    )
