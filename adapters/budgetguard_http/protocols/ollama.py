"""Ollama's own format: `/api/chat` and `/api/generate`, whose streams are lines of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from budgetguard_http.protocols.openai_chat import OpenAIChat
from budgetguard_http.protocols.protocol import (
    Answer,
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
    usage_in,
)


class Ollama(OpenAIChat):
    """`/api/chat`, with messages as chat completions have them, and `/api/generate`."""

    name = "ollama"
    can_refuse = False

    def is_streamed(self, path: str, body: Body) -> bool:
        """Return whether the answer is streamed, which is the default."""
        del path
        return body.get("stream") is not False

    def bound(self, body: Body) -> int | None:
        """Return `num_predict`; what is below 1 is no bound."""
        return count_or_none(record(body.get("options")).get("num_predict"))

    def set_bound(self, body: Body, tokens: int) -> None:
        """Write it."""
        body["options"] = {**record(body.get("options")), "num_predict": tokens}

    def choices(self, body: Body) -> int:
        """Return one."""
        del body
        return 1

    def prompt(self, body: Body) -> Prompted:
        """Return messages, or a prompt, and the tools."""
        messages = body.get("messages") or body.get("prompt")
        system, tools = body.get("system"), items(body.get("tools"))
        return Prompted(messages, system=system, tools=tools, output_schema=body.get("format"))

    def results(self, body: Body) -> list[Result]:
        """Return the tool messages since the last reply; they have no ids."""
        return [
            Result(None, turn.get("content"), name=text_or_none(turn.get("tool_name")))
            for turn in self.since_reply(body)
            if turn.get("role") == "tool"
        ]

    def reply_mark(self, turn: Any) -> tuple[str | None, ...] | None:
        """Return the names of an assistant message's calls, or its text."""
        message = record(turn)
        if message.get("role") != "assistant":
            return None
        calls = [record(record(one).get("function")) for one in items(message.get("tool_calls"))]
        names = tuple(text_or_none(one.get("name")) for one in calls)
        return names or (str(message.get("content") or "").strip(),)

    def form(self, body: Body) -> Form:
        """Return it by `format`."""
        return "json" if body.get("format") else "text"

    def ask_for_usage(self, body: Body) -> bool:
        """Ask for nothing: it comes with the last line."""
        del body
        return False

    def read(self, body: Body, answer: Answer) -> None:
        """Read an answer, or a line of one."""
        message = record(body.get("message")) or {"content": body.get("response")}
        super().read({"choices": [{"message": message}]}, answer)
        answer.writes(message.get("thinking"))
        answer.model = text_or_none(body.get("model"))
        if body.get("done"):
            answer.usage = usage_in(body)
            answer.is_cut = body.get("done_reason") == "length"

    def reader(self, answer: Answer, *, body: Body, hides_usage: bool) -> Reader:
        """Return the reader of the lines."""
        del hides_usage
        return OllamaReader(self, answer, body)

    def synthetic(self, body: Body, model: str, text: str, mark: Mapping[str, Any]) -> Body:
        """Return an answer whose usage is zero; its clients' types take no field of ours."""
        del mark
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


class OllamaReader(Reader):
    """The lines of an answer, each with whole calls."""

    def __init__(self, protocol: Ollama, answer: Answer, body: Body) -> None:
        super().__init__(answer)
        self._wire = protocol
        self._body = body

    def take(self, name: str, data: Body) -> None:
        """Take a line."""
        del name
        self._wire.read(data, self.answer)
        self.has_calls = bool(self.answer.calls)
        self.is_settled = bool(data.get("done"))

    def closing(self, text: str) -> list[Event]:
        """Return the piece that ends it."""
        said = "" if self.answer.said else text
        return self._wire.synthetic_stream(self._body, self.answer.model or "", said, {})
