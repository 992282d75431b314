"""Read what a step returns, or streams, as one assistant message with its usage."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from budgetguard_core import AdapterError, ConfigurationError, kit
from budgetguard_loop._history import Message, as_message, content_text, message_text, result_text

_REPLIES_KEPT = 16
_LONG = 40
"""Characters of an answer that nobody gives about one thing after the other."""
_REPLIES: WeakKeyDictionary[kit.Run, deque[str]] = WeakKeyDictionary()
_LISTS: tuple[Any, ...] = (list, tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """The reply of one model call, for a step that does not return a response of OpenAI's."""

    message: Mapping[str, Any]
    """The assistant message in the format of chat completions: `content`, `tool_calls`."""
    usage: kit.TokenUsage | None = None
    """The usage that the provider reported; None: it is estimated from the text."""
    model: str | None = None
    """The model that was really called, if the provider says so."""
    cost_usd: Decimal | None = None
    """The cost that the provider reports, used in place of the price book."""
    is_cut: bool = False
    """The answer ended at the completion bound of its request (`finish_reason` is `length`)."""


def read_reply(answer: Any) -> ModelReply:
    """Read what a step returned.

    Raises:
        AdapterError: It is nothing that a step may return.
    """
    message, is_cut = _message_in(answer)
    if isinstance(answer, ModelReply):
        return replace(answer, message=message)
    known = kit.parts_of(answer)
    if known("choices") is None:
        return ModelReply(message=message)
    model = known("model")
    return ModelReply(
        message=message,
        usage=kit.token_usage(answer),
        model=model if isinstance(model, str) else None,
        cost_usd=kit.reported_cost(answer),
        is_cut=is_cut,
    )


def _message_in(answer: Any) -> tuple[Message, bool]:
    """Find the message in what a step returned, and whether it ended at its completion bound."""
    if isinstance(answer, ModelReply):
        return _assistant(answer.message), answer.is_cut
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}, False
    choices = kit.part(answer, "choices")
    if isinstance(choices, _LISTS):
        if not choices:
            # A provider's filter has taken the answer; the call was made all the same.
            return _assistant({"content": ""}), False
        first = kit.parts_of(choices[0])
        return _assistant(first("message")), first("finish_reason") == "length"
    if kit.part(answer, "content") is None and not kit.part(answer, "tool_calls"):
        raise _unreadable(answer)
    if kit.part(answer, "type") == "message":
        raise _unreadable(answer)
    return _assistant(answer), False


class ReplyFacts(NamedTuple):
    """The content of a response, or of a chunk of one."""

    text: str
    """Its text, and the arguments of its tool calls."""
    asks: bool
    """It asks for tools."""
    is_cut: bool
    """It ended at the completion bound of its request, and asks for nothing."""

    @property
    def is_final(self) -> bool:
        """True if this is an answer: a text that asks for no tool."""
        return bool(self.text) and not self.asks


def facts_of(response: Any, usage: kit.TokenUsage | None = None) -> ReplyFacts:
    """Read what a response of any shape says, as far as it can be told.

    Args:
        response: What a model call returned.
        usage: What it reports; a reply that asks for tools needs no estimate then.
    """
    if response is None:
        return ReplyFacts("", asks=False, is_cut=False)
    try:
        message, is_cut = _message_in(response)
    except AdapterError:
        content = kit.part(response, "content")
        blocks: list[Any] = [*content] if isinstance(content, list | tuple) else []
        asks = any(kit.part(block, "type") == "tool_use" for block in blocks)
        cut = kit.part(response, "stop_reason") == "max_tokens" and not asks
        return ReplyFacts(result_text(response), asks=asks, is_cut=cut)
    calls, text = message.get("tool_calls"), message_text(message)
    if calls:
        is_measured = usage is not None and usage.output_tokens and not usage.estimated
        text = "" if is_measured else text + str(calls)
    return ReplyFacts(text, asks=bool(calls), is_cut=is_cut and not calls)


def is_in_turn(run: kit.Run, text: str, prompt: Iterable[Any]) -> bool:
    """Return whether an answer belongs to what was said before in this run.

    Who asks about one document after the other may get the same answer many times. That is no
    conversation: its prompts hold no earlier reply. Where the prompt is not given, a long answer
    counts.
    """
    replies = _REPLIES.setdefault(run, deque(maxlen=_REPLIES_KEPT))
    before = set(replies)
    replies.append(text.strip())
    texts = [content_text(kit.part(one, "content") or one) for one in prompt]
    is_known = not before or any(one.strip() in before for one in texts)
    return is_known or (not texts and len(text) >= _LONG)


