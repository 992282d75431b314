"""The parts of OpenAI's Responses, for an answer that no model gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from budgetguard_http.wires.wire import SYNTHETIC_ID, Body, Event

MESSAGE_ID: Final = f"msg_{SYNTHETIC_ID}"


def message_of(text: str) -> Body:
    """Return a message with this text."""
    part: Body = {"type": "output_text", "text": text, "annotations": []}
    return {
        "type": "message",
        "id": MESSAGE_ID,
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def response_of(model: str, output: list[Body]) -> Body:
    """Return a response with these items, and without usage."""
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
        "usage": None,
    }


def message_events(place: int, text: str) -> list[Event]:
    """Return the events of such a message, at its place."""
    message = message_of(text)
    at = {"item_id": MESSAGE_ID, "output_index": place, "content_index": 0}
    empty: Body = {"type": "output_text", "text": "", "annotations": []}
    begun: Body = {**message, "status": "in_progress", "content": []}
    return [
        ("response.output_item.added", {"output_index": place, "item": begun}),
        ("response.content_part.added", {**at, "part": empty}),
        ("response.output_text.delta", {**at, "delta": text, "logprobs": []}),
        ("response.output_text.done", {**at, "text": text, "logprobs": []}),
        ("response.content_part.done", {**at, "part": message["content"][0]}),
        ("response.output_item.done", {"output_index": place, "item": message}),
    ]


def numbered(events: Sequence[Event], first: int) -> list[Event]:
    """Return the events with their types and numbers."""
    return [
        (name, {**data, "type": data.get("type") or name, "sequence_number": number})
        for number, (name, data) in enumerate(events, first)
    ]
