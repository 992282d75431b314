"""The budget of a conversation: its counters go on over the runs of one thread or session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from hashlib import blake2b

from budgetguard_core.ending import end_run
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.guard import Guard
from budgetguard_core.snapshot import Snapshot
from budgetguard_core.stores import CheckpointStore

_LONGEST = 200
_PREFIX = "conversation-"
_RESERVED = {
    "tokens": "reserved_tokens",
    "cost": "reserved_cost",
    "input_tokens": "reserved_input",
}


def run_id_of(key: object) -> str:
    """Return the name under which a conversation is kept and logged.

    Raises:
        ConfigurationError: The framework names no conversation.
    """
    if key is None or not str(key):
        raise ConfigurationError(
            "a budget of a conversation needs its id, got none. Name the thread or session as "
            'the framework has it, or give conversation_id="...".'
        )
    text = str(key)
    if len(text) > _LONGEST:
        text = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{_PREFIX}{text}"


def is_in_one(guards: Iterable[Guard], run_id: str | None = None) -> bool:
    """Return whether guards are those of runs in a conversation; in this one where it is named."""
    names = [one.run_id for guard in guards for one in guard.ancestry]
    return any(name == run_id if run_id else name.startswith(_PREFIX) for name in names)


class Conversation:
    """One conversation while runs of it go on. The same id is the same one, whatever runs in it.

    Attributes:
        guard: The guard that its runs are parts of.
    """

    def __init__(self, guard: Guard, store: CheckpointStore | None) -> None:
        self.guard = guard
        self.runs = 0
        self._store = store

    def save(self) -> None:
        """Save its counters; blocking."""
        snapshot = self.guard.snapshot()
        with _LOCK:
            if self._store is None:
                _KEPT.pop(snapshot.run_id, None)
                _KEPT[snapshot.run_id] = snapshot
                while len(_KEPT) > _MOST_KEPT:
                    del _KEPT[next(iter(_KEPT))]
                return
        try:
            self._store.save(snapshot)
        except Exception as error:
            self.guard.tree.report("conversation", error)

    def leave(self) -> None:
        """Take the end of one of its runs."""
        with _LOCK:
            self.runs -= 1
            if not self.runs:
                # Its time stands still until the next run, which begins from what is saved.
                end_run(self.guard, trip=self.guard.trip)
                del _GOING_ON[id(self._store), self.guard.run_id]
            self.save()


_LOCK = threading.RLock()
_GOING_ON: dict[tuple[int, str], Conversation] = {}
"""By the identity of its store, which it keeps alive, and its name."""
_KEPT: dict[str, Snapshot] = {}
"""Conversations without a store, the one that was used last at the end."""
_MOST_KEPT = 10_000


def joined(
    run_id: str, store: CheckpointStore | None, make: Callable[[Snapshot | None], Guard]
) -> Conversation:
    """Return a conversation, for one more run of it; blocking where it is in a store.

    Args:
        run_id: Its name.
        store: Where it is kept; without one the last 10,000 are remembered in this process.
        make: Makes its guard, which goes on from a snapshot.

    Raises:
        CheckpointError: What is kept of it cannot be used: it would be unbounded.
    """
    with _LOCK:
        found = _GOING_ON.get((id(store), run_id))
        if found is None:
            before = _KEPT.get(run_id) if store is None else store.load(run_id)
            guard = make(None if before is None else _at_rest(before))
            guard.start()
            found = _GOING_ON[id(store), run_id] = Conversation(guard, store)
        found.runs += 1
    return found


def _at_rest(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot for the caps that hold now: they decide whether it is stopped.

    What a killed process had in flight may have been billed, so it counts as spent.
    """
    counters = dict(snapshot.counters)
    try:
        for spent, reserved in _RESERVED.items():
            counters[spent] += counters[reserved]
            counters[reserved] = 0
    except KeyError as error:
        raise snapshot.misfit(error) from None
    at_rest = {"trip": None, "held": (), "observed": None, "open_calls": (), "pauses": 0}
    return snapshot.model_copy(update={**at_rest, "counters": counters})
