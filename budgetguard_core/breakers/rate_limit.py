"""Rate limit: a token bucket for the calls of a tool.

Why not the maintained library `limits`: it counts hits in windows and has no token bucket with a
burst, a hit is only yes or no, so nothing can wait for its turn, and its stores read the wall
clock themselves and start a timer thread. What is needed here is one number.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from budgetguard_core.settings import NS_PER_SECOND, RateLimit, nanoseconds


class Turn(NamedTuple):
    """The answer to whether a call may start."""

    admitted: bool
    wait_ns: int
    """Admitted: how long to wait before the start. Refused: when asking again can succeed."""

    @property
    def seconds(self) -> float:
        """The wait in seconds."""
        return self.wait_ns / NS_PER_SECOND


class RateLimiter:
    """The token bucket of one limit. Safe for threads; it waits for nothing.

    A call that has to wait has its token already: it starts when the wait is over, and nobody can
    overtake it. Times are nanoseconds of one monotonic clock, the same for all who share it.

    Args:
        limit: The settings.
    """

    def __init__(self, limit: RateLimit) -> None:
        self.limit = limit
        # Rounded up, so that the rate is never passed.
        self._interval_ns = -int(-NS_PER_SECOND // limit.rate)
        self._burst_ns = self._interval_ns * (limit.burst - 1)
        self._max_wait_ns = nanoseconds(limit.max_wait_duration)
        # The one number: when the bucket is full again. A token is `_interval_ns` of that.
        self._full_at = 0
        self._lock = threading.Lock()

    def acquire(self, now_ns: int) -> Turn:
        """Take a token, now or within the longest wait; a refused call takes none."""
        with self._lock:
            full_at = max(self._full_at, now_ns)
            wait = full_at - self._burst_ns - now_ns
            if wait > self._max_wait_ns:
                return Turn(False, wait - self._max_wait_ns)
            self._full_at = full_at + self._interval_ns
            return Turn(True, max(wait, 0))

    def release(self) -> None:
        """Give back the token of a call that did not start."""
        with self._lock:
            self._full_at -= self._interval_ns

    def is_idle(self, now_ns: int) -> bool:
        """True if the bucket is full: nothing is taken that is not back yet."""
        with self._lock:
            return self._full_at <= now_ns
