"""Anthropic's messages, as its SDK, Bedrock's `invoke` and Vertex speak them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from budgetguard_core.kit import ToolCall, merge_usage, token_usage
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
    text_of,
    text_or_none,
    usage_in,
    written,
)

_MODEL_IN_PATH: Final = re.compile(r"/models?/([^/:]+)")
_LEAST_OUTSIDE_THOUGHT: Final = 1
_THE_MODEL: Final = (None, "direct")
_HOSTED: Final = frozenset({"server_tool_use", "mcp_tool_use"})
# Within a JSON text there is no quote without a backslash, so that what ends in `":` is a name.
_TEXT: Final = re.compile(
    rb'event: content_block_delta\ndata: \{[^{]*"delta":\s*\{"type":\s*"text_delta",\s*'
    rb'"text":\s*"([^"\\]*(?:\\.[^"\\]*)*)"\s*\}\s*\}\n\n'
)


class AnthropicMessages(ApiProtocol):
    """`/messages`, `/model/<model>/invoke` and `:rawPredict`."""

    name = "anthropic_messages"
    provider = "anthropic"
    can_refuse = True

    def model(self, path: str, body: Body) -> str | None:
        """Return the body's model, or that of the address (Bedrock, Vertex)."""
        named = _MODEL_IN_PATH.search(path)
        return text_or_none(body.get("model")) or (named[1] if named else None)

    def is_streamed(self, path: str, body: Body) -> bool:
        """Recognise it by the body or the address."""
        return bool(body.get("stream")) or path.endswith(("streamRawPredict", "response-stream"))

    def bound(self, body: Body) -> int | None:
        """Return `max_tokens`, which each request has."""
        return count_or_none(body.get("max_tokens"))

    def set_bound(self, body: Body, tokens: int) -> None:
        """Write `max_tokens`."""
        body["max_tokens"] = tokens

    def least_bound(self, body: Body) -> int:
        """Return one token more than thinking may take."""
        thinking = count_or_none(record(body.get("thinking")).get("budget_tokens"))
        return self.min_output_tokens if thinking is None else thinking + _LEAST_OUTSIDE_THOUGHT

    def prompt(self, body: Body) -> Prompted:
        """Return messages, system prompt, tools and the form of the answer."""
        return Prompted(
            body.get("messages"),
            system=body.get("system"),
            tools=items(body.get("tools")),
            output_schema=_form(body),
        )

    def follows(self, body: Body) -> str | None:
        """Return the thread that the provider keeps."""
        thread = body.get("thread")
        return text_or_none(thread) or text_or_none(record(thread).get("id"))

    def results(self, body: Body) -> list[Result]:
        """Return the results since the last reply, which may be in a message each."""
        return [
            Result(one.get("tool_use_id"), one.get("content"), bool(one.get("is_error")))
            for turn in self.since_reply(body)
            for one in map(record, items(turn.get("content")))
            if one.get("type") == "tool_result"
        ]

    def reply_mark(self, turn: Any) -> tuple[str | None, ...] | None:
        """Return the ids of an assistant message's calls, or its text."""
        message = record(turn)
        if message.get("role") != "assistant":
            return None
        blocks = [record(block) for block in items(message.get("content"))]
        ids = tuple(block.get("id") for block in blocks if block.get("type") == "tool_use")
        return ids or (written(message.get("content")).strip(),)

    def user_text(self, turn: Any) -> str | None:
        """Return the text of a user message that is no bundle of results."""
        message = record(turn)
        if message.get("role") != "user":
            return None
        text = written(message.get("content"))
        is_result = any(
            record(block).get("type") == "tool_result" for block in items(message.get("content"))
        )
        return None if is_result and not text else text

    def takes_words(self, body: Body) -> bool:
        """Return False for results which go to the model's code: they take none beside them."""
        turns = reversed(self.turns(body))
        reply = next((turn for turn in turns if self.reply_mark(turn) is not None), None)
        callers = (record(block).get("caller") for block in items(record(reply).get("content")))
        return all(record(caller).get("type") in _THE_MODEL for caller in callers)

    def add_nudge(self, body: Body, text: str) -> None:
        """Put it at the end of the last message, which is the user's."""
        last = record(body["messages"][-1])
        if isinstance(last.get("content"), list):
            last["content"].append({"type": "text", "text": text})
        else:
            last["content"] = f"{last.get('content') or ''}\n\n{text}"

    def form(self, body: Body) -> Form:
        """Return it by `tool_choice` and the form of the output."""
        if record(body.get("tool_choice")).get("type") in ("tool", "any"):
            return "tool"
        return "text" if _form(body) is None else "json"

    def forced_tool(self, body: Body) -> str | None:
        """Return the name in `tool_choice`."""
        choice = record(body.get("tool_choice"))
        return text_or_none(choice.get("name")) if choice.get("type") == "tool" else None

    def read(self, body: Body, answer: Answer) -> None:
        """Read the blocks and the usage."""
        answer.usage, answer.model = usage_in(body), text_or_none(body.get("model"))
        answer.id = text_or_none(record(body.get("thread")).get("id")) or text_or_none(
            body.get("id")
        )
        answer.is_cut = body.get("stop_reason") == "max_tokens"
        for block in map(record, items(body.get("content"))):
            _read_block(answer, block)

    def reader(self, answer: Answer, *, body: Body, hides_usage: bool) -> Reader:
        """Return the reader of the events."""
        del body, hides_usage
        return MessagesReader(answer)

    def synthetic(self, body: Body, model: str, text: str, mark: Mapping[str, Any]) -> Body:
        """Return a message, one of no content where the model refuses; its usage is zero."""
        refuses = self.form(body) == "json"
        return {
            "id": f"msg_{SYNTHETIC_ID}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [] if refuses else [{"type": "text", "text": text}],
            "stop_reason": "refusal" if refuses else "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
            MARK: dict(mark),
        }

    def synthetic_stream(
        self, body: Body, model: str, text: str, mark: Mapping[str, Any]
    ) -> list[Event]:
        """Return the events of such a message."""
        message = self.synthetic(body, model, text, mark)
        begun: Body = {**message, "content": [], "stop_reason": None}
        start = {"type": "message_start", "message": begun}
        block = _text_block(0, text) if message["content"] else []
        end = _end({"output_tokens": 0}, message["stop_reason"])
        return [("message_start", start), *block, *end]


