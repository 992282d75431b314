"""What was set aside in one set of windows, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from budgetguard_core.charges import Amounts
from budgetguard_core.ledger.amounts import ZERO, Amount
from budgetguard_core.ledger.refusal import Refusal
from budgetguard_core.ledger.step import new_id
from budgetguard_core.ledger.windows import Window


class Part:
    """What is leased in one set of windows. Its lease's lock protects it.

    Attributes:
        refusal: None, so that a caller can tell it from a `Refusal` without importing that.
    """

    refusal: None = None

    __slots__ = (
        *("granted", "id", "left", "local", "op", "spent_tokens", "spent_usd"),
        *("tokens_left", "until", "windows"),
    )

    def __init__(self, name: str = "") -> None:
        self.id = name or new_id()
        self.op = 0
        self.granted = ZERO
        self.spent_usd = 0
        """Nano-dollars that were measured so far."""
        self.spent_tokens = 0
        self.left = 0
        """Nano-dollars that are neither spent nor open."""
        self.tokens_left = 0
        self.until = 0
        """Monotonic nanoseconds from which nothing is admitted."""
        self.windows: Sequence[Window] = ()
        self.local = False
        """Not granted by the store, which could not be reached: recorded on the disk."""

    def take(self, usd: int, tokens: int, now: int) -> bool:
        """Set a call's amount aside if it is there."""
        if now >= self.until or usd > self.left or tokens > self.tokens_left:
            return False
        self.left -= usd
        self.tokens_left -= tokens
        return True

    def settle(self, reserved: Amounts, spent: Amounts) -> None:
        """Replace what was set aside by what was measured."""
        usd, tokens = spent
        self.spent_usd += usd
        self.spent_tokens += tokens
        self.left += reserved[0] - usd
        self.tokens_left += reserved[1] - tokens

    @property
    def spent(self) -> Amount:
        """What was measured so far."""
        return Amount(self.spent_usd, self.spent_tokens)

    def opened(self) -> Amount:
        """Return what calls under way have set aside."""
        return Amount(
            self.granted.usd - self.spent.usd - self.left,
            self.granted.tokens - self.spent.tokens - self.tokens_left,
        )

    def message(self) -> int:
        """Return the number of the next message."""
        self.op += 1
        return self.op

    def grant(self, granted: Amount, windows: Sequence[Window], until: int) -> None:
        """Take over what the store granted, in all."""
        self.left += granted.usd - self.granted.usd
        self.tokens_left += granted.tokens - self.granted.tokens
        self.granted = granted
        self.windows = windows
        self.until = until

    def give_back(self) -> None:
        """Keep what is spent and open, and nothing for later."""
        left = Amount(max(0, self.left), max(0, self.tokens_left))
        self.granted = Amount(self.granted.usd - left.usd, self.granted.tokens - left.tokens)
        self.left -= left.usd
        self.tokens_left -= left.tokens

    def assume(self, windows: Sequence[Window]) -> None:
        """Remember the windows of a request whose outcome is unknown."""
        self.windows = windows

    def record(self) -> None:
        """Say that the disk granted it, not the store."""
        self.local = True

    def expire(self) -> None:
        """Admit nothing more."""
        self.until = 0


Obtained: TypeAlias = "Part | Refusal"


class TenantMeter(Protocol):
    """What a guard asks of its tenant's ledger."""

    def take(self, usd: int, tokens: int) -> Part | None:
        """Set an amount aside, in memory. None: ask `obtain`, outside of every lock."""
        ...

    def obtain(self, usd: int, tokens: int, run: str = "") -> Obtained:
        """Set an amount aside, with a trip to the store."""
        ...

    def settle(self, part: Part, reserved: Amounts, spent: Amounts) -> None:
        """Replace what was set aside by what was measured, in memory."""
        ...
