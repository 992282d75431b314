"""Caps from measured runs: what is proposed, how sure that is, and what it would cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from random import Random
from typing import Literal, TypeAlias

Figure: TypeAlias = int | float | Decimal
"""The usage of one run in one dimension, in the unit of its cap."""
Basis: TypeAlias = Literal["maximum", "p95", "p99"]

FEWEST = 10
"""With fewer runs nothing is proposed."""
FIRM = 30
"""With fewer runs a proposal is provisional."""
MANY = 300
"""From here on the 99th percentile is known well enough to stand on."""

_HEAVY_TAILED = ("max_total_tokens", "max_cost_usd")
_DRAWS = 4_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """The distribution of the runs.

    Each quantile is the figure of a run: the smallest that this share of all does not exceed.
    """

    runs: int
    p50: Figure
    p95: Figure
    p99: Figure
    maximum: Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A cap for one dimension.

    Attributes:
        dimension: The cap, as the field of `Budget` is called.
        measured: How the healthy runs are spread.
        basis: What the cap is a multiple of.
        factor: The multiple.
        cap: The proposal, rounded up to what can be written.
        low: The lower end of the 95 % bootstrap interval of the cap.
        high: The upper end.
        exceeds: At most this probable is it that the next healthy run exceeds the cap, whatever
            the distribution: it is as probable to be any place among the runs measured.
        provisional: There are too few runs to rely on it.
    """

    dimension: str
    measured: Quantiles
    basis: Basis
    factor: float
    cap: Figure
    low: Figure
    high: Figure
    exceeds: float
    provisional: bool


def quantiles(figures: Sequence[Figure]) -> Quantiles:
    """Return how figures are spread.

    Raises:
        ValueError: There are none.
    """
    if not figures:
        raise ValueError("quantiles need at least one figure, got none.")
    ordered = sorted(figures)
    return Quantiles(
        runs=len(ordered),
        p50=ordered[rank(len(ordered), 0.50) - 1],
        p95=ordered[rank(len(ordered), 0.95) - 1],
        p99=ordered[rank(len(ordered), 0.99) - 1],
        maximum=ordered[-1],
    )


def propose(dimension: str, figures: Sequence[Figure], *, labelled: bool) -> Proposal | None:
    """Propose a cap, or None where there are fewer than 10 runs or none that used anything.

    With 10 to 29 runs it is three times the maximum, with 30 to 299 twice, from 300 on the 99th
    percentile and a half more, tokens and dollars twice. Of runs that nobody has said to be
    healthy, a runaway may be the maximum: then it is two and a half times the 95th percentile.

    Args:
        dimension: The cap, as the field of `Budget` is called.
        figures: What each run used that ended by itself; runs that a cap ended would only repeat
            that cap.
        labelled: The runs are known to be healthy.
    """
    count = len(figures)
    if count < FEWEST or max(figures) <= 0:
        return None
    basis: Basis
    if not labelled:
        basis, factor = "p95", 2.5
    elif count < FIRM:
        basis, factor = "maximum", 3.0
    elif count < MANY:
        basis, factor = "maximum", 2.0
    else:
        basis, factor = "p99", 2.0 if dimension in _HEAVY_TAILED else 1.5
    ordered = sorted(figures)
    rank_of = count if basis == "maximum" else rank(count, float(basis[1:]) / 100)
    if ordered[rank_of - 1] <= 0:
        return None
    low, high = bootstrap_interval(count, rank_of)
    cap = _times(ordered[rank_of - 1], factor, dimension)
    over = sum(figure > cap for figure in figures)
    return Proposal(
        dimension=dimension,
        measured=quantiles(ordered),
        basis=basis,
        factor=factor,
        cap=cap,
        low=_times(ordered[low - 1], factor, dimension),
        high=_times(ordered[high - 1], factor, dimension),
        exceeds=(over + 1) / (count + 1),
        provisional=count < FIRM,
    )


def rank(count: int, share: float) -> int:
    """Return the place of a quantile among sorted figures, from 1."""
    # 0.95 * 20 is 19.000000000000004 or less, as the share happens to be written.
    return max(1, math.ceil(round(share * count, 9)))


def bootstrap_interval(count: int, rank_of: int) -> tuple[int, int]:
    """Return the places between which the figure of a place is, if the runs were drawn again.

    Of `count` draws with replacement, the place of the one at `place` is distributed as a beta
    variate. Of the maximum the upper end is the maximum itself: no draw exceeds it.
    """
    random = Random(0)  # noqa: S311 - the same for everybody
    drawn = (random.betavariate(rank_of, count - rank_of + 1) for _ in range(_DRAWS))
    places = sorted(max(1, math.ceil(count * share)) for share in drawn)
    return places[_DRAWS // 40], places[-_DRAWS // 40]


def _times(figure: Figure, factor: float, dimension: str) -> Figure:
    """Multiply exactly, and round up: to whole numbers, and dollars to cents or two digits."""
    exact = Decimal(str(figure)) * Decimal(str(factor))
    if dimension != "max_cost_usd":
        return int(exact.to_integral_value(ROUND_CEILING))
    digits = min(-2, exact.adjusted() - 1)
    return exact.quantize(Decimal(1).scaleb(digits), ROUND_CEILING)