class MessagesReader(Reader):
    """The events of a message."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._calls: dict[int, Body] = {}
        self._open: int | None = None
        self._next = 0
        self._piece: re.Match[bytes] | None = None

    def needs(self, event: bytes) -> bool:
        """Recognise a piece of text by all that there is of it."""
        self._piece = _TEXT.fullmatch(event)
        return self._piece is None

    def skim(self, event: bytes) -> None:
        """Take in the piece of text that was found."""
        del event
        self.answer.says(None if self._piece is None else text_of(self._piece[1]))

    def take(self, name: str, data: Body) -> None:
        """Take an event."""
        del name
        answer, kind = self.answer, data.get("type")
        if kind == "message_start":
            message = record(data.get("message"))
            answer.usage = token_usage(message.get("usage"))
            answer.model = text_or_none(message.get("model"))
            answer.id = text_or_none(record(message.get("thread")).get("id")) or text_or_none(
                message.get("id")
            )
        elif kind == "content_block_start":
            block, index = record(data.get("content_block")), int(data.get("index") or 0)
            self._open, self._next = index, index + 1
            if block.get("type") == "tool_use":
                self._calls[index], self.has_calls = {**block, "json": []}, True
            else:
                _read_block(answer, block)
        elif kind == "content_block_delta":
            delta = record(data.get("delta"))
            answer.says(delta.get("text"))
            answer.writes(delta.get("thinking"))
            piece = delta.get("partial_json")
            if isinstance(piece, str):
                answer.writes(piece)
                call = self._calls.get(int(data.get("index") or 0))
                if call is not None:
                    call["json"].append(piece)
        elif kind == "content_block_stop":
            self._open = None
        elif kind == "message_delta":
            answer.usage = merge_usage(answer.usage, token_usage(data.get("usage")))
            answer.is_cut = record(data.get("delta")).get("stop_reason") == "max_tokens"
            if not self.is_settled:
                answer.calls += [self._call(one) for one in self._calls.values()]
            self.is_settled = True

    def end(self) -> None:
        """Take an end without the last figures: those of the beginning are not the answer's."""
        if self.is_settled:
            return
        self.is_settled = True
        self.answer.calls += [self._call(one) for one in self._calls.values()]
        if self.answer.usage is not None:
            self.answer.usage = self.answer.usage._replace(estimated=True)

    def closing(self, text: str) -> list[Event]:
        """Close the open block and the message."""
        events: list[Event] = []
        if self._open is not None:
            events.append(_event("content_block_stop", index=self._open))
        if not self.answer.said:
            events += _text_block(self._next, text)
        usage = self.answer.usage
        return [*events, *_end({"output_tokens": 0 if usage is None else usage.output_tokens})]

    def _call(self, block: Body) -> ToolCall:
        arguments = "".join(block["json"]) or block.get("input")
        return ToolCall(name=str(block.get("name") or ""), arguments=arguments, id=block.get("id"))


def _read_block(answer: Answer, block: Body) -> None:
    kind = block.get("type")
    if kind == "text":
        answer.says(block.get("text"))
    elif kind == "thinking":
        answer.writes(block.get("thinking"))
    elif kind == "tool_use":
        answer.writes(str(block.get("input")))
        answer.calls.append(_tool_call(block))
    elif kind in _HOSTED:
        answer.hosted.append(_tool_call(block))


def _tool_call(block: Body) -> ToolCall:
    return ToolCall(
        name=str(block.get("name") or ""),
        arguments=block.get("input"),
        id=text_or_none(block.get("id")),
        kind="hosted" if block.get("type") in _HOSTED else "function",
    )


def _form(body: Body) -> Any:
    form = body.get("output_format") or record(body.get("output_config")).get("format")
    return form or None


def _event(kind: str, **fields: Any) -> Event:
    return kind, {"type": kind, **fields}


def _text_block(index: int, text: str) -> list[Event]:
    return [
        _event("content_block_start", index=index, content_block={"type": "text", "text": ""}),
        _event("content_block_delta", index=index, delta={"type": "text_delta", "text": text}),
        _event("content_block_stop", index=index),
    ]


def _end(usage: Body, reason: str = "end_turn") -> list[Event]:
    delta = {"stop_reason": reason, "stop_sequence": None}
    return [_event("message_delta", delta=delta, usage=usage), _event("message_stop")]
