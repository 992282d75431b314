"""The parts of OpenAI's Responses, for an answer that no model gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from budgetguard_http.protocols.protocol import SYNTHETIC_ID, Body, Event

MESSAGE_ID: Final = f"msg_{SYNTHETIC_ID}"


def message_of(text: str, *, is_refusal: bool = False) -> Body:
    """Return a message with this text."""
    part: Body = {"type": "output_text", "text": text, "annotations": []}
    if is_refusal:
        part = {"type": "refusal", "refusal": text}
    return {
        "type": "message",
        "id": MESSAGE_ID,
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def response_of(model: str, output: list[Body]) -> Body:
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
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "temperature": None,
        "top_p": None,
        "usage": {
            "input_tokens": 0,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 0,
        },
    }


def message_events(place: int, text: str, *, is_refusal: bool = False) -> list[Event]:
    """Return the events of such a message, at its place."""
    message = message_of(text, is_refusal=is_refusal)
    part = message["content"][0]
    at = {"item_id": MESSAGE_ID, "output_index": place, "content_index": 0}
    begun: Body = {**message, "status": "in_progress", "content": []}
    kind, field = ("refusal", "refusal") if is_refusal else ("output_text", "text")
    beside: Body = {} if is_refusal else {"logprobs": []}
    return [
        ("response.output_item.added", {"output_index": place, "item": begun}),
        ("response.content_part.added", {**at, "part": {**part, field: ""}}),
        (f"response.{kind}.delta", {**at, "delta": text, **beside}),
        (f"response.{kind}.done", {**at, field: text, **beside}),
        ("response.content_part.done", {**at, "part": part}),
        ("response.output_item.done", {"output_index": place, "item": message}),
    ]


def numbered(events: Sequence[Event], first: int) -> list[Event]:
    """Return the events with their types and numbers."""
    return [
        (name, {**data, "type": data.get("type") or name, "sequence_number": number})
        for number, (name, data) in enumerate(events, first)
    ]
