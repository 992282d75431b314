"""What a circuit breaker remembers of calls: the last ones, or those of the last seconds."""

from __future__ import annotations

from collections import deque
from typing import Any

from budgetguard_core.settings import NS_PER_SECOND, natural


class CountWindow:
    """The last calls, one digit each: 1 for a failure, 2 for a slow call, 3 for both."""

    __slots__ = ("_calls", "_size", "failed", "is_spotless", "slow", "total")

    def __init__(self, size: int) -> None:
        self._size = size
        self._calls: deque[int] = deque(maxlen=size)
        self.total = self.failed = self.slow = 0
        # Full, and of successes alone.
        self.is_spotless = False

    def record(self, now: int, failed: bool, slow: bool) -> None:
        """Add a call that ended."""
        del now
        calls = self._calls
        if self.total < self._size:
            self.total += 1
        elif oldest := calls[0]:
            self.failed -= oldest & 1
            self.slow -= oldest >> 1
        if failed or slow:
            calls.append(failed + 2 * slow)
            self.failed += failed
            self.slow += slow
        else:
            calls.append(0)
        self.is_spotless = self.total == self._size and not (self.failed or self.slow)

    def pass_time(self, now: int) -> None:
        """Do nothing: these calls grow no older."""

    def state(self, now: int) -> dict[str, Any]:
        """Return the calls, ready for JSON."""
        del now
        return {"calls": "".join(map(str, self._calls))}

    def load(self, state: dict[str, Any], now: int) -> None:
        """Add the calls of a `state`; of one of another kind of window there are none.

        Raises:
            ValueError: The state is damaged.
        """
        for digit in state.get("calls", ""):
            value = "0123".index(digit)
            self.record(now, bool(value & 1), bool(value & 2))


class TimeWindow:
    """The calls of the last seconds, added up by the second."""

    __slots__ = ("_seconds", "_size", "failed", "slow", "total")
    # Its calls grow older.
    is_spotless = False

    def __init__(self, size: int) -> None:
        self._size = size
        # The second, and its calls: all, failed, slow. Only seconds that have any.
        self._seconds: deque[list[int]] = deque()
        self.total = self.failed = self.slow = 0

    def record(self, now: int, failed: bool, slow: bool) -> None:
        """Add a call that ended."""
        self.pass_time(now)
        self._add(now // NS_PER_SECOND, 1, int(failed), int(slow))

    def _add(self, second: int, total: int, failed: int, slow: int) -> None:
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0, 0])
        latest = self._seconds[-1]
        latest[1] += total
        latest[2] += failed
        latest[3] += slow
        self.total += total
        self.failed += failed
        self.slow += slow

    def pass_time(self, now: int) -> None:
        """Leave out what has grown too old."""
        oldest = now // NS_PER_SECOND - self._size + 1
        while self._seconds and self._seconds[0][0] < oldest:
            _, total, failed, slow = self._seconds.popleft()
            self.total -= total
            self.failed -= failed
            self.slow -= slow

    def state(self, now: int) -> dict[str, Any]:
        """Return the calls, ready for JSON."""
        second = now // NS_PER_SECOND
        return {"seconds": [[second - one[0], *one[1:]] for one in self._seconds]}

    def load(self, state: dict[str, Any], now: int) -> None:
        """Add the calls of a `state`; of one of another kind of window there are none.

        Raises:
            ValueError: The state is damaged.
        """
        second = now // NS_PER_SECOND
        youngest = None
        for age, total, failed, slow in state.get("seconds", ()):
            if youngest is not None and natural(age) >= youngest:
                raise ValueError
            if not (natural(failed) <= natural(total) and natural(slow) <= total):
                raise ValueError
            youngest = natural(age)
            self._add(second - age, total, failed, slow)
        self.pass_time(now)
