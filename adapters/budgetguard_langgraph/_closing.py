"""Writing the end of a conversation into a graph's state, whatever shape that has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

from langchain_core.messages import BaseMessage
from langgraph.channels import LastValue  # pyright: ignore[reportMissingTypeStubs]
from langgraph.constants import END
from langgraph.types import Interrupt, Overwrite, StateSnapshot, StateUpdate

from budgetguard_core import AdapterError
from budgetguard_core.kit import NOT_EXECUTED, OUTCOME_UNKNOWN, close_history, outcome_of
from budgetguard_langgraph._messages import DIALECT, held_in, messages_of
from budgetguard_langgraph._seams import PUSH, ROOT, START
from budgetguard_langgraph.interrupts import ANSWERED, is_budget_interrupt

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

    Args:
        graph: The graph.
        key: The channel of the conversation.
        state: The thread, with what finished siblings wrote in it.
        left: The thread before. Of a run that failed or was killed it does not tell which calls
            had started.
    """
    messages = messages_of(state.values, key)
    ended = outcome_of(left)
    waited = ended is not None and ended.status == "paused"
    note = NOT_EXECUTED if waited or asked_in(left, ())[0] else OUTCOME_UNKNOWN
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


def is_sent(task: Any) -> bool:
    """Return whether a task was made by a `Send`, with an input of its own."""
    return bool(task.path) and task.path[0] == PUSH


def is_deferred(graph: Any, task: Any) -> bool:
    """Return whether a task is of a node that waits for all others and no command schedules."""
    node: Any = graph.builder.nodes.get(task.name)
    return bool(getattr(node, "defer", False))


def asked_in(
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
