"""Amounts: dollars, tokens, model calls and tool calls; whole numbers inside, `Decimal` outside."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_CEILING, Context, Decimal
from operator import add, gt, sub
from typing import Any, NamedTuple, TypedDict

from budgetguard_core.errors import ConfigurationError, shown

LARGEST_STEP = 2**52 - 1
"""The most that one step may move, in each dimension: $4,503,599."""
LARGEST_CEILING = 2**62
"""The bound of a ceiling, in each dimension, in SQLite and PostgreSQL."""
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
        return Amount._make(map(add, self, other))

    def minus(self, other: Amount) -> Amount:
        """Return the difference."""
        return Amount._make(map(sub, self, other))

    def larger(self, other: Amount) -> Amount:
        """Return the larger figure of each dimension."""
        return Amount._make(map(max, self, other))

    def exceeds(self, other: Amount) -> bool:
        """Return whether it is larger in any dimension."""
        return any(map(gt, self, other))

    @classmethod
    def of_text(cls, text: str) -> Amount:
        """Read four figures, as `to_text` wrote them."""
        return cls(*map(int, text.split()))

    def to_text(self) -> str:
        """Return the four figures, as a store keeps them."""
        return " ".join(map(str, self))


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
    """Turn US dollars into nano-dollars, rounded up; an error ends with `way_out`."""
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
    """Return the amount that one step is to move, checked."""
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


def measured(cost: int, tokens: int, model_calls: int = 0) -> Amount:
    """Turn the engine's figures (femto-dollars) into an amount; money is rounded up."""
    nano = min(-(-cost // _FEMTO_PER_NANO), LARGEST_STEP)
    return Amount(nano, min(tokens, LARGEST_STEP), model_calls)


def to_ceilings(options: CeilingOptions, kinds: str, largest: int) -> dict[str, Amount]:
    """Return ceilings, below `largest`, for each kind of window that a ledger has (of d, m, r)."""
    given: Mapping[str, Any] = {**options}
    for name in given.keys() - CeilingOptions.__annotations__.keys():
        raise TypeError(f"there is no option {name!r}")
    found = {
        kind: Amount(*[_ceiling(name, given.get(f"{period}_{name}")) for name in DIMENSIONS])
        for kind, period in _PERIODS.items()
    }
    if any(any(ceiling) for kind, ceiling in found.items() if kind not in kinds):
        raise ConfigurationError(
            "ceilings must be of the ledger's windows, got others: those of a run are for "
            "a URL with ?windows=run, and of a day and a month for any other. Use either."
        )
    if any(max(ceiling) >= largest for ceiling in found.values()):
        raise ConfigurationError(
            f"a ceiling in this store must be below ${to_dollars(largest)} and {largest} "
            "tokens, got more. Use another store."
        )
    return {kind: found[kind] for kind in kinds}


def _ceiling(name: str, given: Any) -> int:
    """Return a ceiling in one dimension; none is kept as 0."""
    if given is None:
        return 0
    if name == "usd":
        if nano := to_nano(given, _NO_CEILING):
            return nano
    elif type(given) is int and given >= 1:
        return given
    words = "> 0" if name == "usd" else "a whole number >= 1"
    raise ConfigurationError(
        f"a ceiling of {name.replace('_', ' ')} must be {words}, got {shown(given)}. {_NO_CEILING}"
    )
