"""The usage of a window, in the units that people use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from budgetguard_core.ledger.amounts import Amount, to_dollars
from budgetguard_core.ledger.step import WindowRecord


@dataclass(frozen=True, slots=True)
class WindowUsage:
    """The usage of one key in one window."""

    key: str
    window: str
    """The label: `d:2026-11-22`, `m:2026-11`, or `r:run` of a ledger for one run."""
    spent_usd: Decimal
    """Measured."""
    reserved_usd: Decimal
    """Set aside for calls under way, or left by a process that died."""
    ceiling_usd: Decimal | None
    spent_tokens: int
    reserved_tokens: int
    ceiling_tokens: int | None
    spent_model_calls: int
    reserved_model_calls: int
    ceiling_model_calls: int | None
    spent_tool_calls: int
    reserved_tool_calls: int
    ceiling_tool_calls: int | None

    @property
    def remaining_usd(self) -> Decimal | None:
        """The amount that may still be reserved; None without a ceiling."""
        if self.ceiling_usd is None:
            return None
        return max(Decimal(0), self.ceiling_usd - self.spent_usd - self.reserved_usd)

    @property
    def remaining_tokens(self) -> int | None:
        """The amount that may still be reserved; None without a ceiling."""
        if self.ceiling_tokens is None:
            return None
        return max(0, self.ceiling_tokens - self.spent_tokens - self.reserved_tokens)


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """The usage of one key today and this month."""

    daily: WindowUsage
    monthly: WindowUsage


def usage_of(
    record: WindowRecord, stored: Mapping[tuple[str, str], Amount], default: Amount | None = None
) -> WindowUsage:
    """Return a store's record of a window with the ceiling that holds now.

    Args:
        record: The window.
        stored: The ceilings that the store holds.
        default: Of this process; that of the process that reserved last if left out.
    """
    kind = record.label[0]
    given = record.ceiling if default is None else default
    ceiling = stored.get((record.key, kind), stored.get(("", kind), given))
    reserved = record.charged.minus(record.spent)
    return WindowUsage(
        record.key,
        record.label,
        to_dollars(record.spent.usd),
        to_dollars(reserved.usd),
        to_dollars(ceiling.usd) if ceiling.usd else None,
        *(record.spent.tokens, reserved.tokens, ceiling.tokens or None),
        *(record.spent.model_calls, reserved.model_calls, ceiling.model_calls or None),
        *(record.spent.tool_calls, reserved.tool_calls, ceiling.tool_calls or None),
    )
