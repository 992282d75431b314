"""The ledger in a SQLite file: no set-up, correct under many processes of one machine."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from budgetguard_core.clock import Clock, SystemClock
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.amounts import ZERO, Amount
from budgetguard_core.ledger.errors import LedgerUnreachable
from budgetguard_core.ledger.step import (
    SEPARATOR,
    TOMBSTONE_SECONDS,
    Answer,
    Hold,
    HoldRecord,
    Identity,
    Row,
    Step,
    WindowRecord,
    ceiling_name,
    ceiling_of_text,
    decide,
    lines_of,
    pairs_of,
)
from budgetguard_core.ledger.windows import Window, oldest_kept

_R = TypeVar("_R")

# A vector is four columns: dollars, tokens, model calls, tool calls. Of a window: charged (c),
# spent (s), the default ceiling of who reserved last (l), what forgotten holds were charged (f).
_SCHEMA = """
CREATE TABLE ledger(id TEXT, adopted REAL, sequence INT);
INSERT INTO ledger VALUES('', 0, 0);
CREATE TABLE windows(key TEXT, label TEXT, warned INT DEFAULT 0,
    c0 INT DEFAULT 0, c1 INT DEFAULT 0, c2 INT DEFAULT 0, c3 INT DEFAULT 0,
    s0 INT DEFAULT 0, s1 INT DEFAULT 0, s2 INT DEFAULT 0, s3 INT DEFAULT 0,
    l0 INT DEFAULT 0, l1 INT DEFAULT 0, l2 INT DEFAULT 0, l3 INT DEFAULT 0,
    f0 INT DEFAULT 0, f1 INT DEFAULT 0, f2 INT DEFAULT 0, f3 INT DEFAULT 0,
    PRIMARY KEY(key, label)) WITHOUT ROWID;
CREATE TABLE holds(id TEXT PRIMARY KEY, a0 INT, a1 INT, a2 INT, a3 INT, closed INT,
    made REAL, expires REAL, owner TEXT, windows TEXT) WITHOUT ROWID;
