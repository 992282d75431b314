"""Amounts of money, for people."""

from __future__ import annotations

from decimal import Decimal


def in_dollars(amount: Decimal) -> str:
    """Write an amount with four significant digits at least, and whole cents."""
    places = max(2, 3 - amount.adjusted()) if amount else 2
    whole, _, cents = f"{amount:,.{places}f}".partition(".")
    return f"${whole}.{cents.rstrip('0'):0<2}"
