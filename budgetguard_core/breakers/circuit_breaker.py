"""Circuit breaker: a tool that keeps failing is left alone for a while, then tried again.

States, transitions, names and default values are those of resilience4j's documentation
(https://resilience4j.readme.io/docs/circuitbreaker). Three things are decided here, because the
documentation leaves them open or its implementation differs from it:

- A result counts only in the state that permitted its call. A slow call from before the breaker
  opened neither decides the trial nor gives a trial call back.
- A trial is decided when all permitted calls have reported, whatever the minimum number of calls.
- No thread waits for a time to come: what is due is done when the breaker is next looked at.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self, cast

from budgetguard_core.breakers.sliding_window import CountWindow, TimeWindow
from budgetguard_core.settings import (
    NS_PER_SECOND,
    CircuitBreakerConfig,
    damaged,
    nanoseconds,
    natural,
)


class CircuitBreakerState(StrEnum):
    """What a circuit breaker does with a call."""

    CLOSED = "closed"
    """Permits every call, and watches how they end."""
    OPEN = "open"
    """Permits none until the wait is over."""
    HALF_OPEN = "half_open"
    """Permits a few trial calls, and goes by how they end."""
    FORCED_OPEN = "forced_open"
    """Permits none until it is told otherwise; records nothing."""
    DISABLED = "disabled"
    """Permits every call until it is told otherwise; records nothing."""


@dataclass(frozen=True, slots=True)
class StateTransition:
    """A change of state."""

    breaker: str
    """The breaker's name."""
    from_state: CircuitBreakerState
    to_state: CircuitBreakerState
    detail: str
    """One sentence for people: what the change was decided by."""


class Permission(NamedTuple):
    """The answer to whether a call may start."""

    permitted: bool
    generation: int
    """What the call's result has to be reported with. It names the state that permitted it."""
    retry_after: float | None = None
    """Where it was turned away: seconds after which it may be permitted; None if that is not known
    (trial calls are in flight, or the breaker was opened by hand)."""
    transitions: tuple[StateTransition, ...] = ()
    """The changes of state that asking has brought about."""


@dataclass(frozen=True, slots=True)
class CircuitBreakerMetrics:
    """What a breaker has seen in the state that it is in."""

    number_of_buffered_calls: int
    number_of_failed_calls: int
    number_of_slow_calls: int
    number_of_not_permitted_calls: int
    failure_rate: float
    """Percentage; -1 below the minimum number of calls."""
    slow_call_rate: float
    """Percentage; -1 below the minimum number of calls."""