CREATE TABLE notes(name TEXT PRIMARY KEY, text TEXT) WITHOUT ROWID;
"""
_VERSION = 1
_LOOK = (
    "SELECT id, adopted, sequence, a0, a1, a2, a3, closed, windows FROM ledger "
    "LEFT JOIN (SELECT a0, a1, a2, a3, closed, windows FROM holds WHERE id = ?)"
)
_ROW = "c0, c1, c2, c3, s0, s1, s2, s3, l0, l1, l2, l3"
_LOOK_AT_WINDOW = f"SELECT {_ROW}, warned FROM windows WHERE key = ? AND label = ?"  # noqa: S608
_KEEP_WINDOW = (
    f"INSERT INTO windows(key, label, {_ROW}, warned) "
    "VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT(key, label) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in (*_ROW.split(", "), "warned"))
)
_FORGET_WINDOWS = "DELETE FROM windows WHERE key = ? AND label >= ? AND label < ?"
_CEILING = "SELECT text FROM notes WHERE name IN (?, ?) ORDER BY name DESC"  # its own one first
# More are looked at than can have come in. An index of closed holds by time would be one page more
# in every settlement.
_STEPS_BETWEEN_CLEANINGS = 500
_CLEANED_AT_ONCE = 2000
_STEPS_BETWEEN_CHECKPOINTS = 200
_SYNCHRONOUS = ("FULL", "NORMAL", "EXTRA")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.002


def check_synchronous(given: str) -> str:
    """Return how SQLite is to write.

    Raises:
        ConfigurationError: It is none of SQLite's ways.
    """
    if given.upper() not in _SYNCHRONOUS:
        raise ConfigurationError(
            f"synchronous must be one of {', '.join(_SYNCHRONOUS)}, got {given[:20]!r}. "
            "Use FULL, the default."
        )
    return given.upper()


class SqliteLedgerStore:
    """A `Store` in a file, for one thread at a time.

    A signal's handler may raise anywhere in here: what is held is freed by SQLite.

    Args:
        path: The file; it and its folder are made, readable by their owner only.
        synchronous: FULL loses nothing. NORMAL loses nothing when a process is killed, but may
            lose what was committed last when the machine loses its power.
        timeout: Seconds until a step gives up.
        clock: The ledger's clock; the machine's if left out.

    Raises:
        ConfigurationError: `synchronous` is none of SQLite's.
        LedgerUnreachable: The file cannot be used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: str = "FULL",
        timeout: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        self._path = Path(path).absolute()  # wherever its process goes
        self._synchronous = check_synchronous(synchronous)
        self._timeout = timeout
        self._clock = clock or SystemClock()
        self._db: sqlite3.Connection | None = None
        self._inode: tuple[int, int] = (0, 0)
        self._inherited: list[sqlite3.Connection] = []
        """Connections of the parent process that a fork took along."""
        self._steps = self._kept = 0
        self._cleaned_to = ""
        try:
            self._write(id)
        except BaseException:
            self.close()
            raise

    # Connection

    def _open(self) -> sqlite3.Connection:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.touch(mode=0o600)
        except OSError as error:
            raise LedgerUnreachable(
                f"the ledger's file must be writable, got {error.strerror}. "
                "Name another file, or make its folder writable."
            ) from None
        self._db = db = sqlite3.connect(
            self._path,
            timeout=self._timeout,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=64,
        )
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {self._synchronous}")
        # SQLite before 3.51.3 (3.50.7, 3.44.6 in their lines) may lose committed pages when a
        # checkpoint meets a commit: ours waits for the write lock first, see `_check_point`.
        db.execute("PRAGMA wal_autocheckpoint = 0")
        # No write once the schema is there: many processes open the file at the same time.
        if _version(db) < 1:
            db.execute("BEGIN IMMEDIATE")
            if _version(db) < 1:
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {_VERSION}")
            db.execute("COMMIT")
        if _version(db) > _VERSION:
            raise LedgerUnreachable(
                f"the ledger's format must be <= {_VERSION}, got {_version(db)}. "
                "Upgrade BudgetGuard."
            )
        db.execute("PRAGMA busy_timeout = 0")  # its own waiting lets a process starve
        self._inode = self._inode_now()
        return db

    def _inode_now(self) -> tuple[int, int]:
        try:
            found = self._path.stat()
        except OSError:
            return (0, 0)
        return (found.st_dev, found.st_ino)

    def close(self) -> None:
        """Close the file; the next step opens it again."""
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def _write(self, work: Callable[[sqlite3.Connection], _R]) -> _R:
        """Do some work in a transaction of the only writer; roll back if it fails."""
        try:
            db = self._begin(SystemClock.monotonic_ns() / 1e9 + self._timeout)
            result = work(db)
            db.execute("COMMIT")
            self._check_point(db)
        except sqlite3.Error as error:
            if not _is_busy(error):
                self.close()
            raise _failure(error, self._timeout) from None
        except BaseException as error:
            if isinstance(error, LedgerUnreachable):
                self.close()  # or each attempt to open it would leave a file open
            elif self._db is not None and self._db.in_transaction:
                self._db.execute("ROLLBACK")  # a full disk may have rolled back already
            raise
        return result

    def _begin(self, deadline: float) -> sqlite3.Connection:
        if self._inherited:
            raise LedgerUnreachable(
                "the ledger's file must not be in use while its process forks, got a step that "
                "took longer than the fork could wait. Open it in the child, or raise timeout."
            )
        if self._db is not None and self._inode != self._inode_now():
            # Removed or replaced: what is written to it from here on nobody would read.
            self.close()
        db = self._db or self._open()
        if db.in_transaction:  # a signal's handler raised while the last one was undone
            db.execute("ROLLBACK")
        pause = _FIRST_PAUSE
        while not _is_begun(db, SystemClock.monotonic_ns() / 1e9 > deadline):
            # Spread, so that two that wait do not wake together for ever.
            threading.Event().wait(pause * random.uniform(0.5, 1.5))  # noqa: S311
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        return db

    def _check_point(self, db: sqlite3.Connection) -> None:
        """Write the log back, where it has grown; while no other process commits."""
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_CHECKPOINTS:
            return
        with suppress(sqlite3.Error):
            db.execute(f"PRAGMA busy_timeout = {int(self._timeout * 1000)}")
            db.execute("PRAGMA wal_checkpoint(RESTART)")
            db.execute("PRAGMA busy_timeout = 0")

    # The step

    def step(self, step: Step) -> Answer:
        """Apply a step once, in one transaction."""
        return self._write(lambda db: self._step(db, step))

    def _step(self, db: sqlite3.Connection, step: Step) -> Answer:
        now = self._clock.wall_ns() / 1e9  # under the write lock
        ledger, adopted, sequence, *found = db.execute(_LOOK, (step.id,)).fetchone()
        if step.ledger and (ledger != step.ledger or sequence < step.sequence):
            met = SEPARATOR.join((ledger, repr(adopted), str(sequence)))
            return Answer("foreign", detail=met, now=now)
        hold = None
        if found[4] is not None:
            elsewhere = not found[4] and found[5] != lines_of(step.windows)
            hold = Hold(Amount(*found[:4]), bool(found[4]), elsewhere)
        taking = step.verb == "reserve"
        rows = [_row(db, window) for window in step.windows]
        ceilings = [_ceiling(db, one) for one in step.windows] if taking and hold is None else []
        flag = _flag(db, step.flags) if taking else ""
        answer, change = decide(step, now, hold, rows, ceilings, flag)
        if change is None:
            return answer._replace(sequence=sequence)
        for place, (window, row) in enumerate(zip(step.windows, rows, strict=True)):
            charged, spent = row.charged.plus(change.charged), row.spent.plus(change.spent)
            ceiling, warned = row.ceiling, row.warned or bool(answer.warn >> place & 1)
            if taking:
                ceiling = window.ceiling
                if row.is_new:
                    db.execute(_FORGET_WINDOWS, (window.key, window.label[:2], window.oldest))
            elif row.is_new:  # it was pruned, or the store has lost it
                charged = spent = answer.amount
            db.execute(_KEEP_WINDOW, (*window[:2], *charged, *spent, *ceiling, warned))
        expires = answer.now + (step.ttl if taking else TOMBSTONE_SECONDS)
        db.execute(
            "INSERT INTO holds VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT(id) DO UPDATE SET "
            "a0 = excluded.a0, a1 = excluded.a1, a2 = excluded.a2, a3 = excluded.a3, "
            "closed = excluded.closed, expires = excluded.expires",
            (
                step.id,
                *answer.amount,
                not taking,
                answer.now,
                expires,
                step.owner,
                lines_of(step.windows),
            ),
        )
        db.execute("UPDATE ledger SET sequence = sequence + 1")
        self._kept += 1
        if self._kept % _STEPS_BETWEEN_CLEANINGS == 1:  # an early one, for processes of a few
            self._cleaned_to = _forget_closed(db, answer.now, self._cleaned_to)
        return answer._replace(sequence=sequence + 1)

    # Identity, notes, ceilings, reports

    def now(self) -> float:
        """Return the machine's clock, which is the ledger's."""
        return self._clock.wall_ns() / 1e9

    def identity(self) -> Identity:
        """Return which ledger it is; made at first use."""

        def find(db: sqlite3.Connection) -> Identity:
            db.execute("UPDATE ledger SET id = ? WHERE id = ''", (uuid.uuid4().hex,))
            return Identity(*db.execute("SELECT * FROM ledger").fetchone())

        return self._write(find)

    def adopt(self) -> str:
        """Accept the ledger as it is under a new id, also for processes that know another one."""
        made = uuid.uuid4().hex
        self._do("UPDATE ledger SET id = ?, adopted = ?", made, self.now())
        return made

    def _do(self, statement: str, *arguments: Any) -> list[Any]:
        return self._write(lambda db: db.execute(statement, arguments).fetchall())

    def notes(self, prefix: str) -> dict[str, str]:
        """Return the notes whose name begins so."""
        statement = "SELECT name, text FROM notes WHERE name >= ? AND name < ?"
        return dict(self._do(statement, prefix, prefix + "\U0010ffff"))

    def write(self, name: str, text: str | None) -> None:
        """Set a note, or take it away."""
        if text is None:
            self._do("DELETE FROM notes WHERE name = ?", name)
        else:
            self._do("INSERT OR REPLACE INTO notes VALUES(?, ?)", name, text)

    def windows(self, key: str = "") -> list[WindowRecord]:
        """Return every window, or those of one key."""
        statement = f"SELECT key, label, {_ROW} FROM windows WHERE "  # noqa: S608
        statement += "key = ? ORDER BY label" if key else "? = '' ORDER BY key, label"
        return [
            WindowRecord(name, label, Amount(*row[:4]), Amount(*row[4:8]), Amount(*row[8:12]))
            for name, label, *row in self._do(statement, key)
        ]

    def holds(self) -> list[HoldRecord]:
        """Return every hold of the last day, and all that are open."""
        rows = self._do(
            "SELECT id, owner, a0, a1, a2, a3, closed, made, expires, windows FROM holds "
            "ORDER BY made"
        )
        return [
            HoldRecord(name, owner, Amount(*amount), bool(closed), made, expires, pairs_of(windows))
            for name, owner, *amount, closed, made, expires, windows in rows
        ]

    def check(self) -> list[str]:
        """Compare each window with the sum of its holds; a damaged file shows here.

        SQLite's own check may say ok where pages of a committed transaction are missing.
        """
        return self._write(_check)

    def forked(self) -> None:
        """Begin anew in a forked child; with a file that is open here nothing can be done."""
        if self._db is not None:
            # Closing it here would drop the locks that the parent relies on.
            self._inherited.append(self._db)
        self._db = None


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _is_begun(db: sqlite3.Connection, is_late: bool) -> bool:
    """Return whether the write lock was free."""
    try:
        db.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if is_late or not _is_busy(error):
            raise
        return False
    return True


