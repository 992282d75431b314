"""Gemini's `generateContent` and its stream, of the Gemini API and of Vertex."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from budgetguard_core.kit import ToolCall, merge_usage, token_usage
from budgetguard_http.protocols.protocol import (
    SYNTHETIC_ID,
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
    repeated,
    text_or_none,
    written,
)

_NO_USAGE: Final = {"promptTokenCount": 0, "candidatesTokenCount": 0, "totalTokenCount": 0}
_MODEL: Final = re.compile(r"/models/([^/:]+):")


class Gemini(ApiProtocol):
    """`:generateContent` and `:streamGenerateContent`."""

    name = "gemini"
    provider = "google"

    def model(self, path: str, body: Body) -> str | None:
        """Return the model in the address."""
        del body
        named = _MODEL.search(path)
        return named[1] if named else None

    def is_streamed(self, path: str, body: Body) -> bool:
        """Recognise it by the address."""
        del body
        return path.endswith(":streamGenerateContent")

    def bound(self, body: Body) -> int | None:
        """Return `maxOutputTokens`."""
        return count_or_none(_config(body).get("maxOutputTokens"))

    def set_bound(self, body: Body, tokens: int) -> None:
        """Write it."""
        name = "generation_config" if "generation_config" in body else "generationConfig"
        body[name] = {**record(body.get(name)), "maxOutputTokens": tokens}

    def least_bound(self, body: Body) -> int:
        """Return one token more than thinking may take, where the request says how much."""
        thinking = count_or_none(record(_config(body).get("thinkingConfig")).get("thinkingBudget"))
        return self.min_output_tokens if thinking is None else thinking + 1

    def choices(self, body: Body) -> int:
        """Return `candidateCount`."""
        return count_or_none(_config(body).get("candidateCount")) or 1

    def prompt(self, body: Body) -> Prompted:
        """Return contents, system instruction, tools and the form of the answer."""
        config = _config(body)
        return Prompted(
            body.get("contents"),
            system=body.get("systemInstruction") or body.get("system_instruction"),
            tools=items(body.get("tools")),
            output_schema=config.get("responseSchema") or config.get("responseJsonSchema"),
        )

    def results(self, body: Body) -> list[Result]:
        """Return the function responses since the last reply, which may be in a content each."""
        parts = [part for turn in self.since_reply(body) for part in items(turn.get("parts"))]
        found: list[Result] = []
        for part in map(record, parts):
            answer = record(part.get("functionResponse") or part.get("function_response"))
            if answer:
                response = answer.get("response")
                is_error = "error" in record(response)
                name = text_or_none(answer.get("name"))
                found.append(Result(text_or_none(answer.get("id")), response, is_error, name))
        return found

    def reply_mark(self, turn: Any) -> tuple[str | None, ...] | None:
        """Return the ids or names of a content's calls, or its text."""
        content = record(turn)
        if content.get("role") != "model":
            return None
        calls = [_function(part) for part in items(content.get("parts"))]
        marks = tuple(call.get("id") or call.get("name") for call in calls if call)
        return marks or (written(content.get("parts")).strip(),)

    def answer_turn(self, text: str) -> Body:
        """Return a content of the model's."""
        return {"role": "model", "parts": [{"text": text}]}

    def user_text(self, turn: Any) -> str | None:
        """Return the text of a user content that is no bundle of results."""
        content = record(turn)
        if content.get("role") not in ("user", None):
            return None
        parts = items(content.get("parts"))
        text = written(parts)
        is_result = any("functionResponse" in record(part) for part in parts)
        return None if is_result and not text else text

    def add_nudge(self, body: Body, text: str) -> None:
        """Put it at the end of the last content, which is the user's."""
        record(body["contents"][-1]).setdefault("parts", []).append({"text": text})

    def form(self, body: Body) -> Form:
        """Return it by the mode of function calls and the type of the answer."""
        if _calling(body).get("mode") == "ANY":
            return "tool"
        config = _config(body)
        is_json = config.get("responseMimeType") in ("application/json", "text/x.enum")
        schema = config.get("responseSchema") or config.get("responseJsonSchema")
        return "json" if is_json or schema else "text"

    def forced_tool(self, body: Body) -> str | None:
        """Return the only function that must be called."""
        choice = _calling(body)
        names = items(choice.get("allowedFunctionNames"))
        return names[0] if choice.get("mode") == "ANY" and len(names) == 1 else None

    def read(self, body: Body, answer: Answer) -> None:
        """Read the parts and the usage."""
        answer.usage = merge_usage(answer.usage, token_usage(body))
        answer.model = text_or_none(body.get("modelVersion")) or answer.model
        answer.id = text_or_none(body.get("responseId")) or answer.id
        for candidate in map(record, items(body.get("candidates"))):
            answer.is_cut |= candidate.get("finishReason") == "MAX_TOKENS"
            for part in map(record, items(record(candidate.get("content")).get("parts"))):
                text = part.get("text")
                answer.writes(text) if part.get("thought") else answer.says(text)
                function = _function(part)
                if function:
                    answer.writes(str(function.get("args")))
                    answer.calls.append(
                        ToolCall(
                            name=str(function.get("name") or ""),
                            arguments=function.get("args"),
                            id=text_or_none(function.get("id")),
                        )
                    )

    def reader(self, answer: Answer, *, body: Body, hides_usage: bool) -> Reader:
        """Return the reader of the chunks."""
        del body, hides_usage
        return GeminiReader(self, answer)

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

    def synthetic_stream(
        self, body: Body, model: str, text: str, mark: Mapping[str, Any]
    ) -> list[Event]:
        """Return it as the only chunk."""
        return [("", self.synthetic(body, model, text, mark))]


class GeminiReader(Reader):
    """The chunks of an answer, each an answer in itself with whole function calls."""

    def __init__(self, protocol: Gemini, answer: Answer) -> None:
        super().__init__(answer)
        self._wire = protocol

    def take(self, name: str, data: Body) -> None:
        """Take a chunk."""
        del name
        self._wire.read(data, self.answer)
        self.has_calls = bool(self.answer.calls)

    def closing(self, text: str) -> list[Event]:
        """Return the events that end it."""
        said = "" if self.answer.said else text
        return [("", self._wire.synthetic({}, self.answer.model or "", said, {}))]


def _config(body: Body) -> Body:
    return record(body.get("generationConfig") or body.get("generation_config"))


def _calling(body: Body) -> Body:
    choice = record(body.get("toolConfig") or body.get("tool_config"))
    return record(choice.get("functionCallingConfig") or choice.get("function_calling_config"))


def _function(part: object) -> Body:
    fields = record(part)
    return record(fields.get("functionCall") or fields.get("function_call"))
