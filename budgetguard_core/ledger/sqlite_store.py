"""The ledger in a SQLite file: no set-up, correct under many processes of one machine."""

from __future__ import annotations

import os
import sqlite3
import threading
import uuid
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from budgetguard_core.clock import Clock, SystemClock
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.file_lock import FileLock
from budgetguard_core.ledger.amounts import LARGEST_CEILING, ZERO, Amount
from budgetguard_core.ledger.errors import LedgerUnreachable
from budgetguard_core.ledger.step import (
    SEPARATOR,
    TOMBSTONE_SECONDS,
    Answer,
    Change,
    Hold,
    HoldRecord,
    Row,
    Step,
    WindowRecord,
    decide,
)
from budgetguard_core.ledger.windows import Window

_SCHEMA = """
CREATE TABLE windows(
    key TEXT, label TEXT,
    cu INT NOT NULL DEFAULT 0, ct INT NOT NULL DEFAULT 0,
    su INT NOT NULL DEFAULT 0, st INT NOT NULL DEFAULT 0,
    warned INT NOT NULL DEFAULT 0, lu INT NOT NULL DEFAULT 0, lt INT NOT NULL DEFAULT 0,
    fu INT NOT NULL DEFAULT 0, ft INT NOT NULL DEFAULT 0,
    PRIMARY KEY(key, label)) WITHOUT ROWID;
CREATE TABLE holds(
    id TEXT PRIMARY KEY, root TEXT, gu INT, gt INT, su INT, st INT, op INT, closed INT,
    made REAL, expires REAL, lease INT, owner TEXT, windows TEXT) WITHOUT ROWID;
CREATE INDEX holds_leased ON holds(root, expires) WHERE closed = 0 AND lease = 1;
CREATE TABLE ceilings(key TEXT, kind TEXT, usd INT, tokens INT, PRIMARY KEY(key, kind))
    WITHOUT ROWID;
CREATE TABLE notes(name TEXT PRIMARY KEY, text TEXT) WITHOUT ROWID;
"""
_VERSION = 1
# More are looked at than can have come in. An index of closed holds by time would be one page more
# in every settlement.
_STEPS_BETWEEN_CLEANINGS = 500
_CLEANED_AT_ONCE = 2000
_NAMES_AT_HAND = 1000
# What changes it: the notes and ceilings that a step looks at. New with each change, and random, so
# that a file which was put in place of another never looks like it.
_CHANGED = "INSERT OR REPLACE INTO notes VALUES('settings', lower(hex(randomblob(16))))"
_FIGURES = ("cu", "ct", "su", "st", "warned", "lu", "lt")
_KEEP_WINDOW = (
    "INSERT INTO windows(key, label, cu, ct, su, st, warned, lu, lt) "
    "VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT(key, label) DO UPDATE SET cu = excluded.cu, "
    "ct = excluded.ct, su = excluded.su, st = excluded.st, warned = excluded.warned, "
    "lu = excluded.lu, lt = excluded.lt"
)
_SYNCHRONOUS = ("FULL", "NORMAL", "EXTRA")


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
    """A `Store` in a file.

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

    largest_ceiling = LARGEST_CEILING

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
        self._mutex = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._file: FileLock | None = None
        self._inode: tuple[int, int] = (0, 0)
        self._inherited: list[sqlite3.Connection] = []
        """Connections of the parent process that a fork took along."""
        self._steps = 0
        self._cleaned_to = ""
        self._settings: str | None = None
        """The settings as they were when these two were read."""
        self._notes: dict[str, str | None] = {}
        self._ceilings: dict[tuple[str, str], Amount | None] = {}
        with self._writing():
            pass

    # Connection

    def _connect(self) -> sqlite3.Connection:
        try:
            return self._open()
        except BaseException:
            self._disconnect()  # or each attempt would leave a file open
            raise

    def _open(self) -> sqlite3.Connection:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = FileLock(self._path.with_name(self._path.name + ".lock"), self._timeout)
            self._path.touch(mode=0o600)
        except OSError as error:
            raise LedgerUnreachable(
                f"the ledger's file must be writable, got {error.strerror}. "
                "Name another file, or make its folder writable."
            ) from None
        with self._file:
            self._db = db = sqlite3.connect(
                self._path,
                timeout=self._timeout,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=64,
            )
            db.execute("PRAGMA journal_mode = WAL")
            db.execute(f"PRAGMA synchronous = {self._synchronous}")
            # No write once the schema is there: many processes open the file at the same time.
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version < 1:
                db.executescript(
                    f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;"
                )
            elif version > _VERSION:
                raise LedgerUnreachable(
                    f"the ledger's format must be <= {_VERSION}, got {version}. "
                    "Upgrade BudgetGuard."
                )
        self._inode = self._inode_now()
        return db

    def _inode_now(self) -> tuple[int, int]:
        try:
            found = self._path.stat()
        except OSError:
            return (0, 0)
        return (found.st_dev, found.st_ino)

    def _disconnect(self) -> None:
        db, file = self._db, self._file
        self._db = self._file = None
        if db is not None:
            # The last one to close a file writes its log back. A lock that nobody frees is no
            # reason to stay open.
            with suppress(TimeoutError), file or nullcontext():
                db.close()
            db.close()
        if file is not None:
            file.close()

    @contextmanager
    def _writing(self) -> Generator[sqlite3.Connection]:
        """A transaction of the only writer; rolled back if the block fails."""
        if not self._mutex.acquire(timeout=self._timeout):
            raise LedgerUnreachable(
                f"the ledger must be free within {self._timeout} s, got another thread's step that "
                "took longer. Raise timeout."
            )
        try:
            if self._inherited:
                raise LedgerUnreachable(
                    "the ledger's file must not be in use while its process forks, got a step that "
                    "took longer than the fork could wait. Open it in the child, or raise timeout."
                )
            if self._db is not None and self._inode != self._inode_now():
                # Removed or replaced: what is written to it from here on nobody would read.
                self._disconnect()
            db = self._db or self._connect()
            with cast("FileLock", self._file):
                db.execute("BEGIN IMMEDIATE")
                try:
                    yield db
                    db.execute("COMMIT")
                except BaseException:
                    if db.in_transaction:  # a full disk may have rolled back already
                        db.execute("ROLLBACK")
                    raise
        except TimeoutError as error:
            raise LedgerUnreachable(f"ledger: {error}") from None
        except sqlite3.Error as error:
            self._disconnect()
            name = getattr(error, "sqlite_errorname", type(error).__name__)
            raise LedgerUnreachable(
                f"the ledger's file must be usable, got {name}. "
                "Check its disk, or name another file."
            ) from None
        finally:
            self._mutex.release()

    # The step

    def step(self, step: Step) -> Answer:
        """Apply a step once, in one transaction."""
        with self._writing() as db:
            now = self._clock.wall_ns() / 1e9  # under the write lock
            names = [part for window in step.windows for part in window[:2]]
            found = db.execute(_look(len(step.windows)), (step.id, *names)).fetchone()
            settings, op = found[0], found[5]
            if settings != self._settings:
                self._settings, self._notes, self._ceilings = settings, {}, {}
            if step.ledger and self._note(db, "id") != step.ledger:
                met, adopted = self._note(db, "id") or "", self._note(db, "adopted") or ""
                return Answer("foreign", ZERO, met + SEPARATOR + adopted, now)
            hold = None
            if op is not None:
                hold = Hold(Amount(*found[1:3]), Amount(*found[3:5]), op, bool(found[6]))
                if not found[6] and found[7] != _lines(step):
                    return Answer("windows", now=now)
            taking = step.takes and (hold is None or step.op > hold.op)
            rows: list[Row] = []
            ceilings: list[Amount] = []
            for place, window in enumerate(step.windows):
                cu, ct, su, st, warned, lu, lt = found[8 + 7 * place : 15 + 7 * place]
                if cu is None:
                    cu = ct = su = st = warned = lu = lt = 0
                    if window.start <= now:  # else its holder's clock is ahead
                        _begin_window(db, window)
                rows.append(Row(Amount(cu, ct), Amount(su, st), bool(warned)))
                # A report is measured by the ceiling that money was last asked for under.
                ceilings.append(self._ceiling(db, window) if taking else Amount(lu, lt))
            flag, live = "", 1
            if taking:
                for one in step.flags:
                    text = self._note(db, f"f:{one}")
                    if text is not None:
                        flag = one + SEPARATOR + text
                        break
                if step.leases:
                    (others,) = db.execute(
                        "SELECT count(*) FROM holds WHERE closed = 0 AND lease = 1 AND root = ? "
                        "AND expires > ? AND id <> ?",
                        (step.windows[0].key, now, step.id),
                    ).fetchone()
                    live = others + 1
            answer, after, change = decide(step, now, hold, rows, ceilings, live, flag)
            if after is not None and change is not None:
                self._keep(db, step, now, hold is not None, rows, ceilings, after, change)
        return answer

    def _note(self, db: sqlite3.Connection, name: str) -> str | None:
        """Return a note as of the latest change of the settings."""
        if name not in self._notes:
            if len(self._notes) >= _NAMES_AT_HAND:
                self._notes.clear()
            row = db.execute("SELECT text FROM notes WHERE name = ?", (name,)).fetchone()
            self._notes[name] = None if row is None else row[0]
        return self._notes[name]

    def _ceiling(self, db: sqlite3.Connection, window: Window) -> Amount:
        """Return what holds for a window: its key's own, else the stored default, else its own."""
        name = (window.key, window.label[0])
        if name not in self._ceilings:
            if len(self._ceilings) >= _NAMES_AT_HAND:
                self._ceilings.clear()
            row = db.execute(
                "SELECT usd, tokens FROM ceilings WHERE key IN ('', ?) AND kind = ? "
                "ORDER BY key DESC",
                name,
            ).fetchone()
            self._ceilings[name] = None if row is None else Amount(*row)
        return self._ceilings[name] or window.ceiling

    def _keep(
        self,
        db: sqlite3.Connection,
        step: Step,
        now: float,
        known: bool,
        rows: Sequence[Row],
        ceilings: Sequence[Amount],
        after: Hold,
        change: Change,
    ) -> None:
        (du, dt), (eu, et), warn = change
        kept: list[tuple[Any, ...]] = []
        for place, (window, row) in enumerate(zip(step.windows, rows, strict=True)):
            (cu, ct), (su, st), warned = row
            figures = (cu + du, ct + dt, su + eu, st + et, warned or warn >> place & 1)
            kept.append((window[0], window[1], *figures, *ceilings[place]))
        db.executemany(_KEEP_WINDOW, kept)
        expires = now + (TOMBSTONE_SECONDS if after.closed else step.ttl)
        (gu, gt), (su, st), op, closed = after
        if known:
            db.execute(
                "UPDATE holds SET gu = ?, gt = ?, su = ?, st = ?, op = ?, closed = ?, "
                "expires = ?, lease = lease OR ? WHERE id = ?",
                (gu, gt, su, st, op, closed, expires, step.leases, step.id),
            )
        else:
            root, lines = step.windows[0].key, _lines(step)
            db.execute(
                "INSERT INTO holds(id, root, gu, gt, su, st, op, closed, made, expires, lease, "
                "owner, windows) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(step.id, root, gu, gt, su, st, op, closed),
                    *(now, expires, step.leases, step.owner, lines),
                ),
            )
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_CLEANINGS == 1:  # the first one, for processes of a few
            self._cleaned_to = _forget_closed(db, now, self._cleaned_to)

    # Notes, ceilings, reports

    def now(self) -> float:
        """Return the machine's clock, which is the ledger's."""
        return self._clock.wall_ns() / 1e9

    def identity(self) -> str:
        """Return the id of the ledger, made at first use."""
        with self._writing() as db:
            return self._identity(db)

    def adopt(self) -> str:
        """Say that this ledger is meant; return its id."""
        with self._writing() as db:
            db.execute("INSERT OR REPLACE INTO notes VALUES('adopted', '1')")
            db.execute(_CHANGED)
            return self._identity(db)

    def _identity(self, db: sqlite3.Connection) -> str:
        found = _notes(db, ("id",))
        if not found:
            found["id"] = uuid.uuid4().hex
            db.execute("INSERT INTO notes VALUES('id', ?)", (found["id"],))
            db.execute(_CHANGED)
        return found["id"]

    def read(self, names: Sequence[str]) -> list[str | None]:
        """Return notes by name."""
        with self._writing() as db:
            found = _notes(db, names)
        return [found.get(name) for name in names]

    def scan(self, prefix: str) -> dict[str, str]:
        """Return the notes whose name begins so."""
        with self._writing() as db:
            return dict(
                db.execute(
                    "SELECT name, text FROM notes WHERE name >= ? AND name < ?",
                    (prefix, prefix + "\U0010ffff"),
                ).fetchall()
            )

    def write(self, name: str, text: str | None) -> None:
        """Set a note, or take it away."""
        with self._writing() as db:
            if text is None:
                db.execute("DELETE FROM notes WHERE name = ?", (name,))
            else:
                db.execute("INSERT OR REPLACE INTO notes VALUES(?, ?)", (name, text))
            if name.startswith("f:"):
                db.execute(_CHANGED)

    def ceilings(self) -> dict[tuple[str, str], Amount]:
        """Return the stored ceilings by key and kind; key "" is the default."""
        with self._writing() as db:
            rows = db.execute("SELECT key, kind, usd, tokens FROM ceilings").fetchall()
        return {(key, kind): Amount(usd, tokens) for key, kind, usd, tokens in rows}

    def set_ceiling(self, key: str, kind: str, ceiling: Amount | None) -> None:
        """Store a ceiling, or take it away."""
        with self._writing() as db:
            if ceiling is None:
                db.execute("DELETE FROM ceilings WHERE key = ? AND kind = ?", (key, kind))
            else:
                db.execute(
                    "INSERT OR REPLACE INTO ceilings VALUES(?, ?, ?, ?)", (key, kind, *ceiling)
                )
            db.execute(_CHANGED)

    def windows(self) -> list[WindowRecord]:
        """Return every window."""
        with self._writing() as db:
            rows = db.execute(
                "SELECT key, label, cu, ct, su, st, lu, lt FROM windows ORDER BY key, label"
            ).fetchall()
        return [_window(row) for row in rows]

    def window(self, key: str, label: str) -> WindowRecord:
        """Return one window, also one that was never used."""
        with self._writing() as db:
            row = db.execute(
                "SELECT key, label, cu, ct, su, st, lu, lt FROM windows "
                "WHERE key = ? AND label = ?",
                (key, label),
            ).fetchone()
        return _window(row or (key, label, 0, 0, 0, 0, 0, 0))

    def holds(self) -> list[HoldRecord]:
        """Return every hold of the last day, and all that are open."""
        with self._writing() as db:
            rows = db.execute(
                "SELECT id, owner, gu, gt, su, st, op, closed, lease, made, expires, windows "
                "FROM holds ORDER BY made"
            ).fetchall()
        return [
            HoldRecord(
                row[0],
                row[1],
                Amount(*row[2:4]),
                Amount(*row[4:6]),
                row[6],
                bool(row[7]),
                bool(row[8]),
                row[9],
                row[10],
                _pairs(row[11]),
            )
            for row in rows
        ]

    def check(self) -> list[str]:
        """Compare each window with the sum of its holds; a damaged file shows here.

        SQLite's own check may say ok where pages of a committed transaction are missing.
        """
        sums: dict[tuple[str, str], list[int]] = {}
        wrong: list[str] = []
        with self._writing() as db:
            for gu, gt, su, st, closed, windows in db.execute(
                "SELECT gu, gt, su, st, closed, windows FROM holds"
            ):
                hold = Hold(Amount(gu, gt), Amount(su, st), 0, bool(closed))
                for pair in _pairs(windows):
                    total = sums.setdefault(pair, [0, 0, 0, 0])
                    for place, figure in enumerate((*hold.charge, su, st)):
                        total[place] += figure
            for key, label, fu, ft, *figures in db.execute(
                "SELECT key, label, fu, ft, cu, ct, su, st FROM windows"
            ):
                total = sums.pop((key, label), [0, 0, 0, 0])
                expected = [total[0] + fu, total[1] + ft, total[2] + fu, total[3] + ft]
                if figures != expected:
                    wrong.append(f"{key!r} {label}: {figures} in the window, {expected} in holds")
        wrong += [f"{key!r} {label}: the window is missing" for key, label in sorted(sums)]
        return wrong

    def before_fork(self) -> bool:
        """Close the file, and hold it closed until the fork is over.

        SQLite keeps what it has locked in the memory of the process. A child would believe that it
        holds the locks of an open file, and the system knows of none: another process that closes
        the file then takes itself for the last, and what the child commits is lost with the log.
        """
        # A step under way may wait for the file as long as that, and then takes its time.
        if not self._mutex.acquire(timeout=2 * self._timeout):
            return False
        with suppress(sqlite3.Error):
            self._disconnect()
        return True

    def after_fork(self) -> None:
        """Let the parent process go on."""
        self._mutex.release()

    def forked(self) -> None:
        """Begin anew in a forked child; with a file that is open here nothing can be done."""
        if self._db is not None:
            # Closing it here would drop the locks that the parent relies on.
            self._inherited.append(self._db)
        if self._file is not None:
            self._file.close()
        self._db = self._file = None
        self._mutex = threading.Lock()

    def close(self) -> None:
        """Close the file."""
        with self._mutex:
            self._disconnect()


