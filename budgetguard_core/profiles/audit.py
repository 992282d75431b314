"""Caps against what runs really use: which ones cut real work, and which never fire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from budgetguard_core.budget import DIMENSIONS, Budget
from budgetguard_core.profiles.calibration import FEWEST, Figure, quantiles

Problem: TypeAlias = Literal["truncates", "never_fires", "limits_never_fire", "limits_always_fire"]

_FAR = 5
"""Above so many times the 99th percentile, a cap stops nothing but what is far out of hand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that is wrong with a cap, or with a profile.

    Attributes:
        problem: `truncates`: the cap is below the 99th percentile of healthy runs. `never_fires`:
            it is above five times that. `limits_never_fire` and `limits_always_fire`: of all runs
            of the profile, none or every one was stopped by a limit.
        dimension: The cap; None where it is about the profile.
        cap: Its value, less what is held back of it for a last answer: that is where it stops.
        p99: The 99th percentile.
        share: The share of healthy runs above the cap; of all runs that a limit stopped, where it
            is about the profile.
        runs: How many runs that is said of.
    """

    problem: Problem
    dimension: str | None = None
    cap: Figure | None = None
    p99: Figure | None = None
    share: float
    runs: int


def audit(
    budget: Budget,
    figures: Mapping[str, Sequence[Figure]],
    *,
    runs: int,
    stopped: Counter[str],
) -> Iterator[Finding]:
    """Look at the caps of a profile. With fewer than 10 runs nothing is said."""
    held = {} if budget.finalize_reserve is None else budget.finalize_reserve.of_caps()
    for dimension in DIMENSIONS:
        cap: Figure | None = getattr(budget, dimension)
        if cap is not None and held.get(dimension) is not None:
            cap = cast("Figure", cast("Any", cap) - held[dimension])  # in the cap's own unit
        measured = figures.get(dimension, ())
        if cap is None or len(measured) < FEWEST:
            continue
        p99 = quantiles(measured).p99
        share = sum(figure > cap for figure in measured) / len(measured)
        problem: Problem | None = None
        if cap < p99:
            problem = "truncates"
        elif p99 > 0 and cap > _FAR * p99:
            problem = "never_fires"
        if problem is not None:
            yield Finding(
                problem=problem,
                dimension=dimension,
                cap=cap,
                p99=p99,
                share=share,
                runs=len(measured),
            )
    fired = stopped.total()
    if runs >= FEWEST and fired in (0, runs):
        yield Finding(
            problem="limits_always_fire" if fired else "limits_never_fire",
            share=fired / runs,
            runs=runs,
        )
