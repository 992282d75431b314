"""Ending work that hangs: the deadline and the abort of one run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from budgetguard_core import Guard

_TICK = 0.001
_GRACE = 0.05
_PATIENCE = 5


class Watchdog:
    """Cancels what a run awaits when its time is over or it is aborted.

    One timer and one listener for a whole run, because a stream has thousands of chunks. Between
    two events of the stream nothing is cancelled: what the consumer does then is its own.

    Args:
        guard: The run's guard.
        has_children: Whether sub-agents are at work. They stop at the same moment by themselves
            and have a partial result to hand over, so they get a little time for it.

    Attributes:
        waiting: The task that awaits the run's next event, or None between two events.
        streaming: Nothing but pieces of a model's answer has come of late, and no step between
            them needs more than to be watched.
        due: The run has to end now.
    """

    __slots__ = (
        "_cancelled",
        "_cancelled_by_others",
        "_forget",
        "_guard",
        "_has_children",
        "_loop",
        "_patience",
        "_timer",
        "_watched",
        "due",
        "streaming",
        "waiting",
    )

    def __init__(self, guard: Guard, has_children: Callable[[], bool]) -> None:
        self._guard = guard
        self._has_children = has_children
        self._loop = asyncio.get_running_loop()
        self._patience = _PATIENCE
        self._timer: asyncio.TimerHandle | None = None
        self._watched = True
        self._cancelled = False
        self._cancelled_by_others = 0
        self.waiting: asyncio.Task[object] | None = None
        self.due = False
        self.streaming = False
        self._arm()
        self._forget = guard.cancellation.on_cancel(self._aborted)

    def close(self) -> None:
        """Stop watching; safe to call again."""
        self._watched = False
        if self._timer is not None:
            self._timer.cancel()
        self._forget()

    def took_effect(self) -> bool:
        """Tell whether a cancellation that came up was this watchdog's, and take it back if so."""
        if not self._cancelled:
            return False
        self._cancelled = False
        task = self.waiting or asyncio.current_task()
        # Somebody else may have cancelled the task as well: then it has to stay cancelled.
        return task is not None and task.uncancel() <= self._cancelled_by_others

    def _arm(self) -> None:
        left = self._guard.time_left()
        if left is not None:
            self._timer = self._loop.call_later(max(left, _TICK), self._wake)

    def _aborted(self) -> None:
        # Comes from any thread, and the loop may be gone by then.
        if self._watched and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self._watched:
            return
        if self._guard.time_left() != 0 and not self._guard.cancellation.cancelled:
            self._arm()  # the deadline was extended, or the clock is not the machine's
            return
        if self._has_children() and self._patience:
            self._patience -= 1
            self._timer = self._loop.call_later(_GRACE, self._wake)
            return
        if self._guard.check() is None:
            return  # OBSERVE only looks on
        self.due = True
        self.streaming = False
        if self.waiting is not None and not self._cancelled:
            self._cancelled = True
            self._cancelled_by_others = self.waiting.cancelling()
            self.waiting.cancel()