def _is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _failure(error: sqlite3.Error, timeout: float) -> LedgerUnreachable:
    if _is_busy(error):
        return LedgerUnreachable(
            f"the ledger's file must be free within {timeout} s, got a process that held it for "
            "longer. Find the process that stands still, or raise timeout."
        )
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    return LedgerUnreachable(
        f"the ledger's file must be usable, got {name}. Check its disk, or name another file.",
        is_absent=not name.startswith("SQLITE_READONLY"),
    )


def _flag(db: sqlite3.Connection, flags: Iterable[str]) -> str:
    for flag in flags:
        found = db.execute("SELECT text FROM notes WHERE name = ?", (f"f:{flag}",)).fetchone()
        if found is not None:
            return f"{flag}{SEPARATOR}{found[0]}"
    return ""


def _row(db: sqlite3.Connection, window: Window) -> Row:
    row = db.execute(_LOOK_AT_WINDOW, window[:2]).fetchone()
    if row is None:
        return Row()
    return Row(Amount(*row[:4]), Amount(*row[4:8]), Amount(*row[8:12]), bool(row[12]), is_new=False)


def _ceiling(db: sqlite3.Connection, window: Window) -> Amount:
    names = (ceiling_name(window.key, window.label), ceiling_name("", window.label))
    stored = db.execute(_CEILING, names).fetchone()
    return window.ceiling if stored is None else ceiling_of_text(stored[0])


