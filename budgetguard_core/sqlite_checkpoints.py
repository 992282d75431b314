"""The stores that keep snapshots in a SQLite file, and in memory."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from budgetguard_core import checkpoint_tables as tables
from budgetguard_core.clock import Clock, SystemClock
from budgetguard_core.errors import CheckpointError, ConfigurationError, RunFencedError
from budgetguard_core.file_lock import FileLock
from budgetguard_core.snapshot import OpenCall, Snapshot, SnapshotParts
from budgetguard_core.stores import Checkpoint

if TYPE_CHECKING:
    import sqlite3

_BUSY_SECONDS = 30.0
_MEMORY = ":memory:"


class SqliteStore:
    """Snapshots in a SQLite file, safe under several threads and processes.

    Each message is written once, so a checkpoint costs the same however long the conversation is.
    The last `keep` checkpoints of each run can be loaded by their number. The file may be shared
    with LangGraph's SQLite saver: the tables' names begin with `budgetguard_`. Every access holds
    a lock on `<path>.lock`, because SQLite before 3.51.3 may lose committed pages when several
    processes write.

    Args:
        path: The file; `.budgetguard/checkpoints.sqlite3` in the home directory if left out. It
            holds conversations, so it is made readable by its owner only, and so is its folder
            where that is made. `":memory:"` keeps everything in memory until `close`.
        keep: How many checkpoints of each run are kept; older ones are pruned.
        clock: Where the time of a checkpoint comes from; the machine's clock if left out.

    Raises:
        CheckpointError: The file cannot be used.
        ConfigurationError: `keep` is below 1.
    """

    _connection: sqlite3.Connection | None = None
    _opened: tuple[int, int] | None = None
    _file: FileLock | None = None

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        keep: int = 20,
        clock: Clock | None = None,
    ) -> None:
        self._keep = _at_least_one(keep)
        self._clock = clock or SystemClock()
        self._path = Path(path) if path is not None else _default_path()
        self._is_memory = str(self._path) == _MEMORY
        if not self._is_memory:
            # The process may change its folder while the store is open.
            self._path = self._path.absolute()
        self._mutex = threading.Lock()
        self._inherited: list[sqlite3.Connection] = []
        self._process = os.getpid()
        with self._transaction():
            pass

    def save(self, snapshot: Snapshot) -> None:
        """Keep a snapshot as the run's last one; on the disk when it returns.

        What it shares with the checkpoint before is not written again, but looked at. It is not
        fenced: use `append` with the leg that `claim` gave.
        """
        self._write(snapshot, None, 0, None)

    def append(
        self, snapshot: Snapshot, *, leg: int, start: int = 0, after: int | None = None
    ) -> int | None:
        """Keep a snapshot of which only the end of the conversation is given; see `NumberedStore`.

        Raises:
            RunFencedError: A later leg was begun.
        """
        return self._write(snapshot, leg, start, after)

    def claim(self, run_id: str) -> int:
        """Begin another leg of a run, and return its number; see `NumberedStore`."""
        with self._transaction() as db:
            return tables.claim(db, run_id)

    def load(self, run_id: str, *, number: int | None = None) -> Snapshot | None:
        """Return the run's last snapshot, or that of an earlier checkpoint; None if there is none.

        Args:
            run_id: The run.
            number: The number of a checkpoint, as `history` lists them.

        Raises:
            CheckpointError: The file or the snapshot is damaged.
        """
        with self._transaction() as db:
            return tables.load(db, run_id, number)

    def history(self, run_id: str) -> tuple[Checkpoint, ...]:
        """List the run's checkpoints that are kept, the oldest first."""
        with self._transaction() as db:
            return tuple(
                Checkpoint(number, None if saved_ns is None else saved_ns / 1e9, messages)
                for number, saved_ns, messages in db.execute(
                    "SELECT number, saved_ns, messages FROM budgetguard_checkpoints "
                    "WHERE run_id = ? ORDER BY number",
                    (run_id,),
                )
            )

    def prune(self, run_id: str, *, keep: int = 1) -> None:
        """Forget all but the last checkpoints of a run.

        Args:
            run_id: The run.
            keep: How many are left.

        Raises:
            ConfigurationError: `keep` is below 1; `delete` forgets a run.
        """
        _at_least_one(keep)
        with self._transaction() as db:
            tables.prune(db, run_id, tables.last_number(db, run_id) - keep)

    def roll_back(self, run_id: str, number: int) -> Snapshot:
        """Make an earlier checkpoint's conversation the run's last one again, as a new checkpoint.

        What was used since stays used: counters and records go on as they are. A tool call that
        ended since then may have taken effect, so a resume does not run it again; the model is
        told that its outcome is unknown. A stop stays one: resume under a fresh budget.

        Args:
            run_id: The run. A process that works on it is fenced.
            number: The number of a checkpoint that is kept.

        Returns:
            The new last checkpoint, to resume from.

        Raises:
            CheckpointError: The run has no such checkpoint.
        """
        with self._transaction() as db:
            earlier, last = tables.load(db, run_id, number), tables.load(db, run_id, None)
            if earlier is None or last is None:
                raise CheckpointError(
                    f"run {run_id!r} has no checkpoint {number!r}. Choose one that history() lists."
                )
            rolled_back = _rolled_back(last, earlier)
            tables.claim(db, run_id)
            self._put(db, run_id, rolled_back.to_parts())
        return rolled_back

    def delete(self, run_id: str) -> None:
        """Forget a run."""
        with self._transaction() as db:
            for table in ("runs", "checkpoints", "items"):
                db.execute(f"DELETE FROM budgetguard_{table} WHERE run_id = ?", (run_id,))  # noqa: S608

    def close(self) -> None:
        """Close the file."""
        with self._mutex:
            self._disconnect()

    # Writing

    def _write(
        self, snapshot: Snapshot, leg: int | None, start: int, after: int | None
    ) -> int | None:
        parts, run_id = snapshot.to_parts(), snapshot.run_id
        with self._transaction() as db:
            if leg is not None and leg < tables.leg_of(db, run_id):
                raise RunFencedError(
                    f"run {run_id!r} was resumed elsewhere, so this leg of it is fenced. Let the "
                    "other go on, or resume the run here again."
                )
            if start and after != tables.last_number(db, run_id):
                return None
            return self._put(db, run_id, parts, start)

    def _put(
        self, db: sqlite3.Connection, run_id: str, parts: SnapshotParts, start: int = 0
    ) -> int:
        return tables.put(db, run_id, parts, start, self._clock.wall_ns(), self._keep)

    # The connection

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        # Not at import: it takes its time, and most runs keep no checkpoint.
        import sqlite3

        if self._process != os.getpid():
            self._forked()
        with self._mutex:
            try:
                if self._connection is not None and self._opened != self._file_now():
                    # Removed or replaced: what is written to it from here on nobody would read.
                    self._disconnect()
                db = self._connection or self._connect()
                with self._file or nullcontext():
                    db.execute("BEGIN IMMEDIATE")
                    try:
                        yield db
                        db.execute("COMMIT")
                    finally:
                        if db.in_transaction:
                            db.execute("ROLLBACK")
            except (sqlite3.Error, OSError) as error:
                if not self._is_memory:
                    self._disconnect()
                raise CheckpointError(
                    f"checkpoint file {str(self._path)!r} cannot be used: {error}. "
                    "Make it writable, or move it away to begin a new one."
                ) from error

    def _connect(self) -> sqlite3.Connection:
        import sqlite3

        if not self._is_memory:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = FileLock(_beside(self._path, ".lock"), _BUSY_SECONDS)
            _OPEN.add(self)
        with self._file or nullcontext():
            if not self._is_memory:
                self._path.touch(mode=0o600)
                _make_private(self._path)
            db = self._connection = sqlite3.connect(
                self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            tables.make(db)
        self._opened = self._file_now()
        return db

    def _file_now(self) -> tuple[int, int] | None:
        """Return what tells the file at the path from another."""
        if self._is_memory:
            return None
        with suppress(OSError):
            found = self._path.stat()
            return found.st_dev, found.st_ino
        return None

    def _disconnect(self) -> None:
        db, file = self._connection, self._file
        self._connection = self._file = None
        if db is not None:
            # The last one to close a file writes its log back. A lock that nobody frees is no
            # reason to wait for twice.
            with suppress(TimeoutError), file or nullcontext():
                db.close()
        if file is not None:
            file.close()

    def _close_for_fork(self) -> bool:
        """Close the file, and hold it closed until the fork is over.

        A child would believe that it holds the locks of an open file: what it commits is lost when
        another process closes the file and takes itself for the last.
        """
        held = self._mutex.acquire(timeout=_BUSY_SECONDS)
        if held:
            self._disconnect()
        return held

    def _forked(self) -> None:
        """Leave the file to the parent process; what is in memory was copied."""
        self._process = os.getpid()
        self._mutex = threading.Lock()
        if not self._is_memory and self._connection is not None:
            # Closing it here would drop the locks that the parent relies on.
            self._inherited.append(self._connection)
            self._connection = None
        if self._file is not None:
            self._file.close()
            self._file = None


_OPEN: weakref.WeakSet[SqliteStore] = weakref.WeakSet()
"""Stores that have opened a file."""


class _Forking(threading.local):
    """What this thread holds closed while it forks."""

    held: tuple[SqliteStore, ...] = ()

    def before(self) -> None:
        self.held = tuple(
            one
            for one in list(_OPEN)
            if one._close_for_fork()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        )

    def after(self) -> None:
        for store in self.held:
            store._mutex.release()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        self.held = ()

    def in_child(self) -> None:
        for store in self.held:
            store._forked()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        self.held = ()


_FORKING = _Forking()
if hasattr(os, "register_at_fork"):  # pragma: no branch - Windows has no fork
    os.register_at_fork(
        before=_FORKING.before,
        after_in_parent=_FORKING.after,
        after_in_child=_FORKING.in_child,
    )


class MemoryStore(SqliteStore):
    """Snapshots in this process only; otherwise as `SqliteStore`.

    Args:
        keep: How many checkpoints of each run are kept; older ones are pruned.
        clock: Where the time of a checkpoint comes from; the machine's clock if left out.
    """

    def __init__(self, *, keep: int = 20, clock: Clock | None = None) -> None:
        super().__init__(_MEMORY, keep=keep, clock=clock)

    def __del__(self) -> None:
        self._disconnect()


def _rolled_back(last: Snapshot, earlier: Snapshot) -> Snapshot:
    shared = tables.overlap(
        [str(one) for one in earlier.records], [str(one) for one in last.records]
    )
    since = [
        OpenCall(kind="tool", call_id=number, id=id_, name=name)
        for number, (id_, name, _) in enumerate(last.records[shared:], last.call_id + 1)
    ]
    return last.model_copy(
        update={
            "messages": earlier.messages,
            "detector": earlier.detector,
            "open_calls": (*last.open_calls, *since),
            "call_id": last.call_id + len(since),
        }
    )


def _at_least_one(keep: int) -> int:
    if not isinstance(keep, int) or keep < 1:
        raise ConfigurationError(
            f"keep must be a number >= 1, got {keep!r}. 1 keeps the last checkpoint of each run."
        )
    return keep


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _make_private(path: Path) -> None:
    """Take the rights of others away; LangGraph's saver may have made the file with them."""
    for file in (path, *(_beside(path, ending) for ending in ("-wal", "-shm"))):
        with suppress(OSError):
            mode = file.stat().st_mode
            if mode & 0o077:
                file.chmod(mode & 0o700)


def _default_path() -> Path:
    return Path.home() / ".budgetguard" / "checkpoints.sqlite3"
