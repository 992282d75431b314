"""The deadline and an abort, for code that awaits: they cancel what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from budgetguard_core import Guard, Trip


class Watch:
    """Looks at a guard's deadline and abort while an event loop runs.

    Use as an asynchronous context manager; inside, `async with watch.pull():` around each await.

    Attributes:
        trip: Why something was cancelled, or None.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._scope: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._forget: Callable[[], None] = lambda: None
        self.trip: Trip | None = None

    async def __aenter__(self) -> Watch:
        loop = asyncio.get_running_loop()

        def aborted() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._look)

        self._forget = self._guard.cancellation.on_cancel(aborted)
        self._arm()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._forget()
        if self._timer is not None:
            self._timer.cancel()

    @asynccontextmanager
    async def pull(self) -> AsyncGenerator[None]:
        """Raise `TimeoutError`, with `trip` set, when the run has to end while the block awaits."""
        when = None if self.trip is None else asyncio.get_running_loop().time()
        async with asyncio.timeout_at(when) as scope:
            self._scope = scope
            try:
                yield
            finally:
                self._scope = None

    def _arm(self) -> None:
        left = self._guard.time_left()
        if left is not None:
            self._timer = asyncio.get_running_loop().call_later(left, self._look)

    def _look(self) -> None:
        if self.trip is not None:
            return
        if not self._guard.cancellation.cancelled and self._guard.time_left() != 0:
            # The run began later than its watch, or its deadline was put off.
            self._arm()
            return
        self.trip = self._guard.check()
        if self.trip is not None and self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())
