"""Velocity: tokens, dollars and tool calls a minute.

A cap on a run's total lets a runaway spend all of it in a minute. This one looks at the pace: near
the ceiling calls are delayed, and a run that reaches it all the same is stopped.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Self, cast

from budgetguard_core.pricing import from_usd, to_usd
from budgetguard_core.settings import (
    NS_PER_SECOND,
    VelocityLimits,
    damaged,
)
from budgetguard_core.stop import StopReason, Violation

_WINDOW = 60
"""Seconds that the window reaches back, the current one not counted."""
_RING = 2 * _WINDOW + 2
"""Seconds that are kept: the window, now, and as far ahead as a call can be delayed."""

FARTHEST_NS = (_WINDOW + 1) * NS_PER_SECOND
"""How far ahead of now a call can be entered."""


class VelocityMeter:
    """What a run has used in the last minute, in constant memory. The guard's lock is its lock.

    The window is made of whole seconds, so that it covers the last 60 to 61 of them: never less
    than a minute. Times are nanoseconds of one monotonic clock.

    Args:
        limits: The ceilings.

    Attributes:
        calm_ns: Until when no call is delayed, whatever is asked; 0 once a band was reached.
    """

    __slots__ = (
        "_cost",
        "_latest",
        "_over_ns",
        "_tokens",
        "_tool_calls",
        "_windows",
        "calm_ns",
        "limits",
    )

    def __init__(self, limits: VelocityLimits) -> None:
        self.limits = limits
        share = limits.throttle_at
        dollars = limits.max_cost_usd_per_minute
        self._tokens = _Window.up_to(limits.max_tokens_per_minute, share)
        self._cost = _Window.up_to(None if dollars is None else from_usd(dollars), share)
        self._tool_calls = _Window.up_to(limits.max_tool_calls_per_minute, share)
        self._windows = {
            "tokens": self._tokens,
            "cost": self._cost,
            "tool_calls": self._tool_calls,
        }
        # The second that the windows reach up to. Threads read the clock before they get the lock,
        # so a reading may be a little older.
        self._latest = 0
        # When that second is over.
        self._over_ns = NS_PER_SECOND
        self.calm_ns = 0

    # Each step asks these: the windows are looked at in place, and a call is saved.

    def model_call_fits(self, now_ns: int) -> bool:
        """Whether a model call may start: neither tokens nor dollars have reached their ceiling."""
        if now_ns >= self._over_ns:
            self._pass_time(now_ns)
        tokens, cost = self._tokens, self._cost
        if tokens is not None and tokens.total >= tokens.ceiling:
            return False
        return cost is None or cost.total < cost.ceiling

    def tool_call_fits(self, now_ns: int) -> bool:
        """Whether one more tool call may start."""
        calls = self._tool_calls
        if calls is None:
            return True
        if now_ns >= self._over_ns:
            self._pass_time(now_ns)
        return calls.total < calls.ceiling

    def start_of_model_call(self, now_ns: int) -> int:
        """When a model call may start that is admitted now: at once, or later in the band."""
        if now_ns >= self._over_ns:
            self._pass_time(now_ns)
        start = now_ns
        tokens, cost = self._tokens, self._cost
        if tokens is not None and tokens.total >= tokens.band:
            start = tokens.start(self._latest)
        if cost is not None and cost.total >= cost.band:
            start = max(start, cost.start(self._latest))
        return start

    def start_of_tool_call(self, now_ns: int) -> int:
        """When a tool call may start that is admitted now."""
        calls = self._tool_calls
        if calls is None:
            return now_ns
        if now_ns >= self._over_ns:
            self._pass_time(now_ns)
        return now_ns if calls.total < calls.band else calls.start(self._latest)

    def book_model_call(self, start_ns: int, tokens: int, cost: int) -> None:
        """Enter a model call that is admitted.

        Args:
            start_ns: When it starts: what `start_of_model_call` said, or up to 61 seconds from
                now where another meter holds it longer.
            tokens: Tokens that are reserved for it.
            cost: Femto-dollars that are reserved for it.
        """
        place = start_ns // NS_PER_SECOND % _RING
        window = self._tokens
        if window is not None and tokens:
            window.ring[place] += tokens
            window.total = total = window.total + tokens
            if total >= window.band:
                self.calm_ns = 0
        window = self._cost
        if window is not None and cost:
            window.ring[place] += cost
            window.total = total = window.total + cost
            if total >= window.band:
                self.calm_ns = 0

    def book_tool_call(self, start_ns: int) -> None:
        """Enter a tool call that is admitted."""
        calls = self._tool_calls
        if calls is not None:
            calls.ring[start_ns // NS_PER_SECOND % _RING] += 1
            calls.total = total = calls.total + 1
            if total >= calls.band:
                self.calm_ns = 0

    def correct_model_call(self, start_ns: int, now_ns: int, tokens: int, cost: int) -> None:
        """Correct a model call that has ended.

        What it used more is entered now, for it was used until now. What it used less is taken
        from where it was entered, if the window still reaches back to that.

        Args:
            start_ns: When it started, as it was entered.
            now_ns: The time.
            tokens: Tokens measured minus tokens reserved.
            cost: Femto-dollars measured minus femto-dollars reserved.
        """
        if now_ns >= self._over_ns:
            self._pass_time(now_ns)
        second, latest = start_ns // NS_PER_SECOND, self._latest
        window = self._tokens
        if window is not None and tokens and window.correct(second, latest, tokens):
            self.calm_ns = 0
        window = self._cost
        if window is not None and cost and window.correct(second, latest, cost):
            self.calm_ns = 0

    def withdraw_tool_call(self, start_ns: int, now_ns: int) -> None:
        """Take out a tool call that did not start."""
        if self._tool_calls is not None:
            now = self._pass_time(now_ns)
            self._tool_calls.correct(start_ns // NS_PER_SECOND, now, -1)

    def model_call_violations(self, now_ns: int) -> list[Violation]:
        """Say which ceilings hold against one more model call."""
        self._pass_time(now_ns)
        limits = self.limits
        found: list[Violation] = []
        if self._tokens is not None and self._tokens.reached:
            found.append(
                _violation(
                    "max_tokens_per_minute", limits.max_tokens_per_minute, self._tokens.total
                )
            )
        if self._cost is not None and self._cost.reached:
            found.append(
                _violation(
                    "max_cost_usd_per_minute",
                    limits.max_cost_usd_per_minute,
                    to_usd(self._cost.total),
                )
            )
        return found

    def tool_call_violations(self, now_ns: int) -> list[Violation]:
        """Say which ceilings hold against one more tool call."""
        self._pass_time(now_ns)
        calls = self._tool_calls
        if calls is None or not calls.reached:
            return []
        limit = self.limits.max_tool_calls_per_minute
        return [_violation("max_tool_calls_per_minute", limit, calls.total)]

    def state(self, now_ns: int) -> dict[str, Any]:
        """Return what the meter knows, ready for JSON. Times are kept as ages in seconds."""
        second = self._pass_time(now_ns)
        return {
            name: [] if window is None else window.state(second)
            for name, window in self._windows.items()
        }

    @classmethod
    def from_state(cls, limits: VelocityLimits, state: object, now_ns: int) -> Self:
        """Make a meter that goes on where another's `state` was taken.

        What the other had no ceiling for begins at nothing.

        Raises:
            ValueError: The state is damaged.
        """
        meter = cls(limits)
        try:
            meter._load(cast("dict[str, Any]", state), now_ns)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise damaged("velocity meter", state) from None
        return meter

    def _load(self, state: dict[str, Any], now_ns: int) -> None:
        second = self._pass_time(now_ns)
        windows = self._windows
        if state.keys() != windows.keys():
            raise ValueError
        for name, window in windows.items():
            if window is not None:
                window.load(state[name], second)
        self._look()

    def _pass_time(self, now_ns: int) -> int:
        """Let what is older than the window go; the second that it reaches up to."""
        second = now_ns // NS_PER_SECOND
        if second > self._latest:
            for window in self._windows.values():
                if window is not None:
                    window.pass_time(self._latest, second)
            self._latest = second
            self._over_ns = (second + 1) * NS_PER_SECOND
            self._look()
        return self._latest

    def _look(self) -> None:
        """Work out until when no call is delayed."""
        windows = self._windows.values()
        calm = all(window is None or window.total < window.band for window in windows)
        self.calm_ns = self._over_ns if calm else 0


class _Window:
    """What was used in each second, of the last minute and of the delays ahead."""

    __slots__ = ("band", "ceiling", "ring", "total")

    def __init__(self, ceiling: int, share: float) -> None:
        self.ceiling = ceiling
        self.band = -int(-share * ceiling // 1)
        self.ring = [0] * _RING
        self.total = 0

    @classmethod
    def up_to(cls, ceiling: int | None, share: float) -> _Window | None:
        return None if ceiling is None else cls(ceiling, share)

    @property
    def reached(self) -> bool:
        """Whether the ceiling is reached, with what is in flight and what is delayed."""
        return self.total >= self.ceiling

    def start(self, second: int) -> int:
        """When a call may start that is in the band: when what was used has fallen below it."""
        left = self.total
        oldest = second - _WINDOW
        while True:
            left -= self.ring[oldest % _RING]
            oldest += 1
            if left < self.band or oldest > second:
                return (oldest + _WINDOW) * NS_PER_SECOND

    def add(self, second: int, amount: int) -> None:
        self.ring[second % _RING] += amount
        self.total += amount

    def correct(self, second: int, now: int, amount: int) -> bool:
        """Add to what is used, or take from it; True where the band is reached then."""
        if amount > 0:
            second = now
        elif second < now - _WINDOW:
            return False
        place, ring = second % _RING, self.ring
        left = ring[place] + amount
        if left < 0:
            amount, left = amount - left, 0
        ring[place] = left
        self.total = total = self.total + amount
        return total >= self.band

    def state(self, second: int) -> list[list[int]]:
        seconds = range(second - _WINDOW, second + _WINDOW + 2)
        return [[second - one, self.ring[one % _RING]] for one in seconds if self.ring[one % _RING]]

    def load(self, state: list[list[int]], second: int) -> None:
        for age, amount in state:
            if type(age) is not int or not -_WINDOW - 1 <= age <= _WINDOW:
                raise ValueError
            if type(amount) is not int or amount < 1:
                raise ValueError
            self.add(second - age, amount)

    def pass_time(self, latest: int, second: int) -> None:
        """Let what is older than the window go."""
        if second - latest >= _RING:
            self.ring = [0] * _RING
            self.total = 0
            return
        for leaving in range(latest - _WINDOW, second - _WINDOW):
            self.total -= self.ring[leaving % _RING]
            self.ring[leaving % _RING] = 0


def _violation(name: str, limit: int | Decimal | None, used: int | Decimal) -> Violation:
    return Violation(
        reason=StopReason.VELOCITY,
        limit=limit,
        used=used,
        detail=f"{name}={limit} is reached: {used} in the last minute",
    )
