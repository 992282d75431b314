"""The protocols of a store of snapshots."""

from __future__ import annotations

from typing import Protocol, TypeGuard, runtime_checkable

from budgetguard_core.snapshot import Snapshot


class SnapshotWriter(Protocol):
    """Saves snapshots."""

    def save(self, snapshot: Snapshot) -> None:
        """Keep a snapshot in place of the run's earlier one. Safe on the disk when it returns."""
        ...


@runtime_checkable
class CheckpointStore(SnapshotWriter, Protocol):
    """Keeps the last snapshot of each run.

    These three verbs are all that a store of your own needs. Without those of `NumberedStore`,
    each checkpoint is given whole, so its cost grows with the conversation, and two processes
    that resume one run are not fenced.
    """

    def load(self, run_id: str) -> Snapshot | None:
        """Return the run's last snapshot, or None."""
        ...

    def delete(self, run_id: str) -> None:
        """Forget a run."""
        ...


class NumberedStore(CheckpointStore, Protocol):
    """A store that is given the new messages only, and that fences a resumed run."""

    def claim(self, run_id: str) -> int:
        """Begin another attempt at a run: from now on earlier ones can not `append`.

        Returns:
            The attempt's number; the first is 1.
        """
        ...

    def append(
        self, snapshot: Snapshot, *, attempt: int, start: int = 0, after: int | None = None
    ) -> int | None:
        """Keep a snapshot of which only the end of the conversation is given.

        Args:
            snapshot: Its `messages` are those from number `start` on.
            attempt: The attempt's number, from `claim`.
            start: The number of messages before them, as the checkpoint `after` has them.
            after: The number of the checkpoint that the caller saved last; None with `start` 0.

        Returns:
            The number of the checkpoint; None, with nothing done, where the run's last checkpoint
            is not `after`, so that the whole has to be given.

        Raises:
            RunFencedError: A later attempt was begun.
        """
        ...


def is_numbered(store: CheckpointStore) -> TypeGuard[NumberedStore]:
    """Return whether a store is given the new messages only.

    A subclass that replaced `save` alone is given whole snapshots, through its own `save`.
    """
    for owner in (store, *type(store).__mro__):
        names = vars(owner) if hasattr(owner, "__dict__") else {}
        if "append" in names:
            return hasattr(store, "claim")
        if "save" in names:
            return False
    return False
