"""The tables of numbered checkpoints in SQLite: what each one adds to the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetguard_core.errors import CheckpointError
from budgetguard_core.snapshot import Snapshot, SnapshotParts

if TYPE_CHECKING:
    import sqlite3

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


def make(db: sqlite3.Connection) -> None:
    """Make the tables where there are none, and take over what an earlier release kept."""
    columns = [column[1] for column in db.execute("PRAGMA table_info(checkpoints)")]
    migration = _MIGRATION if columns == _EARLIER else ""
    db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} {migration} COMMIT;")


def leg_of(db: sqlite3.Connection, run_id: str) -> int:
    """Return the number of a run's latest leg; 0 if none was claimed."""
    row = db.execute("SELECT leg FROM budgetguard_runs WHERE run_id = ?", (run_id,)).fetchone()
    return 0 if row is None else row[0]


def claim(db: sqlite3.Connection, run_id: str) -> int:
    """Begin another leg of a run, and return its number."""
    leg = leg_of(db, run_id) + 1
    db.execute("INSERT OR REPLACE INTO budgetguard_runs VALUES (?, ?)", (run_id, leg))
    return leg


def last_number(db: sqlite3.Connection, run_id: str) -> int:
    """Return the number of a run's last checkpoint; 0 if there is none."""
    (number,) = db.execute(
        "SELECT max(number) FROM budgetguard_checkpoints WHERE run_id = ?", (run_id,)
    ).fetchone()
    return number or 0


def load(db: sqlite3.Connection, run_id: str, number: int | None = None) -> Snapshot | None:
    """Return the snapshot of a checkpoint, of the last one if no number is given.

    Raises:
        CheckpointError: It is damaged.
    """
    try:
        row = db.execute(
            "SELECT number, messages, records, state FROM budgetguard_checkpoints "
            "WHERE run_id = ? AND number = coalesce(?, ?)",
            (run_id, number, last_number(db, run_id)),
        ).fetchone()
    except OverflowError:  # no number of any
        return None
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
        seen.get(kind, []).append(item)
    last = seen["record"]
    if type(records) is int:
        last = last[-records:] if records else []
    parts = SnapshotParts(state, seen["message"], last)
    if len(parts.messages) != messages or len(parts.records) != records:
        raise CheckpointError(
            f"snapshot is damaged ({messages} messages and {records} records were saved, "
            f"{len(parts.messages)} and {len(parts.records)} found). "
            "Restore an earlier one, or start the run anew."
        )
    if any(type(one) is not str for one in (state, *parts.messages, *parts.records)):
        raise CheckpointError(
            "snapshot is damaged (a part of it is no text). "
            "Restore an earlier one, or start the run anew."
        )
    return Snapshot.from_json(parts.to_json())


def put(
    db: sqlite3.Connection, run_id: str, parts: SnapshotParts, start: int, saved_ns: int, keep: int
) -> int:
    """Add a checkpoint, and return its number.

    Args:
        db: The connection, in a transaction.
        run_id: The run.
        parts: The snapshot; its messages are those from number `start` on.
        start: How many messages come first, as the last checkpoint has them.
        saved_ns: The time.
        keep: How many checkpoints of the run are kept.
    """
    messages = parts.messages
    total = start + len(messages)
    number = last_number(db, run_id) + 1
    if not start:
        start = _shared(db, run_id, messages)
        messages = messages[start:]
    _close(db, run_id, "message", number, start, _NO_END)
    _insert(db, run_id, "message", number, start, messages)
    _put_records(db, run_id, number, parts.records)
    db.execute(
        "INSERT INTO budgetguard_checkpoints VALUES (?, ?, ?, ?, ?, ?)",
        (run_id, number, saved_ns, total, len(parts.records), parts.state),
    )
    prune(db, run_id, number - keep)
    return number


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
    shared = overlap([item for _, item in kept], records)
    place = kept[-1][0] + 1 if kept else 0
    _insert(db, run_id, "record", number, place, records[shared:])
    # Closed in bulk, because a row at the other end of the table costs a page of its own.
    end = place + len(records) - shared
    if end // _RECORDS_CLOSED_AT_ONCE > place // _RECORDS_CLOSED_AT_ONCE:
        _close(db, run_id, "record", number, 0, end - len(records))


def overlap(kept: list[str], records: list[str]) -> int:
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


def prune(db: sqlite3.Connection, run_id: str, through: int) -> None:
    """Forget a run's checkpoints up to a number."""
    db.execute(
        "DELETE FROM budgetguard_checkpoints WHERE run_id = ? AND number <= ?", (run_id, through)
    )
    db.execute(
        "DELETE FROM budgetguard_items WHERE run_id = ? AND until <= ?", (run_id, through + 1)
    )
