"""What surrounds the code that runs: the guard, the call in flight, and how to save the run."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

from budgetguard_core import Admit, Budget, ConfigurationError, Guard, ModelCall, Nudge, Trip

_SETTINGS = ("max_output_tokens", "seconds", "nudge")


class Layer:
    """A guarded region of code."""

    __slots__ = ("function", "guard", "save", "seen", "ticket")

    def __init__(
        self,
        guard: Guard,
        *,
        ticket: Admit | None = None,
        function: object = None,
        save: Callable[[], None] | None = None,
    ) -> None:
        self.guard = guard
        self.ticket = ticket
        self.function = function
        self.save = save
        self.seen = False

    def covers(self, guard: Guard) -> bool:
        """Whether a call that this layer admitted was charged to `guard` as well."""
        charged: Guard | None = self.guard
        while charged is not None and charged is not guard:
            charged = charged.parent
        return charged is not None


_TAKEN: WeakSet[Guard] = WeakSet()
_LOCK = threading.Lock()

LAYER: ContextVar[Layer | None] = ContextVar("budgetguard_layer", default=None)


@contextmanager
def entered(layer: Layer) -> Generator[None]:
    """Make a layer the current one."""
    token = LAYER.set(layer)
    try:
        yield
    finally:
        LAYER.reset(token)


def current_guard() -> Guard | None:
    """Return the guard of the run that this code is part of, or None outside of any."""
    layer = LAYER.get()
    return None if layer is None else layer.guard


def current_call() -> Admit | None:
    """Return the admitted call that this code is the body of, or None outside of any.

    A tool finds its `idempotency_key` here, and in `call.guard.cancellation` the token that tells
    it to stop.
    """
    layer = LAYER.get()
    return None if layer is None else layer.ticket


def guard_for(budget: Budget | Guard | None) -> Guard:
    """Return the guard for a run: a guard as it is; a budget makes a new one.

    Inside another run the new one is a child of that run's, so that it spends the same budget.
    """
    if isinstance(budget, Guard):
        return budget
    if budget is not None and not isinstance(budget, Budget):
        raise ConfigurationError(
            f"budget must be a Budget or a Guard, got {type(budget).__name__}. "
            "Build one with Budget(max_iterations=25)."
        )
    above = current_guard()
    return Guard(budget) if above is None else above.child(budget)


@contextmanager
def taking_part(guard: Guard, messages: Sequence[Mapping[str, Any]]) -> Generator[Guard]:
    """Give a run the guard that it counts with while it lasts: the one that it was given.

    If another run is on that guard already it is a child of it, which spends the same budget and
    has a name, a loop memory and calls in flight of its own: what two runs ask for at the same
    time is no repetition.
    """
    with _LOCK:
        shared = guard in _TAKEN
        _TAKEN.add(guard)
    if shared:
        budget = guard.budget
        yield guard.child(Budget(loop_detection=budget.loop_detection, warn_at=budget.warn_at))
        return
    try:
        if messages and messages[-1].get("role") == "user" and guard.tool_counts:
            guard.user_turn()
        yield guard
    finally:
        with _LOCK:
            _TAKEN.discard(guard)


def settings_of(function: Callable[..., Any]) -> frozenset[str]:
    """Name the settings of an admitted call that a function takes as keywords."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(
        parameter.name
        for parameter in parameters
        if parameter.name in _SETTINGS and parameter.kind is not parameter.POSITIONAL_ONLY
    )


def settings_for(ticket: Admit, names: AbstractSet[str]) -> dict[str, Any]:
    """Return the settings of a call by name, those alone that are asked for."""
    every = {
        "max_output_tokens": ticket.max_output_tokens,
        "seconds": seconds_of(ticket),
        "nudge": ticket.message if isinstance(ticket, Nudge) else None,
    }
    return {name: every[name] for name in names}


def seconds_of(ticket: Admit) -> float | None:
    """Return the time that a call may take; a tool has what is left of its run's."""
    if isinstance(ticket.call, ModelCall):
        return ticket.seconds
    guard: Guard = ticket.guard
    return guard.time_left()


class Watch:
    """Cuts work in flight when a run's deadline passes or the run is aborted.

    For code on an event loop: `cut` is called there. Both the deadline and the abort are looked at
    again before, because a handler may have extended the run.

    Attributes:
        trip: Why the work was cut, or None.
    """

    def __init__(self, guard: Guard, cut: Callable[[], object]) -> None:
        self._guard = guard
        self._cut = cut
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.trip: Trip | None = None
        self._forget = guard.cancellation.on_cancel(self._aborted)
        self._arm()

    def close(self) -> None:
        """Stop watching."""
        self._closed = True
        self._forget()
        if self._timer is not None:
            self._timer.cancel()

    def _aborted(self) -> None:
        self._loop.call_soon_threadsafe(self._look)

    def _arm(self) -> None:
        left = self._guard.time_left()
        if left is not None:
            self._timer = self._loop.call_later(left, self._look)

    def _look(self) -> None:
        # An abort may have been on its way from another thread when the work ended.
        if self._closed or self.trip is not None:
            return
        if not self._guard.cancellation.cancelled and self._guard.time_left():
            self._arm()
            return
        self.trip = self._guard.check()
        if self.trip is not None:
            self._cut()


@contextmanager
def cut_short(guard: Guard) -> Generator[Watch | None]:
    """Cancel the current task's block when the run ends; None where no event loop runs.

    Leaving the block swallows that cancellation and no other, as `asyncio.timeout` does.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if task is None:
        yield None
        return
    earlier = task.cancelling()
    watch = Watch(guard, task.cancel)
    try:
        yield watch
    except asyncio.CancelledError:
        if watch.trip is None or task.uncancel() > earlier:
            raise
    else:
        # The work ended in the moment in which it was to be cut.
        if watch.trip is not None:
            task.uncancel()
    finally:
        watch.close()
