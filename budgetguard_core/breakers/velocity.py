"""Velocity: tokens, dollars and tool calls a minute.

A cap on a run's total lets a runaway spend all of it in a minute. This one looks at the pace: near
the ceiling calls are delayed, and a run that reaches it all the same is stopped.
"""

from __future__ import annotations

import math
from decimal import Decimal

from budgetguard_core.pricing import from_usd, to_usd
from budgetguard_core.settings import NS_PER_SECOND, VelocityLimits
from budgetguard_core.stop import StopReason, Violation

_WINDOW = 60
"""Seconds that the window reaches back, the current one not counted."""
_RING = 2 * _WINDOW + 2
"""Seconds that are kept: the window, now, and as far ahead as a call can be delayed."""

FARTHEST_NS = (_WINDOW + 1) * NS_PER_SECOND
"""The time ahead of now at which a call can be entered."""


class VelocityMeter:
    """Meters the use of the last minute, in constant memory. The guard's lock is its lock.

    The window is made of whole seconds, so that it covers the last 60 to 61 of them: never less
    than a minute. Times are nanoseconds of one monotonic clock.
    """

    def __init__(self, limits: VelocityLimits) -> None:
        self.limits = limits
        dollars = limits.max_cost_usd_per_minute
        ceilings = {
            "max_tokens_per_minute": limits.max_tokens_per_minute,
            "max_cost_usd_per_minute": None if dollars is None else from_usd(Decimal(dollars)),
            "max_tool_calls_per_minute": limits.max_tool_calls_per_minute,
        }
        self._windows = [
            _Window(name, ceiling or math.inf, limits.throttle_at)
            for name, ceiling in ceilings.items()
        ]
        # The second that the windows reach up to. Threads read the clock before they get the lock,
        # so a reading may be a little older.
        self._latest = 0

    def start_of_model_call(self, now_ns: int) -> int:
        """The start of a model call that is admitted now: at once, or later in the band."""
        return self._start(self._windows[:2], now_ns)

    def start_of_tool_call(self, now_ns: int) -> int:
        """The start of a tool call that is admitted now."""
        return self._start(self._windows[2:], now_ns)

    def _start(self, windows: list[_Window], now_ns: int) -> int:
        second = self._pass_time(now_ns)
        return max([now_ns, *(one.start(second) for one in windows if one.total >= one.band)])

    def book(self, start_ns: int, tokens: int = 0, cost: int = 0, tool_calls: int = 0) -> None:
        """Enter an admitted call at its start, 61 s ahead at most; the cost in femto-dollars."""
        index = start_ns // NS_PER_SECOND % _RING
        for window, amount in zip(self._windows, (tokens, cost, tool_calls), strict=True):
            window.ring[index] += amount
            window.total += amount

    def correct(
        self, start_ns: int, now_ns: int, tokens: int = 0, cost: int = 0, tool_calls: int = 0
    ) -> None:
        """Correct a call that has ended, or did not start.

        What it used more is entered now, for it was used until now. What it used less is taken
        from where it was entered, if the window still reaches back to that.
        """
        second, latest = start_ns // NS_PER_SECOND, self._pass_time(now_ns)
        for window, amount in zip(self._windows, (tokens, cost, tool_calls), strict=True):
            window.correct(second, latest, amount)

    def model_call_violations(self, now_ns: int) -> list[Violation]:
        """Return the ceilings that hold against one more model call."""
        self._pass_time(now_ns)
        return [self._violation(one) for one in self._windows[:2] if one.total >= one.ceiling]

    def tool_call_violations(self, now_ns: int) -> list[Violation]:
        """Return the ceilings that hold against one more tool call."""
        self._pass_time(now_ns)
        return [self._violation(one) for one in self._windows[2:] if one.total >= one.ceiling]

    def _violation(self, window: _Window) -> Violation:
        name, limit = window.name, getattr(self.limits, window.name)
        used = to_usd(window.total) if "cost" in name else window.total
        detail = f"{name}={limit} is reached: {used} in the last minute"
        return Violation(reason=StopReason.VELOCITY, limit=limit, used=used, detail=detail)

    def _pass_time(self, now_ns: int) -> int:
        """Drop what is older than the window; return the second that it reaches up to."""
        second = now_ns // NS_PER_SECOND
        if second > self._latest:
            for window in self._windows:
                window.pass_time(self._latest, second)
            self._latest = second
        return self._latest


class _Window:
    """The use in each second, of the last minute and of the delays ahead."""

    def __init__(self, name: str, ceiling: float, share: float) -> None:
        self.name = name
        self.ceiling = ceiling
        self.band = ceiling if ceiling == math.inf else math.ceil(share * ceiling)
        self.ring = [0] * _RING
        self.total = 0

    def start(self, second: int) -> int:
        """The time at which a call in the band may start: when usage has fallen below it."""
        remaining = self.total
        oldest = second - _WINDOW
        while True:
            remaining -= self.ring[oldest % _RING]
            oldest += 1
            if remaining < self.band or oldest > second:
                return (oldest + _WINDOW) * NS_PER_SECOND

    def correct(self, second: int, now: int, amount: int) -> None:
        """Add to what is used, or take from it."""
        if amount > 0:
            second = now
        elif second < now - _WINDOW:
            return
        index, ring = second % _RING, self.ring
        amount = max(amount, -ring[index])
        ring[index] += amount
        self.total += amount

    def pass_time(self, latest: int, second: int) -> None:
        """Drop what is older than the window."""
        if second - latest >= _RING:
            self.ring = [0] * _RING
            self.total = 0
            return
        for leaving in range(latest - _WINDOW, second - _WINDOW):
            self.total -= self.ring[leaving % _RING]
            self.ring[leaving % _RING] = 0
