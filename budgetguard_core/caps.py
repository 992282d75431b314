"""A budget compiled for comparison: caps, quotas, and marks, below which no step is looked at."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from decimal import Decimal
from fnmatch import fnmatchcase
from functools import lru_cache
from weakref import ref

from budgetguard_core.budget import Budget
from budgetguard_core.pricing import from_usd

INFINITY = math.inf
"""The cap of a dimension without a cap."""

_WILD = re.compile(r"[*?\[]")


class Quota:
    """How many bodies of some tools may start, and how many did."""

    __slots__ = ("limit", "pattern", "used")

    def __init__(self, pattern: str, limit: int, used: int) -> None:
        self.pattern = pattern
        self.limit = limit
        self.used = used


class Caps:
    """A budget compiled for comparison: whole numbers, infinity where there is no cap."""

    __slots__ = (
        "_classes",
        "budget",
        "cost",
        "iterations",
        "model_calls",
        "nanoseconds",
        "quotas",
        "refuses_unpriced",
        "tokens",
        "tool_calls",
    )

    def __init__(self, budget: Budget, used: Mapping[str, int] | None = None) -> None:
        self.budget = budget
        self.iterations = _or_infinity(budget.max_iterations)
        self.model_calls = _or_infinity(budget.max_model_calls)
        self.tool_calls = _or_infinity(budget.max_tool_calls)
        self.tokens = _or_infinity(budget.max_total_tokens)
        self.nanoseconds = (
            INFINITY if budget.max_seconds is None else int(budget.max_seconds * 1_000_000_000)
        )
        self.cost = INFINITY if budget.max_cost_usd is None else from_usd(budget.max_cost_usd)
        reserve = budget.finalize_reserve
        if reserve is not None:
            self.tokens -= reserve.tokens or 0
            self.cost -= from_usd(reserve.cost_usd or Decimal(0))
        self.refuses_unpriced = budget.max_cost_usd is not None and budget.on_unpriced == "stop"
        self.quotas = tuple(
            Quota(pattern, cap, (used or {}).get(pattern, 0))
            for pattern, cap in budget.tool_quotas.items()
        )
        self._classes = dict(budget.tool_classes)

    def quotas_of(self, name: str) -> tuple[Quota, ...]:
        """Return the quotas that a tool has to pass, in the order of the budget."""
        if not self.quotas:
            return ()
        by_beginning, longest = _by_beginning(tuple(quota.pattern for quota in self.quotas))
        found: set[int] = set()
        for candidate in (name, f"{self.class_of(name)}/{name}"):
            for end in range(min(len(candidate), longest) + 1):
                for place in by_beginning.get(candidate[:end], ()):
                    if fnmatchcase(candidate, self.quotas[place].pattern):
                        found.add(place)
        return tuple(self.quotas[place] for place in sorted(found))

    def class_of(self, name: str) -> str:
        """Return the tool's class, or an empty string."""
        for pattern, tool_class in self._classes.items():
            if fnmatchcase(name, pattern):
                return tool_class
        return ""


@lru_cache(maxsize=64)
def _by_beginning(patterns: tuple[str, ...]) -> tuple[dict[str, list[int]], int]:
    """Sort patterns by what a name has to begin with, so that it is matched with a few of hundreds.

    Returns:
        The places of the patterns, and the length of the longest beginning.
    """
    found: dict[str, list[int]] = {}
    for place, pattern in enumerate(patterns):
        found.setdefault(_WILD.split(pattern, maxsplit=1)[0], []).append(place)
    return found, max(map(len, found))


class Marks:
    """The use from which a dimension is looked at closely: its warning share, then its cap.

    Below every mark a step needs no other check, so a step far from its caps pays for one.
    """

    __slots__ = ("cost", "iterations", "model_calls", "nanoseconds", "tokens", "tool_calls")

    def __init__(self, caps: Caps, warned: Container[str]) -> None:
        share = caps.budget.warn_at

        def mark(dimension: str, cap: float) -> float:
            if dimension in warned or cap == INFINITY:
                return cap
            # Whole, for whole numbers are compared with it: with a fraction that takes longer.
            return math.ceil(cap * share)

        self.iterations = mark("max_iterations", caps.iterations)
        self.model_calls = mark("max_model_calls", caps.model_calls)
        self.tool_calls = mark("max_tool_calls", caps.tool_calls)
        self.tokens = mark("max_total_tokens", caps.tokens)
        self.nanoseconds = mark("max_seconds", caps.nanoseconds)
        self.cost = mark("max_cost_usd", caps.cost)


def _or_infinity(cap: int | None) -> float:
    return INFINITY if cap is None else cap


_LATEST: list[tuple[ref[Budget], Marks]] = []
"""The latest budget, and the marks with which its runs begin: thousands of runs have one budget."""


def marks_of(caps: Caps, warned: tuple[str, ...]) -> Marks:
    """Return the marks of a run; those with which the runs of one budget begin are one object."""
    if warned:
        return Marks(caps, warned)
    if _LATEST:
        budget, marks = _LATEST[0]
        if budget() is caps.budget:
            return marks
    marks = Marks(caps, warned)
    _LATEST[:] = [(ref(caps.budget), marks)]
    return marks
