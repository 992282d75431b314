"""LangChain's messages as a dialect of the kit, and the conversation in a graph's state."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, cast

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
    messages_from_dict,
    messages_to_dict,
)
from langgraph.channels import LastValue  # pyright: ignore[reportMissingTypeStubs]
from langgraph.constants import END
from langgraph.types import Interrupt, Overwrite, StateSnapshot, StateUpdate

from budgetguard_core import AdapterError
from budgetguard_core.kit import (
    NOT_EXECUTED,
    OUTCOME_UNKNOWN,
    Call,
    Turn,
    close_history,
    end_history,
    open_calls,
    outcome_of,
)
from budgetguard_langgraph._seams import ROOT, START
from budgetguard_langgraph.interrupts import ANSWERED, is_budget_interrupt

_KINDS: Final[Mapping[str, type[BaseMessage]]] = {"system": SystemMessage, "assistant": AIMessage}
_ROLES: Final[Mapping[str, Any]] = {"system": "system", "ai": "assistant", "tool": "tool"}


class Dialect:
    """The dialect of LangChain's messages."""

    def read(self, message: BaseMessage) -> Turn:
        """Read a message; tool calls that nobody could read are sent too, so they are calls."""
        if isinstance(message, ToolMessage):
            return Turn("tool", results=((message.tool_call_id, text_of(message)),))
        if isinstance(message, AIMessage):
            requested = [
                *message.tool_calls,
                *(one for one in message.invalid_tool_calls if one["id"]),
            ]
            calls = tuple(
                Call(one["id"] or "", one["name"] or "", one["args"]) for one in requested
            )
            text = text_of(message)
            parts = () if calls and not text else (text,)
            return Turn("assistant", parts, calls, synthetic=is_synthetic(message))
        content = message.content
        return Turn(
            _ROLES.get(message.type, "user"),
            (content,) if isinstance(content, str) else (*content,),
        )

    def results(self, results: Sequence[tuple[Call, Any]], onto: Any) -> list[BaseMessage]:
        """Write tool results: a message that a node has lost, or an error with a note."""
        made: list[BaseMessage] = [
            result
            if isinstance(result, ToolMessage)
            else ToolMessage(
                str(result),
                tool_call_id=call.id,
                name=call.name,
                status="error",
                id=str(uuid.uuid4()),
            )
            for call, result in results
        ]
        return made if onto is None else [onto, *made]

    def ending(self, text: str, metadata: Mapping[str, Any], onto: Any) -> AIMessage:
        """Write the synthetic last message; one that takes an answer's place has its id."""
        if onto is None:
            return AIMessage(text, response_metadata=dict(metadata), id=str(uuid.uuid4()))
        content = onto.content
        if isinstance(content, str):
            content = f"{content}\n\n{text}" if content else text
        else:
            content = [*content, {"type": "text", "text": text}]
        changes = {
            "content": content,
            "response_metadata": {**onto.response_metadata, **metadata},
            "id": onto.id or str(uuid.uuid4()),
        }
        return cast("AIMessage", onto.model_copy(update=changes))

    def words(self, role: str, parts: Sequence[Any]) -> BaseMessage:
        """Write one message of these parts."""
        given = [one for one in parts if one]
        content: Any = given
        if all(isinstance(one, str) for one in given):
            content = "\n\n".join(given)
        else:
            content = [
                {"type": "text", "text": one} if isinstance(one, str) else one for one in given
            ]
        return _KINDS.get(role, HumanMessage)(content)

    def plain(self, messages: Sequence[BaseMessage]) -> list[Any]:
        """Write messages as plain data."""
        return messages_to_dict(messages)

    def from_plain(self, messages: Sequence[Any]) -> list[BaseMessage]:
        """Read what `plain` has written, and messages as they are."""
        if all(isinstance(one, dict) and "data" in one for one in messages):
            return messages_from_dict(messages)
        return convert_to_messages(messages)


DIALECT: Final = Dialect()


def text_of(message: BaseMessage) -> str:
    """Return the text of a message."""
    return str(cast("Any", message).text)


def is_synthetic(message: BaseMessage | None) -> bool:
    """Return whether a message was made by a stopped run."""
    return isinstance(message, AIMessage) and message.response_metadata.get("synthetic") is True


def has_open_calls(messages: Sequence[BaseMessage]) -> bool:
    """Return whether tool calls have no result yet."""
    return bool(open_calls([DIALECT.read(one) for one in messages]))


def ended(
    messages: Sequence[BaseMessage],
    answer: Callable[[Call, int], Any],
    text: str,
    metadata: Mapping[str, Any],
) -> tuple[list[BaseMessage], list[BaseMessage]]:
    """Close a conversation and end it with the synthetic message; return it, and what is new."""
    whole, new = close_history(messages, DIALECT, answer)
    whole, last = end_history(whole, DIALECT, text, metadata)
    return whole, [*new, last]


