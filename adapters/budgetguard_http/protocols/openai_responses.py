"""OpenAI's Responses, as its SDK and Azure speak them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from budgetguard_core.kit import ToolCall
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
    record,
    records,
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
# Beside messages and the results of calls, what the model has no part in.
_CLIENTS: Final = frozenset({"item_reference", "mcp_approval_response"})
_CALLED: Final = ("function", "custom")
_ARGUMENTS: Final = ("arguments", "input", "action", "operation", "query")
_MESSAGE_ID: Final = f"msg_{SYNTHETIC_ID}"


class ResponsesReader(Reader):
    """A response, whole or in events."""

    _sent = 0
    _begun: Body | None = None

    def whole(self, body: Body) -> None:
        """Take a response."""
        answer = self.answer
        answer.usage, answer.model = usage_in(body), text_or_none(body.get("model"))
        answer.id = _conversation(body) or text_or_none(body.get("id"))
        answer.is_cut = at(body, "incomplete_details.reason") == "max_output_tokens"
        for item in records(body.get("output")):
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

    def take(self, name: str, data: Body) -> None:
        """Take an event."""
        kind, number = str(data.get("type")), data.get("sequence_number")
        self._sent = number + 1 if isinstance(number, int) else self._sent
        if kind == "response.created":
            self._begun = record(data.get("response"))
        elif kind.endswith("output_text.delta"):
            self.answer.says(data.get("delta"))
        elif kind.endswith(".delta"):
            self.answer.writes(data.get("delta"))
        elif kind.startswith("response.output_item."):
            self.parts[data.get("output_index") or 0] = record(data.get("item"))
            self.has_calls |= _is_call(record(data.get("item")))
        elif kind in _ENDS:
            self.is_settled = True
            response = record(data.get("response"))
            if not response.get("output"):
                # Some servers end with the head of the response alone.
                response = {**response, "output": list(self.parts.values())}
            text, said = self.answer.text, self.answer.said
            self.answer.text, self.answer.said = [], []
            self.whole(response)
            self.answer.text, self.answer.said = text, said

    def closing(self, text: str) -> list[Event]:
        """Complete the response with what was said; items that were begun stay as they are."""
        events: list[Event] = []
        if not self.answer.said:
            events = _message_events(max(self.parts, default=-1) + 1, text)
        message = _message("".join(self.answer.said) or text)
        response = self._begun or _response(str(self.request.get("model") or ""), [])
        response = {**response, "status": "completed", "output": [message]}
        return _numbered([*events, ("response.completed", {"response": response})], self._sent)


class OpenAIResponses(ApiProtocol):
    """`/responses`."""

    name = "openai_responses"
    provider = "openai"
    paths = Paths(
        messages="input",
        system="instructions",
        tools="tools",
        schema="text.format",
        bound="max_output_tokens",
        forced_tool="tool_choice.name",
    )
    reader_type = ResponsesReader
    min_output_tokens = 16
    can_refuse = True

    def prompt(self, body: Body) -> Prompted:
        """Return input, instructions, what fills a template, tools and the answer's form."""
        prompt, filled = super().prompt(body), record(at(body, "prompt.variables"))
        return prompt._replace(system=[prompt.system, *filled.values()]) if filled else prompt

    def turns(self, body: Body) -> list[Any]:
        """Return the items; a text is the user's message."""
        given = body.get("input")
        is_text = isinstance(given, str)
        return [{"role": "user", "content": given}] if is_text else super().turns(body)

    def follows(self, body: Body) -> str | None:
        """Return the response or the conversation that the provider goes on with."""
        return text_or_none(body.get("previous_response_id")) or _conversation(body)

    def turn(self, message: Body) -> Turn:
        """Read an item; of others than messages and local calls, one that says nothing."""
        kind = str(message.get("type"))
        if _is_call(message):
            return Turn("assistant", calls=(message.get("call_id"),))
        if kind.endswith("_call_output"):
            return Turn("tool", results=(Result(message.get("call_id"), message.get("output")),))
        role = message.get("role") or ("client" if kind in _CLIENTS else "assistant")
        return Turn(role, written(message.get("content")))

    def add_nudge(self, body: Body, text: str) -> None:
        """Put it into the last output; else it is an item of its own."""
        body["input"] = self.turns(body)
        last = record(body["input"][-1]) if body["input"] else {}
        if last.get("type") == "function_call_output" and isinstance(last.get("output"), str):
            last["output"] += f"\n\n{text}"
        else:
            body["input"].append({"role": "user", "content": text})

    def must_call(self, body: Body) -> bool:
        """Return it by `tool_choice`; after a hosted tool there is a text."""
        choice = body.get("tool_choice")
        is_named = at(choice, "type") in _CALLED
        return choice == "required" or is_named or at(choice, "mode") == "required"

    def form(self, body: Body) -> Form:
        """Return it by `tool_choice` and `text.format`."""
        form = super().form(body)
        return "text" if form == "json" and at(body, "text.format.type") == "text" else form

    def synthetic(self, body: Body, model: str, text: str, mark: Mapping[str, Any]) -> Body:
        """Return a response, by the id of the one that the provider goes on from."""
        message = _message(text, is_refusal=self.form(body) == "json")
        made = {**_response(model, [message]), MARK: dict(mark)}
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
            *_message_events(0, text, is_refusal=self.form(body) == "json"),
        ]
        return _numbered([*events, ("response.completed", {"response": response})], 0)


