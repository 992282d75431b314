"""Closing a conversation: every tool call has a result, and the synthetic message is the last."""

from __future__ import annotations

import uuid
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage, convert_to_messages

from budgetguard_core.kit import NOT_EXECUTED, OUTCOME_UNKNOWN


def held_in(values: Any, key: str) -> Any:
    """Return what a graph's state holds under a key; a state that is one value is returned."""
    return values.get(key) if isinstance(values, dict) else getattr(values, key, values)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def messages_of(values: Any, key: str) -> list[BaseMessage]:
    """Return the conversation in a graph's state, or nothing where it has none.

    Texts, pairs and tables among messages are read as LangChain's models read them. A list that
    holds no message is the graph's own.
    """
    found = held_in(values, key)
    if not isinstance(found, (list, tuple)):
        return []
    listed = cast("Sequence[Any]", found)
    messages = [message for message in listed if isinstance(message, BaseMessage)]
    if messages and len(messages) < len(listed):
        # What they cannot read either is the graph's own, and only looked past.
        with suppress(NotImplementedError, TypeError, ValueError):
            return convert_to_messages(listed)
    return messages


def unanswered(messages: Sequence[BaseMessage]) -> list[tuple[str, str]]:
    """List id and name of the tool calls that have no result yet, equal ids one by one."""
    answered = Counter(m.tool_call_id for m in messages if isinstance(m, ToolMessage))
    left: list[tuple[str, str]] = []
    for message in messages:
        asked: tuple[Any, ...] = ()
        if isinstance(message, AIMessage):
            # Packages send those that nobody could read as well.
            invalid = [one for one in message.invalid_tool_calls if one.get("id")]
            asked = (*message.tool_calls, *invalid)
        for call in asked:
            id_ = str(call["id"])
            if answered[id_] > 0:
                answered[id_] -= 1
            else:
                left.append((id_, call["name"] or ""))
    return left


def results_for(
    messages: Sequence[BaseMessage],
    started: Sequence[str | None] = (),
    finished: Mapping[str, Sequence[ToolMessage]] | None = None,
) -> list[BaseMessage]:
    """Answer the open tool calls: with what they returned where that is known, else with a note.

    Args:
        messages: The conversation.
        started: The ids of the calls that are in flight.
        finished: What calls returned that their node has lost with its siblings, by id.
    """
    in_flight = Counter(started)
    known = {id_: deque(results) for id_, results in (finished or {}).items()}
    have = {m.id for m in messages if m.id is not None}
    results: list[BaseMessage] = []
    for id_, name in unanswered(messages):
        lost = known.get(id_)
        found = lost.popleft() if lost else None
        if found is not None and (found.id is None or found.id not in have):
            results.append(found)
            continue
        text = OUTCOME_UNKNOWN if in_flight[id_] > 0 else NOT_EXECUTED
        in_flight[id_] -= 1
        results.append(
            ToolMessage(text, tool_call_id=id_, name=name, status="error", id=str(uuid.uuid4()))
        )
    return results


def placed(messages: Sequence[BaseMessage], results: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Put results right behind the answers that asked for them, before whatever came after."""
    waiting = [one for one in results if isinstance(one, ToolMessage)]
    found: list[BaseMessage] = []
    for place, message in enumerate(messages):
        found.append(message)
        following = messages[place + 1] if place + 1 < len(messages) else None
        if waiting and not isinstance(following, ToolMessage):
            open_ids = Counter(id_ for id_, _ in unanswered(found))
            for one in [one for one in waiting if open_ids[one.tool_call_id] > 0]:
                if open_ids[one.tool_call_id] > 0:
                    open_ids[one.tool_call_id] -= 1
                    waiting.remove(one)
                    found.append(one)
    return found


def synthetic_message(
    messages: Sequence[BaseMessage], text: str, metadata: Mapping[str, Any]
) -> AIMessage:
    """Make the message that ends a stopped run.

    A conversation that ends with an answer already gets it as a part of that answer, because no
    provider takes two messages of the model in a row; it then has the id of the answer.
    """
    last = messages[-1] if messages else None
    if last is not None and is_synthetic(last):
        # A layer below this one has ended the run already.
        return cast("AIMessage", last)
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
    return AIMessage(text, response_metadata=dict(metadata), id=str(uuid.uuid4()))


def is_synthetic(message: BaseMessage | None) -> bool:
    """Return whether a message was made by a stopped run."""
    return isinstance(message, AIMessage) and message.response_metadata.get("synthetic") is True


def closed(
    messages: Sequence[BaseMessage],
    results: Sequence[BaseMessage],
    text: str,
    metadata: Mapping[str, Any],
) -> list[BaseMessage]:
    """Return the conversation with its open calls answered and the synthetic message at its end."""
    whole = placed(messages, results)
    last = synthetic_message(whole, text, metadata)
    if whole and isinstance(whole[-1], AIMessage) and not whole[-1].tool_calls:
        whole.pop()
    return [*whole, last]


def final_text(messages: Sequence[BaseMessage]) -> str | None:
    """Return the text of the last message, if it is the model's."""
    last = messages[-1] if messages else None
    if not isinstance(last, AIMessage):
        return None
    text: Any = last.text
    return str(text() if callable(text) and not isinstance(text, str) else text)
