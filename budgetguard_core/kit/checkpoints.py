"""The checkpoints of one run: what its store has already, and what is new."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from budgetguard_core.guard import Guard
from budgetguard_core.snapshot import Snapshot
from budgetguard_core.stores import CheckpointStore, NumberedStore, is_numbered


def load_to_resume(store: CheckpointStore, run_id: str) -> tuple[Snapshot | None, int | None]:
    """Load a run's last checkpoint in order to go on with it.

    Returns:
        The snapshot, or None if the store has no such run; and the attempt that begins with it, for
        `Run.go_on_as`, or None where the store does not fence. What earlier attempts save from now
        on is refused.

    Raises:
        CheckpointError: The file or the snapshot is damaged.
    """
    snapshot = store.load(run_id)
    if snapshot is None or not is_numbered(store):
        return snapshot, None
    attempt = store.claim(run_id)
    # An earlier attempt may have saved until it was fenced.
    return store.load(run_id), attempt


class Checkpoints:
    """Gives a run's checkpoints to its store.

    Args:
        guard: The run's guard.
        store: Where they go.

    Attributes:
        attempt: What `load_to_resume` gave; else None until the first checkpoint begins one.
    """

    def __init__(self, guard: Guard, store: CheckpointStore) -> None:
        self._guard = guard
        self._store = store
        self.attempt: int | None = None
        self._given: list[Any] = []
        self._plain: list[Any] = []
        self._stored = 0
        self._number: int | None = None

    def take(
        self,
        messages: Sequence[Any],
        pending: Sequence[Any] = (),
        to_plain: Callable[[Sequence[Any]], Iterable[Any]] = list,
    ) -> None:
        """Take what is new in the conversation.

        It is compared from its end backwards with what was taken before, up to the first message
        that is the same object. What was changed further ahead is in the checkpoint that ends the
        run, which is written whole.
        """
        before, total = len(messages), len(messages) + len(pending)
        start = min(len(self._given), total)
        while start and self._given[start - 1] is not (
            messages[start - 1] if start <= before else pending[start - 1 - before]
        ):
            start -= 1
        new = [*messages[start:], *pending[max(start - before, 0) :]]
        self._given[start:] = new
        self._plain[start:] = to_plain(new)
        self._stored = min(self._stored, start)

    def put(self) -> None:
        """Save a checkpoint of the guard and of what was taken.

        Raises:
            RunFencedError: The run was resumed elsewhere.
        """
        if self._number is not None and is_numbered(self._store):
            number = self._store.append(
                self._guard.snapshot(self._plain[self._stored :]),
                attempt=self._begun(self._store),
                start=self._stored,
                after=self._number,
            )
            if number is not None:
                self._number, self._stored = number, len(self._plain)
                return
        self.save(self._guard.snapshot(self._plain))
        self._stored = len(self._plain)

    def save(self, snapshot: Snapshot) -> None:
        """Save a whole snapshot.

        Raises:
            RunFencedError: The run was resumed elsewhere.
        """
        if is_numbered(self._store):
            self._number = self._store.append(snapshot, attempt=self._begun(self._store))
        else:
            self._store.save(snapshot)

    def _begun(self, store: NumberedStore) -> int:
        if self.attempt is None:
            self.attempt = store.claim(self._guard.run_id)
        return self.attempt
