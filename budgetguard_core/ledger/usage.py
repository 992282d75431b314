"""What was used in a window, in the units that people use."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from budgetguard_core.ledger.account import Account
from budgetguard_core.ledger.amounts import to_dollars
from budgetguard_core.ledger.ceilings import ceiling_of
from budgetguard_core.ledger.step import Store, WindowRecord


@dataclass(frozen=True, slots=True)
class WindowUsage:
    """What one key has used in one window."""

    key: str
    window: str
    """The label: `d:2026-11-22` or `m:2026-11`."""
    spent_usd: Decimal
    """Measured."""
    reserved_usd: Decimal
    """Set aside for calls under way, or left by a process that died."""
    ceiling_usd: Decimal | None
    spent_tokens: int
    reserved_tokens: int
    ceiling_tokens: int | None

    @property
    def remaining_usd(self) -> Decimal | None:
        """What may still be reserved; None without a ceiling."""
        if self.ceiling_usd is None:
            return None
        return max(Decimal(0), self.ceiling_usd - self.spent_usd - self.reserved_usd)

    @property
    def remaining_tokens(self) -> int | None:
        """What may still be reserved; None without a ceiling."""
        if self.ceiling_tokens is None:
            return None
        return max(0, self.ceiling_tokens - self.spent_tokens - self.reserved_tokens)


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one key has used today and this month."""

    daily: WindowUsage
    monthly: WindowUsage


def usage_now(store: Store, account: Account) -> TenantUsage:
    """Return what the key of an account has used in the windows of now, by the store's clock."""
    stored = store.ceilings()
    return TenantUsage(
        *(
            usage_of(
                store.window(window.key, window.label)._replace(ceiling=ceiling_of(window, stored))
            )
            for window in account.windows(store.now())
        )
    )


def usage_of(record: WindowRecord) -> WindowUsage:
    """Return a store's record of a window in the units that people use."""
    return WindowUsage(
        record.key,
        record.label,
        to_dollars(record.spent.usd),
        to_dollars(record.charged.usd - record.spent.usd),
        to_dollars(record.ceiling.usd) if record.ceiling.usd else None,
        record.spent.tokens,
        record.charged.tokens - record.spent.tokens,
        record.ceiling.tokens or None,
    )
