"""OpenAI's chat completions, as its SDK, Azure and every compatible server speak them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeAlias

from budgetguard_core.kit import ToolCall, merge_usage
from budgetguard_http.protocols.protocol import (
    MARK,
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
    text_of,
    text_or_none,
    usage_in,
    written,
)

DONE: Final[Event] = ("", "[DONE]")
_FORMS: Final = frozenset({"json_schema", "json_object"})
_MUST_CALL: Final = ("required", "any")
_CALLED: Final = ("function", "custom")
# Within a JSON text there is no quote without a backslash, so that what ends in `":` is a name.
_TEXT: Final = re.compile(
    rb'"(content|refusal|text|reasoning(?:_content)?)":\s*"([^"\\]*(?:\\.[^"\\]*)*)"'
)
_MORE_THAN_TEXT: Final = re.compile(
    rb'"(?:(?:tool_calls|usage|x_groq)":\s*[^n\s]|content":\s*\[|finish_reason":\s*")'
)
_SAID: Final = (b"content", b"refusal", b"text")
_BESIDE_CONTENT: Final = frozenset({"refusal", "reasoning_content", "reasoning"})
_NO_USAGE: Final = {
    "prompt_tokens": 0,
    "completion_tokens": 0,
    "total_tokens": 0,
    "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
}
_ID: Final = f"chatcmpl-{SYNTHETIC_ID}"


class OpenAIChat(ApiProtocol):
    """`/chat/completions`."""

    name = "openai_chat"
    bound_field: ClassVar[str] = "max_completion_tokens"
    can_refuse = True

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

    def form(self, body: Body) -> Form:
        """Return it by `tool_choice` and `response_format`."""
        choice = body.get("tool_choice")
        if choice in _MUST_CALL or record(choice).get("type") in _CALLED:
            return "tool"
        if record(record(choice).get("allowed_tools")).get("mode") == "required":
            return "tool"
        is_json = record(body.get("response_format")).get("type") in _FORMS
        return "json" if is_json else "text"

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
            answer.says(choice.get("text"))
            answer.is_cut |= choice.get("finish_reason") == "length"
            for call in items(message.get("tool_calls")):
                answer.calls.append(_call(answer, record(call)))

    def reader(self, answer: Answer, *, body: Body, hides_usage: bool) -> Reader:
        """Return the reader of the chunks."""
        del body
        return ChatReader(answer, hides_usage=hides_usage)

    def synthetic(self, body: Body, model: str, text: str, mark: Mapping[str, Any]) -> Body:
        """Return a completion whose usage is zero: programs read it."""
        message: Body = {"role": "assistant", "content": None, "refusal": None}
        message[self._place_of_text(body)] = text
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return {
            "id": _ID,
            "object": "chat.completion",
            "created": 0,
            "model": model,
            "choices": repeated(choice, self.choices(body)),
            "usage": dict(_NO_USAGE),
            MARK: dict(mark),
        }

    def synthetic_stream(
        self, body: Body, model: str, text: str, mark: Mapping[str, Any]
    ) -> list[Event]:
        """Return two chunks, the usage where it is asked for, and the end."""
        place = self._place_of_text(body)
        chunks: list[Body] = [
            {**_chunk(model, {"role": "assistant", place: text}, None), MARK: dict(mark)},
            _chunk(model, {}, "stop"),
        ]
        for chunk in chunks:
            chunk["choices"] = repeated(chunk["choices"][0], self.choices(body))
        if record(body.get("stream_options")).get("include_usage"):
            chunks.append({**chunks[1], "choices": [], "usage": dict(_NO_USAGE)})
        return [*(("", chunk) for chunk in chunks), DONE]

    def _place_of_text(self, body: Body) -> str:
        return "refusal" if self.can_refuse and self.form(body) == "json" else "content"


_Key: TypeAlias = tuple[int, int, int]
_Latest: TypeAlias = dict[tuple[int, int], tuple[int, str | None]]


class ChatReader(Reader):
    """The chunks of a chat completion."""

    def __init__(self, answer: Answer, *, hides_usage: bool) -> None:
        super().__init__(answer)
        self._hides_usage = hides_usage
        self._parts: dict[_Key, Body] = {}
        self._latest: _Latest = {}

    def needs(self, event: bytes) -> bool:
        """Recognise it by the names of what is more than text."""
        return _MORE_THAN_TEXT.search(event) is not None or b"[DONE]" in event

    def skim(self, event: bytes) -> None:
        """Find the text without parsing JSON, which most of the time would go into."""
        for name, piece in _TEXT.findall(event):
            text = text_of(piece)
            self.answer.says(text) if name in _SAID else self.answer.writes(text)

    def take(self, name: str, data: Body) -> bool:
        """Take a chunk; hide that of the usage where its client did not ask for it."""
        del name
        answer, choices = self.answer, items(data.get("choices"))
        # A server that has sent it with the answer sends it unasked.
        was_told = answer.usage is not None
        answer.usage = merge_usage(answer.usage, usage_in(data))
        answer.model = text_or_none(data.get("model")) or answer.model
        answer.id = text_or_none(data.get("id")) or answer.id
        for choice in choices:
            delta, place = record(choice.get("delta")), choice.get("index")
            place = place if isinstance(place, int) else 0
            _write(answer, delta)
            answer.says(choice.get("text"))
            answer.is_cut |= choice.get("finish_reason") == "length"
            for number, piece in enumerate(items(delta.get("tool_calls"))):
                self._take_part(place, number, record(piece))
        return self._hides_usage and not (choices or was_told) and bool(data.get("usage"))

    def end(self) -> None:
        """Take the calls, whose pieces have all come; some servers send more after the end."""
        self.answer.calls = [_joined(self._parts[key]) for key in sorted(self._parts)]

    def closing(self, text: str) -> list[Event]:
        """Finish the choice, with a text where there was none."""
        model = self.answer.model or ""
        delta = {} if self.answer.said else {"role": "assistant", "content": text}
        return [("", {**_chunk(model, delta, "stop"), "id": self.answer.id or _ID}), DONE]

    def _take_part(self, place: int, number: int, piece: Body) -> None:
        key = _key_of(place, number, piece, self._latest)
        self.has_calls = True
        part = self._parts.setdefault(key, {"id": None, "name": "", "written": [], "whole": ""})
        named, arguments = _called(piece)
        part["id"] = part["id"] or piece.get("id")
        part["name"] += named
        if isinstance(arguments, str):
            part["written"].append(arguments)
        elif arguments:
            part["whole"] = arguments
        _write_arguments(self.answer, arguments)


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
