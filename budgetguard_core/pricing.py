"""The cost of a model call, in exact integers.

Money is counted in whole femto-dollars (`FEMTO_USD_PER_USD` to the dollar), because a price of up
to nine decimals per million tokens is then a whole number per token: sums are exact, cheap, and
the same under every decimal context.

Prices come from the data that the installed genai-prices carries, unless the user overrides them.
A price that is not known is `None`, never 0. Where a bill can come out one way or the other, the
dearer one is counted, so that a dollar cap stays a bound.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import cache, cached_property, lru_cache
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeAlias

from pydantic import BeforeValidator, field_validator

from budgetguard_core.clock import SystemClock
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.settings import Settings, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from genai_prices.types import ModelInfo, ModelPrice, Provider, TieredPrices

    from budgetguard_core.usage import Counts

__all__ = ["FEMTO_USD_PER_USD", "Price", "PriceBook", "Rates", "from_usd", "to_usd"]

FEMTO_USD_PER_USD: Final = 10**15
"""The unit of money inside the engine: 10**15 of it make one US dollar."""

_PER_TOKEN: Final = FEMTO_USD_PER_USD // 10**6
_PER_REQUEST_OF_1000: Final = FEMTO_USD_PER_USD // 10**3
_RATES: Final = ("input", "cache_read", "cache_write", "cache_write_1h", "output")
_LARGEST_PRICE: Final = 1_000_000

_REMEMBERED_MODELS: Final = 1024
# Names can come from outside; a longer one is no model of any provider and is not worth keeping.
_LONGEST_NAME: Final = 512

# "anthropic.claude-...", "us.anthropic.claude-...": how Amazon Bedrock writes its model ids.
_BEDROCK_ID: Final = re.compile(r"(?:[a-z-]+\.)?[a-z][a-z0-9]*\.[a-z]")


def to_usd(amount: int) -> Decimal:
    """Turn femto-dollars into US dollars, exactly, under any decimal context."""
    whole, part = divmod(abs(amount), FEMTO_USD_PER_USD)
    text = f"{whole}.{part:015d}".rstrip("0")
    return Decimal(f"-{text}" if amount < 0 else text)


def from_usd(amount: Decimal) -> int:
    """Turn US dollars into femto-dollars, under any decimal context."""
    return _ceil(amount, FEMTO_USD_PER_USD)


def _ceil(amount: Decimal, factor: int) -> int:
    numerator, denominator = amount.as_integer_ratio()
    return -(-numerator * factor // denominator)


def _amount(decimals: int) -> BeforeValidator:
    """Return a validator of US dollars, which are kept as Decimals."""

    def check(value: Any) -> Decimal | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
            raise ValueError(  # noqa: TRY004 - pydantic turns only these into its report
                f'must be a Decimal, an int or a float, got {value!r}. Write it as Decimal("2.50").'
            )
        amount = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
        if not amount.is_finite() or not 0 <= amount <= _LARGEST_PRICE:
            raise ValueError(
                f"must be between 0 and {_LARGEST_PRICE} US dollars, got {value}. "
                "Use 0 for what costs nothing."
            )
        if 10**decimals % amount.as_integer_ratio()[1]:
            raise ValueError(
                f"must have at most {decimals} decimal places, got {value}. Round it up."
            )
        return amount

    return BeforeValidator(check)


_Rate: TypeAlias = Annotated[Decimal | float, _amount(9)]
_RateOrNone: TypeAlias = Annotated[Decimal | float | None, _amount(9)]
_Tokens: TypeAlias = Annotated[int, whole(end="Leave it out if it is not known.")]


class Price(Settings):
    """The price of one model, for `PriceBook(overrides=...)`.

    Rates are US dollars per million tokens with at most nine decimals. They may be given as
    Decimal, int or float (a float counts as it prints). A rate that is left out is never free.

    Example:
        `Price(input=Decimal("2.50"), output=10, cache_read=Decimal("1.25"))`

    Raises:
        ConfigurationError: A value is not a number, negative, not finite, above 1,000,000, or has
            more decimals than can be counted exactly; or the tiers are not in rising order.
    """

    input: _Rate
    """Input tokens that are neither read from nor written to the provider's cache."""
    output: _Rate
    """Output tokens, including reasoning."""
    cache_read: _RateOrNone = None
    """Input tokens read from the provider's cache. `None`: as `input`."""
    cache_write: _RateOrNone = None
    """Input tokens written to the provider's cache for its normal life (Anthropic: five minutes).

    `None`: as `input`; for a model with "claude" in its name 1.25 times that, as Anthropic bills.
    """
    cache_write_1h: _RateOrNone = None
    """Input tokens written to the provider's cache for one hour.

    `None`: the dearer of `input` and `cache_write`; for a model with "claude" in its name at least
    twice `input`, as Anthropic bills.
    """
    per_request: Annotated[Decimal | float, _amount(15)] = Decimal(0)
    """US dollars for each model call, on top of its tokens; at most 15 decimals."""
    tiers: Sequence[tuple[_Tokens, Price]] = ()
    """Other prices for long calls, as `(threshold, price)` in rising order.

    A price holds for *all* tokens of a call whose `input_tokens` (cache included) exceed the
    threshold; a call of exactly that many still has the price below.
    """
    context_window: _Tokens | None = None
    """Most input tokens that one call can have. `None`: not known."""

    @field_validator("tiers")
    @classmethod
    def _rise(cls, tiers: Sequence[tuple[int, Price]]) -> tuple[tuple[int, Price], ...]:
        below = 0
        for threshold, price in tiers:
            if threshold <= below:
                raise ValueError(
                    f"must have thresholds that rise, got {threshold} after {below}. "
                    "Give each threshold once, the lowest first."
                )
            if price.tiers:
                raise ValueError(
                    f"must be prices without tiers of their own, got {price!r:.80}. "
                    "Put every threshold into one sequence."
                )
            below = threshold
        return tuple(tiers)