def _notes(db: sqlite3.Connection, names: Sequence[str]) -> dict[str, str]:
    marks = ",".join("?" * len(names))
    statement = f"SELECT name, text FROM notes WHERE name IN ({marks})"  # noqa: S608
    return dict(db.execute(statement, names).fetchall())


@lru_cache
def _look(windows: int) -> str:
    """Return the one query of a step: settings, the hold and its windows, each found by its key."""
    columns = ["(SELECT text FROM notes WHERE name = 'settings')"]
    columns.append("h.gu, h.gt, h.su, h.st, h.op, h.closed, h.windows")
    joins = ["(SELECT 1) LEFT JOIN holds h ON h.id = ?"]
    for place in range(windows):
        one = f"w{place}"
        columns.append(", ".join(f"{one}.{name}" for name in _FIGURES))
        joins.append(f"windows {one} ON {one}.key = ? AND {one}.label = ?")
    return f"SELECT {', '.join(columns)} FROM {' LEFT JOIN '.join(joins)}"  # noqa: S608


def _begin_window(db: sqlite3.Connection, window: Window) -> None:
    """Forget the windows that a new one makes too old to keep."""
    kind = window.label[:2]
    db.execute(
        "DELETE FROM windows WHERE key = ? AND label >= ? AND label < ?",
        (window.key, kind, window.oldest or kind),
    )


