"""The deadline and an abort: one watcher, on an event loop or beside a blocking call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

from budgetguard_core.kit.alarms import ALARMS
from budgetguard_core.kit.run import Run
from budgetguard_core.stop import Trip

GRACE = 0.05
"""Seconds that runs inside a run get to end by themselves, with a partial result to hand over."""
PATIENCE = 5
"""How many times they get them."""
UNCANCELLABLE = 1.0
"""Seconds after which work that does not let itself be cancelled is left behind."""


class _Timer(Protocol):
    def cancel(self) -> object: ...


class Watch:
    """Cuts work in flight when its run's deadline passes or the run is aborted.

    Where an event loop runs, `cut` is called on it; elsewhere in a thread of its own, which is for
    closing a socket or setting a flag. The deadline and the abort are looked at again before,
    because a handler may have extended the run. Runs inside the run end first.

    Args:
        run: The run to watch.
        cut: Ends the work in flight, once.
        blocking: The work blocks its thread, and with it an event loop that runs there: `cut` is
            called in another one.

    Attributes:
        left: Seconds until the deadline when it was looked at last; None without one.
        trip: Why the work was cut, or None.
    """

    def __init__(self, run: Run, cut: Callable[[], object], *, blocking: bool = False) -> None:
        self._run = run
        self._cut = cut
        self._patience = PATIENCE
        self._timer: _Timer | None = None
        self._closed = False
        self._held = self._missed = False
        self._lock = threading.Lock()
        self.trip: Trip | None = None
        self._loop = None if blocking else _running_loop()
        self._forget = run.on_abort(self._aborted)
        self._arm()

    def close(self) -> None:
        """Stop watching; safe to call again."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
        self._forget()
        # It holds this, and this what the work has brought: not until a garbage collection.
        self._forget = _nothing

    def hold(self) -> None:
        """Cut nothing until `go_on`."""
        self._held = True

    def go_on(self) -> None:
        """Watch again, and look soon at what passed meanwhile."""
        self._held = False
        if self._missed:
            self._missed = False
            self._look_in(0)
        elif self._timer is None:
            self._arm()

    def is_of(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether it watches on this event loop."""
        return self._loop is loop

    def _arm(self) -> None:
        self.left = left = self._run.time_left()
        if left is not None:
            self._look_in(left)

    def _look_in(self, seconds: float) -> None:
        with self._lock:
            if self._closed:
                return
            if self._loop is not None:
                self._timer = self._loop.call_later(seconds, self._look)
            else:
                self._timer = ALARMS.set(seconds, self._look)

    def _aborted(self) -> None:
        loop = self._loop
        if loop is None:
            self._look()
        elif not loop.is_closed():
            # Comes from any thread.
            loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        # An abort may have been on its way from another thread when the work ended.
        if self._closed or self.trip is not None:
            return
        if self._held:
            self._missed = True
            return
        if not self._run.aborted and self._run.time_left():
            self._arm()
            return
        if self._run.has_children and self._patience:
            self._patience -= 1
            self._look_in(GRACE)
            return
        self.trip = self._run.check()
        if self.trip is not None:
            self._cut()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _nothing() -> None:
    """There is nothing to forget any more."""


class CutShort:
    """Cancels what a task does in blocks that follow each other, when the run ends.

    As `cut_short` does in one block, with one watch for all of them: of what is between them
    nothing is cancelled. `close` it in the end.

    Args:
        run: The run to watch.
    """

    __slots__ = ("_earlier", "_run", "_task", "_watch")

    def __init__(self, run: Run) -> None:
        self._run = run
        self._watch: Watch | None = None
        self._task: asyncio.Task[Any] | None = None
        self._earlier = 0

    def __enter__(self) -> Watch | None:
        try:
            task = asyncio.current_task()
        except RuntimeError:
            task = None
        if task is None:
            return None
        self._task, self._earlier = task, task.cancelling()
        watch = self._watch
        if watch is not None and watch.is_of(task.get_loop()):
            watch.go_on()
            return watch
        self.close()
        self._watch = watch = Watch(self._run, self._cut)
        return watch

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        task, watch = self._task, self._watch
        self._task = None
        if task is None or watch is None:
            return False
        watch.hold()
        if isinstance(error, asyncio.CancelledError):
            return watch.trip is not None and task.uncancel() <= self._earlier
        if error is None and watch.trip is not None:
            # The work ended in the moment in which it was to be cut.
            task.uncancel()
        return False

    def close(self) -> None:
        """Stop watching; safe to call again."""
        # Each holds the other: not until a garbage collection.
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _cut(self) -> None:
        if self._task is not None:
            self._task.cancel()


@contextmanager
def cut_short(run: Run) -> Generator[Watch | None]:
    """Cancel what the current task does in this block when the run ends; None without a loop.

    Leaving the block swallows that cancellation and no other, as `asyncio.timeout` does: ask
    `watch.trip`.
    """
    cut = CutShort(run)
    try:
        with cut as watch:
            yield watch
    finally:
        cut.close()


async def supervised(run: Run, work: asyncio.Task[Any]) -> Trip | None:
    """Wait for a task; cancel it at the deadline and when the run is aborted.

    Returns:
        Why it was cut, None when it ended by itself: then ask the task how. Work that does not
        let itself be cancelled is left behind after a second.

    Raises:
        asyncio.CancelledError: The caller was cancelled, and the work with it, which unwinds as
            long as it needs and the run may last.
    """
    woken = asyncio.get_running_loop().create_future()

    def cut() -> None:
        work.cancel()
        woken.cancel()

    watch = Watch(run, cut)
    try:
        await asyncio.wait({work, woken}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await asyncio.wait({work}, timeout=UNCANCELLABLE)
        if not work.done():
            run.guard.tree.report("a call in flight did not let itself be cancelled")
            work.add_done_callback(_look_at)
    except asyncio.CancelledError:
        work.cancel()
        await asyncio.wait({work, woken}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await asyncio.wait({work}, timeout=UNCANCELLABLE)
        raise
    finally:
        watch.close()
        woken.cancel()
    return watch.trip


def _look_at(task: asyncio.Task[Any]) -> None:
    """Take what an abandoned task ends with one day; nobody is left to hear of it."""
    if not task.cancelled():
        task.exception()
