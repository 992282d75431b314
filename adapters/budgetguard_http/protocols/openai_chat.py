"""OpenAI's chat completions, as its SDK, Azure, Mistral and every compatible server speak them."""

from __future__ import annotations

from typing import ClassVar, Final

from budgetguard_core.kit import content_text, merge_usage
from budgetguard_http.protocols.fields import (
    Body,
    Event,
    at,
    count_or_none,
    record,
    records,
    text_or_none,
)
from budgetguard_http.protocols.protocol import MARK, ApiProtocol, Paths, Reader, repeated, usage_in

DONE: Final[Event] = ("", "[DONE]")
_OTHER_CONTENT: Final = frozenset({"refusal", "reasoning_content", "reasoning"})
_NO_USAGE: Final = {
    "prompt_tokens": 0,
    "completion_tokens": 0,
    "total_tokens": 0,
    "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
}
_ID: Final = "chatcmpl-synthetic"


class ChatReader(Reader):
    """A chat completion, whole or in chunks."""

    def take(self, name: str, data: Body) -> bool:
        """Take a chunk; hide that of the usage where its client did not ask for it."""
        choices = records(data.get("choices"))
        # A server that has sent it with the answer sends it unasked.
        has_usage = self.usage is not None
        self.usage = merge_usage(self.usage, usage_in(data))
        self.model = text_or_none(data.get("model")) or self.model
        self.id = text_or_none(data.get("id")) or self.id
        for choice in choices:
            message, position = record(choice.get("delta") or choice.get("message")), 0
            if isinstance(choice.get("index"), int):
                position = choice["index"]
            self.says(message.get("content") and content_text(message["content"]))
            for field in _OTHER_CONTENT & message.keys():
                self.says(message[field]) if field == "refusal" else self.writes(message[field])
            self.says(choice.get("text"))
            self.is_cut |= choice.get("finish_reason") == "length"
            for number, piece in enumerate(records(message.get("tool_calls"))):
                self._take_call(position, number, piece)
        return self.hides_usage and not (choices or has_usage) and bool(data.get("usage"))

    def closing(self, text: str) -> list[Event]:
        """Finish the choice, with a text where there was none."""
        delta = {} if self.shown else {"role": "assistant", "content": text}
        return [("", {**_chunk(self.model or "", delta, "stop"), "id": self.id or _ID}), DONE]

    def _take_call(self, choice: int, number: int, piece: Body) -> None:
        """Take a call, or a piece of one, which belongs to the call of the same index.

        Some servers give several calls the same one, each with a name and an id of its own; others
        make up an id for each piece, and only the first has a name.
        """
        function = record(piece.get("function")) or record(piece.get("custom"))
        name, id_ = text_or_none(function.get("name")), text_or_none(piece.get("id"))
        arguments = function.get("arguments", function.get("input"))
        is_whole = not isinstance(arguments, str)
        key = choice, piece["index"] if isinstance(piece.get("index"), int) else number
        call, _ = self.begun.get(key, (None, None))
        if call is not None and name and id_ and call.id not in (None, id_):
            self.begun[*key, len(self.begun)] = self.begun.pop(key)
            call = None
        if call is None:
            self.begins(key, {"name": name, "id": id_}, arguments if is_whole else None)
        else:
            call.name, call.id = call.name + (name or ""), call.id or id_
        self.continues(key, arguments)


class OpenAIChat(ApiProtocol):
    """`/chat/completions`."""

    bound_field: ClassVar[str] = "max_completion_tokens"
    paths = Paths(
        messages="messages",
        tools="tools",
        schema="response_format",
        choices="n",
        tool_choice="tool_choice",
        forced_tool="tool_choice.function.name",
    )
    reader_type = ChatReader
    can_refuse = True
    usage_is_optional = True

    def bound(self, body: Body) -> int | None:
        """Return the lower of the two fields that there are for it."""
        both = (count_or_none(body.get(name)) for name in ("max_completion_tokens", "max_tokens"))
        return min((one for one in both if one is not None), default=None)

    def set_bound(self, body: Body, tokens: int) -> None:
        """Write the field that the request has already: servers know one of them or both."""
        body["max_tokens" if "max_tokens" in body else self.bound_field] = tokens

    def synthetic(self, body: Body, model: str, text: str, mark: Body) -> Body:
        """Return a completion whose usage is zero: programs read it."""
        message: Body = {"role": "assistant", "content": None, "refusal": None}
        message[self._text_field(body)] = text
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return {
            "id": _ID,
            "object": "chat.completion",
            "created": 0,
            "model": model,
            "choices": repeated(choice, self.choices(body)),
            "usage": dict(_NO_USAGE),
            MARK: mark,
        }

    def synthetic_stream(self, body: Body, model: str, text: str, mark: Body) -> list[Event]:
        """Return two chunks, the usage where it is asked for, and the end."""
        position = self._text_field(body)
        chunks: list[Body] = [
            {**_chunk(model, {"role": "assistant", position: text}, None), MARK: mark},
            _chunk(model, {}, "stop"),
        ]
        for chunk in chunks:
            chunk["choices"] = repeated(chunk["choices"][0], self.choices(body))
        if at(body, "stream_options.include_usage"):
            chunks.append({**chunks[1], "choices": [], "usage": dict(_NO_USAGE)})
        return [*(("", chunk) for chunk in chunks), DONE]

    def _text_field(self, body: Body) -> str:
        return "refusal" if self.can_refuse and self.form(body) == "json" else "content"


class Mistral(OpenAIChat):
    """`/chat/completions` and `/agents/completions` of Mistral, which refuses fields of others."""

    provider = "mistral"
    bound_field = "max_tokens"
    can_refuse = False
    usage_is_optional = False


class Completions(OpenAIChat):
    """`/completions`, the legacy one: a prompt and a text, and no conversation."""

    bound_field = "max_tokens"
    paths = Paths(prompt="prompt", choices="n")
    can_refuse = False

    def synthetic(self, body: Body, model: str, text: str, mark: Body) -> Body:
        """Return a completion whose usage is zero."""
        made = super().synthetic(body, model, text, mark)
        for choice in made["choices"]:
            choice["text"] = choice.pop("message")["content"]
        return {**made, "object": "text_completion"}

    def synthetic_stream(self, body: Body, model: str, text: str, mark: Body) -> list[Event]:
        """Return it as the only chunk, and the end."""
        return [("", self.synthetic(body, model, text, mark)), DONE]


class Embeddings(ApiProtocol):
    """`/embeddings`, which Azure and Mistral have too, and `/api/embed`: no turn of a loop."""

    is_turn = False
    paths = Paths(prompt="input prompt")


def _chunk(model: str, delta: Body, finish: str | None) -> Body:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    head = {"id": _ID, "object": "chat.completion.chunk", "created": 0, "model": model}
    return {**head, "choices": [choice]}
