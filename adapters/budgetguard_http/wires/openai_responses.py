"""OpenAI's Responses, as its SDK and Azure speak them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from budgetguard_core import ToolCall
from budgetguard_http.wires.synthetic_response import (
    MESSAGE_ID,
    message_events,
    message_of,
    numbered,
    response_of,
)
from budgetguard_http.wires.wire import (
    MARK,
    NOTHING_LEFT,
    Answer,
    Ask,
    Body,
    Editor,
    Event,
    Prompted,
    Result,
    Wire,
    count_or_none,
    items,
    record,
    text_or_none,
    usage_in,
    written,
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
_FORMS: Final = frozenset({"json_schema", "json_object"})


class OpenAIResponses(Wire):
    """`/responses`."""

    name = "openai_responses"
    provider = "openai"
    min_output_tokens = 16

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

    def add_refused(self, body: Body, refused: Sequence[tuple[ToolCall, str]]) -> bool:
        """Put in outputs where the provider keeps the conversation."""
        if self.follows(body) is None:
            return False
        body["input"] = [*self.outputs(body, refused), *self.turns(body)]
        return True

    def outputs(self, body: Body, refused: Sequence[tuple[ToolCall, str]]) -> list[Body]:
        """Return outputs, of the kinds that the request's tools have."""
        tools = map(record, items(body.get("tools")))
        kinds = {tool.get("name"): tool.get("type") for tool in tools}
        found: list[Body] = []
        for call, text in refused:
            kind = "custom_tool" if kinds.get(call.name) == "custom" else "function"
            found.append({"type": f"{kind}_call_output", "call_id": call.id, "output": text})
        return found

    def wants_form(self, body: Body) -> bool:
        """Return whether JSON is asked for, or a certain tool's call."""
        form = record(record(body.get("text")).get("format")).get("type")
        return form in _FORMS or self.forced_tool(body) is not None

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

    def keep(self, body: Body, kept: Sequence[bool], text: str) -> Body:
        """Leave out items."""
        stays = iter(kept)
        body["output"] = [
            item for item in items(body.get("output")) if not _is_call(item) or next(stays)
        ]
        if not any(kept) and not any(
            record(one).get("type") == "message" for one in body["output"]
        ):
            body["output"].append(message_of(text))
        return body

    def editor(self, answer: Answer, ask: Ask | None, *, body: Body, hides_usage: bool) -> Editor:
        """Return the reader of the events."""
        del hides_usage
        return ResponsesEditor(self, answer, ask, str(body.get("model") or ""))

    def synthetic(self, model: str, text: str, mark: Mapping[str, Any]) -> Body:
        """Return a response without usage."""
        return {**response_of(model, [message_of(text)]), MARK: dict(mark)}

    def synthetic_stream(self, model: str, text: str, mark: Mapping[str, Any]) -> list[Event]:
        """Return the events of such a response."""
        response = self.synthetic(model, text, mark)
        begun: Body = {**response, "status": "in_progress", "output": []}
        events: list[Event] = [("response.created", {"response": begun}), *message_events(0, text)]
        return numbered([*events, ("response.completed", {"response": response})], 0)

    def placed(self, made: Body, body: Body) -> Body:
        """Give it the id of the response that the request follows: the provider goes on there."""
        before = text_or_none(body.get("previous_response_id"))
        if before is None:
            return made
        if "response" in made:
            return {**made, "response": {**made["response"], "id": before}}
        return {**made, "id": before} if "output" in made else made


