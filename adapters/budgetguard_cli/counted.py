"""A recorded run as a budget counts it: its own, or another that is tried on it."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from functools import partial
from typing import TypeAlias

from budgetguard_core import Budget, Guard, PriceBook, Trip, Usage, events
from budgetguard_core.kit import Event, ModelCall
from budgetguard_core.replay import Replay

_OF_BREAKERS = (
    events.CallDelayed,
    events.ToolCallTurnedAway,
    events.CircuitBreakerChanged,
    events.ToolMixUnusual,
)
Amounts: TypeAlias = Counter[str]
"""The amounts of a run, spent or saved, by name; a difference is never below nothing."""
_NAMES = ("model_calls", "tool_calls", "tokens", "cost_usd", "estimated_calls", "unpriced_calls")


def plain(amounts: Amounts) -> dict[str, int | Decimal]:
    """Return amounts for machines, zeros included."""
    return {name: amounts[name] for name in _NAMES} | {"cost_usd": Decimal(amounts["cost_usd"])}


def _of(usage: Usage) -> Amounts:
    fields = {name: "total_tokens" if name == "tokens" else name for name in _NAMES}
    return Counter({name: getattr(usage, field) for name, field in fields.items()})


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
        self._without_usage = 0
        self._before = self._began = Amounts()

    def apply(self, event: Event, *, is_root: bool) -> None:
        """Count the next event. A candidate that has stopped the run counts no more."""
        resumes = is_root and isinstance(event, events.RunRestored)
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
            self._began = _of(self.usage)
        if root is not None and self._is_candidate:
            self.trip = root.trip
        if root is not None and (self.trip or (is_root and isinstance(event, events.RunEnded))):
            # Guards of thousands of runs take memory.
            self._final, self._without_usage, self._replay = root.usage, _model_calls(root), None

    @property
    def usage(self) -> Usage:
        """The usage that its guard has counted."""
        root = None if self._replay is None else self._replay.root
        return self._final if root is None else root.usage

    @property
    def calls_without_usage(self) -> int:
        """Model calls that never reported back; what they used is in no figure."""
        root = None if self._replay is None else self._replay.root
        return self._without_usage if root is None else _model_calls(root)

    @property
    def amounts(self) -> Amounts:
        """The amounts of all attempts."""
        return self._before + self._of_attempt

    @property
    def _of_attempt(self) -> Amounts:
        return _of(self.usage) - self._began

    def _count(self, event: Event) -> None:
        if isinstance(event, _OF_BREAKERS):
            self.refused[event.event] += 1
        if isinstance(event, events.ToolCallsRequested) and self._quotas:
            refused = sum(call.decision == "refuse" for call in event.calls)
            self.refused += Counter({"tool_call_refused": refused})


def _model_calls(guard: Guard) -> int:
    return sum(isinstance(one.call, ModelCall) for one in guard.open_calls())


def _enforced(event: Event) -> Event:
    """Return the beginning of a run that was only observed as that of one that is bounded."""
    if isinstance(event, events.RunStarted):
        return event.model_copy(update={"mode": "enforce"})
    if isinstance(event, events.RunRestored):
        snapshot = {**event.snapshot, "mode": "enforce", "trip": None, "observed": None}
        return event.model_copy(update={"snapshot": snapshot})
    return event
