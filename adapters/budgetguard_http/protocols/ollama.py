"""Ollama's own format: `/api/chat` and `/api/generate`, whose streams are lines of JSON."""

from __future__ import annotations

from budgetguard_http.protocols.fields import Body, Event, record, text_or_none
from budgetguard_http.protocols.openai_chat import ChatReader
from budgetguard_http.protocols.protocol import ApiProtocol, Paths, usage_in


class OllamaReader(ChatReader):
    """An answer, whole or in lines, each with whole calls."""

    _lines = 0

    def take(self, name: str, data: Body) -> bool:
        """Take a line."""
        message = record(data.get("message")) or {"content": data.get("response")}
        super().take(name, {"choices": [{"index": self._lines, "message": message}]})
        self._lines += 1
        self.writes(message.get("thinking"))
        self.model = text_or_none(data.get("model"))
        if data.get("done"):
            self.usage = usage_in(data)
            self.is_cut = data.get("done_reason") == "length"
            self.is_settled = True
        return False


class Ollama(ApiProtocol):
    """`/api/chat`, with messages as chat completions have them, and `/api/generate`."""

    paths = Paths(
        messages="messages",
        prompt="messages prompt",
        system="system",
        tools="tools",
        schema="format",
        bound="options.num_predict",
    )
    reader_type = OllamaReader
    streams = True

    def synthetic(self, body: Body, model: str, text: str, mark: Body) -> Body:
        """Return an answer whose usage is zero; its clients' types take no field of ours."""
        shown: Body = {"message": {"role": "assistant", "content": text}}
        if "messages" not in body:
            shown = {"response": text}
        figures = {"prompt_eval_count": 0, "eval_count": 0, "total_duration": 0}
        made = {"model": model, "created_at": "1970-01-01T00:00:00Z", **shown, "done": True}
        return {**made, "done_reason": "stop", **figures}

    def synthetic_stream(self, body: Body, model: str, text: str, mark: Body) -> list[Event]:
        """Return a line with the text, and the last one, of which clients take no text."""
        shown = self.synthetic(body, model, text, mark)
        begun = {name: shown[name] for name in shown if not name.endswith(("reason", "count"))}
        return [("", {**begun, "done": False}), ("", self.synthetic(body, model, "", mark))]
