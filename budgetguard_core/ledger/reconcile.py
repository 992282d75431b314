"""The comparison of windows with their holds, which shows a damaged file."""

from __future__ import annotations

from collections.abc import Iterable

from budgetguard_core.ledger.amounts import ZERO, Amount
from budgetguard_core.ledger.step import HoldRecord, WindowRecord
from budgetguard_core.ledger.windows import DAYS_KEPT


def differences(
    windows: Iterable[WindowRecord], holds: Iterable[HoldRecord], now: float
) -> list[str]:
    """Return in words where a window and its holds disagree.

    A window has reserved what its open holds are charged, and has spent at least what its closed
    ones were: those of more than a day ago are forgotten. SQLite's own check may say ok where pages
    of a committed transaction are missing.
    """
    reserved: dict[tuple[str, str], Amount] = {}
    spent: dict[tuple[str, str], Amount] = {}
    wanted: set[tuple[str, str]] = set()
    for hold in holds:
        sums = spent if hold.closed else reserved
        for pair in hold.windows:
            sums[pair] = sums.get(pair, ZERO).plus(hold.charge)
            if hold.made > now - DAYS_KEPT * 86400:  # else its day may have been pruned
                wanted.add(pair)
    wrong: list[str] = []
    for row in windows:
        pair = (row.key, row.label)
        wanted.discard(pair)
        found = (row.charged.minus(row.spent), row.spent)
        known = (reserved.get(pair, ZERO), spent.get(pair, ZERO))
        if found[0] != known[0] or known[1].exceeds(found[1]):
            wrong.append(
                f"{row.key!r} {row.label}: reserved and spent are {list(map(tuple, found))} "
                f"in the window, {list(map(tuple, known))} in holds"
            )
    return wrong + [f"{key!r} {label}: the window is missing" for key, label in sorted(wanted)]
