"""OpenAI's Responses, as its SDK and Azure speak them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from budgetguard_core.kit import ToolCall
from budgetguard_http.protocols.protocol import (
    MARK,
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
    text_or_none,
    usage_in,
    written,
)
from budgetguard_http.protocols.synthetic_response import (
    message_events,
    message_of,
    numbered,
    response_of,
)

_ENDS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
# What the client has to run; every other item that ends in `_call` was run by the provider.
_LOCAL: Final = frozenset(
    f"{what}_call"
    for what in ("apply_patch", "computer", "custom_tool", "function", "local_shell", "shell")
)
_AT_THE_PROVIDER: Final = "container_reference"
# Beside messages and the results of calls, what the model has no part in.
_CLIENTS: Final = frozenset({"item_reference", "mcp_approval_response"})
_CALLED: Final = ("function", "custom")
_FORMS: Final = frozenset({"json_schema", "json_object"})


class OpenAIResponses(ApiProtocol):
    """`/responses`."""

    name = "openai_responses"
    provider = "openai"
    min_output_tokens = 16
    can_refuse = True

    def bound(self, body: Body) -> int | None:
        """Return `max_output_tokens`."""
        return count_or_none(body.get("max_output_tokens"))

    def set_bound(self, body: Body, tokens: int) -> None:
        """Write `max_output_tokens`."""
        body["max_output_tokens"] = tokens

    def prompt(self, body: Body) -> Prompted:
        """Return input, instructions, what fills a template, tools and the answer's form."""
        system, filled = body.get("instructions"), record(body.get("prompt")).get("variables")
        return Prompted(
            body.get("input"),
            system=[system, *record(filled).values()] if filled else system,
            tools=items(body.get("tools")),
            output_schema=record(body.get("text")).get("format"),
        )

    def turns(self, body: Body) -> list[Any]:
        """Return the items; a text is the user's message."""
        given = body.get("input")
        return [{"role": "user", "content": given}] if isinstance(given, str) else items(given)

    def follows(self, body: Body) -> str | None:
        """Return the response or the conversation that the provider goes on with."""
        return text_or_none(body.get("previous_response_id")) or _conversation(body)

    def results(self, body: Body) -> list[Result]:
        """Return the outputs after the model's last item."""
        found: list[Result] = []
        for item in reversed([record(one) for one in items(body.get("input"))]):
            kind = str(item.get("type"))
            if kind.endswith("_call_output"):
                found.append(Result(item.get("call_id"), item.get("output")))
            elif self.reply_mark(item) is not None:
                break
        return found[::-1]

    def reply_mark(self, turn: Any) -> tuple[str | None, ...] | None:
        """Return the id of a call, or the text of a message of the model's; of others nothing."""
        item = record(turn)
        if _is_call(item):
            return (item.get("call_id"),)
        if item.get("role") == "assistant":
            return (written(item.get("content")).strip(),)
        return None if item.get("role") or item.get("type") in _CLIENTS else ("",)

    def user_text(self, turn: Any) -> str | None:
        """Return the text of a user item."""
        item = record(turn)
        return written(item.get("content")) if item.get("role") == "user" else None

    def add_nudge(self, body: Body, text: str) -> None:
        """Put it into the last output; else it is an item of its own."""
        body["input"] = self.turns(body)
        last = record(body["input"][-1]) if body["input"] else {}
        if last.get("type") == "function_call_output" and isinstance(last.get("output"), str):
            last["output"] += f"\n\n{text}"
        else:
            body["input"].append({"role": "user", "content": text})

    def form(self, body: Body) -> Form:
        """Return it by `tool_choice` and `text.format`; after a hosted tool there is a text."""
        choice = body.get("tool_choice")
        kind, mode = record(choice).get("type"), record(choice).get("mode")
        if choice == "required" or kind in _CALLED or mode == "required":
            return "tool"
        is_json = record(record(body.get("text")).get("format")).get("type") in _FORMS
        return "json" if is_json else "text"

    def forced_tool(self, body: Body) -> str | None:
        """Return the name in `tool_choice`."""
        return text_or_none(record(body.get("tool_choice")).get("name"))

    def read(self, body: Body, answer: Answer) -> None:
        """Read the items and the usage."""
        answer.usage, answer.model = usage_in(body), text_or_none(body.get("model"))
        answer.id = _conversation(body) or text_or_none(body.get("id"))
        details = record(body.get("incomplete_details"))
        answer.is_cut = details.get("reason") == "max_output_tokens"
        for item in map(record, items(body.get("output"))):
            kind = str(item.get("type"))
            if kind == "message":
                answer.says(written(item.get("content")))
            elif kind == "reasoning":
                answer.writes(written(item.get("summary")))
            elif _is_call(item):
                call = _call(item)
                answer.writes(str(call.arguments))
                answer.calls.append(call)
            elif kind.endswith("_call"):
                answer.hosted.append(_call(item, hosted=True))

    def reader(self, answer: Answer, *, body: Body, hides_usage: bool) -> Reader:
        """Return the reader of the events."""
        del hides_usage
        return ResponsesReader(self, answer, str(body.get("model") or ""))

    def synthetic(self, body: Body, model: str, text: str, mark: Mapping[str, Any]) -> Body:
        """Return a response, by the id of the one that the provider goes on from."""
        message = message_of(text, is_refusal=self.form(body) == "json")
        made = {**response_of(model, [message]), MARK: dict(mark)}
        before = text_or_none(body.get("previous_response_id"))
        return made if before is None else {**made, "id": before}

    def synthetic_stream(
        self, body: Body, model: str, text: str, mark: Mapping[str, Any]
    ) -> list[Event]:
        """Return the events of such a response."""
        response = self.synthetic(body, model, text, mark)
        begun: Body = {**response, "status": "in_progress", "output": []}
        events: list[Event] = [
            ("response.created", {"response": begun}),
            *message_events(0, text, is_refusal=self.form(body) == "json"),
        ]
        return numbered([*events, ("response.completed", {"response": response})], 0)


