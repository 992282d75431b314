"""The statements that SQLite and PostgreSQL have in common: notes and reports."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.step import HoldRecord, Identity, WindowRecord, pairs_of

WINDOW = "key label CHARGED SPENT CEILING warned"
HOLD = "id owner AMOUNT closed made expires windows"
_IDENTITY = (
    "SELECT a.text, b.text, (SELECT last_value FROM bg_sequence) FROM bg_notes a "
    "LEFT JOIN bg_notes b ON b.name = 'adopted' WHERE a.name = 'id'"
)
_NOTE = "INSERT INTO bg_notes VALUES(?, ?) ON CONFLICT(name) DO UPDATE SET text = excluded.text"


class SqlStore:
    """The part of a store that is the same in SQLite and PostgreSQL.

    Notes are 'id' and 'adopted'; 'f:' and a kill switch; 'c:<kind>:<key>' and a ceiling.
    """

    vector = "{0}{1}"
    """The column of one figure of a vector."""

    def all(self, statement: str, *arguments: Any) -> list[Any]:
        """Return the rows of one statement, in which ? stands for each argument."""
        raise NotImplementedError

    def identity(self) -> Identity:
        """Return which ledger it is; made at first use."""
        made = uuid.uuid4().hex
        self.all("INSERT INTO bg_notes VALUES('id', ?) ON CONFLICT DO NOTHING", made)
        ((found, adopted, number),) = self.all(_IDENTITY)
        return Identity(found, float(adopted or 0), number)

    def notes(self, prefix: str) -> dict[str, str]:
        """Return the notes whose name begins so."""
        statement = "SELECT name, text FROM bg_notes WHERE name >= ? AND name < ?"
        return dict(self.all(statement, prefix, prefix + "\U0010ffff"))

    def write(self, name: str, text: str | None) -> None:
        """Set a note, or take it away."""
        if text is None:
            self.all("DELETE FROM bg_notes WHERE name = ?", name)
        else:
            self.all(_NOTE, name, text)

    def windows(self, key: str = "") -> list[WindowRecord]:
        """Return every window, or those of one key."""
        of_one = "key = ? ORDER BY label" if key else "? = '' ORDER BY key, label"
        return list(map(window_of, self._rows(WINDOW, f"bg_windows WHERE {of_one}", key)))

    def holds(self) -> list[HoldRecord]:
        """Return every hold of the last day, and all that are open."""
        return list(map(hold_of, self._rows(HOLD, "bg_holds ORDER BY made")))

    def _rows(self, names: str, source: str, *arguments: Any) -> list[Any]:
        statement = f"SELECT {columns(names, self.vector)} FROM {source}"  # noqa: S608
        return self.all(statement, *arguments)


def columns(names: str, vector: str) -> str:
    """Return the columns of a table, those in capitals being vectors."""
    found: list[str] = []
    for name in names.split():
        four = [vector.format(name.lower(), index) for index in (1, 2, 3, 4)]
        found += four if name.isupper() else [name]
    return ", ".join(found)


def window_of(row: Sequence[Any]) -> WindowRecord:
    """Read a window, as `WINDOW` names its columns."""
    vectors = Amount._make(row[2:6]), Amount._make(row[6:10]), Amount._make(row[10:14])
    return WindowRecord(row[0], row[1], *vectors, warned=bool(row[14]))


def hold_of(row: Sequence[Any]) -> HoldRecord:
    """Read a hold, as `HOLD` names its columns."""
    *amount, closed, made, expires, windows = row[2:]
    pairs = pairs_of(windows)
    return HoldRecord(row[0], row[1], Amount(*amount), bool(closed), made, expires, pairs)
