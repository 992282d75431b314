"""Amounts: nano-dollars and tokens, whole numbers inside, `Decimal` outside."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context, Decimal
from typing import NamedTuple

from budgetguard_core.errors import ConfigurationError, shown

LARGEST_STEP = 2**52 - 1
"""The most that one step may move, in either dimension: $4,503,599."""
LARGEST_CEILING = 2**62
"""What a ceiling has to be below, in either dimension, in SQLite and PostgreSQL."""
LARGEST_CEILING_IN_LUA = 2**52
"""The same in Redis: Lua's numbers are doubles, which hold the sum of two such figures exactly."""

# Above any precision that an amount needs, whatever the caller's own context is.
_CONTEXT = Context(prec=60, rounding=ROUND_CEILING)
_NO_CEILING = "Use None for no ceiling; kill a tenant to stop it."


class Amount(NamedTuple):
    """Money and tokens together."""

    usd: int = 0
    """Nano-dollars, of which one cached token may cost 25."""
    tokens: int = 0


ZERO = Amount()


def to_nano(dollars: Decimal | float, way_out: str = "Use 0 for nothing.") -> int:
    """Turn US dollars into nano-dollars, rounded up.

    Args:
        dollars: The amount.
        way_out: What an error advises.

    Raises:
        ConfigurationError: It is no finite amount >= 0.
    """
    if type(dollars) not in (int, float, Decimal):
        raise ConfigurationError(
            f"usd must be an amount of US dollars (Decimal, int or float), got {shown(dollars)}. "
            'Use Decimal("0.05") for five cents.'
        )
    # repr, so that 0.3 means three tenths and not the binary fraction nearest to it.
    amount = Decimal(repr(dollars)) if isinstance(dollars, float) else Decimal(dollars)
    if not (amount.is_finite() and amount >= 0 and amount.adjusted() < 30):
        raise ConfigurationError(
            f"usd must be finite, >= 0 and below 10**30, got {shown(dollars)}. {way_out}"
        )
    nano = amount.scaleb(9, _CONTEXT)
    return int(nano.to_integral_value(ROUND_CEILING, _CONTEXT))


def to_dollars(nano: int) -> Decimal:
    """Turn nano-dollars into US dollars, exactly, without trailing zeros."""
    text = f"{abs(nano):010d}"
    whole, part = text[:-9], text[-9:].rstrip("0")
    sign = "-" if nano < 0 else ""
    return Decimal(f"{sign}{whole}.{part}" if part else f"{sign}{whole}")


def to_amount(usd: Decimal | float, tokens: int) -> Amount:
    """Check what one step is to move.

    Raises:
        ConfigurationError: A figure makes no sense.
    """
    if type(tokens) is not int or tokens < 0:
        raise ConfigurationError(
            f"tokens must be a whole number >= 0, got {shown(tokens)}. Use 0 for none."
        )
    amount = Amount(to_nano(usd), tokens)
    if max(amount) > LARGEST_STEP:
        raise ConfigurationError(
            f"a step must move less than $4,503,599 and 2**52 tokens, got {shown(max(amount))}. "
            "Split it."
        )
    return amount


def check_ceiling(ceiling: Amount, largest: int) -> Amount:
    """Return a pair of ceilings that a store can count.

    Raises:
        ConfigurationError: One of them is not below `largest`.
    """
    if max(ceiling) >= largest:
        raise ConfigurationError(
            f"a ceiling in this store must be below ${to_dollars(largest)} and {largest} "
            "tokens, got more. Use another store."
        )
    return ceiling


def to_ceiling(usd: Decimal | float | None, tokens: int | None) -> Amount:
    """Check a pair of ceilings; None is no ceiling, which is kept as 0.

    Raises:
        ConfigurationError: A figure makes no sense.
    """
    nano = 0 if usd is None else to_nano(usd, _NO_CEILING)
    if usd is not None and nano == 0:
        raise ConfigurationError(f"a ceiling must be > 0, got {usd}. {_NO_CEILING}")
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise ConfigurationError(
            f"a ceiling of tokens must be a whole number >= 1, got {shown(tokens)}. {_NO_CEILING}"
        )
    return Amount(nano, tokens or 0)
