"""The statements that SQLite and PostgreSQL have in common: notes and reports."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.step import HoldRecord, Identity, WindowRecord, pairs_of

WINDOWS = "SELECT key, label, charged, spent, ceiling FROM bg_windows"
HOLDS = "SELECT id, owner, amount, closed, made, expires, windows FROM bg_holds"
_IDENTITY = (
    "SELECT a.text, b.text, (SELECT last_value FROM bg_sequence) FROM bg_notes a "
    "LEFT JOIN bg_notes b ON b.name = 'adopted' WHERE a.name = 'id'"
)
_NOTE = "INSERT INTO bg_notes VALUES(?, ?) ON CONFLICT(name) DO UPDATE SET text = excluded.text"


class SqlStore:
    """The part of a store that is the same in SQLite and PostgreSQL.

    Notes are 'id' and 'adopted'; 'f:' and a kill switch; 'c:<kind>:<key>' and a ceiling.
    """

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
        return list(map(window_of, self.all(f"{WINDOWS} WHERE {of_one}", key)))

    def holds(self) -> list[HoldRecord]:
        """Return every hold of the last day, and all that are open."""
        return list(map(hold_of, self.all(f"{HOLDS} ORDER BY made")))


def window_of(row: Sequence[Any]) -> WindowRecord:
    """Read a window: its key, its label, its vectors, and whether it has warned."""
    key, label, charged, spent, ceiling, *warned = row
    vectors = (_amount_of(charged), _amount_of(spent), _amount_of(ceiling))
    return WindowRecord(key, label, *vectors, *map(bool, warned))


def hold_of(row: Sequence[Any]) -> HoldRecord:
    """Read a hold."""
    name, owner, amount, closed, made, expires, windows = row
    pairs = pairs_of(windows)
    return HoldRecord(name, owner, _amount_of(amount), bool(closed), made, expires, pairs)


def _amount_of(vector: Any) -> Amount:
    """Read a vector: an array of PostgreSQL, or a text in SQLite, which has none."""
    return Amount.of_text(vector) if isinstance(vector, str) else Amount(*vector)