class ResponsesEditor(Editor):
    """The events of a response."""

    def __init__(self, wire: OpenAIResponses, answer: Answer, ask: Ask | None, model: str) -> None:
        super().__init__(answer, ask)
        self._wire = wire
        self._response: Body = response_of(model, [])
        self._items: dict[int, Body] = {}
        """The items that the reader has got, by their places; those in `_open` not to their end."""
        self._open: set[int] = set()
        self._open_parts: dict[int, list[str]] = {}
        """What was said in the last part of each item that is open."""
        self._done: dict[int, Body] = {}
        """The items that are whole, held back or not, by their places."""
        self._held: list[Event] = []
        self._sent = 0

    def needs(self, event: bytes) -> bool:
        """Return True: numbers and places of the events may change."""
        del event
        return True

    def take(self, name: str, data: Body) -> list[Event] | None:
        """Take an event."""
        kind = str(data.get("type"))
        if kind == "response.created":
            self._response = record(data.get("response"))
        elif kind.endswith("output_text.delta"):
            self.answer.says(data.get("delta"))
        elif kind.endswith(".delta"):
            self.answer.writes(data.get("delta"))
        if kind == "response.output_item.done":
            self._done[data.get("output_index") or 0] = record(data.get("item"))
        if kind in _ENDS:
            self.is_settled = True
            response = record(data.get("response"))
            if not response.get("output"):
                # Some servers end with the head of the response alone.
                response = {**response, "output": [self._done[n] for n in sorted(self._done)]}
            fresh = Answer()
            fresh.text, fresh.said = self.answer.text, self.answer.said
            self._wire.read(response, fresh)
            self._take_over(fresh)
            if self._held or (self.ask is not None and fresh.calls):
                return self._released(name, data, response)
        elif self.ask is not None and (self._held or _is_local(data)):
            self._held.append((name, data))
            return []
        number = data.get("sequence_number")
        self._sent = number + 1 if isinstance(number, int) else self._sent
        self._passed_on(kind, data)
        return None

    def _passed_on(self, kind: str, data: Body) -> None:
        """Note what the reader has got, to close it in good order where the answer is cut."""
        place = data.get("output_index")
        if not isinstance(place, int):
            return
        if kind == "response.output_item.added":
            self._items[place] = {**record(data.get("item"))}
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
        """Complete what there is; tool calls, of which some were held back, are left out."""
        said = bool(self.answer.said)
        events: list[Event] = []
        for place in sorted(self._open):
            item = self._items[place]
            if item.get("type") == "message":
                events += self._finished(place, item, "" if said else text)
            elif not _is_call(item):
                events.append(("response.output_item.done", {"output_index": place, "item": item}))
        done = [self._items[place] for place in sorted(self._items)]
        done = [item for item in done if not _is_call(item)]
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

    def _take_over(self, whole: Answer) -> None:
        answer = self.answer
        answer.usage, answer.model, answer.id = whole.usage, whole.model, whole.id
        answer.is_cut, answer.calls, answer.hosted = whole.is_cut, whole.calls, whole.hosted

    def _released(self, name: str, last: Body, response: Body) -> list[Event]:
        places = [n for n, one in enumerate(items(response.get("output"))) if _is_call(one)]
        kept = self.ask(self.answer.calls) if self.ask is not None else [True] * len(places)
        dropped = {place for place, stays in zip(places, kept, strict=True) if not stays}
        events: list[Event] = []
        for held_name, held in self._held:
            index = held.get("output_index")
            if index in dropped:
                continue
            if isinstance(index, int):
                held = {**held, "output_index": index - sum(one < index for one in dropped)}
            events.append((held_name, held))
        self._held = []
        if dropped:
            response = self._wire.keep(response, kept, NOTHING_LEFT)
            last = {**last, "response": response}
            output = items(response.get("output"))
            if output and output[-1].get("id") == MESSAGE_ID:
                events += message_events(len(output) - 1, NOTHING_LEFT)
        return numbered([*events, (name, last)], self._sent)


def _conversation(body: Body) -> str | None:
    given = body.get("conversation")
    return text_or_none(given) or text_or_none(record(given).get("id"))


def _is_call(item: object) -> bool:
    fields = record(item)
    where = record(fields.get("environment")).get("type")
    return fields.get("type") in _LOCAL and where != _AT_THE_PROVIDER


def _is_local(data: Body) -> bool:
    return _is_call(data.get("item"))


def _call(item: Body, *, hosted: bool = False) -> ToolCall:
    known = ("arguments", "input", "action", "operation", "query")
    arguments = next((item[name] for name in known if item.get(name) is not None), None)
    return ToolCall(
        name=str(item.get("name") or str(item.get("type")).removesuffix("_call")),
        arguments=arguments,
        id=text_or_none(item.get("call_id")) or text_or_none(item.get("id")),
        kind="hosted" if hosted else "function",
    )
