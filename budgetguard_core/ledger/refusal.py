"""Why money is not given, in words."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

from budgetguard_core.ledger.amounts import to_dollars
from budgetguard_core.ledger.errors import LedgerRefused
from budgetguard_core.ledger.kill_switch import kill_of
from budgetguard_core.ledger.step import SEPARATOR, Answer
from budgetguard_core.ledger.windows import Window, quoted

REASONS = {"d": "tenant_daily", "m": "tenant_monthly"}
"""The stop reason of each kind of window."""
ABORTED = "aborted"


class Refusal(NamedTuple):
    """The answer to a call that may not start."""

    reason: str
    """`tenant_daily`, `tenant_monthly` or `aborted`."""
    detail: str
    """One sentence for people."""
    limit: Decimal | int | None = None
    """The ceiling, in US dollars or tokens."""
    used: Decimal | int | None = None
    """What counts against it: spent and reserved."""

    @property
    def refusal(self) -> Refusal:
        """Itself."""
        return self

    def error(self) -> LedgerRefused:
        """Return it as an exception."""
        return LedgerRefused(*self)


class Warned(NamedTuple):
    """A window that reached 80 % of its ceiling; told once to one process."""

    key: str
    reason: str
    """`tenant_daily` or `tenant_monthly`."""
    window: str
    """The label, `d:2026-11-22` or `m:2026-11`."""
    limit: Decimal | int = 0
    """The ceiling, in US dollars or tokens."""
    used: Decimal | int = 0
    """What counts against it: spent and reserved."""


def refusal_of(answer: Answer, windows: Sequence[Window]) -> Refusal:
    """Say why a step was refused or killed, or came too late."""
    if answer.status == "refused":
        place, dimension, charged, ceiling, _ = map(int, answer.detail.split(SEPARATOR))
        window = windows[place]
        reason = REASONS[window.label[0]]
        when = f"{'day' if window.label[0] == 'd' else 'month'} {window.label[2:]}"
        if dimension:
            return Refusal(
                reason,
                f"tenant {quoted(window.key)} has used or reserved {charged} of {ceiling} tokens "
                f"of the {when}",
                ceiling,
                charged,
            )
        used, limit = to_dollars(charged), to_dollars(ceiling)
        return Refusal(
            reason,
            f"tenant {quoted(window.key)} has used or reserved ${used} of ${limit} of the {when}",
            limit,
            used,
        )
    if answer.status == "killed":
        flag, _, text = answer.detail.partition(SEPARATOR)
        return Refusal(ABORTED, kill_of(flag, text).detail)
    return Refusal(ABORTED, "this reservation was settled or taken back already")


def warned_of(answer: Answer, windows: Sequence[Window]) -> tuple[Warned, ...]:
    """Return the windows that a step brought to 80 %."""
    return tuple(
        Warned(window.key, REASONS[window.label[0]], window.label)
        for place, window in enumerate(windows)
        if answer.warn >> place & 1
    )
