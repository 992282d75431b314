"""The stores that keep snapshots: in memory, and in a SQLite file."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeGuard, runtime_checkable

from budgetguard_core.clock import Clock, SystemClock
from budgetguard_core.errors import CheckpointError, ConfigurationError, RunFencedError
from budgetguard_core.file_lock import FileLock
from budgetguard_core.snapshot import OpenCall, Snapshot, SnapshotParts

if TYPE_CHECKING:
    import sqlite3

_BUSY_SECONDS = 30.0
_MEMORY = ":memory:"
_NO_END = 2**62
# As many as a guard keeps, and how many more wait to be closed.
_RECORDS = 256
_RECORDS_CLOSED_AT_ONCE = 1024
# "budgetguard_" in each name: LangGraph's saver has a table `checkpoints` of its own, and one file
# may serve both. An item (a message, the record of a tool call) is seen by the checkpoints from
# `since` to before `until`.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS budgetguard_runs(
    run_id TEXT PRIMARY KEY, leg INT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS budgetguard_checkpoints(
    run_id TEXT, number INT, saved_ns INT, messages INT, records INT, state TEXT NOT NULL,
    PRIMARY KEY(run_id, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS budgetguard_items(
    run_id TEXT, kind TEXT, place INT, since INT, until INT, item TEXT NOT NULL,
    PRIMARY KEY(run_id, kind, place, since)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS budgetguard_items_until
    ON budgetguard_items(run_id, until) WHERE until IS NOT NULL;
"""
# Earlier releases kept each run's last snapshot in one row.
_EARLIER = ["run_id", "snapshot"]
_MIGRATION = """
INSERT INTO budgetguard_checkpoints
    SELECT run_id, 1 + coalesce((
        SELECT max(number) FROM budgetguard_checkpoints AS kept
        WHERE kept.run_id = checkpoints.run_id), 0), NULL, NULL, NULL, snapshot
    FROM checkpoints WHERE snapshot IS NOT NULL;
DROP TABLE checkpoints;
"""


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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One of a run's numbered checkpoints."""

    number: int
    """Grows by one with each checkpoint of the run, from 1."""
    saved_at: float | None
    """When it was saved, in seconds since the Unix epoch; None if an earlier release saved it."""
    messages: int | None
    """How many messages its conversation has; None if an earlier release saved it."""


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
            return _claim(db, run_id)

    def load(self, run_id: str, *, number: int | None = None) -> Snapshot | None:
        """Return the run's last snapshot, or that of an earlier checkpoint; None if there is none.

        Args:
            run_id: The run.
            number: The number of a checkpoint, as `history` lists them.

        Raises:
            CheckpointError: The file or the snapshot is damaged.
        """
        with self._transaction() as db:
            return _load(db, run_id, number)

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
            _prune(db, run_id, _last(db, run_id) - keep)

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
            earlier, last = _load(db, run_id, number), _load(db, run_id, None)
            if earlier is None or last is None:
                raise CheckpointError(
                    f"run {run_id!r} has no checkpoint {number!r}. Choose one that history() lists."
                )
            rolled_back = _rolled_back(last, earlier)
            _claim(db, run_id)
            self._put(db, rolled_back, rolled_back.to_parts())
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
            if leg is not None and leg < _leg(db, run_id):
                raise RunFencedError(
                    f"run {run_id!r} was resumed elsewhere, so this leg of it is fenced. Let the "
                    "other go on, or resume the run here again."
                )
            if start and after != _last(db, run_id):
                return None
            return self._put(db, snapshot, parts, start)

    def _put(
        self, db: sqlite3.Connection, snapshot: Snapshot, parts: SnapshotParts, start: int = 0
    ) -> int:
        run_id, messages = snapshot.run_id, parts.messages
        total = start + len(messages)
        number = _last(db, run_id) + 1
        if not start:
            start = _shared(db, run_id, messages)
            messages = messages[start:]
        _close(db, run_id, "message", number, start, _NO_END)
        _insert(db, run_id, "message", number, start, messages)
        _put_records(db, run_id, number, parts.records)
        db.execute(
            "INSERT INTO budgetguard_checkpoints VALUES (?, ?, ?, ?, ?, ?)",
            (run_id, number, self._clock.wall_ns(), total, len(parts.records), parts.state),
        )
        _prune(db, run_id, number - self._keep)
        return number

    # The connection

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        # Not at import: it takes its time, and most runs keep no checkpoint.
        import sqlite3

        if self._process != os.getpid():
            self._forked()
        with self._mutex:
            try:
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
            columns = [column[1] for column in db.execute("PRAGMA table_info(checkpoints)")]
            migration = _MIGRATION if columns == _EARLIER else ""
            db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} {migration} COMMIT;")
        return db

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


