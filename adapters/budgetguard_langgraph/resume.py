"""Going on with a stopped thread under a fresh budget."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from langchain_core.messages import BaseMessage
from langgraph.types import Command, StateSnapshot, StateUpdate

from budgetguard_core import AdapterError, Budget, Guard
from budgetguard_core.kit import Envelope
from budgetguard_langgraph._closing import conversation_in, conversation_key, replaced
from budgetguard_langgraph._history import is_synthetic, unanswered
from budgetguard_langgraph._seams import ROOT
from budgetguard_langgraph.bounded import bounded, plain, terms_of

_PAST = 8


def resume(graph: Any, config: Any, budget: Budget | Guard | Envelope, **options: Any) -> Any:
    """Go on with a stopped thread where it stopped; nothing that completed runs again.

    Args:
        graph: The graph, bounded or not, with its checkpointer.
        config: The configuration with the thread's id.
        budget: The fresh budget, a guard, or an envelope.
        **options: What `invoke` takes besides.

    Raises:
        AdapterError: The thread was not stopped by a budget, or was changed since.
    """
    again, given = _prepared(graph, config, budget)
    return again.invoke(given, config, **options)


def resume_stream(
    graph: Any, config: Any, budget: Budget | Guard | Envelope, **options: Any
) -> Iterator[Any]:
    """Go on with a stopped thread as `resume` does, and return what `stream` returns."""
    again, given = _prepared(graph, config, budget)
    found: Iterator[Any] = again.stream(given, config, **options)
    return found


async def aresume(
    graph: Any, config: Any, budget: Budget | Guard | Envelope, **options: Any
) -> Any:
    """Go on with a stopped thread where it stopped, as `resume` does."""
    again, given = await _aprepared(graph, config, budget)
    return await again.ainvoke(given, config, **options)


async def aresume_stream(
    graph: Any, config: Any, budget: Budget | Guard | Envelope, **options: Any
) -> AsyncIterator[Any]:
    """Go on with a stopped thread as `resume` does, and return what `astream` returns."""
    again, given = await _aprepared(graph, config, budget)
    found: AsyncIterator[Any] = again.astream(given, config, **options)
    return found


def _prepared(graph: Any, config: Any, budget: Budget | Guard | Envelope) -> tuple[Any, Any]:
    """Return the graph to go on with, and its input; the thread is ready for it."""
    again = _again(graph, budget)
    state = graph.get_state(config)
    past: Sequence[StateSnapshot] = ()
    if not state.next:
        past = list(graph.get_state_history(config, limit=_PAST))
    update, given = _plan(graph, state, past)
    if update is not None:
        graph.bulk_update_state(config, update)
    return again, given


async def _aprepared(graph: Any, config: Any, budget: Budget | Guard | Envelope) -> tuple[Any, Any]:
    again = _again(graph, budget)
    state = await graph.aget_state(config)
    past: Sequence[StateSnapshot] = ()
    if not state.next:
        past = [one async for one in graph.aget_state_history(config, limit=_PAST)]
    update, given = _plan(graph, state, past)
    if update is not None:
        await graph.abulk_update_state(config, update)
    return again, given


def _again(graph: Any, budget: Budget | Guard | Envelope) -> Any:
    if not terms_of(graph):
        return bounded(graph, budget)
    terms = terms_of(graph)[-1]
    before = terms.envelope
    options: Any = {}
    if not isinstance(budget, Envelope):
        options = {"on_trip": before.on_trip, "store": before.store}
        options["on_outcome"] = before.on_outcome
    return bounded(
        plain(graph), budget, messages_key=terms.messages_key, grace=terms.grace, **options
    )


def _plan(
    graph: Any, state: StateSnapshot, past: Sequence[StateSnapshot]
) -> tuple[list[list[StateUpdate]] | None, Any]:
    """Return what to write to the thread, and the input to go on with."""
    if state.next:
        return None, None
    terms = terms_of(graph)
    key = conversation_key(graph, terms[-1].messages_key if terms else "messages")
    messages = conversation_in(state.values, key)
    last = messages[-1] if messages else None
    before = next((one for one in past if (one.metadata or {}).get("source") != "update"), None)
    if key is None or last is None or not is_synthetic(last):
        changed = any(is_synthetic(one) for one in messages)
        found = "was changed since it was stopped" if changed else "ended by itself"
        raise AdapterError(
            f"resume needs a thread that a budget stopped, got one that {found}. "
            "Give it a new input instead."
        )
    if before is None or not before.next:
        raise AdapterError(
            "resume needs the checkpoint at which a thread was stopped, got a thread without it. "
            "Give it a new input instead."
        )
    open_tasks = [task.name for task in before.tasks if task.result is None and not task.error]
    earlier = conversation_in(before.values, key)
    original = next((one for one in earlier if one.id is not None and one.id == last.id), None)
    if original is None and earlier and len(earlier) == len(messages):
        # Without ids a message that took another's place is told by where it stands.
        original = earlier[-1]
    value = _without_the_end(graph, key, messages, original)
    if unanswered(earlier) and open_tasks:
        # The refused calls have their answers, so what comes after their node is next.
        update = value if key == ROOT else {key: value}
        return [[StateUpdate(update, open_tasks[0])]], None
    goto = sorted(set(open_tasks or before.next))
    return None, Command(update=[(key, value)], goto=goto)


def _without_the_end(
    graph: Any, key: str, messages: Sequence[BaseMessage], original: BaseMessage | None
) -> Any:
    return replaced(graph, key, [*messages[:-1], *([] if original is None else [original])])
