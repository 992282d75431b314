"""Amounts: dollars, tokens, model calls and tool calls; whole numbers inside, `Decimal` outside."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any, NamedTuple, TypedDict

from budgetguard_core.errors import ConfigurationError, shown

LARGEST_STEP = 2**52 - 1
"""The most that one step may move, in each dimension: $4,503,599."""
LARGEST_CEILING = 2**62
"""What a ceiling has to be below, in each dimension, in SQLite and PostgreSQL."""
LARGEST_CEILING_IN_LUA = 2**52
"""The same in Redis: Lua's numbers are doubles, which hold the sum of two such figures exactly."""

# Above any precision that an amount needs, whatever the caller's own context is.
_CONTEXT = Context(prec=60, rounding=ROUND_CEILING)
_FEMTO_PER_NANO = 10**6
_NO_CEILING = "Use None for no ceiling; kill a tenant to stop it."
_PERIODS = {"d": "daily", "m": "monthly", "r": "run"}


class Amount(NamedTuple):
    """An amount in every dimension that a ceiling can have: requested or used."""

    usd: int = 0
    """Nano-dollars, of which one cached token may cost 25."""
    tokens: int = 0
    model_calls: int = 0
    tool_calls: int = 0

    def plus(self, other: Amount) -> Amount:
        """Return the sum."""
        return Amount(*[a + b for a, b in zip(self, other, strict=True)])

    def minus(self, other: Amount) -> Amount:
        """Return the difference."""
        return Amount(*[a - b for a, b in zip(self, other, strict=True)])

    def larger(self, other: Amount) -> Amount:
        """Return the larger figure of each dimension."""
        return Amount(*map(max, self, other))

    def exceeds(self, other: Amount) -> bool:
        """Return whether it is larger in any dimension."""
        return any(a > b for a, b in zip(self, other, strict=True))


ZERO = Amount()
DIMENSIONS = Amount._fields


class CeilingOptions(TypedDict, total=False):
    """Ceilings by period and dimension; what is None or left out has none."""

    daily_usd: Decimal | float | None
    daily_tokens: int | None
    daily_model_calls: int | None
    daily_tool_calls: int | None
    monthly_usd: Decimal | float | None
    monthly_tokens: int | None
    monthly_model_calls: int | None
    monthly_tool_calls: int | None
    run_usd: Decimal | float | None
    run_tokens: int | None
    run_model_calls: int | None
    run_tool_calls: int | None


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


def to_amount(
    usd: Decimal | float, tokens: int = 0, model_calls: int = 0, tool_calls: int = 0
) -> Amount:
    """Check what one step is to move.

    Raises:
        ConfigurationError: A figure makes no sense.
    """
    counts = (tokens, model_calls, tool_calls)
    for name, count in zip(DIMENSIONS[1:], counts, strict=True):
        if type(count) is not int or count < 0:
            raise ConfigurationError(
                f"{name} must be a whole number >= 0, got {shown(count)}. Use 0 for none."
            )
    amount = Amount(to_nano(usd), *counts)
    if max(amount) > LARGEST_STEP:
        raise ConfigurationError(
            f"a step must move less than $4,503,599 and 2**52 tokens, got {shown(max(amount))}. "
            "Split it."
        )
    return amount


def measured(cost: int, tokens: int, model_calls: int = 0, tool_calls: int = 0) -> Amount:
    """Turn the engine's figures (femto-dollars) into an amount; money is rounded up."""
    nano = min(-(-cost // _FEMTO_PER_NANO), LARGEST_STEP)
    return Amount(nano, min(tokens, LARGEST_STEP), model_calls, tool_calls)


def to_ceiling(usd: Decimal | float | None = None, *counts: int | None) -> Amount:
    """Check the ceilings of one period, dollars first; None is no ceiling, which is kept as 0.

    Raises:
        ConfigurationError: A figure makes no sense.
    """
    nano = 0 if usd is None else to_nano(usd, _NO_CEILING)
    if usd is not None and nano == 0:
        raise ConfigurationError(f"a ceiling must be > 0, got {usd}. {_NO_CEILING}")
    for name, count in zip(DIMENSIONS[1:], counts, strict=False):
        if count is not None and (type(count) is not int or count < 1):
            words = f"a ceiling of {name.replace('_', ' ')}"
            raise ConfigurationError(
                f"{words} must be a whole number >= 1, got {shown(count)}. {_NO_CEILING}"
            )
    return Amount(nano, *[count or 0 for count in counts])


def to_ceilings(options: CeilingOptions, largest: int = LARGEST_CEILING) -> dict[str, Amount]:
    """Return ceilings by kind of window (d, m, r).

    Raises:
        ConfigurationError: A figure makes no sense, or is not below `largest`.
        TypeError: There is no such ceiling.
    """
    given: Mapping[str, Any] = {**options}
    for name in given.keys() - CeilingOptions.__annotations__.keys():
        raise TypeError(f"there is no option {name!r}")
    found = {
        kind: to_ceiling(*[given.get(f"{period}_{name}") for name in DIMENSIONS])
        for kind, period in _PERIODS.items()
    }
    for ceiling in found.values():
        if max(ceiling) >= largest:
            raise ConfigurationError(
                f"a ceiling in this store must be below ${to_dollars(largest)} and {largest} "
                "tokens, got more. Use another store."
            )
    return found