def facts_of_chunk(chunk: Any) -> ReplyFacts:
    """Read what a chunk of a stream adds."""
    if isinstance(chunk, str):
        return ReplyFacts(chunk, asks=False, is_cut=False)
    choices = kit.part(chunk, "choices")
    if not isinstance(choices, _LISTS):
        text = str(kit.part(kit.part(chunk, "delta"), "text") or "")
        cut = kit.part(kit.part(chunk, "delta"), "stop_reason") == "max_tokens"
        return ReplyFacts(text, asks=False, is_cut=cut)
    delta = kit.part(choices[0], "delta") if choices else None
    calls = kit.part(delta, "tool_calls")
    cut = bool(choices) and kit.part(choices[0], "finish_reason") == "length"
    text = content_text(kit.part(delta, "content")) + str(calls or "")
    return ReplyFacts(text, asks=bool(calls), is_cut=cut)


class _StreamedCall:
    """One tool call of a streamed reply, as far as it has come in."""

    def __init__(self) -> None:
        self.id = ""
        self._name: list[str] = []
        self._arguments: list[str] = []

    def add(self, piece: Any) -> None:
        """Take in what a chunk says of the call."""
        self.id = kit.part(piece, "id") or self.id
        function = kit.part(piece, "function")
        self._name.append(kit.part(function, "name") or "")
        self._arguments.append(kit.part(function, "arguments") or "")

    def whole(self) -> Message:
        """Return the call as a message has it."""
        function = {"name": "".join(self._name), "arguments": "".join(self._arguments)}
        return {"id": self.id, "type": "function", "function": function}


class StreamedReply:
    """Puts the chunks of one streamed reply together.

    Args:
        pieces: Where the pieces of its text are kept; together they are what was said so far.
    """

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces
        self._tool_calls: list[_StreamedCall] = []
        self._at: dict[int, _StreamedCall] = {}
        self._usage: kit.TokenUsage | None = None
        self._model: str | None = None
        self._is_cut = False
        self._whole: ModelReply | None = None

    def add(self, chunk: Any) -> None:
        """Take in a chunk: a chunk of chat completions, a piece of text, or a whole reply.

        Raises:
            AdapterError: It is none of these.
        """
        if isinstance(chunk, str):
            self._pieces.append(chunk)
            return
        choices = kit.part(chunk, "choices")
        usage = kit.token_usage(chunk) if kit.part(chunk, "usage") is not None else None
        if not isinstance(choices, _LISTS) or (choices and kit.part(choices[0], "delta") is None):
            self._whole = read_reply(chunk)
            return
        self._usage = kit.merge_usage(self._usage, usage)
        model = kit.part(chunk, "model")
        self._model = model if isinstance(model, str) and model else self._model
        for choice in choices[:1]:
            self._is_cut |= kit.part(choice, "finish_reason") == "length"
            delta = kit.part(choice, "delta")
            self._pieces.append(content_text(kit.part(delta, "content")))
            for position, piece in enumerate(kit.part(delta, "tool_calls") or ()):
                index, own = kit.part(piece, "index"), kit.part(piece, "id")
                index = position if index is None else index
                call = self._at.get(index)
                # Some servers give several calls the same index, each with a name and an id of its
                # own; others make up an id for each piece, and only the first has a name.
                named = kit.part(kit.part(piece, "function"), "name")
                if call is None or (named and own and call.id not in ("", own)):
                    call = self._at[index] = _StreamedCall()
                    self._tool_calls.append(call)
                call.add(piece)

    def reply(self) -> ModelReply:
        """Return the whole reply."""
        if self._whole is not None:
            return self._whole
        text = "".join(self._pieces)
        message: Message = {"content": text}
        if self._tool_calls:
            message["tool_calls"] = [call.whole() for call in self._tool_calls]
            message["content"] = text or None
        return ModelReply(
            message=_assistant(message), usage=self._usage, model=self._model, is_cut=self._is_cut
        )


def _assistant(message: Any) -> Message:
    """Copy a message as plain data that can be sent back: nothing that is None or empty."""
    plain = _plain(message)
    kept: Message = {
        name: value
        for name, value in plain.items()
        if value or name == "content" or not (value is None or value == [])
    }
    kept["role"] = "assistant"
    calls = kept.get("tool_calls")
    if calls:
        if not isinstance(calls, _LISTS):
            raise _unreadable(calls)
        kept.setdefault("content", None)
        kept["tool_calls"] = [_with_id(call) for call in calls]
    return kept


def _plain(record: Any) -> Message:
    try:
        return as_message(record)
    except ConfigurationError:
        raise _unreadable(record) from None


def _with_id(call: Any) -> Message:
    plain = _plain(call)
    # Never the same twice: a tool's idempotency key and a resume tell calls apart by their ids.
    plain["id"] = plain.get("id") or f"call_{uuid.uuid4().hex}"
    return plain


def _unreadable(answer: object) -> AdapterError:
    return AdapterError(
        "a step must return a chat completion, an assistant message, a text or a ModelReply, got "
        f"{type(answer).__name__}. Wrap what your SDK returns in a ModelReply."
    )
