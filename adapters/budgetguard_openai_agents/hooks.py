"""The hooks that users attach to a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Literal

from agents import RunHooks

from budgetguard_core import (
    AdapterError,
    Budget,
    CheckpointStore,
    ConfigurationError,
    Guard,
    Mode,
    PriceBook,
    Sink,
)
from budgetguard_core.guard import WarningHandler

_LOCK = threading.Lock()
_TAKEN: set[Guard] = set()


def below(guard: Guard) -> Guard:
    """Make the guard of a run that spends another's budget, and looks for loops by itself.

    What two runs ask for at the same time is no repetition.
    """
    budget = guard.budget
    return guard.child(Budget(loop_detection=budget.loop_detection, warn_at=budget.warn_at))


def release(guard: Guard) -> None:
    """Say that the run which was on a guard is over."""
    with _LOCK:
        _TAKEN.discard(guard)


class BudgetHooks(RunHooks[Any]):
    """Bound a run: `Runner.run(agent, input, hooks=BudgetHooks(Budget(max_iterations=25)))`.

    Works in `run`, `run_sync` and `run_streamed`. A run that is stopped returns a normal result,
    with a synthetic last message; `outcome(result)` says why. Sub-agents and runs inside tools
    spend the same budget. Can be given to many runs, one after the other or at the same time.

    The SDK's `max_turns` of 10 is its default and no decision of yours, so it is lifted where the
    budget has a cap; any other `max_turns` holds, and ends the run as `framework_limit`.

    Args:
        budget: A `Budget`: each run gets a fresh guard. A `Guard`: it is shared, nothing resets;
            of runs at the same time each looks for loops by itself.
        inner: Your own run hooks. They are called after the guard has admitted the step.
        on_trip: Return the partial result, or raise `RunStopped` with the outcome.
        store: Where the checkpoint of a run that ended goes.
        sinks: For the guards made from a `Budget`: where events go.
        on_warning: For the guards made from a `Budget`: called when a cap is nearly reached.
        price_book: For the guards made from a `Budget`: where prices come from.
        mode: For the guards made from a `Budget`: ENFORCE, OBSERVE or OFF.

    Raises:
        ConfigurationError: The budget is neither, or what belongs to a `Budget` came with a
            `Guard`.
    """

    def __init__(
        self,
        budget: Budget | Guard,
        inner: RunHooks[Any] | None = None,
        *,
        on_trip: Literal["return", "raise"] = "return",
        store: CheckpointStore | None = None,
        sinks: Iterable[Sink | Callable[[Any], object]] = (),
        on_warning: WarningHandler | None = None,
        price_book: PriceBook | None = None,
        mode: Mode | str = Mode.ENFORCE,
    ) -> None:
        from budgetguard_openai_agents.runner import install

        if not isinstance(budget, Budget | Guard):
            raise ConfigurationError(
                f"budget must be a Budget or a Guard, got {type(budget).__name__}. "
                "Build one with Budget(max_iterations=25)."
            )
        self.budget = budget
        self.inner = inner
        self.on_trip = on_trip
        self.store = store
        self._sinks = tuple(sinks)
        self._on_warning = on_warning
        self._price_book = price_book
        self._mode = mode
        if isinstance(budget, Guard) and (
            self._sinks or on_warning or price_book or mode is not Mode.ENFORCE
        ):
            raise ConfigurationError(
                "sinks, on_warning, price_book and mode belong to the Guard, which has its own. "
                "Give them to Guard(...), or give a Budget."
            )
        while isinstance(self.inner, BudgetHooks):
            # Two layers that see the same calls: they are counted once.
            if self.inner.budget is not budget:
                raise ConfigurationError(
                    "a run has one budget, got BudgetHooks with another one as inner hooks. "
                    "Give the same Guard to both, or use Guard.child for a part of the run."
                )
            self.inner = self.inner.inner
        install()

    def guard_below(self, above: Guard | None) -> Guard:
        """Make or choose the guard of a run, within the run above it."""
        if isinstance(self.budget, Guard):
            with _LOCK:
                if self.budget not in _TAKEN:
                    _TAKEN.add(self.budget)
                    return self.budget
            return below(self.budget)
        if above is not None:
            return above.child(self.budget, on_warning=self._on_warning)
        return Guard(
            self.budget,
            mode=self._mode,
            sinks=self._sinks,
            on_warning=self._on_warning,
            price_book=self._price_book,
        )

    async def on_agent_start(self, context: Any, agent: Any) -> None:  # noqa: ARG002
        """Refuse to run without the runner that ends a run: nothing would be enforced."""
        raise AdapterError(
            "BudgetHooks works through the default agent runner that it installs, and another one "
            "was set since. Call set_default_agent_runner before you make BudgetHooks."
        )