def _leg(db: sqlite3.Connection, run_id: str) -> int:
    row = db.execute("SELECT leg FROM budgetguard_runs WHERE run_id = ?", (run_id,)).fetchone()
    return 0 if row is None else row[0]


def _claim(db: sqlite3.Connection, run_id: str) -> int:
    leg = _leg(db, run_id) + 1
    db.execute("INSERT OR REPLACE INTO budgetguard_runs VALUES (?, ?)", (run_id, leg))
    return leg


def _last(db: sqlite3.Connection, run_id: str) -> int:
    (number,) = db.execute(
        "SELECT max(number) FROM budgetguard_checkpoints WHERE run_id = ?", (run_id,)
    ).fetchone()
    return number or 0


def _load(db: sqlite3.Connection, run_id: str, number: int | None) -> Snapshot | None:
    row = db.execute(
        "SELECT number, messages, records, state FROM budgetguard_checkpoints "
        "WHERE run_id = ? AND number = coalesce(?, ?)",
        (run_id, number, _last(db, run_id)),
    ).fetchone()
    if row is None:
        return None
    number, messages, records, state = row
    if messages is None:
        return Snapshot.from_json(state)
    seen: dict[str, list[str]] = {"message": [], "record": []}
    for kind, item in db.execute(
        "SELECT kind, item FROM budgetguard_items WHERE run_id = ? AND since <= ? "
        "AND (until IS NULL OR until > ?) ORDER BY kind, place",
        (run_id, number, number),
    ):
        seen[kind].append(item)
    parts = SnapshotParts(state, seen["message"], seen["record"][-records:] if records else [])
    if len(parts.messages) != messages or len(parts.records) != records:
        raise CheckpointError(
            f"snapshot is damaged ({messages} messages and {records} records were saved, "
            f"{len(parts.messages)} and {len(parts.records)} found). "
            "Restore an earlier one, or start the run anew."
        )
    return Snapshot.from_json(parts.to_json())


def _shared(db: sqlite3.Connection, run_id: str, messages: list[str]) -> int:
    """Count the messages at the beginning that the last checkpoint has as well."""
    kept = db.execute(
        "SELECT item FROM budgetguard_items WHERE run_id = ? AND kind = 'message' "
        "AND until IS NULL ORDER BY place",
        (run_id,),
    )
    shared = 0
    for (item,), message in zip(kept, messages, strict=False):
        if item != message:
            break
        shared += 1
    kept.close()
    return shared


def _put_records(db: sqlite3.Connection, run_id: str, number: int, records: list[str]) -> None:
    """Add those that are new: what is given is the end of a list that grows."""
    kept = db.execute(
        "SELECT place, item FROM budgetguard_items WHERE run_id = ? AND kind = 'record' "
        "AND until IS NULL ORDER BY place DESC LIMIT ?",
        (run_id, _RECORDS),
    ).fetchall()[::-1]
    shared = _overlap([item for _, item in kept], records)
    place = kept[-1][0] + 1 if kept else 0
    _insert(db, run_id, "record", number, place, records[shared:])
    # Closed in bulk, because a row at the other end of the table costs a page of its own.
    end = place + len(records) - shared
    if end // _RECORDS_CLOSED_AT_ONCE > place // _RECORDS_CLOSED_AT_ONCE:
        _close(db, run_id, "record", number, 0, end - len(records))


def _overlap(kept: list[str], records: list[str]) -> int:
    """Count the entries at the beginning of `records` with which `kept` ends."""
    for length in range(min(len(kept), len(records)), 0, -1):
        if kept[-length:] == records[:length]:
            return length
    return 0


def _insert(
    db: sqlite3.Connection, run_id: str, kind: str, number: int, place: int, items: list[str]
) -> None:
    db.executemany(
        "INSERT INTO budgetguard_items VALUES (?, ?, ?, ?, NULL, ?)",
        ((run_id, kind, place + n, number, item) for n, item in enumerate(items)),
    )


def _close(
    db: sqlite3.Connection, run_id: str, kind: str, number: int, start: int, end: int
) -> None:
    """Hide items from this checkpoint on; those before it still see them."""
    db.execute(
        "UPDATE budgetguard_items SET until = ? WHERE run_id = ? AND kind = ? AND place >= ? "
        "AND place < ? AND until IS NULL",
        (number, run_id, kind, start, end),
    )


def _prune(db: sqlite3.Connection, run_id: str, through: int) -> None:
    db.execute(
        "DELETE FROM budgetguard_checkpoints WHERE run_id = ? AND number <= ?", (run_id, through)
    )
    db.execute(
        "DELETE FROM budgetguard_items WHERE run_id = ? AND until <= ?", (run_id, through + 1)
    )


def _rolled_back(last: Snapshot, earlier: Snapshot) -> Snapshot:
    shared = _overlap([str(one) for one in earlier.records], [str(one) for one in last.records])
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
