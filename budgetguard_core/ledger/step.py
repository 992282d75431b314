"""The two verbs of a ledger, and what every store does with them.

A *hold* is what one call has reserved in some windows. `reserve` makes it before the call, `settle`
puts what was used in its place after the call. Each message names its hold, so that losing or
repeating one does no harm. `decide` is the rule: SQLite runs it, Redis and PostgreSQL say the same
in Lua and PL/pgSQL, and the tests compare all of them.

What a hold is charged: what it reserved, until it is settled, expired or not; then what was used.
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
"""How long a settled hold is remembered, so that a repeat of its messages changes nothing."""
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
    """What is to be reserved, or what was used."""
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
    """What the hold is charged now."""
    detail: str = ""
    """refused: the window's place, the dimension's, charged, ceiling; killed: flag, its text;
    foreign: the id of the ledger that was met, when it was adopted, its number."""
    now: float = 0.0
    """The store's clock."""
    warn: int = 0
    """Bit i is set when this step brought the i-th window to 80 % of its ceiling, first of all."""
    sequence: int = 0
    """Grows with each change of the store; 0 where it is not known."""


class Hold(NamedTuple):
    """A hold as the store keeps it."""

    amount: Amount
    """What was reserved, or once it is closed, what was used."""
    closed: bool
    is_elsewhere: bool = False
    """It is open, and the step names other windows than it was made in."""


class Row(NamedTuple):
    """A window as the store keeps it."""

    charged: Amount = ZERO
    spent: Amount = ZERO
    ceiling: Amount = ZERO
    """The default of the process that reserved last."""
    warned: bool = False
    is_new: bool = True


class Change(NamedTuple):
    """The change of a step in each of its windows."""

    charged: Amount
    spent: Amount


def decide(
    step: Step,
    now: float,
    hold: Hold | None,
    rows: Sequence[Row],
    ceilings: Sequence[Amount],
    flag: str,
) -> tuple[Answer, Change | None]:
    """Return the answer to a step, and what it changes in its windows.

    Pure: reads no clock and no store. A step that changes nothing leaves None.

    Args:
        step: The message.
        now: The store's clock, read under its lock.
        hold: The hold of this id, if there is one.
        rows: The windows of the step, in its order.
        ceilings: Theirs, for a reservation; 0 is none.
        flag: The first kill switch that is set and its text, or nothing.
    """
    before = ZERO if hold is None else hold.amount
    if hold is not None and hold.is_elsewhere:
        return Answer("windows", now=now), None
    if step.verb == "settle":
        counted = before if hold is not None and hold.closed else ZERO
        spent = counted.larger(step.amount)
        if hold is not None and hold.closed and spent == before:
            return Answer("ok", spent, now=now), None
        return Answer("ok", spent, now=now), Change(spent.minus(before), spent.minus(counted))
    if hold is not None:
        return Answer("closed" if hold.closed else "ok", before, now=now), None
    if flag:
        return Answer("killed", detail=flag, now=now), None
    if any(not window.start <= now < window.end for window in step.windows):
        return Answer("clock", now=now), None
    warn = 0
    for place, (row, ceiling) in enumerate(zip(rows, ceilings, strict=True)):
        if not any(ceiling):
            continue
        for dimension, (limit, used, need) in enumerate(
            zip(ceiling, row.charged, step.amount, strict=True)
        ):
            if limit and used + need > limit:
                facts = SEPARATOR.join(map(str, (place, dimension, used, limit)))
                return Answer("refused", detail=facts, now=now), None
            if limit and not row.warned and (used + need) * 5 >= limit * 4:
                warn |= 1 << place
    return Answer("ok", step.amount, now=now, warn=warn), Change(step.amount, ZERO)


def lines_of(windows: Sequence[Window]) -> str:
    """Return the names of windows as a store keeps them beside a hold."""
    return "\n".join([f"{window[0]}\t{window[1]}" for window in windows])


def pairs_of(lines: str) -> tuple[tuple[str, str], ...]:
    """Return the key and the label of each window."""
    parts = (line.partition("\t") for line in lines.split("\n") if line)
    return tuple((key, label) for key, _, label in parts)


def ceiling_name(key: str, label: str) -> str:
    """Return the name of the note that holds a key's ceiling; key "" is the default of all."""
    return f"c:{label[0]}:{key}"


def ceiling_of_text(text: str) -> Amount:
    """Read a ceiling as a note holds it: four figures."""
    return Amount(*map(int, text.split()))


class WindowRecord(NamedTuple):
    """A window, for reports."""

    key: str
    label: str
    charged: Amount = ZERO
    spent: Amount = ZERO
    ceiling: Amount = ZERO
    """The default of the process that reserved last; what the store holds for the key wins."""


class HoldRecord(NamedTuple):
    """A hold, for reports and for reconciliation."""

    id: str
    owner: str
    charge: Amount
    """What counts against the ceilings: reserved, or once it is closed, used."""
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
    """When somebody accepted it as it is, by the store's clock."""
    sequence: int = 0
