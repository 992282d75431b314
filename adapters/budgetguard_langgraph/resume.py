"""Going on with a stopped thread under a fresh budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import BaseMessage, RemoveMessage
from langgraph.types import Command, StateSnapshot, StateUpdate

from budgetguard_core import AdapterError, Budget, Guard
from budgetguard_langgraph._history import is_synthetic, messages_of, unanswered
from budgetguard_langgraph._run import Terms
from budgetguard_langgraph.bounded import bounded, plain, terms_of

_PAST = 8


def resume(graph: Any, config: Any, budget: Budget | Guard, **options: Any) -> Any:
    """Go on with a stopped thread where it stopped; nothing that completed runs again.

    Args:
        graph: The graph, bounded or not, with its checkpointer.
        config: The configuration with the thread's id.
        budget: The fresh budget, or a guard.
        **options: What `invoke` takes besides.

    Raises:
        AdapterError: The thread was not stopped by a budget.
    """
    again = _again(graph, budget)
    state = graph.get_state(config)
    past: Sequence[StateSnapshot] = ()
    if not state.next:
        past = list(plain(graph).get_state_history(config, limit=_PAST))
    update, given = _plan(state, past, _key(graph))
    if update is not None:
        graph.bulk_update_state(config, update)
    return again.invoke(given, config, **options)


async def aresume(graph: Any, config: Any, budget: Budget | Guard, **options: Any) -> Any:
    """Go on with a stopped thread where it stopped, as `resume` does."""
    again = _again(graph, budget)
    state = await graph.aget_state(config)
    past: Sequence[StateSnapshot] = ()
    if not state.next:
        past = [one async for one in plain(graph).aget_state_history(config, limit=_PAST)]
    update, given = _plan(state, past, _key(graph))
    if update is not None:
        await graph.abulk_update_state(config, update)
    return await again.ainvoke(given, config, **options)


def _key(graph: Any) -> str:
    return (terms_of(graph) or Terms(Budget())).messages_key


def _again(graph: Any, budget: Budget | Guard) -> Any:
    terms = terms_of(graph) or Terms(budget)
    return bounded(
        graph,
        budget,
        on_trip=terms.on_trip,
        store=terms.store,
        messages_key=terms.messages_key,
        grace=terms.grace,
    )


def _plan(
    state: StateSnapshot, past: Sequence[StateSnapshot], key: str
) -> tuple[list[list[StateUpdate]] | None, Any]:
    """Return what to write to the thread, and the input to go on with."""
    if state.next:
        return None, None
    messages = messages_of(state.values, key)
    last = messages[-1] if messages else None
    before = next((one for one in past if (one.metadata or {}).get("source") != "update"), None)
    if last is None or not is_synthetic(last) or before is None or not before.next:
        raise AdapterError(
            "resume needs a thread that a budget stopped, got one that ended by itself. "
            "Give it a new input instead."
        )
    open_tasks = [task.name for task in before.tasks if task.result is None and not task.error]
    earlier = messages_of(before.values, key)
    original = next((one for one in earlier if one.id == last.id), None)
    undone: list[BaseMessage] = [original or RemoveMessage(id=str(last.id))]
    if unanswered(earlier) and open_tasks:
        # The refused calls have their answers, so what comes after their node is next.
        return [[StateUpdate({key: undone}, open_tasks[0])]], None
    return None, Command(update={key: undone}, goto=sorted(set(open_tasks or before.next)))
