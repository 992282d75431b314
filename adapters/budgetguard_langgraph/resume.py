"""Going on with a stopped thread under a fresh budget."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias, cast

from langchain_core.messages import BaseMessage
from langgraph.pregel import Pregel  # pyright: ignore[reportMissingTypeStubs]
from langgraph.types import StateSnapshot, StateUpdate

from budgetguard_core import AdapterError, Budget, Guard
from budgetguard_core.kit import Envelope, Flow, outcome_of, run_awaited, run_blocking
from budgetguard_langgraph._messages import (
    conversation_key,
    has_open_calls,
    holds_another,
    is_synthetic,
    messages_of,
    replaced,
)
from budgetguard_langgraph._pauses import Thread, both, with_outcome
from budgetguard_langgraph._seams import COPY, ROOT, configuration
from budgetguard_langgraph.bounded import bind, bounded, plain, terms_of

_Graph: TypeAlias = Pregel[Any, Any, Any, Any]

_PAST: Final = 32
_COPY: Final = [[StateUpdate(None, COPY)]]
_DELTAS: Final = "counters_since_delta_snapshot"


def resume(
    graph: _Graph,
    config: Mapping[str, Any] | None,
    budget: Budget | Guard | Envelope,
    **options: Any,
) -> dict[str, Any] | Any:
    """Go on with a stopped thread where it stopped; nothing that completed runs again.

    Args:
        graph: The graph, bounded or not, with its checkpointer.
        config: The configuration with the thread's id; None where `with_config` has given it to
            the graph.
        budget: The fresh budget, a guard, or an envelope. A budget takes the place of that of the
            outermost `bounded`, whose other options stay: ledger and tenant, sinks, handlers.
        **options: What `invoke` takes besides.

    Raises:
        AdapterError: The thread was not stopped by a budget, or was changed since; there is no
            thread, because there is no checkpointer or no `thread_id`; or a tenant paid for the
            guard that was around it, and a `Budget` does not say who pays now.
    """
    again = run_blocking(_prepared(graph, config, budget))
    return again.invoke(None, config, **options)


def resume_stream(
    graph: _Graph,
    config: Mapping[str, Any] | None,
    budget: Budget | Guard | Envelope,
    **options: Any,
) -> Iterator[dict[str, Any] | Any]:
    """Go on with a stopped thread as `resume` does, and return what `stream` returns."""
    again = run_blocking(_prepared(graph, config, budget))
    found: Iterator[Any] = again.stream(None, config, **options)
    return found


async def aresume(
    graph: _Graph,
    config: Mapping[str, Any] | None,
    budget: Budget | Guard | Envelope,
    **options: Any,
) -> dict[str, Any] | Any:
    """Go on with a stopped thread where it stopped, as `resume` does."""
    again = await run_awaited(_prepared(graph, config, budget))
    return await again.ainvoke(None, config, **options)


async def aresume_stream(
    graph: _Graph,
    config: Mapping[str, Any] | None,
    budget: Budget | Guard | Envelope,
    **options: Any,
) -> AsyncIterator[dict[str, Any] | Any]:
    """Go on with a stopped thread as `resume` does, and return what `astream` returns."""
    again = await run_awaited(_prepared(graph, config, budget))
    found: AsyncIterator[Any] = again.astream(None, config, **options)
    return found


def _prepared(graph: Any, config: Any, budget: Budget | Guard | Envelope) -> Flow[Any]:
    """Make a thread ready; return the graph to go on with."""
    # First, as what is wrong with the budget must change nothing on the thread.
    *inner, terms = terms_of(graph) or terms_of(bounded(graph, budget))
    terms = replace(terms, envelope=_instead(terms.envelope, budget))
    location = {**configuration(graph.config or {}), **configuration(config or {})}
    saver = Thread(graph, location).saver
    if saver is None:
        missing = "no thread_id" if location.get("thread_id") is None else "no checkpointer"
        raise AdapterError(
            f"resume needs the thread of a graph with a checkpointer, got {missing}. Compile the "
            'graph with one, and pass {"configurable": {"thread_id": ...}} to run and to resume it.'
        )
    found: dict[str, Any] = {**(config or {}), "configurable": location}
    state = yield both(graph.get_state, graph.aget_state, found)
    saved = yield both(saver.get_tuple, saver.aget_tuple, state.config)
    if saved is None:
        raise _unfit("a thread that a budget stopped", "one on which there was no run")
    state = with_outcome(state, saved)
    if not state.next:
        past = yield both(_history, _ahistory, graph, found)
        yield from _reopen(graph, saver, found, state, past, terms.messages_key)
    return bind(plain(graph), (*inner, replace(terms, earlier=outcome_of(state))))


def _history(graph: Any, config: Any) -> list[StateSnapshot]:
    return list(graph.get_state_history(config, limit=_PAST))


async def _ahistory(graph: Any, config: Any) -> list[StateSnapshot]:
    return [one async for one in graph.aget_state_history(config, limit=_PAST)]


def _unfit(needed: str, got: str) -> AdapterError:
    return AdapterError(f"resume needs {needed}, got {got}. Give it a new input instead.")


def _instead(before: Envelope, budget: Budget | Guard | Envelope) -> Envelope:
    """Put a fresh budget in the place of a graph's: who pays and who is told stays."""
    if isinstance(budget, Envelope):
        return budget
    if isinstance(budget, Budget) and isinstance(before.budget, Budget):
        return replace(before, budget=budget)
    payers = before.budget.snapshot().tenant if isinstance(before.budget, Guard) else ()
    if isinstance(budget, Budget) and payers:
        names = ", ".join(map(repr, payers))
        raise AdapterError(
            f"resume needs a ledger and a tenant, because {names} paid for the stopped run, got a "
            "Budget. Use Envelope(budget=..., ledger=..., tenant=...)."
        )
    return Envelope(
        budget=budget,
        on_trip=before.on_trip,
        store=before.store,
        on_outcome=before.on_outcome,
        prune=before.prune,
    )


