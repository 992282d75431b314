"""Bulkhead: how many calls of a tool may run at the same time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from budgetguard_core.settings import BulkheadConfig, nanoseconds


class Slot:
    """A call's place in a bulkhead, or its place in the queue. Give it back with `release`.

    Attributes:
        granted: The call may run.
        wait_until_ns: Until when a call in the queue may wait. After that, release and refuse it.
        wake: Called in the thread that grants the place. Set it, then look at `granted`.
    """

    def __init__(self, granted: bool, wait_until_ns: int) -> None:
        self.granted = granted
        self.released = False
        self.wait_until_ns = wait_until_ns
        self.wake: Callable[[], object] = lambda: None


class Bulkhead:
    """The places of one bulkhead. Safe for threads; it waits for nothing.

    Whoever waits is served in the order of asking.

    Args:
        config: The settings; resilience4j's defaults if left out.
    """

    def __init__(self, config: BulkheadConfig | None = None) -> None:
        self.config = config or BulkheadConfig()
        self._max_wait_ns = nanoseconds(self.config.max_wait_duration)
        self._most = self.config.max_concurrent_calls
        self._running = 0
        self._queue: deque[Slot] = deque()
        self._lock = threading.Lock()

    @property
    def load(self) -> tuple[int, int]:
        """Calls that have a place, and those in the queue."""
        return self._running, len(self._queue)

    def is_idle(self, now_ns: int) -> bool:
        """True if no call has a place."""
        del now_ns  # as the others are asked
        return self._running == 0

    def acquire(self, now_ns: int) -> Slot | None:
        """Ask for a place: granted, or in the queue; None where the call is refused at once."""
        with self._lock:
            if self._running < self._most:
                self._running += 1
                return Slot(True, now_ns)
            if not self._max_wait_ns:
                return None
            slot = Slot(False, now_ns + self._max_wait_ns)
            self._queue.append(slot)
            return slot

    def release(self, slot: Slot) -> None:
        """Give a place back, or leave the queue. The next in the queue gets it. Twice is once."""
        with self._lock:
            if slot.released:
                return
            slot.released = True
            if not slot.granted:
                self._queue.remove(slot)
                return
            if not self._queue:
                self._running -= 1
                return
            following = self._queue.popleft()
            following.granted = True
        # Outside the lock: it is the caller's code.
        following.wake()