class _Row(NamedTuple):
    """Femto-dollars per token and per request, for calls with more input tokens than `least`."""

    least: int
    input: int
    cache_read: int
    cache_write: int
    cache_write_1h: int
    output: int
    per_request: int


_FIRST: Final = -1


def _row(least: int, rates: Sequence[Decimal | None], request: int, *, claude: bool) -> _Row:
    """Make a row of the rates in the order of `_RATES`, the first of which is known."""
    known = [None if rate is None else _ceil(rate, _PER_TOKEN) for rate in rates]
    plain, (read, write, hour, output) = known[0] or 0, known[1:]
    if write is None:
        write = -(-plain * 5 // 4) if claude else plain
    if hour is None:
        hour = max(plain * 2 if claude else plain, write)
    # Models without a price for output (embeddings) have none to bill.
    output = plain if output is None else output
    return _Row(least, plain, plain if read is None else read, write, hour, output, request)


def _rows_of_price(price: Price, *, claude: bool) -> tuple[_Row, ...]:
    return tuple(
        _row(
            least,
            [getattr(each, name) for name in _RATES],
            from_usd(Decimal(each.per_request)),
            claude=claude,
        )
        for least, each in ((_FIRST, price), *price.tiers)
    )


class Rates:
    """The rates of one model, ready to multiply.

    Amounts are femto-dollars; `to_usd` turns them into dollars. Made by `PriceBook.rates_for`.
    """

    window: float
    """Most input tokens that one call can have; infinity if that is not known."""

    def __init__(self, rows: tuple[_Row, ...], context_window: int | None) -> None:
        self.window = inf if context_window is None else float(context_window)
        # The highest threshold first: the first one that is exceeded decides.
        self._rows = rows[::-1]
        self._bounds = tuple(_dearest(rows[: end + 1]) for end in range(len(rows)))[::-1]

    @property
    def context_window(self) -> int | None:
        """Most input tokens that one call can have, or `None` if that is not known."""
        return None if self.window == inf else int(self.window)

    def cost(self, usage: Counts) -> int:
        """Return what one finished call costs.

        Args:
            usage: The tokens of this one call (tiers depend on the size of a single call): a
                `TokenUsage`, or its figures, with no part above its whole. All tokens count as
                text; reasoning tokens are part of the output and not billed again.

        Returns:
            Femto-dollars, including the price per request.
        """
        tokens, made, reads, writes, hours, _, _ = usage
        _, plain, read, write, hour, output, request = _reached(self._rows, tokens)
        cost = tokens * plain + made * output + request
        if reads:
            cost += reads * (read - plain)
        if writes:
            cost += writes * (write - plain) + hours * (hour - write)
        return cost

    def projected_cost(self, input_tokens: int, output_tokens: int) -> int:
        """Return the most that a call of this size can cost: `input_cost` plus `output_cost`."""
        bound = _reached(self._bounds, input_tokens)
        return input_tokens * bound.input + output_tokens * bound.output + bound.per_request

    def input_cost(self, tokens: int) -> int:
        """Return the most that a call with up to this many input tokens can cost for them.

        It includes the price per request. Every token is taken at the dearest rate that can apply:
        as a cache write, even of one hour, where that costs more than input.
        """
        bound = _reached(self._bounds, tokens)
        return tokens * bound.input + bound.per_request

    def output_cost(self, tokens: int, *, input_tokens: int | None = None) -> int:
        """Return the most that up to this many output tokens can cost, reasoning included.

        The most input tokens that the call can have decide the tier; the dearest where they are
        not known. Without the price per request, which `input_cost` has.
        """
        bounds = self._bounds
        bound = bounds[0] if input_tokens is None else _reached(bounds, input_tokens)
        return tokens * bound.output


def _reached(falling: tuple[_Row, ...], tokens: int) -> _Row:
    for row in falling[:-1]:
        if tokens > row.least:
            return row
    return falling[-1]


def _dearest(rows: Sequence[_Row]) -> _Row:
    """Join rows into one that no call under any of them can cost more than."""
    dearest = _Row(*(max(rates) for rates in zip(*rows, strict=True)))
    return dearest._replace(input=max(dearest[1:5]))


class PriceBook:
    """The prices of models: the user's own first, then the data of the installed genai-prices.

    genai-prices is imported when the first price is taken from it, and never asks the network.
    Standard prices are used; batch, flex, priority and other special service is not told apart, and
    neither are audio, image and video tokens or charges for a provider's own tools. Where a
    provider has hours of the day with other prices, the dearest hour counts all day.

    Args:
        overrides: Prices by model name, exactly as the framework reports the name. They are
            complete: nothing in them is filled from genai-prices. There are no patterns, because
            "gpt-4o*" would price gpt-4o-mini, too.
        as_of: The day (UTC) whose prices hold. `None`: the day on which this book is made; a book
            does not change its prices while it is used.

    Raises:
        ConfigurationError: An override is not a `Price`, or its name is empty.
    """

    def __init__(
        self, overrides: Mapping[str, Price] | None = None, *, as_of: date | None = None
    ) -> None:
        self.as_of: Final = _today() if as_of is None else as_of
        self._overrides: Final = {
            name: _checked_override(name, price) for name, price in (overrides or {}).items()
        }
        self._look_up: Final = lru_cache(maxsize=_REMEMBERED_MODELS)(self._found)

    @cached_property
    def version(self) -> str:
        """The source of the prices: "genai-prices 0.2.3", and a digest of the overrides if any."""
        source = f"genai-prices {_release()}"
        if not self._overrides:
            return source
        written = json.dumps(
            [
                (name, rows, price.context_window)
                for name, (price, rows) in sorted(self._overrides.items())
            ]
        )
        return f"{source} + overrides {hashlib.sha256(written.encode()).hexdigest()[:12]}"

    def rates_for(self, model: str, provider: str | None = None) -> Rates | None:
        """Return the rates of a model, or `None` if its price is not known.

        Args:
            model: The name as the framework or the provider gives it, also as "openai/gpt-4o",
                "openai:gpt-4o", or a Bedrock id or ARN. A name must match a model of genai-prices;
                it is not cut down until something fits. A fine-tuned model ("ft:...") is known only
                if genai-prices has a price for fine-tuned models of its kind.
            provider: Who serves it, as the framework says ("openai", "amazon_bedrock", ...). It is
                believed: a model that this provider does not have is not looked for elsewhere.
                `None` or "litellm": found from the name.

        Returns:
            The same object for the same model, as long as it is among the last 1,024 asked for.
        """
        if len(model) > _LONGEST_NAME or (provider and len(provider) > _LONGEST_NAME):
            return None
        look_up = self._look_up
        return look_up(model, provider)

    def _found(self, model: str, provider: str | None) -> Rates | None:
        if override := self._overrides.get(model):
            return Rates(override[1], override[0].context_window)
        info = _find_model(model.lower(), provider)
        if info is None:
            return None
        rows = _rows_of_data(_possible_prices(info, self.as_of), claude="claude" in info.id)
        return Rates(rows, info.context_window) if rows else None


def shared_prices() -> PriceBook:
    """Return the book of today's prices that all runs without one of their own look into."""
    return _prices_of(_today())


@lru_cache(maxsize=1)
def _prices_of(day: date) -> PriceBook:
    return PriceBook(as_of=day)


def _today() -> date:
    return datetime.fromtimestamp(SystemClock.wall_ns() / 10**9, UTC).date()


def _checked_override(name: object, price: object) -> tuple[Price, tuple[_Row, ...]]:
    if not isinstance(name, str) or not 1 <= len(name) <= _LONGEST_NAME:
        raise ConfigurationError(
            f"a model name in overrides must be a str of 1 to {_LONGEST_NAME}, got {name!r}. "
            "Use the name that the framework reports."
        )
    if not isinstance(price, Price):
        raise ConfigurationError(
            f"overrides[{name!r}] must be a Price, got {price!r}. "
            "Write Price(input=..., output=...)."
        )
    return price, _rows_of_price(price, claude="claude" in name.lower())


def _find_model(name: str, provider: str | None) -> ModelInfo | None:
    # The snapshot in genai_prices.data_snapshot remembers every name that it did not find, without
    # a bound; names can come from outside, so the search is done here.
    from genai_prices.data import providers
    from genai_prices.data_snapshot import find_provider_by_id

    name = name.removeprefix("models/")
    if provider and provider.lower() != "litellm":
        server = find_provider_by_id(providers, provider)
        return server.find_model(name, all_providers=providers) if server else None

    for separator in "/", ":":
        prefix, _, rest = name.partition(separator)
        server = find_provider_by_id(providers, prefix) if rest else None
        found = server.find_model(rest, all_providers=providers) if server else None
        if found:
            return found

    inferred = next((each for each in providers if _claims(each, name)), None)
    if inferred and (found := inferred.find_model(name, all_providers=providers)):
        return found
    served_by = "openai" if name.startswith("ft:") else "aws" if _BEDROCK_ID.match(name) else None
    return _find_model(name, served_by) if served_by else None


def _claims(provider: Provider, name: str) -> bool:
    return provider.model_match is not None and provider.model_match.is_match(name)


def _possible_prices(info: ModelInfo, day: date) -> Sequence[ModelPrice]:
    """Return every price that can hold at some time of this day; genai-prices lets the last win."""
    from genai_prices.types import ModelPrice, TimeOfDateConstraint

    if isinstance(info.prices, ModelPrice):
        return [info.prices]
    possible: list[ModelPrice] = []
    for each in reversed(info.prices):
        if isinstance(each.constraint, TimeOfDateConstraint):
            possible.append(each.prices)
        elif each.constraint is None or each.constraint.start_date <= day:
            return [*possible, each.prices]
    return [*possible, info.prices[0].prices]


def _rows_of_data(possible: Sequence[ModelPrice], *, claude: bool) -> tuple[_Row, ...] | None:
    from genai_prices.types import TieredPrices

    listed = [[getattr(prices, f"{name}_mtok", None) for name in _RATES] for prices in possible]
    tiered = [rate for rates in listed for rate in rates if isinstance(rate, TieredPrices)]
    tiered += [
        prices.requests_kcount
        for prices in possible
        if isinstance(prices.requests_kcount, TieredPrices)
    ]
    rows: list[_Row] = []
    for least in (_FIRST, *sorted({tier.start for rate in tiered for tier in rate.tiers})):
        alternatives: list[_Row] = []
        for prices, rates in zip(possible, listed, strict=True):
            reached = [_rate_at(rate, least) for rate in rates]
            if reached[0] is None:
                return None
            request = _rate_at(prices.requests_kcount, least) or Decimal(0)
            request_cost = _ceil(request, _PER_REQUEST_OF_1000)
            alternatives.append(_row(least, reached, request_cost, claude=claude))
        rows.append(_Row(*(max(rates) for rates in zip(*alternatives, strict=True))))
    return tuple(rows)


def _rate_at(rate: Decimal | TieredPrices | None, least: int) -> Decimal | None:
    if rate is None or isinstance(rate, Decimal):
        return rate
    reached = [tier.price for tier in rate.tiers if tier.start <= least]
    return reached[-1] if reached else rate.base


@cache
def _release() -> str:
    # Reads and parses a file: not for each run, and not for the import of this module either.
    from importlib.metadata import version

    return version("genai-prices")