def held_in(values: Any, key: str) -> Any:
    """Return what a graph's state holds under a key; a state that is one value is returned."""
    return values.get(key) if isinstance(values, dict) else getattr(values, key, values)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def messages_of(values: Any, key: str | None) -> list[BaseMessage]:
    """Return the conversation in a graph's state, or nothing where it has none.

    Texts, pairs and tables among messages are read as LangChain's models read them. A list that
    holds no message is the graph's own.
    """
    found = None if key is None else held_in(values, key)
    if not isinstance(found, (list, tuple)):
        return []
    listed = cast("Sequence[Any]", found)
    messages = [message for message in listed if isinstance(message, BaseMessage)]
    if messages and len(messages) < len(listed):
        # What they cannot read either is the graph's own, and only looked past.
        with suppress(NotImplementedError, TypeError, ValueError):
            return convert_to_messages(listed)
    return messages


_ID: Final = re.compile("[0-9a-f]{32}")
FOLD: Final = [StateUpdate(None, END)]
"""Keeps what finished siblings wrote, and schedules nothing."""


def conversation_key(graph: Any, messages_key: str) -> str | None:
    """Return the channel that holds the conversation, None where no channel does."""
    channels = graph.channels
    for key in (messages_key, ROOT):
        if key in channels:
            return key
    reduced = [
        name
        for name, channel in channels.items()
        if "add_messages" in getattr(getattr(channel, "operator", None), "__name__", "")
    ]
    return reduced[0] if len(reduced) == 1 else None


def holds_another(values: Any, key: str) -> bool:
    """Return whether the channel of this name holds anything but messages: it is not written to."""
    found = values if key == ROOT else held_in(values, key)
    if found is None:
        return False
    if not isinstance(found, (list, tuple)):
        return True
    return len(messages_of(values, key)) < len(cast("Sequence[Any]", found))


def write(graph: Any, key: str, whole: Sequence[BaseMessage]) -> list[list[StateUpdate]]:
    """Return the updates that make this the whole conversation, with nothing left to run."""
    value = replaced(graph, key, whole)
    update: Any = value if key == ROOT else {key: value}
    return [[StateUpdate(update, writer_of(graph, key))], FOLD]


def answered(
    graph: Any, key: str, state: StateSnapshot, left: StateSnapshot
) -> list[list[StateUpdate]] | None:
    """Return the updates that answer the calls that a run left open; None where none is.

    Of a run that failed or was killed the thread does not tell which calls had started.
    """
    messages = messages_of(state.values, key)
    ended = outcome_of(left)
    waited = ended is not None and ended.status == "paused"
    note = NOT_EXECUTED if waited or stops_and_questions(left, ())[0] else OUTCOME_UNKNOWN
    whole, new = close_history(messages, DIALECT, lambda _, __: note)
    return write(graph, key, whole) if new else None


def replaced(graph: Any, key: str, whole: Sequence[BaseMessage]) -> Any:
    """Return what to write to a channel so that it holds this.

    A channel without a reducer takes the whole; one with a reducer is written past it, because
    what a reducer of the user's makes of a message that takes another's place is not known.
    """
    return list(whole) if isinstance(graph.channels[key], LastValue) else Overwrite(list(whole))


def writer_of(graph: Any, key: str) -> str:
    """Return a node in whose name a channel can be written without a router of the user's."""
    builder = graph.builder
    routed: Any = builder.branches
    given: Any = builder.schemas.get(builder.input_schema, {})
    if key in given and not routed.get(START):
        return START
    names: list[str] = [name for name in graph.nodes if name != START]
    return next((name for name in names if not routed.get(name)), names[0])


def stops_and_questions(
    state: StateSnapshot | None, waiting: Sequence[Interrupt]
) -> tuple[bool, list[Interrupt]]:
    """Return whether a budget stopped tasks of a thread, and list what a person is asked in it."""
    shown = [] if state is None else [one for task in state.tasks for one in task.interrupts]
    found = {one.id: one for one in (*waiting, *shown)}
    questions = [one for one in found.values() if not is_budget_interrupt(one)]
    return len(questions) < len(found), questions


def addressed(given: Any, questions: Sequence[Interrupt]) -> Any:
    """Return an answer with the id of the only question, unless it has ids.

    LangGraph wants it where several interrupts wait, and nobody was shown those of a budget.

    Raises:
        AdapterError: There is none: a budget stop is to be answered like a person's approval.
    """
    if not questions:
        raise AdapterError(ANSWERED)
    answer: Any = given.resume
    if len(questions) > 1 or (
        isinstance(answer, dict) and all(_ID.fullmatch(str(key)) for key in cast("Any", answer))
    ):
        return given
    return replace(given, resume={questions[0].id: answer})