def _reopen(
    graph: Any,
    saver: Any,
    config: Any,
    state: StateSnapshot,
    past: Sequence[StateSnapshot],
    messages_key: str,
) -> Flow[None]:
    """Take a closed thread back to where it was stopped, with all that its tasks have done."""
    key = conversation_key(graph, messages_key)
    if key is not None and holds_another(state.values, key):
        key = None
    messages, outcome = messages_of(state.values, key), outcome_of(state)
    is_stopped = outcome is not None and outcome.status == "terminated"
    if key is not None:
        is_stopped = bool(messages) and is_synthetic(messages[-1])
    if not is_stopped:
        is_changed = any(is_synthetic(one) for one in messages)
        folded_messages = "ended by itself" + ("" if outcome or key else " or was changed since")
        folded_messages = "was changed since it was stopped" if is_changed else folded_messages
        raise _unfit("a thread that a budget stopped", f"one that {folded_messages}")
    newest = before = next((one for one in past if _source(one) != "update"), None)
    by_itself = before is not None and _has_ended(before, key)
    if by_itself:
        # The middleware has written the end. A step that only was refused left no checkpoint.
        before = next((one for one in past if one.next and not _has_ended(one, key)), None)
    if before is None or not before.next or (by_itself and len(before.tasks) > 1):
        raise _unfit("the checkpoint at which a thread was stopped", "a thread without it")
    earlier = messages_of(before.values, key)
    open_tasks_of = [task.name for task in before.tasks if task.result is None and not task.error]
    if key is not None and open_tasks_of and has_open_calls(earlier):
        # The refused calls have their answers, so what comes after their node is next.
        value = _without_the_end(graph, key, messages, earlier)
        update = [[StateUpdate(value if key == ROOT else {key: value}, open_tasks_of[0])]]
        yield both(graph.bulk_update_state, graph.abulk_update_state, config, update)
        return
    folded = newest if by_itself else past[past.index(before) - 1]
    if key is not None and folded is not None and _was_edited(state, folded, key):
        raise _unfit("a thread as it was stopped", "one that was changed since")
    yield from _go_back(graph, saver, before.config, keeps=not by_itself)


def _source(state: StateSnapshot) -> object:
    return (state.metadata or {}).get("source")


def _has_ended(state: StateSnapshot, key: str | None) -> bool:
    """Return whether a checkpoint has the end of a stopped conversation."""
    messages = messages_of(state.values, key)
    return bool(messages) and is_synthetic(messages[-1])


