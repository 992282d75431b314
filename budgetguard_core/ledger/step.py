"""The one verb of a ledger, and what every store does with it.

A *hold* is money set aside in some windows. An exact reservation is a hold of one call, a lease is
a hold that grows. A step says in absolute figures what its holder knows, so that losing or
repeating a message does no harm. `decide` is the rule: SQLite runs it, Redis and PostgreSQL say
the same in Lua and PL/pgSQL, and the tests compare all of them.

What a hold is charged: what was spent, once it is closed; until then the larger of what was
granted and what was spent, expired or not. An expired hold is never free money.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

from budgetguard_core.clock import SystemClock
from budgetguard_core.ledger.amounts import ZERO, Amount
from budgetguard_core.ledger.windows import Window

TOMBSTONE_SECONDS = 24 * 3600
"""How long a closed hold is remembered, so that a repeat of its messages changes nothing."""
SEPARATOR = "\x1f"
"""Between the parts of a detail; no name can hold it."""

Status: TypeAlias = Literal["ok", "refused", "killed", "clock", "closed", "foreign", "windows"]


def new_id() -> str:
    """Make the id of a hold: by time first, so that neighbours in time share pages of an index."""
    return f"{SystemClock.wall_ns():016x}{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class Step:
    """What a holder tells the store, and asks of it."""

    id: str
    op: int
    """Grows with each message of the hold. One that is not larger is a repeat, or was overtaken:
    only its report counts."""
    windows: Sequence[Window]
    """Sorted by key and label: one lock order for everyone."""
    spent: Amount = ZERO
    """Measured so far, in all."""
    keep: Amount = ZERO
    """What is to stay granted; at least `spent` and what is open."""
    need: Amount = ZERO
    """What has to be granted beyond `keep`, or the step is refused."""
    want: Amount = ZERO
    """What would be good to have; at least `need`."""
    close: bool = False
    ttl: float = 60.0
    """Seconds until the hold is to be reconciled, if nothing is heard of it."""
    share: int = 2
    """A lease gets at most its part of what is left, divided by this."""
    flags: tuple[str, ...] = ("all",)
    """The kill switches that concern the hold, sorted."""
    owner: str = ""
    """The run, or the process that leases."""
    ledger: str = ""
    """The id of the ledger that the holder knows."""

    def within(self, ledger: str) -> Step:
        """Return it for the ledger of this id; a third of what `replace` costs."""
        return Step(
            self.id,
            self.op,
            self.windows,
            self.spent,
            self.keep,
            self.need,
            self.want,
            self.close,
            self.ttl,
            self.share,
            self.flags,
            self.owner,
            ledger,
        )

    @property
    def takes(self) -> bool:
        """Whether the step asks for money."""
        return self.want != ZERO or self.need != ZERO

    @property
    def leases(self) -> bool:
        """Whether the hold is one that grows."""
        beyond = self.want.usd > self.need.usd or self.want.tokens > self.need.tokens
        return not self.close and (self.op > 1 or beyond)


class Answer(NamedTuple):
    """What the store says.

    `windows` says that an open hold was made in other windows than the step names, which is a
    mistake of the caller.
    """

    status: Status
    granted: Amount = ZERO
    """What the hold has now, in all."""
    detail: str = ""
    """refused: window's place, dimension, charged with what this step reports, ceiling, holders of
    leases; killed: flag, its
    text; foreign: the id of the ledger that was met, and whether it was adopted."""
    now: float = 0.0
    """The store's clock; 0 where the step needed no clock."""
    warn: int = 0
    """Bit i is set when this step brought the i-th window to 80 % of its ceiling, first of all: by
    what it took, or by what it reported beyond what was set aside."""


class Hold(NamedTuple):
    """A hold as the store keeps it."""

    granted: Amount
    spent: Amount
    op: int
    closed: bool

    @property
    def charge(self) -> Amount:
        """What counts against the ceilings."""
        return self.spent if self.closed else _larger(self.granted, self.spent)


class Change(NamedTuple):
    """What a step changes in each of its windows."""

    charged: Amount
    spent: Amount
    warn: int


class Row(NamedTuple):
    """A window as the store keeps it."""

    charged: Amount = ZERO
    spent: Amount = ZERO
    warned: bool = False


def _larger(a: Amount, b: Amount) -> Amount:
    return Amount(max(a.usd, b.usd), max(a.tokens, b.tokens))


def _sum(a: Amount, b: Amount) -> Amount:
    return Amount(a.usd + b.usd, a.tokens + b.tokens)


def _difference(a: Amount, b: Amount) -> Amount:
    return Amount(a.usd - b.usd, a.tokens - b.tokens)