class ResponsesReader(Reader):
    """The events of a response."""

    def __init__(self, protocol: OpenAIResponses, answer: Answer, model: str) -> None:
        super().__init__(answer)
        self._wire = protocol
        self._response: Body = response_of(model, [])
        self._items: dict[int, Body] = {}
        """The items that the reader has got, by their places; those in `_open` not to their end."""
        self._open: set[int] = set()
        self._open_parts: dict[int, list[str]] = {}
        """What was said in the last part of each item that is open."""
        self._sent = 0

    def take(self, name: str, data: Body) -> None:
        """Take an event."""
        del name
        kind = str(data.get("type"))
        if kind == "response.created":
            self._response = record(data.get("response"))
        elif kind.endswith("output_text.delta"):
            self.answer.says(data.get("delta"))
        elif kind.endswith(".delta"):
            self.answer.writes(data.get("delta"))
        number = data.get("sequence_number")
        self._sent = number + 1 if isinstance(number, int) else self._sent
        self._passed_on(kind, data)
        if kind in _ENDS:
            self.is_settled = True
            response = record(data.get("response"))
            if not response.get("output"):
                # Some servers end with the head of the response alone.
                done = [self._items[n] for n in sorted(self._items)]
                response = {**response, "output": done}
            text, said = self.answer.text, self.answer.said
            self.answer.text, self.answer.said = [], []
            self._wire.read(response, self.answer)
            self.answer.text, self.answer.said = text, said

    def _passed_on(self, kind: str, data: Body) -> None:
        """Note what the reader has got, to close it in good order where the answer is cut."""
        place = data.get("output_index")
        if not isinstance(place, int):
            return
        if kind == "response.output_item.added":
            self._items[place] = {**record(data.get("item"))}
            self.has_calls |= _is_call(data.get("item"))
            self._open.add(place)
        elif kind == "response.output_item.done":
            self._items[place] = record(data.get("item"))
            self._open.discard(place)
        elif place not in self._open:
            return
        elif kind == "response.content_part.added":
            item = self._items[place]
            item["content"] = [*items(item.get("content")), {**record(data.get("part"))}]
            self._open_parts[place] = []
        elif kind == "response.content_part.done":
            self._items[place]["content"][-1:] = [record(data.get("part"))]
            self._open_parts.pop(place, None)
        elif kind == "response.output_text.delta" and place in self._open_parts:
            self._open_parts[place].append(str(data.get("delta") or ""))

    def closing(self, text: str) -> list[Event]:
        """Complete what there is."""
        said = bool(self.answer.said)
        events: list[Event] = []
        for place in sorted(self._open):
            item = self._items[place]
            if item.get("type") == "message":
                events += self._finished(place, item, "" if said else text)
            else:
                events.append(("response.output_item.done", {"output_index": place, "item": item}))
        done = [self._items[place] for place in sorted(self._items)]
        if not any(item.get("type") == "message" for item in done):
            events += message_events(max(self._items, default=-1) + 1, text)
            done.append(message_of(text))
        response = {**self._response, "status": "completed", "output": done}
        return numbered([*events, ("response.completed", {"response": response})], self._sent)

    def _finished(self, place: int, item: Body, text: str) -> list[Event]:
        """Finish a message that was begun, with a text where nothing was said."""
        events: list[Event] = []
        parts: list[Body] = items(item.get("content"))
        at: Body = {"item_id": item.get("id"), "output_index": place}
        if not parts:
            empty: Body = {"type": "output_text", "text": "", "annotations": []}
            parts = [{**empty}]
            self._open_parts[place] = []
            events.append(
                ("response.content_part.added", {**at, "content_index": 0, "part": empty})
            )
        at["content_index"], part = len(parts) - 1, parts[-1]
        if place in self._open_parts:
            if part.get("type") == "output_text":
                part["text"] = (part.get("text") or "") + "".join(self._open_parts[place])
                if text:
                    part["text"] = text
                    said: Body = {"delta": text, "logprobs": []}
                    events.append(("response.output_text.delta", {**at, **said}))
                whole: Body = {"text": part.get("text") or "", "logprobs": []}
                events.append(("response.output_text.done", {**at, **whole}))
            events.append(("response.content_part.done", {**at, "part": part}))
        item.update(status="completed", content=parts)
        return [*events, ("response.output_item.done", {"output_index": place, "item": item})]


def _conversation(body: Body) -> str | None:
    given = body.get("conversation")
    return text_or_none(given) or text_or_none(record(given).get("id"))


def _is_call(item: object) -> bool:
    fields = record(item)
    where = record(fields.get("environment")).get("type")
    return fields.get("type") in _LOCAL and where != _AT_THE_PROVIDER


def _call(item: Body, *, hosted: bool = False) -> ToolCall:
    known = ("arguments", "input", "action", "operation", "query")
    arguments = next((item[name] for name in known if item.get(name) is not None), None)
    return ToolCall(
        name=str(item.get("name") or str(item.get("type")).removesuffix("_call")),
        arguments=arguments,
        id=text_or_none(item.get("call_id")) or text_or_none(item.get("id")),
        kind="hosted" if hosted else "function",
    )
