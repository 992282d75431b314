"""The stores that keep snapshots in a SQLite file, and in memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from budgetguard_core.errors import CheckpointError, RunFencedError
from budgetguard_core.snapshot import Snapshot

if TYPE_CHECKING:
    import sqlite3

_BUSY_SECONDS = 30.0
_POLL_SECONDS = 0.002
_MEMORY = ":memory:"
# "budgetguard_" in each name: one file may serve LangGraph's saver too.
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS budgetguard_runs(run_id TEXT PRIMARY KEY, attempt INT NOT NULL, "
    "number INT NOT NULL, messages INT NOT NULL, state TEXT) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS budgetguard_messages(run_id TEXT, place INT, message TEXT "
    "NOT NULL, PRIMARY KEY(run_id, place)) WITHOUT ROWID",
)


class SqliteStore:
    """Snapshots in a SQLite file, safe under several threads and processes.

    Each message is written once, so a checkpoint costs the same however long the conversation is.
    The file may be shared with LangGraph's SQLite saver: the tables' names begin with
    `budgetguard_`. It is opened for each access, under a lock on `<path>.lock`: SQLite before
    3.51.3 may lose committed pages when several processes write.

    Args:
        path: The file; `.budgetguard/checkpoints.sqlite3` in the home directory if left out. It
            holds conversations, so it is made readable by its owner only, and so is its folder
            where that is made. `":memory:"` keeps everything in memory until `close`.

    Raises:
        CheckpointError: The file cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        default = Path.home() / ".budgetguard" / "checkpoints.sqlite3"
        self._path = default if path is None else Path(path)
        self._is_memory = str(self._path) == _MEMORY
        if not self._is_memory:
            # The process may change its folder while the store is in use.
            self._path = self._path.absolute()
        self._memory: sqlite3.Connection | None = None
        self._mutex = threading.Lock()
        with self._transaction():
            pass

    def save(self, snapshot: Snapshot) -> None:
        """Keep a snapshot as the run's last one; on the disk when it returns.

        The messages that it shares with the last one are compared and not written again. It is
        not fenced: use `append` with the number that `claim` returned.
        """
        self._write(snapshot, None, 0, None)

    def append(
        self, snapshot: Snapshot, *, attempt: int, start: int = 0, after: int | None = None
    ) -> int | None:
        """Keep a snapshot of which only the end of the conversation is given; see `NumberedStore`.

        Raises:
            RunFencedError: A later attempt was begun.
        """
        return self._write(snapshot, attempt, start, after)

    def claim(self, run_id: str) -> int:
        """Begin another attempt at a run, and return its number; see `NumberedStore`."""
        with self._transaction() as db:
            return int(
                db.execute(
                    "INSERT INTO budgetguard_runs VALUES (?, 1, 0, 0, NULL) "
                    "ON CONFLICT(run_id) DO UPDATE SET attempt = attempt + 1 RETURNING attempt",
                    (run_id,),
                ).fetchone()[0]
            )

    def load(self, run_id: str) -> Snapshot | None:
        """Return the run's last snapshot, or None.

        Raises:
            CheckpointError: The file or the snapshot is damaged.
        """
        with self._transaction() as db:
            row = _run(db, run_id)
            messages = [message for _, message in _messages(db, run_id)]
        if row is None or row[3] is None:
            return None
        _, _, count, state = row
        if len(messages) != count or any(type(one) is not str for one in (state, *messages)):
            raise CheckpointError(
                f"snapshot is damaged ({count} messages were saved, {len(messages)} found, or a "
                "part of it is no text). Restore an earlier one, or start the run anew."
            )
        return Snapshot.from_parts(state, messages)

    def delete(self, run_id: str) -> None:
        """Forget a run."""
        with self._transaction() as db:
            db.execute("DELETE FROM budgetguard_runs WHERE run_id = ?", (run_id,))
            db.execute("DELETE FROM budgetguard_messages WHERE run_id = ?", (run_id,))

    def close(self) -> None:
        """Forget what is in memory; a file is not open between two accesses."""
        with self._mutex:
            if self._memory is not None:
                self._memory.close()
                self._memory = None

    def _write(
        self, snapshot: Snapshot, attempt: int | None, start: int, after: int | None
    ) -> int | None:
        (state, messages), run_id = snapshot.to_parts(), snapshot.run_id
        with self._transaction() as db:
            latest, number, *_ = _run(db, run_id) or (0, 0)
            if attempt is not None and attempt < latest:
                raise RunFencedError(
                    f"run {run_id!r} was resumed elsewhere, so this attempt of it is fenced. Let "
                    "the other go on, or resume the run here again."
                )
            if start and after != number:
                return None
            total = start + len(messages)
            if not start:
                start = _shared(db, run_id, messages)
                messages = messages[start:]
            db.execute(
                "DELETE FROM budgetguard_messages WHERE run_id = ? AND place >= ?", (run_id, start)
            )
            db.executemany(
                "INSERT INTO budgetguard_messages VALUES (?, ?, ?)",
                ((run_id, index, message) for index, message in enumerate(messages, start)),
            )
            db.execute(
                "INSERT OR REPLACE INTO budgetguard_runs VALUES (?, ?, ?, ?, ?)",
                (run_id, latest, number + 1, total, state),
            )
            return number + 1

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        # Not at import: it takes its time, and most runs keep no checkpoint.
        import sqlite3

        try:
            with self._in_memory() if self._is_memory else self._connected() as db:
                db.execute("BEGIN IMMEDIATE")
                try:
                    for table in _SCHEMA:
                        db.execute(table)
                    yield db
                    db.execute("COMMIT")
                finally:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
        except Timeout as error:
            raise CheckpointError(
                f"checkpoint file {str(self._path)!r} must be free within {_BUSY_SECONDS} s, got a "
                "process that held it for longer. Find the process that stands still."
            ) from error
        except (sqlite3.Error, OSError) as error:
            raise CheckpointError(
                f"checkpoint file {str(self._path)!r} cannot be used: {error}. "
                "Make it writable, or move it away to begin a new one."
            ) from error

    @contextmanager
    def _in_memory(self) -> Generator[sqlite3.Connection]:
        with self._mutex:
            if self._memory is None:
                self._memory = _connect(_MEMORY)
            yield self._memory

    @contextmanager
    def _connected(self) -> Generator[sqlite3.Connection]:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(_sidecar(self._path, ".lock"), mode=0o600, thread_local=False)
        with lock.acquire(timeout=_BUSY_SECONDS, poll_interval=_POLL_SECONDS):
            self._path.touch(mode=0o600)
            _make_private(self._path)
            with closing(_connect(self._path)) as db:
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = FULL")
                yield db


