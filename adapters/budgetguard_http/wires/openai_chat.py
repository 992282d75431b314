"""OpenAI's chat completions, as its SDK, Azure and every compatible server speak them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, TypeAlias

from budgetguard_core import ToolCall
from budgetguard_core.kit import merge_usage
from budgetguard_http.wires.wire import (
    MARK,
    NOTHING_LEFT,
    SYNTHETIC_ID,
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
    repeated,
    text_of,
    text_or_none,
    usage_in,
    written,
)

DONE: Final[Event] = ("", "[DONE]")
_FORMS: Final = frozenset({"json_schema", "json_object"})
# Within a JSON text there is no quote without a backslash, so that what ends in `":` is a name.
_TEXT: Final = re.compile(
    rb'"(content|refusal|reasoning(?:_content)?)":\s*"([^"\\]*(?:\\.[^"\\]*)*)"'
)
_MORE_THAN_TEXT: Final = re.compile(
    rb'"(?:(?:tool_calls|usage|x_groq)":\s*[^n\s]|content":\s*\[|finish_reason":\s*")'
)
_SAID: Final = (b"content", b"refusal")
_BESIDE_CONTENT: Final = frozenset({"refusal", "reasoning_content", "reasoning"})
_ID: Final = f"chatcmpl-{SYNTHETIC_ID}"


class OpenAIChat(Wire):
    """`/chat/completions`."""

    name = "openai_chat"
    bound_field: ClassVar[str] = "max_completion_tokens"

    def bound(self, body: Body) -> int | None:
        """Return the lower of the two fields that there are for it."""
        newer, older = body.get("max_completion_tokens"), body.get("max_tokens")
        one, other = count_or_none(newer), count_or_none(older)
        return one or other if one is None or other is None else min(one, other)

    def set_bound(self, body: Body, tokens: int) -> None:
        """Write the field that the request has already: servers know one of them or both."""
        body["max_tokens" if "max_tokens" in body else self.bound_field] = tokens

    def choices(self, body: Body) -> int:
        """Return `n`."""
        return (count_or_none(body["n"]) or 1) if "n" in body else 1

    def prompt(self, body: Body) -> Prompted:
        """Return messages, tools and the form of the answer."""
        return Prompted(
            body.get("messages"),
            tools=items(body.get("tools")),
            output_schema=body.get("response_format"),
        )

    def turns(self, body: Body) -> list[Any]:
        """Return the messages."""
        return items(body.get("messages"))

    def results(self, body: Body) -> list[Result]:
        """Return the tool messages since the last reply."""
        found: list[Result] = []
        for turn in reversed(items(body.get("messages"))):
            message = record(turn)
            if message.get("role") == "tool":
                found.append(Result(message.get("tool_call_id"), message.get("content")))
            elif message.get("role") == "assistant":
                break
        return found[::-1]

    def reply_mark(self, turn: Any) -> tuple[str | None, ...] | None:
        """Return the ids of an assistant message's calls, or its text."""
        message = record(turn)
        if message.get("role") != "assistant":
            return None
        ids = tuple(record(call).get("id") for call in items(message.get("tool_calls")))
        return ids or (written(message.get("content")).strip(),)

    def user_text(self, turn: Any) -> str | None:
        """Return the text of a user message."""
        message = record(turn)
        return written(message.get("content")) if message.get("role") == "user" else None

    def add_nudge(self, body: Body, text: str) -> None:
        """Put it into the last tool result; else it is a message of its own."""
        last = record(body["messages"][-1])
        if last.get("role") == "tool" and isinstance(last.get("content"), str):
            last["content"] += f"\n\n{text}"
        else:
            body["messages"].append({"role": "user", "content": text})

    def wants_form(self, body: Body) -> bool:
        """Return whether JSON is asked for, or a certain tool's call."""
        form = record(body.get("response_format")).get("type")
        return form in _FORMS or self.forced_tool(body) is not None

    def forced_tool(self, body: Body) -> str | None:
        """Return the name in `tool_choice`."""
        choice = record(body.get("tool_choice"))
        return text_or_none(record(choice.get("function")).get("name"))

    def ask_for_usage(self, body: Body) -> bool:
        """Ask by `stream_options`."""
        options = record(body.get("stream_options"))
        if options.get("include_usage"):
            return False
        body["stream_options"] = {**options, "include_usage": True}
        return True

    def read(self, body: Body, answer: Answer) -> None:
        """Read message, calls and usage of every choice."""
        answer.usage, answer.model = usage_in(body), text_or_none(body.get("model"))
        answer.id = text_or_none(body.get("id"))
        for one in items(body.get("choices")):
            choice = record(one)
            message = record(choice.get("message"))
            _write(answer, message)
            answer.is_cut |= choice.get("finish_reason") == "length"
            for call in items(message.get("tool_calls")):
                answer.calls.append(_call(answer, record(call)))

    def keep(self, body: Body, kept: Sequence[bool], text: str) -> Body:
        """Leave out calls of each choice."""
        stays = iter(kept)
        for choice in items(body.get("choices")):
            message = record(choice.get("message"))
            calls = items(message.get("tool_calls"))
            if not calls:
                continue
            message["tool_calls"] = [call for call in calls if next(stays)]
            if not message["tool_calls"]:
                del message["tool_calls"]
                message["content"] = message.get("content") or text
                choice["finish_reason"] = "stop"
        return body

    def editor(self, answer: Answer, ask: Ask | None, *, body: Body, hides_usage: bool) -> Editor:
        """Return the reader of the chunks."""
        return ChatEditor(answer, ask, choices=self.choices(body), hides_usage=hides_usage)

    def synthetic(self, model: str, text: str, mark: Mapping[str, Any]) -> Body:
        """Return a completion without usage."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return {
            "id": _ID,
            "object": "chat.completion",
            "created": 0,
            "model": model,
            "choices": [choice],
            MARK: dict(mark),
        }

    def synthetic_stream(self, model: str, text: str, mark: Mapping[str, Any]) -> list[Event]:
        """Return two chunks and the end."""
        said = {"role": "assistant", "content": text}
        return [
            ("", {**_chunk(model, said, None), MARK: dict(mark)}),
            ("", _chunk(model, {}, "stop")),
            DONE,
        ]

    def placed(self, made: Body, body: Body) -> Body:
        """Give it as many choices as were asked for."""
        return repeated(made, "choices", self.choices(body))


_Key: TypeAlias = tuple[int, int, int]
_Latest: TypeAlias = dict[tuple[int, int], tuple[int, str | None]]


class ChatEditor(Editor):
    """The chunks of a chat completion."""

    def __init__(self, answer: Answer, ask: Ask | None, *, choices: int, hides_usage: bool) -> None:
        super().__init__(answer, ask)
        self._choices = choices
        self._finished: set[int] = set()
        self._hides_usage = hides_usage
        self._parts: dict[_Key, Body] = {}
        self._kept: dict[_Key, bool] = {}
        """Whether a call stays, of those that were asked for."""
        self._read: _Latest = {}
        self._written: _Latest = {}
        """The same as of what was passed on: what is held back is edited later."""
        self._held: list[Body] = []

    def needs(self, event: bytes) -> bool:
        """Recognise it by the names of what is more than text."""
        return bool(self._held) or _MORE_THAN_TEXT.search(event) is not None or b"[DONE]" in event

    def skim(self, event: bytes) -> None:
        """Find the text without parsing JSON, which most of the time would go into."""
        for name, piece in _TEXT.findall(event):
            text = text_of(piece)
            self.answer.says(text) if name in _SAID else self.answer.writes(text)

    def rest(self) -> list[Event]:
        """Release what may stay of an answer that never reported its end."""
        if not self._held:
            # A server may send fewer choices than it was asked for.
            self._collect()
            return []
        *self._held, last = self._held
        return [("", one) for one in self._released(last)]

    def take(self, name: str, data: Body) -> list[Event] | None:
        """Take a chunk."""
        answer, choices = self.answer, items(data.get("choices"))
        # A server that has sent it with the answer sends it unasked.
        was_told = answer.usage is not None
        answer.usage = merge_usage(answer.usage, usage_in(data))
        answer.model = text_or_none(data.get("model")) or answer.model
        answer.id = text_or_none(data.get("id")) or answer.id
        if not self._held:
            self._written = self._read.copy()
        for choice in choices:
            delta, place = record(choice.get("delta")), choice.get("index")
            place = place if isinstance(place, int) else 0
            _write(answer, delta)
            answer.is_cut |= choice.get("finish_reason") == "length"
            for number, piece in enumerate(items(delta.get("tool_calls"))):
                self._take_part(place, number, record(piece))
            if choice.get("finish_reason"):
                self._finished.add(place)
        if self._hides_usage and not (choices or was_told) and data.get("usage"):
            return []
        if len(self._parts) > len(self._kept):
            over = len(self._finished) >= self._choices
            if self.ask is None:
                if over:
                    self._collect()
                return None
            if not over:
                self._held.append(data)
                return []
            return [(name, one) for one in self._released(data)]
        return None if all(self._kept.values()) else [(name, self._edited(data))]

    def closing(self, text: str) -> list[Event]:
        """Finish the choice, with a text where there was none."""
        model = self.answer.model or ""
        delta = {} if self.answer.said else {"role": "assistant", "content": text}
        return [("", {**_chunk(model, delta, "stop"), "id": self.answer.id or _ID}), DONE]

    def _take_part(self, place: int, number: int, piece: Body) -> None:
        key = _key_of(place, number, piece, self._read)
        if key not in self._parts:
            # Some servers say with each call that the answer is finished.
            self._finished.discard(place)
            self._parts[key] = {"id": None, "name": "", "written": [], "whole": ""}
        part = self._parts[key]
        named, arguments = _called(piece)
        part["id"] = part["id"] or piece.get("id")
        part["name"] += named
        if isinstance(arguments, str):
            part["written"].append(arguments)
        elif arguments:
            part["whole"] = arguments
        _write_arguments(self.answer, arguments)

    def _collect(self) -> None:
        """Take the calls that are new, and ask for them where no layer above does."""
        keys = sorted(self._parts.keys() - self._kept.keys())
        calls = [_joined(self._parts[key]) for key in keys]
        self.answer.calls += calls
        stays = self.ask(calls) if self.ask and calls else [True] * len(calls)
        self._kept.update(zip(keys, stays, strict=True))

    def _released(self, last: Body) -> list[Body]:
        self._collect()
        held, self._held = [*self._held, last], []
        return held if all(self._kept.values()) else [self._edited(data) for data in held]

    def _edited(self, data: Body) -> Body:
        choices = [self._without(record(choice)) for choice in items(data.get("choices"))]
        return {**data, "choices": choices}

    def _without(self, choice: Body) -> Body:
        kept = self._kept
        place, delta = choice.get("index") or 0, dict(record(choice.get("delta")))
        mine = [key for key in sorted(kept) if key[0] == place and kept[key]]
        if "tool_calls" in delta:
            pieces: list[Body] = []
            for number, piece in enumerate(items(delta.pop("tool_calls"))):
                key = _key_of(place, number, record(piece), self._written)
                if kept.get(key):
                    pieces.append({**piece, "index": mine.index(key)})
            if pieces:
                delta["tool_calls"] = pieces
        if choice.get("finish_reason") and not mine:
            if not self.answer.said:
                delta["content"] = NOTHING_LEFT
            return {**choice, "delta": delta, "finish_reason": "stop"}
        return {**choice, "delta": delta}


def _write(answer: Answer, message: Body) -> None:
    said = message.get("content")
    if said:
        answer.says(said if isinstance(said, str) else written(said))
    if not _BESIDE_CONTENT.isdisjoint(message):
        if refusal := message.get("refusal"):
            answer.says(refusal)
        for name in ("reasoning_content", "reasoning"):
            if thought := message.get(name):
                answer.writes(thought)


def _key_of(place: int, number: int, piece: Body, latest: _Latest) -> _Key:
    """Return which call of which choice a piece belongs to.

    By the index. Some servers give several calls the same one, each with a name and an id of its
    own; others make up an id for each piece, and only the first has a name.
    """
    given, own = piece.get("index"), text_or_none(piece.get("id"))
    index = number if given is None else int(given)
    turn, known = latest.get((place, index), (0, None))
    if own is not None and known not in (None, own) and _called(piece)[0]:
        turn += 1
    latest[place, index] = turn, own or known
    return place, index, turn


def _called(call: Body) -> tuple[str, Any]:
    """Return name and arguments of a call, or of a piece of one."""
    function = record(call.get("function")) or record(call.get("custom"))
    return function.get("name") or "", function.get("arguments", function.get("input"))


def _write_arguments(answer: Answer, arguments: Any) -> None:
    if arguments is not None:
        answer.writes(arguments if isinstance(arguments, str) else str(arguments))


def _call(answer: Answer, call: Body) -> ToolCall:
    name, arguments = _called(call)
    _write_arguments(answer, arguments)
    return ToolCall(name=str(name), arguments=arguments, id=text_or_none(call.get("id")))


def _joined(part: Body) -> ToolCall:
    arguments = part["whole"] or "".join(part["written"])
    return ToolCall(name=part["name"], arguments=arguments, id=text_or_none(part["id"]))


def _chunk(model: str, delta: Body, finish: str | None) -> Body:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {
        "id": _ID,
        "object": "chat.completion.chunk",
        "created": 0,
        "model": model,
        "choices": [choice],
    }
