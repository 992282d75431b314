"""OpenAI's chat completions, as its SDK, Azure, Mistral and every compatible server speak them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from budgetguard_core.kit import ToolCall, merge_usage
from budgetguard_http.protocols.protocol import (
    MARK,
    SYNTHETIC_ID,
    ApiProtocol,
    Body,
    Event,
    Form,
    Paths,
    Prompted,
    Reader,
    Result,
    Turn,
    at,
    count_or_none,
    record,
    records,
    repeated,
    text_or_none,
    usage_in,
    written,
)

DONE: Final[Event] = ("", "[DONE]")
_MUST_CALL: Final = ("required", "any")
_CALLED: Final = ("function", "custom")
_BESIDE_CONTENT: Final = frozenset({"refusal", "reasoning_content", "reasoning"})
_NO_USAGE: Final = {
    "prompt_tokens": 0,
    "completion_tokens": 0,
    "total_tokens": 0,
    "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
}
_ID: Final = f"chatcmpl-{SYNTHETIC_ID}"


class ChatReader(Reader):
    """A chat completion, whole or in chunks."""

    def take(self, name: str, data: Body) -> bool:
        """Take a chunk; hide that of the usage where its client did not ask for it."""
        answer, choices = self.answer, records(data.get("choices"))
        # A server that has sent it with the answer sends it unasked.
        was_told = answer.usage is not None
        answer.usage = merge_usage(answer.usage, usage_in(data))
        answer.model = text_or_none(data.get("model")) or answer.model
        answer.id = text_or_none(data.get("id")) or answer.id
        for choice in choices:
            message, place = record(choice.get("delta") or choice.get("message")), 0
            if isinstance(choice.get("index"), int):
                place = choice["index"]
            self._write(message)
            answer.says(choice.get("text"))
            answer.is_cut |= choice.get("finish_reason") == "length"
            for number, piece in enumerate(records(message.get("tool_calls"))):
                self._take_call(place, number, piece)
        return self.hides_usage and not (choices or was_told) and bool(data.get("usage"))

    def end(self) -> None:
        """Take the calls, whose pieces have all come; some servers send more after the end."""
        self.answer.calls = [_joined(self.parts[key]) for key in sorted(self.parts)]

    def closing(self, text: str) -> list[Event]:
        """Finish the choice, with a text where there was none."""
        model = self.answer.model or ""
        delta = {} if self.answer.said else {"role": "assistant", "content": text}
        return [("", {**_chunk(model, delta, "stop"), "id": self.answer.id or _ID}), DONE]

    def _write(self, message: Body) -> None:
        said = message.get("content")
        if said:
            self.answer.says(said if isinstance(said, str) else written(said))
        if not _BESIDE_CONTENT.isdisjoint(message):
            self.answer.says(message.get("refusal"))
            self.answer.writes(message.get("reasoning_content"))
            self.answer.writes(message.get("reasoning"))

    def _take_call(self, place: int, number: int, piece: Body) -> None:
        """Take a call, or a piece of one."""
        key = self._key_of(place, number, piece)
        self.has_calls = True
        part = self.parts.setdefault(key, {"id": None, "name": "", "written": [], "whole": ""})
        named, arguments = _called(piece)
        part["id"] = part["id"] or piece.get("id")
        part["name"] += named
        if isinstance(arguments, str):
            part["written"].append(arguments)
        elif arguments:
            part["whole"] = arguments
        if arguments is not None:
            self.answer.writes(arguments if isinstance(arguments, str) else str(arguments))

    def _key_of(self, place: int, number: int, piece: Body) -> tuple[int, int, int]:
        """Return which call of which choice a piece belongs to.

        By the index. Some servers give several calls the same one, each with a name and an id of
        its own; others make up an id for each piece, and only the first has a name.
        """
        given, own = piece.get("index"), text_or_none(piece.get("id"))
        index = number if given is None else int(given)
        turn = 0
        while (place, index, turn + 1) in self.parts:
            turn += 1
        known = self.parts.get((place, index, turn), {}).get("id")
        if own is not None and known not in (None, own) and _called(piece)[0]:
            turn += 1
        return place, index, turn


class OpenAIChat(ApiProtocol):
    """`/chat/completions`."""

    name = "openai_chat"
    bound_field: ClassVar[str] = "max_completion_tokens"
    paths = Paths(
        messages="messages",
        tools="tools",
        schema="response_format",
        forced_tool="tool_choice.function.name",
    )
    reader_type = ChatReader
    can_refuse = True

    def bound(self, body: Body) -> int | None:
        """Return the lower of the two fields that there are for it."""
        both = (count_or_none(body.get(name)) for name in ("max_completion_tokens", "max_tokens"))
        return min((one for one in both if one is not None), default=None)

    def set_bound(self, body: Body, tokens: int) -> None:
        """Write the field that the request has already: servers know one of them or both."""
        body["max_tokens" if "max_tokens" in body else self.bound_field] = tokens

    def choices(self, body: Body) -> int:
        """Return `n`."""
        return (count_or_none(body["n"]) or 1) if "n" in body else 1

    def turn(self, message: Body) -> Turn:
        """Read a message."""
        role, content = message.get("role"), message.get("content")
        if role == "tool":
            return Turn(role, results=(Result(message.get("tool_call_id"), content),))
        calls = tuple(call.get("id") for call in records(message.get("tool_calls")))
        return Turn(role, written(content), calls)

    def must_call(self, body: Body) -> bool:
        """Return it by `tool_choice`."""
        choice = body.get("tool_choice")
        is_any = choice in _MUST_CALL or at(choice, "allowed_tools.mode") == "required"
        return is_any or at(choice, "type") in _CALLED

    def form(self, body: Body) -> Form:
        """Return it by `tool_choice` and `response_format`."""
        form = super().form(body)
        return "text" if form == "json" and at(body, "response_format.type") == "text" else form

    def ask_for_usage(self, body: Body) -> bool:
        """Ask by `stream_options`."""
        options = record(body.get("stream_options"))
        if options.get("include_usage"):
            return False
        body["stream_options"] = {**options, "include_usage": True}
        return True

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
        if at(body, "stream_options.include_usage"):
            chunks.append({**chunks[1], "choices": [], "usage": dict(_NO_USAGE)})
        return [*(("", chunk) for chunk in chunks), DONE]

    def _place_of_text(self, body: Body) -> str:
        return "refusal" if self.can_refuse and self.form(body) == "json" else "content"


class Mistral(OpenAIChat):
    """`/chat/completions` and `/agents/completions` of Mistral, which refuses fields of others."""

    name = "mistral"
    provider = "mistral"
    bound_field = "max_tokens"
    can_refuse = False

    def ask_for_usage(self, body: Body) -> bool:
        """Ask for nothing: it comes with every stream."""
        return False


class Completions(OpenAIChat):
    """`/completions`, the legacy one: a prompt and a text, and no conversation."""

    name = "openai_completions"
    bound_field = "max_tokens"
    paths = Paths()
    can_refuse = False

    def prompt(self, body: Body) -> Prompted:
        """Return the prompt."""
        return Prompted(body.get("prompt"))

    def synthetic(self, body: Body, model: str, text: str, mark: Mapping[str, Any]) -> Body:
        """Return a completion whose usage is zero."""
        made = super().synthetic(body, model, text, mark)
        for choice in made["choices"]:
            choice["text"] = choice.pop("message")["content"]
        return {**made, "object": "text_completion"}

    def synthetic_stream(
        self, body: Body, model: str, text: str, mark: Mapping[str, Any]
    ) -> list[Event]:
        """Return it as the only chunk, and the end."""
        return [("", self.synthetic(body, model, text, mark)), DONE]


def _called(call: Body) -> tuple[str, Any]:
    """Return name and arguments of a call, or of a piece of one."""
    function = record(call.get("function")) or record(call.get("custom"))
    return function.get("name") or "", function.get("arguments", function.get("input"))


def _joined(part: Body) -> ToolCall:
    arguments = part["whole"] or "".join(part["written"])
    return ToolCall(name=str(part["name"]), arguments=arguments, id=text_or_none(part["id"]))


def _chunk(model: str, delta: Body, finish: str | None) -> Body:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {
        "id": _ID,
        "object": "chat.completion.chunk",
        "created": 0,
        "model": model,
        "choices": [choice],
    }
