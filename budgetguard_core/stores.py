"""The stores that keep snapshots: in memory, and in a SQLite file."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

from budgetguard_core.errors import CheckpointError
from budgetguard_core.snapshot import Snapshot

_BUSY_MILLISECONDS = 30_000


@runtime_checkable
class CheckpointStore(Protocol):
    """Where snapshots are kept, the last one of each run."""

    def save(self, snapshot: Snapshot) -> None:
        """Keep a snapshot in place of the run's earlier one. Safe on the disk when it returns."""
        ...

    def load(self, run_id: str) -> Snapshot | None:
        """Return the run's last snapshot, or None."""
        ...

    def delete(self, run_id: str) -> None:
        """Forget a run."""
        ...


class MemoryStore:
    """Snapshots in this process only, as text, so that nothing in them is shared."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def save(self, snapshot: Snapshot) -> None:
        """Keep a snapshot in place of the run's earlier one."""
        self._texts[snapshot.run_id] = snapshot.to_json()

    def load(self, run_id: str) -> Snapshot | None:
        """Return the run's last snapshot, or None."""
        text = self._texts.get(run_id)
        return None if text is None else Snapshot.from_json(text)

    def delete(self, run_id: str) -> None:
        """Forget a run."""
        self._texts.pop(run_id, None)


class SqliteStore:
    """Snapshots in a SQLite file, safe under several threads and processes (WAL).

    Args:
        path: The file; `.budgetguard/checkpoints.sqlite3` in the home directory if left out. It
            holds conversations, so it and its folder are made readable by their owner only.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = Path(path) if path is not None else _default_path()
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.touch(mode=0o600)
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._inherited: sqlite3.Connection | None = None
        self._process = os.getpid()
        with self._connected() as connection:
            # The mode is kept in the file; changing it needs the file to itself for a moment.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS checkpoints (run_id TEXT PRIMARY KEY, snapshot TEXT)"
            )

    def save(self, snapshot: Snapshot) -> None:
        """Keep a snapshot in place of the run's earlier one; on the disk when it returns."""
        text = snapshot.to_json()
        with self._connected() as connection:
            connection.execute(
                "INSERT INTO checkpoints VALUES (?, ?) "
                "ON CONFLICT (run_id) DO UPDATE SET snapshot = excluded.snapshot",
                (snapshot.run_id, text),
            )

    def load(self, run_id: str) -> Snapshot | None:
        """Return the run's last snapshot, or None.

        Raises:
            CheckpointError: The file or the snapshot is damaged.
        """
        with self._connected() as connection:
            row = connection.execute(
                "SELECT snapshot FROM checkpoints WHERE run_id = ?", (run_id,)
            ).fetchone()
        return None if row is None else Snapshot.from_json(row[0])

    def delete(self, run_id: str) -> None:
        """Forget a run."""
        with self._connected() as connection:
            connection.execute("DELETE FROM checkpoints WHERE run_id = ?", (run_id,))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _connected(self) -> Generator[sqlite3.Connection]:
        with self._lock:
            try:
                # A connection must not cross a fork: each process opens its own, and must not
                # close the other's either.
                if self._process != os.getpid():
                    self._inherited = self._connection
                    self._connection = None
                    self._process = os.getpid()
                if self._connection is None:
                    self._connection = sqlite3.connect(
                        self._path,
                        timeout=_BUSY_MILLISECONDS / 1000,
                        isolation_level=None,
                        check_same_thread=False,
                    )
                    self._connection.execute("PRAGMA synchronous = FULL")
                yield self._connection
            except sqlite3.DatabaseError as error:
                self._disconnect()
                raise CheckpointError(
                    f"checkpoint file {str(self._path)!r} cannot be used: {error}. "
                    "Make it writable, or move it away to begin a new one."
                ) from error


def _default_path() -> Path:
    return Path.home() / ".budgetguard" / "checkpoints.sqlite3"
