"""What a ledger raises.

Messages never hold a driver's own text: it may quote the URL, and with it the password.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from budgetguard_core.errors import BudgetGuardError
from budgetguard_core.ledger.windows import Window


class LedgerError(BudgetGuardError):
    """The root of what a ledger raises."""


class LedgerUnreachable(LedgerError):
    """The store did not answer within the time-out, or answered with a failure of its own.

    Whether the step took effect is not known; every step may be repeated.
    """

    was_sent = True
    """Whether the step may have reached the store."""
    windows: Sequence[Window] = ()
    """Those of the step: by the time that the error comes, another day may have begun."""


class OtherWindows(LedgerError):
    """A step names other windows than its hold was made in."""


class LedgerChanged(LedgerUnreachable):
    """The store is not the one that this process knows: it was wiped, or restored from elsewhere.

    An empty store would hand the whole ceiling out again, so nothing is admitted until
    `budgetguard ledger adopt` says that the new one is meant, whatever `on_ledger_error` says: the
    store answers.
    """

    was_sent = False


class LedgerRefused(LedgerError):
    """A reservation does not fit under a ceiling, or a kill switch is set.

    Attributes:
        reason: `tenant_daily`, `tenant_monthly` or `aborted`.
        detail: One sentence for people.
        limit: The ceiling, in US dollars or tokens; None for a kill switch.
        used: What counts against it already, in the same unit.
    """

    def __init__(self, reason: str, detail: str, limit: Any = None, used: Any = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.limit = limit
        self.used = used

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.detail, self.limit, self.used)
