"""Ollama's own format: `/api/chat` and `/api/generate`, whose streams are lines of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from budgetguard_http.protocols.openai_chat import ChatReader
from budgetguard_http.protocols.protocol import (
    ApiProtocol,
    Body,
    Event,
    Paths,
    Prompted,
    Result,
    Turn,
    at,
    record,
    records,
    text_or_none,
    usage_in,
)


class OllamaReader(ChatReader):
    """An answer, whole or in lines, each with whole calls."""

    _lines = 0

    def take(self, name: str, data: Body) -> bool:
        """Take a line."""
        message = record(data.get("message")) or {"content": data.get("response")}
        super().take(name, {"choices": [{"index": self._lines, "message": message}]})
        self._lines += 1
        self.answer.writes(message.get("thinking"))
        self.answer.model = text_or_none(data.get("model"))
        if data.get("done"):
            self.answer.usage = usage_in(data)
            self.answer.is_cut = data.get("done_reason") == "length"
            self.end()
            self.is_settled = True
        return False

    def closing(self, text: str) -> list[Event]:
        """Return the piece that ends it."""
        said = "" if self.answer.said else text
        return self.protocol.synthetic_stream(self.request, self.answer.model or "", said, {})


class Ollama(ApiProtocol):
    """`/api/chat`, with messages as chat completions have them, and `/api/generate`."""

    name = "ollama"
    paths = Paths(
        messages="messages",
        system="system",
        tools="tools",
        schema="format",
        bound="options.num_predict",
    )
    reader_type = OllamaReader

    def is_streamed(self, path: str, body: Body) -> bool:
        """Return whether the answer is streamed, which is the default."""
        return body.get("stream") is not False

    def prompt(self, body: Body) -> Prompted:
        """Return messages, or a prompt, and the tools."""
        return super().prompt(body)._replace(messages=body.get("messages") or body.get("prompt"))

    def turn(self, message: Body) -> Turn:
        """Read a message; calls have names and no ids."""
        role, content = message.get("role"), message.get("content")
        if role == "tool":
            name = text_or_none(message.get("tool_name"))
            return Turn(role, results=(Result(None, content, name=name),))
        calls = records(message.get("tool_calls"))
        names = tuple(text_or_none(at(one, "function.name")) for one in calls)
        return Turn(role, str(content or ""), names)

    def synthetic(self, body: Body, model: str, text: str, mark: Mapping[str, Any]) -> Body:
        """Return an answer whose usage is zero; its clients' types take no field of ours."""
        said: Body = {"message": {"role": "assistant", "content": text}}
        if "messages" not in body:
            said = {"response": text}
        figures = {"prompt_eval_count": 0, "eval_count": 0, "total_duration": 0}
        made = {"model": model, "created_at": "1970-01-01T00:00:00Z", **said, "done": True}
        return {**made, "done_reason": "stop", **figures}

    def synthetic_stream(
        self, body: Body, model: str, text: str, mark: Mapping[str, Any]
    ) -> list[Event]:
        """Return a line with the text, and the last one, of which clients take no text."""
        said = self.synthetic(body, model, text, mark)
        begun = {name: said[name] for name in said if not name.endswith(("reason", "count"))}
        return [("", {**begun, "done": False}), ("", self.synthetic(body, model, "", mark))]