class MemoryStore(SqliteStore):
    """Snapshots in this process only; otherwise as `SqliteStore`."""

    def __init__(self) -> None:
        super().__init__(_MEMORY)

    def __del__(self) -> None:
        self.close()


def _connect(path: str | Path) -> sqlite3.Connection:
    import sqlite3

    return sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )


def _run(db: sqlite3.Connection, run_id: str) -> tuple[int, int, int, Any] | None:
    """Return the run's attempt, checkpoint number, number of messages and state."""
    query = "SELECT attempt, number, messages, state FROM budgetguard_runs WHERE run_id = ?"
    row: tuple[int, int, int, Any] | None = db.execute(query, (run_id,)).fetchone()
    return row


def _messages(db: sqlite3.Connection, run_id: str) -> sqlite3.Cursor:
    query = "SELECT place, message FROM budgetguard_messages WHERE run_id = ? ORDER BY place"
    return db.execute(query, (run_id,))


def _shared(db: sqlite3.Connection, run_id: str, messages: list[str]) -> int:
    """Count the messages at the beginning that the last checkpoint has as well."""
    shared = 0
    with closing(_messages(db, run_id)) as kept:
        for (_, kept_message), message in zip(kept, messages, strict=False):
            if kept_message != message:
                break
            shared += 1
    return shared


def _sidecar(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _make_private(path: Path) -> None:
    """Take the rights of others away; LangGraph's saver may have made the file with them."""
    for file in (path, *(_sidecar(path, ending) for ending in ("-wal", "-shm"))):
        with suppress(OSError):
            mode = file.stat().st_mode
            if mode & 0o077:
                file.chmod(mode & 0o700)