def _was_edited(state: StateSnapshot, folded: StateSnapshot, key: str) -> bool:
    """Return whether a thread holds more than a run wrote when it ended (`folded`)."""
    messages, folded_messages = messages_of(state.values, key), messages_of(folded.values, key)
    if (
        len(messages) > len(folded_messages) + 1
        or messages[:-1] != folded_messages[: len(messages) - 1]
    ):
        return True
    if key == ROOT:
        return False
    names = {*state.values, *folded.values} - {key}
    return any(state.values.get(name) != folded.values.get(name) for name in names)


def _without_the_end(
    graph: Any, key: str, messages: Sequence[BaseMessage], earlier: Sequence[BaseMessage]
) -> Any:
    last = messages[-1]
    kept = [one for one in earlier if one.id is not None and one.id == last.id]
    if not kept and len(earlier) == len(messages):
        # Without ids a message that took another's place is told by where it stands.
        kept = [earlier[-1]]
    return replaced(graph, key, [*messages[:-1], *kept[:1]])


# Going back to the checkpoint at which a thread was stopped, with all that its tasks have done.
# What runs there again has other ids, because LangGraph makes them of the checkpoint's own. A task
# that has finished is known by its writes, and a subgraph finds its checkpoints by the task that it
# is: both are copied to the ids that take their place.


def _go_back(graph: Any, saver: Any, config: Any, *, keeps: bool) -> Flow[None]:
    """Make a copy of a checkpoint the newest of its thread, with what its tasks have done."""
    before = yield from _state(graph, config)
    saved = yield both(saver.get_tuple, saver.aget_tuple, config)
    copy = yield both(graph.bulk_update_state, graph.abulk_update_state, config, _COPY)
    if keeps:
        yield from _carry(graph, saver, before, saved, copy)


def _state(graph: Any, config: Any) -> Flow[StateSnapshot]:
    get, aget = partial(graph.get_state, subgraphs=True), partial(graph.aget_state, subgraphs=True)
    state: StateSnapshot = yield both(get, aget, config)
    return state


def _carry(graph: Any, saver: Any, before: StateSnapshot, saved: Any, copy: Any) -> Flow[None]:
    """Give the tasks of a copied checkpoint what those of the original have done."""
    copied = yield from _state(graph, copy)
    tasks: dict[Any, Any] = {cast("Any", task).path: task for task in copied.tasks}
    pairs = [(old, tasks[old.path]) for old in cast("Any", before.tasks) if old.path in tasks]
    done = {old.id: new.id for old, new in pairs if old.result is not None}
    writes: dict[str, list[tuple[str, Any]]] = {}
    for task, channel, value in saved.pending_writes or ():
        if task in done:
            writes.setdefault(done[task], []).append((channel, value))
    for task, written in writes.items():
        yield both(saver.put_writes, saver.aput_writes, copy, written, task)
    for old, new in pairs:
        inner, location = old.state, new.state
        if old.id in done or not isinstance(inner, StateSnapshot):
            continue
        kept = yield both(saver.get_tuple, saver.aget_tuple, inner.config)
        if kept is not None and isinstance(location, StateSnapshot):
            moved = _placed(kept, copied, location)
            if moved is not None:
                there = yield both(saver.put, saver.aput, *moved)
                yield from _carry(graph, saver, inner, kept, there)


def _placed(
    kept: Any, parent_state: StateSnapshot, location: StateSnapshot
) -> tuple[Any, ...] | None:
    """Return what a saver takes to keep a subgraph's checkpoint for the task in the copy."""
    parent, own = configuration(parent_state.config), configuration(location.config)
    namespace = own["checkpoint_ns"]
    # The first: it has a history of its own. The second: its state is not in one checkpoint.
    if namespace == kept.config["configurable"]["checkpoint_ns"] or kept.metadata.get(_DELTAS):
        return None
    parents = dict((parent_state.metadata or {}).get("parents") or {})
    parents[parent.get("checkpoint_ns", "")] = parent["checkpoint_id"]
    address = {"thread_id": own["thread_id"], "checkpoint_ns": namespace}
    versions = dict(kept.checkpoint["channel_versions"])
    return (
        {"configurable": address},
        kept.checkpoint,
        {**kept.metadata, "parents": parents},
        versions,
    )
