"""OpenAI's Responses, as its SDK and Azure speak them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from budgetguard_core.kit import RESPONSES, content_text
from budgetguard_http.protocols.fields import Body, Event, at, record, records, text_or_none
from budgetguard_http.protocols.protocol import MARK, ApiProtocol, Paths, Reader, usage_in

_ENDS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})


class ResponsesReader(Reader):
    """A response, whole or in events."""

    _sent = 0
    _begun: Body | None = None

    def whole(self, body: Body) -> None:
        """Take a response."""
        self.usage, self.model = usage_in(body), text_or_none(body.get("model"))
        self.id = text_or_none(at(body, "conversation.id conversation id"))
        self.is_cut = at(body, "incomplete_details.reason") == "max_output_tokens"
        for index, item in enumerate(records(body.get("output"))):
            kind = str(item.get("type"))
            calls = self.protocol.turn(item).calls
            if kind == "message":
                self.says(content_text(item.get("content")))
            elif kind == "reasoning":
                self.writes(content_text(item.get("summary")))
            elif kind.endswith("_call"):
                known = {"name": item.get("name") or kind.removesuffix("_call")}
                arguments: Any = calls[0].arguments if calls else at(item, "arguments action query")
                known["id"] = item.get("call_id") or item.get("id")
                self.begins(index, known, arguments, hosted=not calls)

    def take(self, name: str, data: Body) -> None:
        """Take an event."""
        kind, number = str(data.get("type")), data.get("sequence_number")
        self._sent = number + 1 if isinstance(number, int) else self._sent
        if kind == "response.created":
            self._begun = record(data.get("response"))
        elif kind.endswith("output_text.delta"):
            self.says(data.get("delta"))
        elif kind.endswith(".delta"):
            self.writes(data.get("delta"))
        elif kind.startswith("response.output_item."):
            item = self.items[data.get("output_index") or 0] = record(data.get("item"))
            self.has_calls |= bool(self.protocol.turn(item).calls)
        elif kind in _ENDS:
            self.is_settled = True
            response = record(data.get("response"))
            if not response.get("output"):
                # Some servers end with the head of the response alone.
                response = {**response, "output": list(self.items.values())}
            text, shown = self.text, self.shown
            self.text, self.shown = [], []
            self.whole(response)
            self.text, self.shown = text, shown

    def closing(self, text: str) -> list[Event]:
        """Complete the response: a message that was begun has what it said, as clients check."""
        shown, output = "".join(self.shown), list[Body]()
        for _, item in sorted(self.items.items()):
            if item.get("type") == "message" and item.get("status") != "completed":
                item = {**item, "status": "completed", "content": _message(shown)["content"]}
            shown = shown.removeprefix(content_text(item.get("content")))
            output.append(item)
        _, *message, (name, end) = self.protocol.synthetic_stream(
            self.request, str(self.request.get("model") or ""), text, {}
        )
        if self.shown:
            message = []
        else:
            position = max(self.items, default=-1) + 1
            message = [(kind, {**data, "output_index": position}) for kind, data in message]
            output += end["response"]["output"]
        response = {**(self._begun or end["response"]), "status": "completed", "output": output}
        return _numbered([*message, (name, {"response": response})], self._sent)


class OpenAIResponses(ApiProtocol):
    """`/responses`."""

    provider = "openai"
    paths = Paths(
        messages="input",
        system="instructions",
        tools="tools",
        schema="text.format",
        bound="max_output_tokens",
        tool_choice="tool_choice",
        forced_tool="tool_choice.name",
        follows="previous_response_id conversation.id conversation",
    )
    dialect = RESPONSES
    reader_type = ResponsesReader
    min_output_tokens = 16
    can_refuse = True

    def prompt(self, body: Body) -> Body:
        """Return input, instructions, what fills a template, tools and the answer's form."""
        prompt, filled = super().prompt(body), record(at(body, "prompt.variables"))
        return {**prompt, "system": [prompt["system"], *filled.values()]} if filled else prompt

    def turns(self, body: Body) -> list[Any]:
        """Return the items; a text is the user's message."""
        given = body.get("input")
        is_text = isinstance(given, str)
        return [{"role": "user", "content": given}] if is_text else super().turns(body)

    def synthetic(self, body: Body, model: str, text: str, mark: Body) -> Body:
        """Return a response, by the id of the one that the provider goes on from."""
        message = _message(text, is_refusal=self.form(body) == "json")
        before = text_or_none(body.get("previous_response_id"))
        return {
            "id": before or "resp_synthetic",
            "object": "response",
            "created_at": 0,
            "status": "completed",
            "model": model,
            "output": [message],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "metadata": {},
            **dict.fromkeys(("error", "incomplete_details", "instructions")),
            "usage": {
                "input_tokens": 0,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": 0,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 0,
            },
            MARK: mark,
        }

    def synthetic_stream(self, body: Body, model: str, text: str, mark: Body) -> list[Event]:
        """Return the events of such a response."""
        response = self.synthetic(body, model, text, mark)
        begun: Body = {**response, "status": "in_progress", "output": []}
        (message,) = response["output"]
        (part,) = message["content"]
        kind, field = part["type"], "refusal" if part["type"] == "refusal" else "text"
        position: Body = {"output_index": 0}
        where: Body = {"item_id": message["id"], **position, "content_index": 0}
        written: Body = where if field == "refusal" else {**where, "logprobs": []}
        events: list[Event] = [
            ("response.created", {"response": begun}),
            (
                "response.output_item.added",
                {**position, "item": {**message, "status": "in_progress", "content": []}},
            ),
            ("response.content_part.added", {**where, "part": {**part, field: ""}}),
            (f"response.{kind}.delta", {**written, "delta": text}),
            (f"response.{kind}.done", {**written, field: text}),
            ("response.content_part.done", {**where, "part": part}),
            ("response.output_item.done", {**position, "item": message}),
            ("response.completed", {"response": response}),
        ]
        return _numbered(events, 0)


def _message(text: str, *, is_refusal: bool = False) -> Body:
    part: Body = {"type": "output_text", "text": text, "annotations": []}
    if is_refusal:
        part = {"type": "refusal", "refusal": text}
    return {
        "type": "message",
        "id": "msg_synthetic",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _numbered(events: Sequence[Event], first: int) -> list[Event]:
    """Return the events with their types and numbers."""
    return [
        (name, {**data, "type": name, "sequence_number": number})
        for number, (name, data) in enumerate(events, first)
    ]