class CircuitBreaker:
    """The state of one circuit breaker. Safe for threads; it waits for nothing.

    Ask before the call, then report how it ended, with the generation of the answer. Times are
    nanoseconds of one monotonic clock, the same for all who share the breaker.

    Args:
        name: What it is for: a tool, in transitions and metrics.
        config: The settings; resilience4j's defaults if left out.
    """

    __slots__ = (
        "_admitted",
        "_closed",
        "_enough",
        "_generation",
        "_granted",
        "_lock",
        "_not_permitted",
        "_now",
        "_since",
        "_slow_ns",
        "_state",
        "_trial_ns",
        "_wait_ns",
        "_window",
        "config",
        "name",
    )
    _closed: Permission | None

    def __init__(self, name: str, config: CircuitBreakerConfig | None = None) -> None:
        self.name = name
        self.config = config or CircuitBreakerConfig()
        self._lock = threading.Lock()
        self._wait_ns = nanoseconds(self.config.wait_duration_in_open_state)
        self._trial_ns = nanoseconds(self.config.max_wait_duration_in_half_open_state)
        self._slow_ns = nanoseconds(self.config.slow_call_duration_threshold)
        self._now = 0
        self._generation = 0
        self._closed: Permission | None = None
        self._enter(CircuitBreakerState.CLOSED, 0)

    # The questions that a call asks

    def try_acquire_permission(self, now_ns: int) -> Permission:
        """Ask whether a call may start.

        A permission that is given must be answered once, by `on_success`, `on_error` or
        `release_permission`; a trial call that never is keeps its place.
        """
        # Read at once, so that a closed breaker, as almost all are, costs no lock.
        closed = self._closed
        if closed is not None:
            return closed
        with self._lock:
            now = self._time(now_ns)
            transitions = self._pass_time(now, asked=True)
            state = self._state
            if state in (CircuitBreakerState.CLOSED, CircuitBreakerState.DISABLED):
                return self._granted
            if state is CircuitBreakerState.HALF_OPEN:
                permitted = self.config.permitted_number_of_calls_in_half_open_state
                if self._admitted < permitted:
                    self._admitted += 1
                    return self._granted._replace(transitions=transitions)
            self._not_permitted += 1
            return Permission(False, self._generation, self._retry_after(now), transitions)

    def on_success(
        self, generation: int, duration_ns: int, now_ns: int
    ) -> tuple[StateTransition, ...]:
        """Record a call that succeeded.

        Args:
            generation: The one that the permission had.
            duration_ns: How long the call took.
            now_ns: When it ended.

        Returns:
            The changes of state that this has brought about.
        """
        return self.record(generation, False, duration_ns, now_ns)

    def on_error(
        self, generation: int, duration_ns: int, now_ns: int
    ) -> tuple[StateTransition, ...]:
        """Record a call that failed; as `on_success`."""
        return self.record(generation, True, duration_ns, now_ns)

    def release_permission(self, generation: int) -> None:
        """Give back the permission of a call that did not start, or whose error is ignored."""
        with self._lock:
            if self._state is CircuitBreakerState.HALF_OPEN and generation == self._generation:
                self._admitted -= 1

    # What is asked of it from outside

    def circuit_state(self, now_ns: int) -> CircuitBreakerState:
        """Return the state that the breaker is in, with what has become due by itself."""
        with self._lock:
            self._pass_time(self._time(now_ns), asked=False)
            return self._state

    def retry_after(self, now_ns: int) -> float | None:
        """Seconds after which a call may be permitted; 0 for now, None where it is not known."""
        with self._lock:
            now = self._time(now_ns)
            self._pass_time(now, asked=False)
            return self._retry_after(now)

    def metrics(self, now_ns: int) -> CircuitBreakerMetrics:
        """Return what the breaker has seen in the state that it is in."""
        with self._lock:
            now = self._time(now_ns)
            self._pass_time(now, asked=False)
            window = self._window
            window.pass_time(now)
            enough = window.total >= self._minimum() and window.total > 0
            return CircuitBreakerMetrics(
                window.total,
                window.failed,
                window.slow,
                self._not_permitted,
                100 * window.failed / window.total if enough else -1.0,
                100 * window.slow / window.total if enough else -1.0,
            )

    def transition_to(self, state: CircuitBreakerState | str, now_ns: int) -> StateTransition:
        """Change the state by hand, from any to any; what was recorded is forgotten.

        The two forced states are entered and left only here and by `reset`.
        """
        with self._lock:
            return self._change(
                CircuitBreakerState(state), self._time(now_ns), "it was changed by hand"
            )

    def reset(self, now_ns: int) -> StateTransition:
        """Close the breaker and forget what was recorded."""
        return self.transition_to(CircuitBreakerState.CLOSED, now_ns)

    # Snapshots

    def state(self, now_ns: int) -> dict[str, Any]:
        """Return what the breaker knows, ready for JSON. Times are kept as ages."""
        with self._lock:
            now = self._time(now_ns)
            self._pass_time(now, asked=False)
            self._window.pass_time(now)
            return {
                "state": str(self._state),
                "generation": self._generation,
                "age_ns": now - self._since,
                "admitted": self._admitted,
                "not_permitted": self._not_permitted,
                "window": self._window.state(now),
            }

    @classmethod
    def from_state(
        cls, name: str, config: CircuitBreakerConfig | None, state: object, now_ns: int
    ) -> Self:
        """Make a breaker that goes on where another's `state` was taken.

        Under another kind of window what was recorded is forgotten; the state is kept.

        Raises:
            ValueError: The state is damaged.
        """
        breaker = cls(name, config)
        try:
            breaker._load(cast("dict[str, Any]", state), now_ns)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise damaged("circuit breaker", state) from None
        return breaker

    def _load(self, state: dict[str, Any], now: int) -> None:
        known = {"state", "generation", "age_ns", "admitted", "not_permitted", "window"}
        if state.keys() != known or natural(state["generation"]) < 1:
            raise ValueError
        self._now = now
        self._enter(CircuitBreakerState(state["state"]), now - natural(state["age_ns"]))
        self._generation = state["generation"]
        self._granted = Permission(True, self._generation)
        if self._closed is not None:
            self._closed = self._granted
        self._admitted = natural(state["admitted"])
        self._not_permitted = natural(state["not_permitted"])
        self._window.load(state["window"], now)
        if self._state is CircuitBreakerState.HALF_OPEN:
            permitted = self.config.permitted_number_of_calls_in_half_open_state
            if max(self._admitted, self._window.total + 1) > permitted:
                # Fewer trial calls are permitted now than were made: begin the trial anew.
                self._enter(CircuitBreakerState.HALF_OPEN, now)

    # The machine

    def _time(self, now_ns: int) -> int:
        # Threads read the clock before they get the lock, so a reading may be a little old.
        if now_ns > self._now:
            self._now = now_ns
        return self._now

    def _enter(self, state: CircuitBreakerState, since: int) -> None:
        config = self.config
        self._state = state
        self._since = since
        self._generation += 1
        self._granted = Permission(True, self._generation)
        self._closed = self._granted if state is CircuitBreakerState.CLOSED else None
        self._admitted = 0
        self._not_permitted = 0
        if state is CircuitBreakerState.HALF_OPEN:
            size = config.permitted_number_of_calls_in_half_open_state
            self._window: CountWindow | TimeWindow = CountWindow(size)
        elif state is CircuitBreakerState.CLOSED and config.sliding_window_type == "time_based":
            self._window = TimeWindow(config.sliding_window_size)
        else:
            self._window = CountWindow(config.sliding_window_size)
        self._enough = self._minimum()

    def _change(self, state: CircuitBreakerState, since: int, detail: str) -> StateTransition:
        before = self._state
        self._enter(state, since)
        return StateTransition(self.name, before, state, detail)

    def _pass_time(self, now: int, *, asked: bool) -> tuple[StateTransition, ...]:
        """Do what is due; `asked` when a call wants to start."""
        transitions: tuple[StateTransition, ...] = ()
        if self._state is CircuitBreakerState.HALF_OPEN and self._trial_ns:
            over = self._since + self._trial_ns
            if now >= over:
                transitions = (
                    self._change(
                        CircuitBreakerState.OPEN, over, "the trial calls did not end in time"
                    ),
                )
        if self._state is CircuitBreakerState.OPEN:
            automatic = self.config.automatic_transition_from_open_to_half_open_enabled
            over = self._since + self._wait_ns
            if now >= over and (asked or automatic):
                # Trials that came and went while nobody looked are left out.
                missed = not automatic or (self._trial_ns and now >= over + self._trial_ns)
                transitions += (
                    self._change(
                        CircuitBreakerState.HALF_OPEN,
                        now if missed else over,
                        "the wait in the open state is over",
                    ),
                )
        return transitions

    def _retry_after(self, now: int) -> float | None:
        state = self._state
        if state is CircuitBreakerState.OPEN:
            return max(self._since + self._wait_ns - now, 0) / NS_PER_SECOND
        if state is CircuitBreakerState.FORCED_OPEN:
            return None
        full = (
            state is CircuitBreakerState.HALF_OPEN
            and self._admitted >= self.config.permitted_number_of_calls_in_half_open_state
        )
        return None if full else 0.0

    def _minimum(self) -> int:
        config = self.config
        if self._state is CircuitBreakerState.HALF_OPEN:
            return config.permitted_number_of_calls_in_half_open_state
        if config.sliding_window_type == "time_based":
            return config.minimum_number_of_calls
        return min(config.minimum_number_of_calls, config.sliding_window_size)

    def record(
        self, generation: int, failed: bool, duration_ns: int, now_ns: int
    ) -> tuple[StateTransition, ...]:
        """Record how a call ended: `on_success` and `on_error` in one."""
        slow = duration_ns > self._slow_ns
        # Read at once, as for the permission: one more success leaves a window of nothing else as
        # it is, whatever other threads record before or after.
        if not (failed or slow or self._closed is None) and self._window.is_spotless:
            return ()
        with self._lock:
            now = self._now
            if now_ns > now:
                self._now = now = now_ns
            transitions: tuple[StateTransition, ...] = ()
            trial = False
            if self._closed is None:
                transitions = self._pass_time(now, asked=False)
                trial = self._state is CircuitBreakerState.HALF_OPEN
                if not trial:
                    return transitions
            if generation != self._generation:
                return transitions
            window = self._window
            window.record(now, failed, slow)
            if window.total < self._enough or not (trial or window.failed or window.slow):
                return transitions
            config = self.config
            detail = None
            if 100 * window.failed >= config.failure_rate_threshold * window.total:
                detail = (
                    f"{window.failed} of {window.total} calls failed, "
                    f"failure_rate_threshold={config.failure_rate_threshold:g}"
                )
            elif 100 * window.slow >= config.slow_call_rate_threshold * window.total:
                detail = (
                    f"{window.slow} of {window.total} calls were slow, "
                    f"slow_call_rate_threshold={config.slow_call_rate_threshold:g}"
                )
            if detail is not None:
                return (*transitions, self._change(CircuitBreakerState.OPEN, now, detail))
            if trial:
                detail = f"{window.total} trial calls ended below the thresholds"
                return (*transitions, self._change(CircuitBreakerState.CLOSED, now, detail))
            return transitions
