"""A recorded run as a budget counts it: its own, or another that is tried on it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import partial
from typing import Any, Self

from budgetguard_core import Budget, Event, Guard, ModelCall, PriceBook, Trip, Usage
from budgetguard_core.events import (
    CallDelayed,
    CircuitBreakerChanged,
    RunEnded,
    RunRestored,
    RunStarted,
    ToolCallsRequested,
    ToolCallTurnedAway,
    ToolMixUnusual,
)
from budgetguard_core.replay import Replay

REFUSED = "tool_call_refused"
"""The name under which calls are counted that a candidate with quotas would have refused."""

_OF_BREAKERS = (CallDelayed, ToolCallTurnedAway, CircuitBreakerChanged, ToolMixUnusual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """The amounts of a run, spent or saved.

    Attributes:
        tokens: Prompt plus completion.
        cost_usd: US dollars of the calls whose cost was recorded or whose model has a known price.
        estimated_calls: Model calls without recorded usage: tokens and dollars are estimates.
        unpriced_calls: Model calls of unknown price: they are not in `cost_usd`.
    """

    model_calls: int = 0
    tool_calls: int = 0
    tokens: int = 0
    cost_usd: Decimal = Decimal(0)
    estimated_calls: int = 0
    unpriced_calls: int = 0

    @classmethod
    def of(cls, usage: Usage) -> Self:
        """Return what is compared out of a guard's usage."""
        names = [f.name for f in fields(cls) if f.name != "tokens"]
        return cls(tokens=usage.total_tokens, **{name: getattr(usage, name) for name in names})

    def __add__(self, other: Amounts) -> Amounts:
        return self._with(other, operator.add)

    def __sub__(self, other: Amounts) -> Amounts:
        """Return the difference, and nothing where the other is larger."""
        return self._with(other, _less)

    def _with(self, other: Amounts, combined: Callable[[Any, Any], Any]) -> Amounts:
        names = [f.name for f in fields(self)]
        pairs = {name: combined(getattr(self, name), getattr(other, name)) for name in names}
        return Amounts(**pairs)


def _less(mine: Any, its: Any) -> Any:
    return max(mine - its, type(mine)(0))


class Counted:
    """A run as one budget counts it, over every process in which it went on.

    Attributes:
        trip: Why the budget stopped it.
        refused: What its breakers and quotas did, by the names of the events.
    """

    def __init__(self, prices: PriceBook, budget: Budget | None = None) -> None:
        self.trip: Trip | None = None
        self.refused: Counter[str] = Counter()
        self._is_candidate = budget is not None
        self._quotas = budget is not None and bool(budget.tool_quotas)
        # Without a candidate nobody asks what its breakers do.
        sinks = [self._count] if self._is_candidate else []
        self._new = partial(Replay, budget, price_book=prices, sinks=sinks)
        self._replay: Replay | None = self._new()
        self._final = Usage()
        self._unreported = 0
        self._before = self._began = Amounts()

    def apply(self, event: Event, *, is_root: bool) -> None:
        """Count the next event. A candidate that has stopped the run counts no more."""
        resumes = is_root and isinstance(event, RunRestored)
        if resumes and self._replay is None and self.trip is None:
            self._replay = self._new()
        if self._replay is None:
            return
        if resumes:
            self._before += self._of_attempt
        if self._is_candidate and is_root:
            event = _enforced(event)
        self._replay.apply(event)
        root = self._replay.root
        if resumes:
            self._began = Amounts.of(self.usage)
        if root is not None and self._is_candidate:
            self.trip = root.trip
        if root is not None and (self.trip or (is_root and isinstance(event, RunEnded))):
            # Guards of thousands of runs take memory.
            self._final, self._unreported, self._replay = root.usage, _model_calls(root), None

    @property
    def usage(self) -> Usage:
        """The usage that its guard has counted."""
        root = None if self._replay is None else self._replay.root
        return self._final if root is None else root.usage

    @property
    def unreported_calls(self) -> int:
        """Model calls that never reported back; what they used is in no figure."""
        root = None if self._replay is None else self._replay.root
        return self._unreported if root is None else _model_calls(root)

    @property
    def amounts(self) -> Amounts:
        """The amounts of all attempts."""
        return self._before + self._of_attempt

    @property
    def _of_attempt(self) -> Amounts:
        return Amounts.of(self.usage) - self._began

    def _count(self, event: Event) -> None:
        if isinstance(event, _OF_BREAKERS):
            self.refused[event.event] += 1
        if isinstance(event, ToolCallsRequested) and self._quotas:
            refused = sum(call.decision == "refuse" for call in event.calls)
            self.refused += Counter({REFUSED: refused})


def _model_calls(guard: Guard) -> int:
    return sum(isinstance(one.call, ModelCall) for one in guard.open_calls())


def _enforced(event: Event) -> Event:
    """Return the beginning of a run that was only observed as that of one that is bounded."""
    if isinstance(event, RunStarted):
        return event.model_copy(update={"mode": "enforce"})
    if isinstance(event, RunRestored):
        snapshot = {**event.snapshot, "mode": "enforce", "trip": None, "observed": None}
        return event.model_copy(update={"snapshot": snapshot})
    return event
