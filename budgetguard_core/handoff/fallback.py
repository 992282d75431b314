"""An executor that goes on with a stopped run: a cheaper model, the last turns, its own budget."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeAlias

from budgetguard_core.budget import Budget
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.guard import Guard
from budgetguard_core.handoff.record import HandedOver
from budgetguard_core.kit import keep_turns

Execute: TypeAlias = Callable[[list[Any], Guard], Any]


_ENCLOSING: ContextVar[tuple[Fallback, ...]] = ContextVar("budgetguard_fallbacks", default=())


def enclosing_fallbacks() -> tuple[Fallback, ...]:
    """Return the fallbacks whose executor this code is a part of."""
    return _ENCLOSING.get()


class Fallback:
    """Runs the rest of a stopped run, cut to its task and last turns.

    Whatever the executor calls, of any adapter, is bounded by the budget: it runs in
    `guard.activate()`. The run that was stopped pays for none of it.

    Args:
        execute: Is given the messages, in the framework's own types and closed by the last one, and
            a guard for its own run: `lambda messages, guard: run_bounded(cheap, guard,
            messages=[*messages, {"role": "user", "content": "Go on."}])`. It may be async.
        budget: The envelope; each run that is handed over gets a fresh guard of it.
        last: How many of the last turns it is given.
        on_result: Called with what was handed over and what the executor returned.

    Raises:
        ConfigurationError: An argument makes no sense.
    """

    def __init__(
        self,
        execute: Execute,
        budget: Budget,
        *,
        last: int = 6,
        on_result: Callable[[HandedOver, Any], object] | None = None,
    ) -> None:
        if not isinstance(budget, Budget) or not budget.caps():
            raise ConfigurationError(
                "budget must be a Budget with a cap, got none. Use Budget(max_cost_usd=0.1)."
            )
        self._execute = execute
        self._budget = budget
        self._shorten = keep_turns(last)
        self._on_result = on_result

    def __call__(self, handed: HandedOver) -> Any:
        """Run the rest, and return what the executor returned."""
        guard = Guard(self._budget)
        messages = list(self._shorten(list(handed.outcome.messages)))
        token = _ENCLOSING.set((*enclosing_fallbacks(), self))
        try:
            with guard.activate():
                result = self._execute(messages, guard)
                if inspect.iscoroutine(result):
                    result = asyncio.run(result)
        finally:
            _ENCLOSING.reset(token)
        if self._on_result is not None:
            self._on_result(handed, result)
        return result
