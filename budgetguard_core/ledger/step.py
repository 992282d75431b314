"""The two verbs of a ledger, and what every store does with them.

A *hold* is the money that one call has reserved in some windows. `reserve` makes it before the
call, `settle` puts the used amount in its place. Each message names its hold, so that losing or
repeating one does no harm. `decide` is the rule: SQLite runs it, Redis and PostgreSQL do the same
in Lua and PL/pgSQL, and the tests compare all of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from budgetguard_core.clock import SystemClock
from budgetguard_core.ledger.amounts import ZERO, Amount
from budgetguard_core.ledger.windows import Window

TTL_SECONDS = 600.0
"""Seconds until the store lists a reservation: a call that hangs may be billed long after."""
TOMBSTONE_SECONDS = 24 * 3600
"""The time for which a settled hold is remembered, so that a repeated message changes nothing."""
SEPARATOR = "\x1f"
"""Between the parts of a detail; no name can hold it."""

Verb: TypeAlias = Literal["reserve", "settle"]
Status: TypeAlias = Literal["ok", "refused", "killed", "clock", "closed", "foreign", "windows"]


def new_id() -> str:
    """Make the id of a hold: by time first, so that neighbours in time share pages of an index."""
    return f"{SystemClock.wall_ns():016x}{secrets.token_hex(8)}"


class Step(NamedTuple):
    """One message to the store.

    A settlement is always taken: above its reservation, above the ceiling, late, of a hold that the
    store does not know. The provider has billed it; what is refused is the next reservation.
    """

    verb: Verb
    id: str
    windows: Sequence[Window]
    """Sorted by key and label: one lock order for everyone."""
    amount: Amount = ZERO
    """The amounts to reserve, or those used."""
    flags: tuple[str, ...] = ("all",)
    """The kill switches that concern the hold, sorted."""
    owner: str = ""
    """The run."""
    ttl: float = TTL_SECONDS
    ledger: str = ""
    """The id of the ledger that the sender knows; empty for any."""
    sequence: int = 0
    """The latest of the store's numbers that the sender knows."""


class Answer(NamedTuple):
    """The answer of the store."""

    status: Status
    amount: Amount = ZERO
    """The charge of the hold now."""
    detail: str = ""
    """refused: the window's place, the dimension's, charged, ceiling; killed: flag, its text;
    foreign: the id of the ledger that was met, when it was adopted, its number."""
    now: float = 0.0
    """The store's clock."""
    warn: int = 0
    """Bit i is set when this step brought the i-th window to 80 % of its ceiling, first of all."""
    sequence: int = 0
    """Grows with each change of the store; 0 where it is not known."""


class WindowRecord(NamedTuple):
    """A window as the store keeps it."""

    key: str
    label: str
    charged: Amount = ZERO
    spent: Amount = ZERO
    ceiling: Amount = ZERO
    """The default of the process that reserved last; what the store holds for the key wins."""
    warned: bool = False


class HoldRecord(NamedTuple):
    """A hold as the store keeps it."""

    id: str
    owner: str
    charge: Amount
    """The amount that counts against the ceilings: reserved, or once it is closed, used."""
    closed: bool
    made: float
    expires: float
    windows: tuple[tuple[str, str], ...]
    """Key and label."""

    @property
    def spent(self) -> Amount:
        """The amount that was reported."""
        return self.charge if self.closed else ZERO


class Identity(NamedTuple):
    """Which ledger a store holds."""

    id: str
    adopted: float = 0.0
    """The time at which somebody accepted it as it is, by the store's clock."""
    sequence: int = 0


def decide(
    step: Step,
    now: float,
    hold: HoldRecord | None,
    rows: Sequence[WindowRecord | None],
    ceilings: Sequence[Amount],
    flag: str,
) -> tuple[Answer, list[WindowRecord]]:
    """Return the answer to a step, and the windows that it changes, as they are to be.

    Pure: reads no clock and no store. A step that changes anything changes all of its windows.
    `now` is the store's clock, `rows` are the windows in the order of the step, as far as they are
    there, and `ceilings` theirs, for a reservation; `flag` is the first kill switch that is set and
    its text, or nothing.
    """
    before, counted = (ZERO, ZERO) if hold is None else (hold.charge, hold.spent)
    if hold is not None and not hold.closed and hold.windows != names_of(step.windows):
        return Answer("windows", now=now), []
    changed: list[WindowRecord] = []
    if step.verb == "settle":
        spent = counted.larger(step.amount)
        answer = Answer("ok", spent, now=now)
        if hold is not None and hold.closed and spent == before:
            return answer, []
        change, more = spent.minus(before), spent.minus(counted)
        for window, row in zip(step.windows, rows, strict=True):
            if row is None:  # it was pruned, or the store has lost it
                changed.append(WindowRecord(window.key, window.label, spent, spent))
            else:
                charged, total = row.charged.plus(change), row.spent.plus(more)
                changed.append(row._replace(charged=charged, spent=total))
        return answer, changed
    if hold is not None:
        return Answer("closed" if hold.closed else "ok", before, now=now), []
    if flag:
        return Answer("killed", detail=flag, now=now), []
    if any(not window.start <= now < window.end for window in step.windows):
        return Answer("clock", now=now), []
    warn = 0
    for index, (window, found, ceiling) in enumerate(
        zip(step.windows, rows, ceilings, strict=True)
    ):
        row = found or WindowRecord(window.key, window.label)
        charged, is_near = row.charged.plus(step.amount), row.warned
        for dimension, limit in enumerate(ceiling):
            if limit and charged[dimension] > limit:
                facts = (index, dimension, row.charged[dimension], limit)
                detail = SEPARATOR.join(map(str, facts))
                return Answer("refused", detail=detail, now=now), []
            is_near = is_near or 0 < limit * 4 <= charged[dimension] * 5
        warn |= (is_near and not row.warned) << index
        changed.append(row._replace(charged=charged, ceiling=window.ceiling, warned=is_near))
    return Answer("ok", step.amount, now=now, warn=warn), changed


def names_of(windows: Sequence[Window]) -> tuple[tuple[str, str], ...]:
    """Return the key and the label of each window."""
    return tuple([(window.key, window.label) for window in windows])


def lines_of(windows: Sequence[Window]) -> str:
    """Return the names of windows as a store keeps them beside a hold."""
    return "\n".join([f"{window.key}\t{window.label}" for window in windows])


def pairs_of(lines: str) -> tuple[tuple[str, str], ...]:
    """Return the key and the label of each window, from the lines that a store keeps."""
    parts = (line.partition("\t") for line in lines.split("\n") if line)
    return tuple([(key, label) for key, _, label in parts])


def ceiling_name(key: str, label: str) -> str:
    """Return the name of the note that holds a key's ceiling; key "" is the default of all."""
    return f"c:{label[0]}:{key}"
