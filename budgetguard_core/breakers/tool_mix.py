"""Tool mix: does this run use its tools as runs like it did?

200 reads without a search are no repetition when each reads another file. They are an unusual
mix. The alarm is a soft signal, given once: a run that does something else is not for that a
runaway, so nothing is refused or stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from budgetguard_core.settings import ToolMix

_LEAST_EXPECTED = 5


class ToolMixAlarm:
    """A run's histogram, at constant memory. The guard's lock is its lock.

    Args:
        settings: The baseline, and how unlike it a run must be.
    """

    def __init__(self, settings: ToolMix) -> None:
        self.settings = settings
        self._counts = dict.fromkeys(settings.baseline.tools, 0)
        # Tools that the baseline does not have: a model can invent names without end.
        self._rest = 0
        self._calls = 0
        self._next_look = settings.minimum_number_of_calls
        self._reported = False

    def observe(self, tool: str) -> dict[str, Any] | None:
        """Take in a tool call that starts; once, the fields of the event of an unusual mix."""
        self._calls += 1
        if tool in self._counts:
            self._counts[tool] += 1
        else:
            self._rest += 1
        if self._reported or self._calls < self._next_look:
            return None
        self._next_look *= 2
        return self._look()

    def _look(self) -> dict[str, Any] | None:
        baseline = self.settings.baseline
        run = {name: count for name, count in self._counts.items() if count}
        if self._rest:
            run["tools that are not in the baseline"] = self._rest
        result = chi_squared(run, baseline.tools)
        if result is None:
            return None
        statistic, freedom, farthest = result
        p_value = chi_squared_p_value(statistic, freedom)
        if p_value >= self.settings.alpha:
            return None
        self._reported = True
        detail = (
            f"{self._calls} tool calls are unlike those of {baseline.runs} recorded runs: "
            f"chi-squared {statistic:.1f} with {freedom} degrees of freedom, "
            f"p={p_value:.2g} < alpha={self.settings.alpha:g}; most unlike: {', '.join(farthest)}"
        )
        return {"calls": self._calls, "p_value": p_value, "detail": detail}


def chi_squared(
    run: Mapping[str, int], baseline: Mapping[str, int]
) -> tuple[float, int, list[str]] | None:
    """Test whether a run's tools are distributed as a baseline's (homogeneity, two samples).

    Two samples, because the baseline is a sample as well: a tool that it happens not to have is
    rare, not impossible. Tools with fewer than five expected calls on either side are one
    category, after Cochran's rule; it takes in the next rarest until it has five itself.

    Returns:
        The statistic, the degrees of freedom, and in words up to three tools that are the most
        unlike, the farthest first. None where fewer than two categories are left.
    """
    in_run, in_baseline = sum(run.values()), sum(baseline.values())
    whole = in_run + in_baseline
    smaller = min(in_run, in_baseline)
    columns = sorted(
        ((run.get(name, 0), baseline.get(name, 0), name) for name in {**baseline, **run}),
        key=lambda column: (column[0] + column[1], column[2]),
    )
    # From the rarest on, until the rare ones together are frequent enough as well.
    pooled_run = pooled_baseline = rare = 0
    for here, there, _ in columns:
        pooled = pooled_run + pooled_baseline
        enough = _LEAST_EXPECTED * whole
        if (here + there) * smaller >= enough and (not pooled or pooled * smaller >= enough):
            break
        pooled_run += here
        pooled_baseline += there
        rare += 1
    columns = columns[rare:]
    if rare:
        columns.append((pooled_run, pooled_baseline, "rare tools"))
    if len(columns) < 2:
        return None
    parts: list[tuple[float, str]] = []
    for here, there, name in columns:
        both = here + there
        expected_here, expected_there = both * in_run / whole, both * in_baseline / whole
        part = (here - expected_here) ** 2 / expected_here
        part += (there - expected_there) ** 2 / expected_there
        share, usual = 100 * here / in_run, 100 * there / in_baseline
        parts.append((part, f"{name} {share:.0f} % instead of {usual:.0f} %"))
    parts.sort(key=lambda part: (-part[0], part[1]))
    statistic = math.fsum(part for part, _ in parts)
    return statistic, len(parts) - 1, [text for _, text in parts[:3]]


def chi_squared_p_value(statistic: float, freedom: int) -> float:
    """Return how probable a chi-squared statistic is that is at least as large.

    The upper tail has a closed form for whole degrees of freedom: a sum of Poisson terms where
    they are even, with the error function where they are odd.
    """
    half = statistic / 2
    if half <= 0:
        return 1.0
    # In logarithms: half ** k alone would overflow for a large statistic.
    log_half = math.log(half)
    first = freedom % 2 / 2
    terms = (
        math.exp((first + step) * log_half - half - math.lgamma(first + step + 1))
        for step in range(freedom // 2)
    )
    tail = math.erfc(math.sqrt(half)) if first else 0.0
    return min(tail + math.fsum(terms), 1.0)