def _forget_closed(db: sqlite3.Connection, now: float, after: str) -> str:
    """Forget old tombstones; what they were charged is kept as one figure of the window.

    Looks at some holds after the one that was looked at last; returns where it came to.
    """
    looked_at, last = db.execute(
        "SELECT count(*), max(id) FROM (SELECT id FROM holds WHERE id > ? ORDER BY id LIMIT ?)",
        (after, _CLEANED_AT_ONCE),
    ).fetchone()
    rows = db.execute(
        "SELECT id, a0, a1, a2, a3, windows FROM holds WHERE id > ? AND id <= ? AND closed = 1 "
        "AND expires < ?",
        (after, last, now),
    ).fetchall()
    db.executemany(
        "UPDATE windows SET f0 = f0 + ?, f1 = f1 + ?, f2 = f2 + ?, f3 = f3 + ? "
        "WHERE key = ? AND label = ?",
        [(*row[1:5], *pair) for row in rows for pair in pairs_of(row[5])],
    )
    db.executemany("DELETE FROM holds WHERE id = ?", [row[:1] for row in rows])
    return last if looked_at == _CLEANED_AT_ONCE else ""


def _check(db: sqlite3.Connection) -> list[str]:
    charged: dict[tuple[str, str], Amount] = {}
    spent: dict[tuple[str, str], Amount] = {}
    for *amount, closed, windows in db.execute("SELECT a0, a1, a2, a3, closed, windows FROM holds"):
        for pair in pairs_of(windows):
            charged[pair] = charged.get(pair, ZERO).plus(Amount(*amount))
            if closed:
                spent[pair] = spent.get(pair, ZERO).plus(Amount(*amount))
    wrong: list[str] = []
    oldest: dict[tuple[str, str], str] = {}
    for key, label, *figures in db.execute(
        f"SELECT key, label, f0, f1, f2, f3, {_ROW} FROM windows ORDER BY key, label"  # noqa: S608
    ):
        kept = Amount(*figures[:4])
        expected = (
            charged.pop((key, label), ZERO).plus(kept),
            spent.get((key, label), ZERO).plus(kept),
        )
        found = (Amount(*figures[4:8]), Amount(*figures[8:12]))
        if found != expected:
            wrong.append(
                f"{key!r} {label}: charged and spent are {list(map(tuple, found))} in the window, "
                f"{list(map(tuple, expected))} in holds"
            )
        oldest[key, label[0]] = oldest_kept(label)
    # One that a newer window has made too old to keep is not missed.
    return wrong + [
        f"{key!r} {label}: the window is missing"
        for key, label in sorted(charged)
        if label >= oldest.get((key, label[0]), "")
    ]
