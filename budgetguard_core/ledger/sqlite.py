"""The ledger in a SQLite file: no set-up, correct under many processes of one machine."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from budgetguard_core.clock import Clock, SystemClock
from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.errors import LedgerUnreachable
from budgetguard_core.ledger.sql import HOLD, WINDOW, SqlStore, columns, hold_of, window_of
from budgetguard_core.ledger.step import (
    SEPARATOR,
    TOMBSTONE_SECONDS,
    Answer,
    HoldRecord,
    Step,
    WindowRecord,
    ceiling_name,
    decide,
    lines_of,
)
from budgetguard_core.ledger.windows import Window

_R = TypeVar("_R")

_WINDOW, _HOLD = columns(WINDOW, SqlStore.vector), columns(HOLD, SqlStore.vector)
_SCHEMA = f"""
CREATE TABLE bg_windows({_WINDOW}, PRIMARY KEY(key, label)) WITHOUT ROWID;
CREATE TABLE bg_holds({_HOLD}, PRIMARY KEY(id)) WITHOUT ROWID;
CREATE TABLE bg_notes(name TEXT PRIMARY KEY, text TEXT) WITHOUT ROWID;
CREATE TABLE bg_sequence(last_value INT);
INSERT INTO bg_sequence VALUES(0);
PRAGMA user_version = 1
"""
_VERSION = 1
_KEEP_WINDOW = f"INSERT OR REPLACE INTO bg_windows VALUES({', '.join('?' * 15)})"
_KEEP_HOLD = f"INSERT OR REPLACE INTO bg_holds VALUES({', '.join('?' * 10)})"
_LOOK = "SELECT s.last_value, h.* FROM bg_sequence s LEFT JOIN bg_holds h ON h.id = ?"
_LOOK_AT_WINDOW = "SELECT * FROM bg_windows WHERE key = ? AND label = ?"
# More are looked at than can have come in. An index of closed holds by time would be one page more
# in every settlement.
_STEPS_BETWEEN_CLEANINGS = 500
_CLEANED_AT_ONCE = 2000
_STEPS_BETWEEN_CHECKPOINTS = 200
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.002


class SqliteLedgerStore(SqlStore):
    """A `Store` in a file, for one thread at a time.

    The file and its folder are made, readable by their owner only. A signal's handler may raise
    anywhere in here: what is held is freed by SQLite.
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
        self._synchronous = synchronous
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
            self.close()  # or each attempt would leave a file open
            raise

    def _open(self) -> sqlite3.Connection:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.touch(mode=0o600)
        self._db = db = sqlite3.connect(
            self._path, timeout=self._timeout, isolation_level=None, check_same_thread=False
        )
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {self._synchronous}")
        # SQLite before 3.51.3 (3.50.7, 3.44.6 in their lines) may lose committed pages when a
        # checkpoint meets a commit: ours waits for the write lock first, see `_check_point`.
        db.execute("PRAGMA wal_autocheckpoint = 0")
        # No write once the schema is there: many processes open the file at the same time.
        if _version(db) < _VERSION:
            db.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA.split(";") if _version(db) < _VERSION else ():
                db.execute(statement)
            db.execute("COMMIT")
        if _version(db) != _VERSION:
            raise LedgerUnreachable(
                f"the ledger's format must be {_VERSION}, got {_version(db)}. Upgrade BudgetGuard."
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
        """Close the file, which undoes a step under way; the next step opens it again."""
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def forked(self) -> None:
        """Begin anew in a forked child; with a file that is open here nothing can be done."""
        if self._db is not None:
            # Closing it here would drop the locks that the parent relies on.
            self._inherited.append(self._db)
        self._db = None

    def _write(self, work: Callable[[sqlite3.Connection], _R]) -> _R:
        """Do some work in a transaction of the only writer; undo it if it fails."""
        try:
            db = self._begin()
            result = work(db)
            db.execute("COMMIT")
            self._check_point(db)
        except (sqlite3.Error, OSError) as error:
            if not _is_busy(error):
                self.close()
            raise self._failure(error) from None
        except BaseException:
            self.close()
            raise
        return result

    def _begin(self) -> sqlite3.Connection:
        deadline = SystemClock.monotonic_ns() + self._timeout * 1e9
        if self._inherited:
            raise LedgerUnreachable(
                "the ledger's file must not be in use while its process forks, got a step that "
                "took longer than the fork could wait. Open it in the child, or raise timeout."
            )
        if self._db is not None and self._inode != self._inode_now():
            # Removed or replaced: what is written to it from here on nobody would read.
            self.close()
        db = self._db or self._open()
        pause = _FIRST_PAUSE
        while True:
            try:
                db.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if SystemClock.monotonic_ns() > deadline or not _is_busy(error):
                    raise
            else:
                return db
            # Spread, so that two that wait do not wake together for ever.
            threading.Event().wait(pause * random.uniform(0.5, 1.5))  # noqa: S311
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def _check_point(self, db: sqlite3.Connection) -> None:
        """Write the log back, where it has grown; while no other process commits."""
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_CHECKPOINTS:
            return
        with suppress(sqlite3.Error):
            db.execute(f"PRAGMA busy_timeout = {int(self._timeout * 1000)}")
            db.execute("PRAGMA wal_checkpoint(RESTART)")
            db.execute("PRAGMA busy_timeout = 0")

    def _failure(self, error: sqlite3.Error | OSError) -> LedgerUnreachable:
        if _is_busy(error):
            return LedgerUnreachable(
                f"the ledger's file must be free within {self._timeout} s, got a process that held "
                "it for longer. Find the process that stands still, or raise timeout."
            )
        name = getattr(error, "sqlite_errorname", "") or getattr(error, "strerror", None)
        return LedgerUnreachable(
            f"the ledger's file must be usable, got {name or type(error).__name__}. "
            "Check its disk, or name another file.",
            is_absent=not str(name).startswith("SQLITE_READONLY"),
        )

    def step(self, step: Step) -> Answer:
        """Apply a step once, in one transaction."""
        return self._write(lambda db: self._step(db, step))

    def _step(self, db: sqlite3.Connection, step: Step) -> Answer:
        now = self._clock.wall_ns() / 1e9  # under the write lock
        is_reserve = step.verb == "reserve"
        names = ["id", "adopted"]
        if is_reserve:
            names += [f"f:{flag}" for flag in step.flags]
            for one in step.windows:
                names += (ceiling_name(one.key, one.label), ceiling_name("", one.label))
        marks = ", ".join("?" * len(names))
        statement = f"SELECT name, text FROM bg_notes WHERE name IN ({marks})"  # noqa: S608
        notes: dict[str, str] = dict(db.execute(statement, names).fetchall())
        sequence, *found = db.execute(_LOOK, (step.id,)).fetchone()
        if step.ledger and (notes.get("id") != step.ledger or sequence < step.sequence):
            met = (notes.get("id", ""), notes.get("adopted", "0"), str(sequence))
            return Answer("foreign", detail=SEPARATOR.join(met), now=now)
        hold = None if found[0] is None else hold_of(found)
        rows: list[WindowRecord | None] = []
        for one in step.windows:
            row = db.execute(_LOOK_AT_WINDOW, one[:2]).fetchone()
            rows.append(None if row is None else window_of(row))
        flags = [flag for flag in step.flags if f"f:{flag}" in notes]
        flag = f"{flags[0]}{SEPARATOR}{notes[f'f:{flags[0]}']}" if flags else ""
        ceilings = [_ceiling_of(one, notes) for one in step.windows] if is_reserve else ()
        answer, changed = decide(step, now, hold, rows, ceilings, flag)
        if not changed:
            return answer._replace(sequence=sequence)
        for window, old, row in zip(step.windows, rows, changed, strict=True):
            if is_reserve and old is None:
                db.execute(
                    "DELETE FROM bg_windows WHERE key = ? AND label >= ? AND label < ?",
                    (window.key, window.label[:2], window.oldest),
                )
            figures = (*row.charged, *row.spent, *row.ceiling)
            db.execute(_KEEP_WINDOW, (*row[:2], *figures, row.warned))
        expires = now + (step.ttl if is_reserve else TOMBSTONE_SECONDS)
        made, owner, lines = now, step.owner, lines_of(step.windows)
        if hold is not None:
            made, owner, lines = hold.made, hold.owner, found[-1]
        db.execute(
            _KEEP_HOLD, (step.id, owner, *answer.amount, not is_reserve, made, expires, lines)
        )
        db.execute("UPDATE bg_sequence SET last_value = last_value + 1")
        self._kept += 1
        if self._kept % _STEPS_BETWEEN_CLEANINGS == 1:  # an early one, for processes of a few
            self._forget_closed(db, now)
        return answer._replace(sequence=sequence + 1)

    def _forget_closed(self, db: sqlite3.Connection, now: float) -> None:
        """Forget old tombstones, of some holds after those that were looked at last."""
        looked_at = db.execute(
            "SELECT id FROM bg_holds WHERE id > ? ORDER BY id LIMIT ?",
            (self._cleaned_to, _CLEANED_AT_ONCE),
        ).fetchall()
        db.executemany(
            "DELETE FROM bg_holds WHERE id = ? AND closed AND expires < ?",
            [(name, now) for (name,) in looked_at],
        )
        self._cleaned_to = looked_at[-1][0] if len(looked_at) == _CLEANED_AT_ONCE else ""

    def now(self) -> float:
        """Return the machine's clock, which is the ledger's."""
        return self._clock.wall_ns() / 1e9

    def all(self, statement: str, *arguments: Any) -> list[Any]:
        """Return the rows of one statement."""
        return self._write(lambda db: db.execute(statement, arguments).fetchall())

    def records(self) -> tuple[list[WindowRecord], list[HoldRecord]]:
        """Return every window and every hold, as of one instant."""
        windows, holds = self._write(
            lambda db: (
                db.execute("SELECT * FROM bg_windows ORDER BY key, label").fetchall(),
                db.execute("SELECT * FROM bg_holds").fetchall(),
            )
        )
        return list(map(window_of, windows)), list(map(hold_of, holds))


def _ceiling_of(window: Window, notes: dict[str, str]) -> Amount:
    for key in (window.key, ""):
        if (stored := notes.get(ceiling_name(key, window.label))) is not None:
            return Amount.of_text(stored)
    return window.ceiling


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _is_busy(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
