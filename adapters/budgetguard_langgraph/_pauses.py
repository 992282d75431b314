"""The records of a run on its thread: its end, and its counters where it waits for a person.

A checkpoint takes writes of tasks; those of a task that no graph has are kept and never applied. So
both lie in the framework's own checkpoint, whatever saver it has, and nothing of them is in
the state. Caps are not read from there.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from langgraph.checkpoint.base import WRITES_IDX_MAP, BaseCheckpointSaver
from langgraph.types import Interrupt, StateSnapshot

from budgetguard_core import BudgetGuardError, Guard, Outcome, Snapshot
from budgetguard_core.kit import Flow, Step, remember
from budgetguard_langgraph._seams import CHECKPOINTER, INTERRUPT, TASK, configuration
from budgetguard_langgraph.interrupts import is_budget_interrupt

_CHANNEL: Final = "budgetguard"
_ENDED: Final = "budgetguard:ended:"
_OVER: Final = "budgetguard:over"
_COORDINATES: Final = ("thread_id", "checkpoint_ns", "checkpoint_id", "checkpoint_map")


def both(call: Callable[..., Any], awaited: Callable[..., Awaitable[Any]], *given: Any) -> Step:
    """Return the step of a call that has a blocking and an awaited form."""
    return Step(lambda: call(*given), lambda: awaited(*given))


def called_with(bound: Any, given: Any) -> dict[str, Any]:
    """Return what a graph will be called with, as LangGraph puts it together."""
    explicit = {**configuration(bound or {}), **configuration(given or {})}
    if any(explicit.get(name) is not None for name in _COORDINATES):
        return explicit
    return {**configuration(), **explicit}


def pending(writes: Iterable[Any]) -> list[Interrupt]:
    """List the interrupts that wait at a checkpoint: those of finished tasks stay in its writes."""
    listed = list(writes)
    finished = {task for task, channel, _ in listed if channel not in WRITES_IDX_MAP}
    return [
        one
        for task, channel, value in listed
        if channel == INTERRUPT and task not in finished
        for one in value
    ]


class Thread:
    """The thread of one graph run: where its checkpoints are.

    Attributes:
        has_checkpointer: Its checkpoints are kept, on this thread or another.
        waiting: The interrupts at its checkpoint, once the counters there were looked for.
        was_stopped: A budget has stopped a task there, which may have finished since; releases of
            LangGraph before 1.2 have it wait still.
    """

    def __init__(self, graph: Any, configurable: Any, outer: Any = None) -> None:
        self.waiting: list[Interrupt] = []
        self.was_stopped = False
        self._taken: str | None = None
        saver = configurable.get(CHECKPOINTER, getattr(graph, "checkpointer", None))
        self.has_checkpointer = isinstance(saver, BaseCheckpointSaver)
        thread_id = configurable.get("thread_id")
        self.saver: Any = saver if self.has_checkpointer and thread_id is not None else None
        namespace = str(configurable.get("checkpoint_ns") or "")
        if getattr(graph, "checkpointer", None) is True:
            namespace = "|".join(part.split(":")[0] for part in namespace.split("|"))
        self.config: Any = {
            "configurable": {"thread_id": str(thread_id), "checkpoint_ns": namespace}
        }
        checkpoint = configurable.get("checkpoint_id")
        if checkpoint is not None and TASK not in configurable:
            self.config["configurable"]["checkpoint_id"] = checkpoint
        self.key = (str(thread_id), namespace)
        # Runs that are one inside the other on the same thread are kept apart.
        enclosing = None if outer is None else outer.thread
        self.slot: int = (
            enclosing.slot + 1 if enclosing is not None and enclosing.key == self.key else 0
        )

    @property
    def asks_nobody(self) -> bool:
        """True if all that waits there is the stop of a budget."""
        return bool(self.waiting) and all(is_budget_interrupt(one) for one in self.waiting)

    def moved(self, config: Any) -> None:
        """Follow a call that was made at one checkpoint of the thread to the one where it is."""
        location, checkpoint = (
            self.config["configurable"],
            configuration(config).get("checkpoint_id"),
        )
        if "checkpoint_id" in location and checkpoint is not None:
            location["checkpoint_id"] = checkpoint

    def kept(self) -> Flow[Snapshot | None]:
        """Return the counters of the run that waits here."""
        if self.saver is None:
            return None
        chain: list[Any] = []
        with suppress(Exception):  # a saver that can only be awaited; one that fails ends the graph
            location: Any = self.config
            while location is not None:
                chain.append((yield self._read(location)))
                location = _before(chain[-1], self.slot)
        return self._newest(chain)

    def leave(self, guard: Guard, outcome: Outcome) -> Flow[None]:
        """Leave how a run ended, without its messages, and the counters of one that waits.

        Of those that a stopped run was taken up with nothing is made any more: others begin anew.
        They are written to the checkpoint where the thread is, in the name of a task that no graph
        has.
        """
        if self.saver is None or outcome.status == "completed":
            return
        writes: list[tuple[str, Any]] = []
        if outcome.status == "paused":
            # Without caps: they come from the envelope that goes on.
            snapshot = guard.snapshot().model_copy(update={"budget": None})
            writes.append((f"{_CHANNEL}:{self.slot}", snapshot.to_json()))
        elif self._taken is not None:
            writes.append((_OVER, self._taken))
        try:
            saved = yield self._read(self.config)
            if saved is None:
                return
            if self.slot == 0:
                number = max(_ends(saved), default=0) + 1
                text = outcome.model_dump_json(exclude={"messages", "final"})
                writes.append((f"{_ENDED}{number}", text))
            if writes:
                to = saved.config, writes, secrets.token_hex(16)
                yield both(self.saver.put_writes, self.saver.aput_writes, *to)
        except Exception as error:
            guard.tree.report("checkpoint", error)

    def _read(self, config: Any) -> Step:
        return both(self.saver.get_tuple, self.saver.aget_tuple, config)

    def _newest(self, chain: Sequence[Any]) -> Snapshot | None:
        listed = [list[Any](one.pending_writes or ()) for one in chain if one is not None]
        writes = listed[0] if listed else []
        self.waiting = pending(writes)
        requested = [one for _, channel, value in writes if channel == INTERRUPT for one in value]
        self.was_stopped = any(is_budget_interrupt(one) for one in requested)
        left = [one for writes in listed for one in writes]
        over = {value for _, channel, value in left if channel == _OVER}
        texts = [value for _, channel, value in left if channel == f"{_CHANNEL}:{self.slot}"]
        found: list[Snapshot] = []
        for text in texts:
            try:
                found.append(Snapshot.from_json(text))
            except (BudgetGuardError, TypeError, ValueError):
                continue
        going = [one for one in found if one.run_id not in over]
        newest = max(going, key=lambda one: (one.seq, one.call_id), default=None)
        self._taken = None if newest is None else newest.run_id
        return newest


def _before(saved: Any, slot: int) -> Any:
    """Return where else counters may lie: what changes a thread leaves them where it waited."""
    if saved is None:
        return None
    metadata: Any = saved.metadata or {}
    if metadata.get("source") != "update":
        return None
    writes: Iterable[Any] = saved.pending_writes or ()
    has_some = any(channel == f"{_CHANNEL}:{slot}" for _, channel, _ in writes)
    return None if has_some else saved.parent_config


class EndedState(StateSnapshot):
    """A state that knows how the run ended that left it; a plain tuple takes no attributes."""


def with_outcome(state: StateSnapshot, saved: Any) -> StateSnapshot:
    """Return a state, with the outcome that lies at its checkpoint, if one does."""
    texts = _ends(saved)
    if not texts:
        return state
    try:
        outcome = Outcome.model_validate_json(texts[max(texts)])
    except ValueError:  # written by another release
        return state
    state_of_end = EndedState(*state)
    remember(state_of_end, outcome)
    return state_of_end


def _ends(saved: Any) -> dict[int, str]:
    """Return how the runs ended that were at a checkpoint; savers keep no order of writes."""
    writes: Iterable[Any] = () if saved is None else saved.pending_writes or ()
    return {
        int(channel.removeprefix(_ENDED)): value
        for _, channel, value in writes
        if channel.startswith(_ENDED)
    }