def _conversation(body: Body) -> str | None:
    return text_or_none(body.get("conversation")) or text_or_none(at(body, "conversation.id"))


def _is_call(item: Body) -> bool:
    at_the_provider = at(item, "environment.type") == "container_reference"
    return item.get("type") in _LOCAL and not at_the_provider


def _call(item: Body, *, hosted: bool = False) -> ToolCall:
    return ToolCall(
        name=str(item.get("name") or str(item.get("type")).removesuffix("_call")),
        arguments=next((item[name] for name in _ARGUMENTS if item.get(name) is not None), None),
        id=text_or_none(item.get("call_id")) or text_or_none(item.get("id")),
        kind="hosted" if hosted else "function",
    )


def _message(text: str, *, is_refusal: bool = False) -> Body:
    part: Body = {"type": "output_text", "text": text, "annotations": []}
    if is_refusal:
        part = {"type": "refusal", "refusal": text}
    return {
        "type": "message",
        "id": _MESSAGE_ID,
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _response(model: str, output: list[Body]) -> Body:
    """Return a response with these items; programs read its usage, which is zero."""
    return {
        "id": f"resp_{SYNTHETIC_ID}",
        "object": "response",
        "created_at": 0,
        "status": "completed",
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {},
        **dict.fromkeys(
            ("error", "incomplete_details", "instructions", "temperature", "top_p"), None
        ),
        "usage": {
            "input_tokens": 0,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 0,
        },
    }


def _message_events(place: int, text: str, *, is_refusal: bool = False) -> list[Event]:
    """Return the events of a message, at its place."""
    message = _message(text, is_refusal=is_refusal)
    part = message["content"][0]
    where = {"item_id": _MESSAGE_ID, "output_index": place, "content_index": 0}
    begun: Body = {**message, "status": "in_progress", "content": []}
    kind, field = ("refusal", "refusal") if is_refusal else ("output_text", "text")
    beside: Body = {} if is_refusal else {"logprobs": []}
    return [
        ("response.output_item.added", {"output_index": place, "item": begun}),
        ("response.content_part.added", {**where, "part": {**part, field: ""}}),
        (f"response.{kind}.delta", {**where, "delta": text, **beside}),
        (f"response.{kind}.done", {**where, field: text, **beside}),
        ("response.content_part.done", {**where, "part": part}),
        ("response.output_item.done", {"output_index": place, "item": message}),
    ]


def _numbered(events: Sequence[Event], first: int) -> list[Event]:
    """Return the events with their types and numbers."""
    return [
        (name, {**data, "type": name, "sequence_number": number})
        for number, (name, data) in enumerate(events, first)
    ]