def _forget_closed(db: sqlite3.Connection, now: float, after: str) -> str:
    """Forget old tombstones; what they were charged is kept as one figure of the window.

    Looks at some holds after the one that was looked at last; returns where it came to.
    """
    looked_at, last = db.execute(
        "SELECT count(*), max(id) FROM (SELECT id FROM holds WHERE id > ? ORDER BY id LIMIT ?)",
        (after, _CLEANED_AT_ONCE),
    ).fetchone()
    rows = db.execute(
        "SELECT id, su, st, windows FROM holds WHERE id > ? AND id <= ? AND closed = 1 "
        "AND expires < ?",
        (after, last, now),
    ).fetchall()
    db.executemany(
        "UPDATE windows SET fu = fu + ?, ft = ft + ? WHERE key = ? AND label = ?",
        [(su, st, *pair) for _, su, st, windows in rows for pair in _pairs(windows)],
    )
    db.executemany("DELETE FROM holds WHERE id = ?", [(row[0],) for row in rows])
    return last if looked_at == _CLEANED_AT_ONCE else ""


def _lines(step: Step) -> str:
    return "\n".join(f"{window.key}\t{window.label}" for window in step.windows)


def _pairs(windows: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (key, label) for key, _, label in (line.partition("\t") for line in windows.split("\n"))
    )


def _window(row: Iterable[Any]) -> WindowRecord:
    key, label, cu, ct, su, st, lu, lt = row
    return WindowRecord(key, label, Amount(cu, ct), Amount(su, st), Amount(lu, lt))
