"""The errors of a ledger, and the reasons for which it grants nothing.

Messages never hold a driver's own text: it may quote the URL, and with it the password.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from budgetguard_core.errors import BudgetGuardError
from budgetguard_core.ledger.amounts import DIMENSIONS, to_dollars
from budgetguard_core.ledger.kill_switch import kill_of
from budgetguard_core.ledger.step import SEPARATOR, Answer
from budgetguard_core.ledger.windows import KINDS, Window, quoted

ABORTED = "aborted"
_REASONS = {"d": "tenant_daily", "m": "tenant_monthly"}
_RUN_REASONS = ("max_cost_usd", "max_total_tokens", "max_model_calls", "max_tool_calls")


class LedgerError(BudgetGuardError):
    """The root of what a ledger raises."""


class LedgerUnreachable(LedgerError):
    """The store did not answer within the time-out, or answered with a failure of its own.

    Whether the step took effect is not known; every step may be repeated.

    Attributes:
        is_absent: Nothing answered: what `on_ledger_error="allow"` is about. A server that answers
            with an error, such as a replica that only reads, is not absent.
        was_sent: Whether the step may have reached the store.
    """

    def __init__(self, message: str, *, is_absent: bool = True, was_sent: bool = True) -> None:
        super().__init__(message)
        self.is_absent = is_absent
        self.was_sent = was_sent


class OtherWindows(LedgerError):
    """A step names other windows than its hold was made in."""


class LedgerChanged(LedgerUnreachable):
    """The store is not the one that this process knows: wiped, restored or rolled back.

    Such a store would hand out again what was spent already, so nothing is admitted until
    `budgetguard ledger adopt` says that it is meant, whatever `on_ledger_error` says.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, is_absent=False, was_sent=False)


class LedgerRefused(LedgerError):
    """A reservation does not fit under a ceiling, or a kill switch is set.

    Raised by `Ledger.reserve`, and the answer to a run.

    Attributes:
        reason: `tenant_daily`, `tenant_monthly`, `aborted`, or of a ledger for one run the name of
            the cap.
        detail: One sentence for people.
        limit: The ceiling, in US dollars, tokens or calls; None for a kill switch.
        used: What counts against it already, in the same unit.
        key: Whose ceiling it is; empty for a kill switch.
    """

    def __init__(
        self, reason: str, detail: str, limit: Any = None, used: Any = None, key: str = ""
    ) -> None:
        super().__init__(reason, detail, limit, used, key)
        self.reason = reason
        self.detail = detail
        self.limit = limit
        self.used = used
        self.key = key

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class Warned(NamedTuple):
    """A window that reached 80 % of its ceiling; told once to one process."""

    key: str
    reason: str
    """`tenant_daily` or `tenant_monthly`."""
    window: str
    """The label, `d:2026-11-22` or `m:2026-11`."""
    limit: Decimal | int = 0
    """The ceiling, in US dollars, tokens or calls."""
    used: Decimal | int = 0
    """The amount that counts against it: spent and reserved."""


def reason_of(label: str, dimension: int) -> str:
    """Return the stop reason of a window's ceiling."""
    return _REASONS.get(label[0]) or _RUN_REASONS[dimension]


def in_units(figure: int, dimension: int) -> Decimal | int:
    """Return a figure as people write it: dollars, or a count."""
    return figure if dimension else to_dollars(figure)


def refusal_of(answer: Answer, windows: Sequence[Window]) -> LedgerRefused:
    """Return why a step was refused or killed, or came too late."""
    if answer.status == "refused":
        index, dimension, charged, ceiling = map(int, answer.detail.split(SEPARATOR))
        window = windows[index]
        used, limit = in_units(charged, dimension), in_units(ceiling, dimension)
        unit = f" {DIMENSIONS[dimension].replace('_', ' ')}" if dimension else ""
        sign = "" if dimension else "$"
        when = KINDS[window.label[0]] + (f" {window.label[2:]}" if window.oldest else "")
        return LedgerRefused(
            reason_of(window.label, dimension),
            f"tenant {quoted(window.key)} has used or reserved {sign}{used} of {sign}{limit}{unit} "
            f"of the {when}",
            limit,
            used,
            window.key,
        )
    if answer.status == "killed":
        flag, _, text = answer.detail.partition(SEPARATOR)
        return LedgerRefused(ABORTED, kill_of(flag, text).detail)
    return LedgerRefused(ABORTED, "this reservation was settled or taken back already")
