"""What a store of snapshots is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

from budgetguard_core.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One of a run's numbered checkpoints."""

    number: int
    """Grows by one with each checkpoint of the run, from 1."""
    saved_at: float | None
    """When it was saved, in seconds since the Unix epoch; None if an earlier release saved it."""
    messages: int | None
    """How many messages its conversation has; None if an earlier release saved it."""


class SnapshotWriter(Protocol):
    """What saves snapshots."""

    def save(self, snapshot: Snapshot) -> None:
        """Keep a snapshot in place of the run's earlier one. Safe on the disk when it returns."""
        ...


@runtime_checkable
class CheckpointStore(SnapshotWriter, Protocol):
    """Where snapshots are kept, the last one of each run.

    These three verbs are all that a store of your own needs. What it does not get then: each
    checkpoint is given whole, so its cost grows with the conversation; there are no numbered
    checkpoints to go back to; and two processes that resume one run are not told of each other.
    A store that has the verbs of `NumberedStore` as well gets all three.
    """

    def load(self, run_id: str) -> Snapshot | None:
        """Return the run's last snapshot, or None."""
        ...

    def delete(self, run_id: str) -> None:
        """Forget a run."""
        ...


class NumberedStore(CheckpointStore, Protocol):
    """A store that is given what is new only, and that fences a resumed run."""

    def claim(self, run_id: str) -> int:
        """Begin another leg of a run: what earlier legs `append` from now on is refused.

        Returns:
            The leg's number; the first is 1.
        """
        ...

    def append(
        self, snapshot: Snapshot, *, leg: int, start: int = 0, after: int | None = None
    ) -> int | None:
        """Keep a snapshot of which only the end of the conversation is given.

        Args:
            snapshot: Its `messages` are those from number `start` on.
            leg: What `claim` returned.
            start: How many messages come first, as the checkpoint `after` has them.
            after: The number of the checkpoint that the caller saved last; None with `start` 0.

        Returns:
            The number of the checkpoint; None, with nothing done, where the run's last checkpoint
            is not `after`, so that the whole has to be given.

        Raises:
            RunFencedError: A later leg was begun.
        """
        ...


def is_numbered(store: CheckpointStore) -> TypeGuard[NumberedStore]:
    """Tell whether a store is given what is new only.

    A subclass that replaced `save` alone is given whole snapshots, through its own `save`.
    """
    for owner in (store, *type(store).__mro__):
        names = vars(owner) if hasattr(owner, "__dict__") else {}
        if "append" in names:
            return hasattr(store, "claim")
        if "save" in names:
            return False
    return False