def decide(
    step: Step,
    now: float,
    hold: Hold | None,
    rows: Sequence[Row],
    ceilings: Sequence[Amount],
    live: int,
    flag: str,
) -> tuple[Answer, Hold | None, Change | None]:
    """Return the answer to a step, the hold that it leaves and what it changes in the windows.

    Pure: reads no clock and no store. A step that changes nothing leaves None and None.

    Args:
        step: The message.
        now: The store's clock, read under its lock.
        hold: The hold of this id, if there is one.
        rows: The windows of the step, in its order.
        ceilings: Theirs, for a step that takes as they are stored, for a report as money was last
            asked for; 0 is none.
        live: How many holders share what is left, this one included.
        flag: The first kill switch that is set and its text, or nothing.
    """
    was = hold or Hold(ZERO, ZERO, 0, closed=False)
    spent = _larger(was.spent, step.spent)
    stale = hold is not None and step.op <= was.op
    closing = step.close and not stale
    status: Status = "closed" if stale and was.closed and not step.close else "ok"
    if stale and spent == was.spent:
        return Answer(status, was.granted, now=now), None, None
    if was.closed or closing:
        granted = spent
    elif stale:
        granted = was.granted
    else:
        granted = step.keep if hold else ZERO
    charge = _larger(granted, spent)
    taking = step.takes and not stale
    more, detail = ZERO, ""
    if taking:
        if was.closed or step.close:
            status = "closed"
        elif flag:
            status, detail = "killed", flag
        elif any(not window.start <= now < window.end for window in step.windows):
            status = "clock"
        else:
            added = _difference(charge, was.charge)
            more, detail = _grant(step, rows, ceilings, live, added)
            status = "refused" if detail else "ok"
    if hold is None and status != "ok":
        return Answer(status, ZERO, detail, now), None, None
    granted = _sum(granted, more)
    added = _difference(_larger(charge, granted), was.charge)
    warn = _warnings(rows, ceilings, added)
    after = Hold(granted, spent, max(was.op, step.op), was.closed or closing)
    change = Change(added, _difference(spent, was.spent), warn)
    return Answer(status, granted, detail, now, warn), after, change


def _grant(
    step: Step, rows: Sequence[Row], ceilings: Sequence[Amount], live: int, added: Amount
) -> tuple[Amount, str]:
    """Return what fits in every window, or why what is needed does not."""
    more = list(step.want)
    for place, (row, ceiling) in enumerate(zip(rows, ceilings, strict=True)):
        for dimension in (0, 1):
            limit = ceiling[dimension]
            if not limit:
                continue
            used = row.charged[dimension] + added[dimension]
            left = limit - used
            need = step.need[dimension]
            if left < need:
                facts = (place, dimension, used, limit, live)
                return ZERO, SEPARATOR.join(map(str, facts))
            part = max(need, left // (step.share * max(1, live)))
            more[dimension] = min(more[dimension], part, max(left, 0))
    return Amount(*more), ""


def _warnings(rows: Sequence[Row], ceilings: Sequence[Amount], added: Amount) -> int:
    # Without a loop over the two dimensions: this is part of every step of SQLite.
    warn = 0
    for place, (row, (usd, tokens)) in enumerate(zip(rows, ceilings, strict=True)):
        charged = row.charged
        if not row.warned and (
            (usd and (charged[0] + added[0]) * 5 >= usd * 4)
            or (tokens and (charged[1] + added[1]) * 5 >= tokens * 4)
        ):
            warn |= 1 << place
    return warn


class WindowRecord(NamedTuple):
    """A window, for reports."""

    key: str
    label: str
    charged: Amount
    spent: Amount
    ceiling: Amount
    """As it was when money was last asked for; 0 is none."""


class HoldRecord(NamedTuple):
    """A hold, for reports and for reconciliation."""

    id: str
    owner: str
    granted: Amount
    spent: Amount
    op: int
    closed: bool
    lease: bool
    made: float
    expires: float
    windows: tuple[tuple[str, str], ...]
    """Key and label."""

    @property
    def charge(self) -> Amount:
        """What counts against the ceilings."""
        return Hold(self.granted, self.spent, self.op, self.closed).charge


class Store(Protocol):
    """One of the three stores. Every method is one bounded trip, and may be called from any thread.

    All raise `LedgerUnreachable` when the store does not answer.
    """

    largest_ceiling: int
    """In nano-dollars or tokens."""

    def step(self, step: Step) -> Answer:
        """Apply a step once, atomically over its windows and the kill switches."""
        ...

    def now(self) -> float:
        """Return the store's clock."""
        ...

    def identity(self) -> str:
        """Return the id of the ledger, made at first use."""
        ...

    def adopt(self) -> str:
        """Say that this ledger is meant, also by processes that know another one; its id."""
        ...

    def read(self, names: Sequence[str]) -> list[str | None]:
        """Return notes (kill switches, recalls, processes) by name."""
        ...

    def scan(self, prefix: str) -> dict[str, str]:
        """Return the notes whose name begins so."""
        ...

    def write(self, name: str, text: str | None) -> None:
        """Set a note, or take it away."""
        ...

    def ceilings(self) -> dict[tuple[str, str], Amount]:
        """Return the stored ceilings by key and kind; key "" is the default."""
        ...

    def set_ceiling(self, key: str, kind: str, ceiling: Amount | None) -> None:
        """Store a ceiling, or take it away."""
        ...

    def windows(self) -> list[WindowRecord]:
        """Return every window."""
        ...

    def window(self, key: str, label: str) -> WindowRecord:
        """Return one window, also one that was never used."""
        ...

    def holds(self) -> list[HoldRecord]:
        """Return every hold, closed ones only where the store keeps their particulars."""
        ...

    def before_fork(self) -> bool:
        """Leave nothing open that must not cross a fork; return whether `after_fork` is due."""
        ...

    def after_fork(self) -> None:
        """Go on in the parent process."""
        ...

    def forked(self) -> None:
        """Leave the connection to the parent process; called in a forked child."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...
