"""Holds whose process has gone: listed, and settled at full value or on a person's word.

A hold stays charged in full until somebody settles it here. Below full value it may be settled only
when its holder cannot spend any more: after twice the time to live, on a person's word.
"""

from __future__ import annotations

from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.ledger import Ledger
from budgetguard_core.ledger.step import TTL_SECONDS, HoldRecord, Step
from budgetguard_core.ledger.windows import Window


def expired_holds(ledger: Ledger) -> list[HoldRecord]:
    """Return the holds that are to be reconciled: open, and silent for longer than they said."""
    now = ledger.now()
    return [hold for hold in ledger.holds() if not hold.closed and hold.expires <= now]


def is_long_gone(hold: HoldRecord, now: float) -> bool:
    """Return whether twice the time to live has passed since the reservation."""
    return now >= hold.expires + TTL_SECONDS


def settle_hold(ledger: Ledger, hold: HoldRecord, spent: Amount | None = None) -> Amount:
    """Settle a hold in its holder's place, at full value if no amount is given.

    Nothing that was reported is taken back. A holder that wakes up finds its hold closed; what it
    reports then still counts.

    Returns:
        What the hold is charged now.
    """
    amount = hold.charge if spent is None else spent
    windows = tuple(Window(key, label, 0.0, 0.0) for key, label in hold.windows)
    step = Step("settle", hold.id, windows, amount, owner=hold.owner)
    return ledger.connection.send(step).amount
