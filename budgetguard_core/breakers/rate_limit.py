"""Rate limit: a token bucket for the calls of a tool.

Why not the maintained library `limits`: it counts hits in windows and has no token bucket with a
burst, a hit is only yes or no, so nothing can wait for its turn, and its stores read the wall
clock themselves and start a timer thread. What is needed here is one number.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Self, cast

from budgetguard_core.settings import (
    NS_PER_SECOND,
    RateLimit,
    damaged,
    nanoseconds,
    natural,
)


class Turn(NamedTuple):
    """The answer to whether a call may start."""

    admitted: bool
    wait_ns: int
    """Admitted: how long to wait before the start. Refused: when asking again can succeed."""

    @property
    def seconds(self) -> float:
        """The wait in seconds."""
        return self.wait_ns / NS_PER_SECOND


_AT_ONCE = Turn(True, 0)


class RateLimiter:
    """The token bucket of one limit. Safe for threads; it waits for nothing.

    A call that has to wait has its token already: it starts when the wait is over, and nobody can
    overtake it. Times are nanoseconds of one monotonic clock, the same for all who share it.

    Args:
        limit: The settings.
    """

    __slots__ = ("_burst_ns", "_full_at", "_interval_ns", "_lock", "_max_wait_ns", "limit")

    def __init__(self, limit: RateLimit) -> None:
        self.limit = limit
        # Rounded up, so that the rate is never passed.
        self._interval_ns = -int(-NS_PER_SECOND // limit.rate)
        self._burst_ns = self._interval_ns * (limit.burst - 1)
        self._max_wait_ns = nanoseconds(limit.max_wait_duration)
        # The one number: when the bucket is full again. A token is `_interval_ns` of that.
        self._full_at: int | None = None
        self._lock = threading.Lock()

    def acquire(self, now_ns: int) -> Turn:
        """Take a token, now or within the longest wait; a refused call takes none."""
        with self._lock:
            full_at = self._full_at
            if full_at is None or full_at < now_ns:
                full_at = now_ns
            wait = full_at - self._burst_ns - now_ns
            if wait > self._max_wait_ns:
                return Turn(False, wait - self._max_wait_ns)
            self._full_at = full_at + self._interval_ns
            return Turn(True, wait) if wait > 0 else _AT_ONCE

    def release(self) -> None:
        """Give back the token of a call that did not start."""
        with self._lock:
            if self._full_at is not None:
                self._full_at -= self._interval_ns

    def is_full(self, now_ns: int) -> bool:
        """Whether nothing is taken that is not back yet."""
        with self._lock:
            return self._full_at is None or self._full_at <= now_ns

    def state(self, now_ns: int) -> dict[str, Any]:
        """Return what the limiter knows, ready for JSON. Times are kept as distances."""
        with self._lock:
            return {"full_in_ns": 0 if self._full_at is None else max(self._full_at - now_ns, 0)}

    @classmethod
    def from_state(cls, limit: RateLimit, state: object, now_ns: int) -> Self:
        """Make a limiter that goes on where another's `state` was taken.

        Raises:
            ValueError: The state is damaged.
        """
        limiter = cls(limit)
        try:
            loaded = cast("dict[str, Any]", state)
            if loaded.keys() != {"full_in_ns"}:
                raise ValueError  # noqa: TRY301 - one message for whatever is wrong with it
            limiter._full_at = now_ns + natural(loaded["full_in_ns"])
        except (AttributeError, TypeError, ValueError):
            raise damaged("rate limiter", state) from None
        return limiter
