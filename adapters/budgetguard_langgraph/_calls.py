"""What all callbacks on a tree of guards share, so that a call which two see counts once."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from uuid import UUID

from langchain_core.messages import BaseMessage, ToolMessage

from budgetguard_core import Admit, Budget, Guard, ToolCall, ToolDecision, Trip

_KEPT = 512
_PLACES_KEPT = 128

Key: TypeAlias = tuple[Any, ...]


@dataclass(slots=True)
class OpenModelCall:
    """A model call in flight."""

    ticket: Admit
    prompt: Sequence[Any]
    parameters: Mapping[str, Any] | None
    root: UUID | None
    place: Key
    streamed: int = 0
    """Bytes of the answer so far."""


@dataclass(slots=True)
class OpenToolCall:
    """A tool call in flight."""

    ticket: Admit
    key: Key
    pause: Key


@dataclass(slots=True)
class Batch:
    """The tool calls of one answer of a model, in the order in which it wrote them."""

    calls: list[ToolCall]
    decisions: dict[str, deque[ToolDecision]] = field(
        default_factory=dict[str, deque[ToolDecision]]
    )
    results: dict[str, ToolMessage] = field(default_factory=dict[str, ToolMessage])
    admitted: bool = False


class Calls:
    """The calls in flight of a tree of guards, and what is known of those before."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.settled = threading.Condition(self.lock)
        self.models: dict[UUID, OpenModelCall] = {}
        self.tools: dict[UUID, OpenToolCall] = {}
        self.roots: dict[UUID | None, UUID | None] = {}
        """The top-level call above each chain and tool in flight."""
        self.batches: dict[Key, Batch] = {}
        self.places: OrderedDict[Key, list[Key]] = OrderedDict()
        """The keys of the batches that each graph waits for or has run last."""
        self.paused: OrderedDict[Key, Admit] = OrderedDict()
        self.failed: OrderedDict[Key, None] = OrderedDict()
        self.stops: OrderedDict[UUID, tuple[Trip, Sequence[BaseMessage]]] = OrderedDict()
        self.ended_roots: OrderedDict[Key, None] = OrderedDict()
        self.handlers: OrderedDict[str, Any] = OrderedDict()
        self.active: dict[UUID, Guard] = {}
        """The guard of each top-level call that callbacks have seen begin."""
        self.wrapped = 0
        """How many `bounded` runs are going on; they write the ending, not the callback."""

    def enter(self) -> bool:
        """Say that a `bounded` run begins; tell whether there was one already."""
        with self.lock:
            self.wrapped += 1
            return self.wrapped > 1

    def take(self, root: UUID, guard: Guard) -> Guard:
        """Return the guard that a top-level call counts with: the one given, or a part of it."""
        with self.lock:
            if root not in self.active:
                self.active[root] = part_of(guard) if self.active else guard
            return self.active[root]

    def leave(self) -> None:
        """Say that a `bounded` run is over."""
        with self.lock:
            self.wrapped -= 1

    def ends(self, root: Key) -> bool:
        """Tell whether this is the first callback that sees the end of a run."""
        with self.lock:
            if root in self.ended_roots:
                return False
            keep(self.ended_roots, root, None)
            return True

    def ended(self, run_id: UUID) -> OpenToolCall | None:
        """Take out a tool call that ended."""
        with self.settled:
            self.settled.notify_all()
            self.roots.pop(run_id, None)
            return self.tools.pop(run_id, None)

    def runs_tools(self, root: UUID | None) -> bool:
        """Tell whether tools of a run are in flight."""
        return any(call.key[0] == root for call in [*self.tools.values()])

    def wait_for_tools(self, root: UUID | None, seconds: float) -> None:
        """Block until no tool of a run is in flight, at most so long."""
        with self.settled:
            self.settled.wait_for(lambda: not self.runs_tools(root), seconds)

    def result_of(self, root: UUID | None, tool_call_id: str) -> ToolMessage | None:
        """Return what a finished tool call returned, where its node lost it with its siblings."""
        with self.lock:
            for key, batch in self.batches.items():
                if key[0] == root and key[2] == tool_call_id:
                    return batch.results.get(tool_call_id)
        return None

    def asked(self, root: UUID | None, place: str, calls: list[ToolCall]) -> None:
        """Keep the tool calls of an answer until their node runs them."""
        batch = Batch(calls)
        with self.lock:
            # The graph has gone on, so what it asked for before is answered.
            before = self.places.pop((root, place), ())
            waiting = [key for key in before if not self.batches[key].admitted]
            for key in before:
                if key not in waiting:
                    del self.batches[key]
            keys = dict.fromkeys((root, place, call.id) for call in calls)
            for key in keys:
                self.batches[key] = batch
            self.places[root, place] = [*dict.fromkeys([*waiting, *keys])]
            while len(self.places) > _PLACES_KEPT:
                for key in self.places.popitem(last=False)[1]:
                    del self.batches[key]


def part_of(guard: Guard) -> Guard:
    """Return the guard of a run on a guard that another run is on already.

    It spends the same budget, but what two runs ask for at the same time is no repetition.
    """
    budget = guard.budget
    return guard.child(Budget(loop_detection=budget.loop_detection, warn_at=budget.warn_at))


def keep(store: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Put a value under a key, and forget the oldest beyond what is kept."""
    store[key] = value
    store.move_to_end(key)
    while len(store) > _KEPT:
        store.popitem(last=False)


def innermost(calls: Calls, *guards: Guard | None) -> Guard | None:
    """Return the lowest of some guards of one tree."""
    found: Guard | None = None
    depth = -1
    for guard in guards:
        if guard is None or guard.attachment(Calls) is not calls:
            continue
        here = sum(1 for _ in chain(guard))
        if here > depth:
            found, depth = guard, here
    return found


def chain(guard: Guard | None) -> Sequence[Guard]:
    """Return a guard and its ancestors."""
    guards: list[Guard] = []
    while guard is not None:
        guards.append(guard)
        guard = guard.parent
    return guards
