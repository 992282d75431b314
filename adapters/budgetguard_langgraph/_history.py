"""Closing a conversation: every tool call has a result, and the synthetic message is the last."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, cast

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from budgetguard_core import (
    NOT_EXECUTED,
    OUTCOME_UNKNOWN,
    Guard,
    Trip,
    synthetic_metadata,
    synthetic_text,
)


def messages_of(values: Any, key: str) -> list[BaseMessage]:
    """Return the conversation in a graph's state, or nothing where it has none."""
    found = values.get(key) if isinstance(values, dict) else getattr(values, key, values)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(found, (list, tuple)):
        return []
    return [message for message in found if isinstance(message, BaseMessage)]  # pyright: ignore[reportUnknownVariableType]


def unanswered(messages: Sequence[BaseMessage]) -> list[tuple[str, str]]:
    """List id and name of the tool calls that have no result yet."""
    answered = {m.tool_call_id for m in messages if isinstance(m, ToolMessage)}
    return [
        (str(call["id"]), call["name"])
        for message in messages
        if isinstance(message, AIMessage)
        for call in message.tool_calls
        if call["id"] not in answered
    ]


def results_for(
    messages: Sequence[BaseMessage],
    guard: Guard,
    finished: Callable[[str], ToolMessage | None] = lambda _: None,
) -> list[BaseMessage]:
    """Answer the open tool calls: with what they returned where that is known, else with a note."""
    started = {ticket.call.id for ticket in guard.open_tool_calls()}
    return [
        finished(id_)
        or ToolMessage(
            OUTCOME_UNKNOWN if id_ in started else NOT_EXECUTED,
            tool_call_id=id_,
            name=name,
            status="error",
            id=str(uuid.uuid4()),
        )
        for id_, name in unanswered(messages)
    ]


def synthetic_message(messages: Sequence[BaseMessage], guard: Guard, trip: Trip) -> AIMessage:
    """Make the message that ends a stopped run.

    A conversation that ends with an answer already gets it as a part of that answer, because no
    provider takes two messages of the model in a row; it then has the id of the answer.
    """
    last = messages[-1] if messages else None
    if last is not None and is_synthetic(last):
        # A layer below this one has ended the run already.
        return cast("AIMessage", last)
    text, metadata = synthetic_text(guard), synthetic_metadata(guard, trip)
    if isinstance(last, AIMessage) and not last.tool_calls:
        content = last.content
        if isinstance(content, str):
            content = f"{content}\n\n{text}" if content else text
        else:
            content = [*content, {"type": "text", "text": text}]
        return last.model_copy(
            update={
                "content": content,
                "response_metadata": {**last.response_metadata, **metadata},
                "id": last.id or str(uuid.uuid4()),
            }
        )
    return AIMessage(text, response_metadata=metadata, id=str(uuid.uuid4()))


def is_synthetic(message: BaseMessage | None) -> bool:
    """Tell whether a message was made by a stopped run."""
    return isinstance(message, AIMessage) and message.response_metadata.get("synthetic") is True


def merged(messages: Sequence[BaseMessage], closing: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Append the closing messages; one with the id of an earlier message takes its place."""
    ids = {message.id: place for place, message in enumerate(messages) if message.id is not None}
    result = list(messages)
    for message in closing:
        place = ids.get(message.id) if message.id is not None else None
        if place is not None:
            result[place] = message
        elif (
            is_synthetic(message)
            and result
            and isinstance(result[-1], AIMessage)
            and not result[-1].tool_calls
        ):
            result[-1] = message
        else:
            result.append(message)
    return result


def final_text(messages: Sequence[BaseMessage]) -> str | None:
    """Return the text of the last message, if it is the model's."""
    last = messages[-1] if messages else None
    if not isinstance(last, AIMessage):
        return None
    text: Any = last.text
    return str(text() if callable(text) and not isinstance(text, str) else text)
