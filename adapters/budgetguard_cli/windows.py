"""How windows, amounts and times of a ledger look in a table."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

from budgetguard_core.ledger import WindowUsage

_SMALLEST_SHOWN = Decimal("0.000001")
_KINDS = {"d": "day", "m": "month", "r": "of"}


def window(label: str) -> str:
    """Return `day 2026-11-22` or `month 2026-11`."""
    return f"{_KINDS[label[0]]} {label[2:]}"


def both(usd: Decimal, tokens: int) -> str:
    """Return an amount in both of its dimensions."""
    return f"${usd.quantize(_SMALLEST_SHOWN).normalize():f}  {tokens:,} tokens"


def ceilings(usd: Decimal | None, tokens: int | None) -> str:
    """Return the ceilings of a window, or `none`."""
    parts: list[str] = []
    if usd is not None:
        parts.append(f"${usd:f}")
    if tokens is not None:
        parts.append(f"{tokens:,} tokens")
    return "  ".join(parts) or "none"


def share(row: WindowUsage) -> str:
    """Return the share of its nearest ceiling that a window has used, spent and reserved."""
    shares: list[Decimal] = []
    if row.ceiling_usd:
        shares.append((row.spent_usd + row.reserved_usd) / row.ceiling_usd)
    if row.ceiling_tokens:
        shares.append(Decimal(row.spent_tokens + row.reserved_tokens) / row.ceiling_tokens)
    return f"{max(shares):.0%}" if shares else ""


def instant(seconds: float) -> str:
    """Return a time of the store's clock."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
