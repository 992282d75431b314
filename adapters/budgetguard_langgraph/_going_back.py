"""Going back to the checkpoint at which a thread was stopped, with all that its tasks have done.

What runs there again has other ids, because LangGraph makes them of the checkpoint's own. A task
that has finished is known by its writes, and a subgraph finds its checkpoints by the task that it
is: both are copied to the ids that take their place.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, cast

from langgraph.types import StateSnapshot, StateUpdate

from budgetguard_core.kit import Flow
from budgetguard_langgraph._pauses import both
from budgetguard_langgraph._seams import COPY, configuration

_COPY: Final = [[StateUpdate(None, COPY)]]
_DELTAS: Final = "counters_since_delta_snapshot"


def go_back(graph: Any, saver: Any, config: Any) -> Flow[None]:
    """Make a copy of a checkpoint the newest of its thread.

    Args:
        graph: The graph.
        saver: Its checkpointer.
        config: Where the checkpoint is.
    """
    before = yield from _state(graph, config)
    saved = yield both(saver.get_tuple, saver.aget_tuple, config)
    copy = yield both(graph.bulk_update_state, graph.abulk_update_state, config, _COPY)
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
        inner, place = old.state, new.state
        if old.id in done or not isinstance(inner, StateSnapshot):
            continue
        kept = yield both(saver.get_tuple, saver.aget_tuple, inner.config)
        if kept is not None and isinstance(place, StateSnapshot):
            moved = _placed(kept, copied, place)
            if moved is not None:
                there = yield both(saver.put, saver.aput, *moved)
                yield from _carry(graph, saver, inner, kept, there)


def _placed(kept: Any, around: StateSnapshot, place: StateSnapshot) -> tuple[Any, ...] | None:
    """Return what a saver takes to keep a subgraph's checkpoint for the task in the copy."""
    parent, own = configuration(around.config), configuration(place.config)
    namespace = own["checkpoint_ns"]
    # The first: it has a history of its own. The second: its state is not in one checkpoint.
    if namespace == kept.config["configurable"]["checkpoint_ns"] or kept.metadata.get(_DELTAS):
        return None
    above = dict((around.metadata or {}).get("parents") or {})
    above[parent.get("checkpoint_ns", "")] = parent["checkpoint_id"]
    address = {"thread_id": own["thread_id"], "checkpoint_ns": namespace}
    versions = dict(kept.checkpoint["channel_versions"])
    return {"configurable": address}, kept.checkpoint, {**kept.metadata, "parents": above}, versions
