"""Circuit breaker: a tool that keeps failing is left alone for a while, then tried again.

States, transitions, names and default values are those of resilience4j's documentation
(https://resilience4j.readme.io/docs/circuitbreaker), with a count-based window. Three things are
decided here, because the documentation leaves them open or its implementation differs from it:

- A result counts only in the state that permitted its call. A slow call from before the breaker
  opened neither decides the trial nor gives a trial call back.
- A trial is decided when all permitted calls have reported, whatever the minimum number of calls.
- No thread waits for a time to come: the trial begins with the first call after the wait.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import StrEnum
from typing import NamedTuple

from budgetguard_core.settings import NS_PER_SECOND, CircuitBreakerConfig, nanoseconds

_NAME_LENGTH = 200


class CircuitBreakerState(StrEnum):
    """The states of a circuit breaker, by what it does with a call."""

    CLOSED = "closed"
    """Permits every call, and watches how they end."""
    OPEN = "open"
    """Permits none until the wait is over."""
    HALF_OPEN = "half_open"
    """Permits a few trial calls, and goes by how they end."""


class StateTransition(NamedTuple):
    """A change of state, with the fields of its event."""

    breaker: str
    from_state: str
    to_state: str
    detail: str


class Permission(NamedTuple):
    """The answer to whether a call may start."""

    permitted: bool
    generation: int
    """The token with which the call's result is reported. It names the state that permitted it."""
    retry_after: float | None = None
    """For a refused call: seconds after which it may be permitted; None if that is not known
    (trial calls are in flight)."""
    transitions: tuple[StateTransition, ...] = ()
    """The changes of state that asking has brought about."""


class CircuitBreaker:
    """The state of one circuit breaker. Safe for threads; it waits for nothing.

    Ask before the call, then report how it ended, with the generation of the answer. Times are
    nanoseconds of one monotonic clock, the same for all who share the breaker.

    Args:
        name: What it is for: a tool, in transitions.
        config: The settings; resilience4j's defaults if left out.
    """

    def __init__(self, name: str, config: CircuitBreakerConfig | None = None) -> None:
        self.name = name
        self.config = config or CircuitBreakerConfig()
        self._lock = threading.Lock()
        self._wait_ns = nanoseconds(self.config.wait_duration_in_open_state)
        self._slow_ns = nanoseconds(self.config.slow_call_duration_threshold)
        self._now = self._generation = self._failed = self._slow = self._minimum = 0
        self._enter(CircuitBreakerState.CLOSED, 0)

    def try_acquire_permission(self, now_ns: int) -> Permission:
        """Ask whether a call may start.

        A permission that is given must be answered once, by `record` or `release_permission`; a
        trial call that never is keeps its place.
        """
        with self._lock:
            now = self._time(now_ns)
            transitions: tuple[StateTransition, ...] = ()
            if self._state is CircuitBreakerState.OPEN and not self._retry_after(now):
                detail = "the wait in the open state is over"
                transitions = (self._change(CircuitBreakerState.HALF_OPEN, now, detail),)
            permitted = self._state is CircuitBreakerState.CLOSED
            if self._state is CircuitBreakerState.HALF_OPEN:
                permitted = self._trials < self._minimum
                self._trials += permitted
            after = None if permitted else self._retry_after(now)
            return Permission(permitted, self._generation, after, transitions)

    def record(
        self, generation: int, failed: bool, duration_ns: int, now_ns: int
    ) -> tuple[StateTransition, ...]:
        """Record how a call ended, and return the changes of state that this has brought about."""
        with self._lock:
            if generation != self._generation:
                return ()
            calls, config = self._calls, self.config
            if len(calls) == calls.maxlen:
                self._failed -= calls[0][0]
                self._slow -= calls[0][1]
            calls.append((failed, duration_ns > self._slow_ns))
            self._failed = fails = self._failed + failed
            self._slow = slow = self._slow + calls[-1][1]
            if len(calls) < self._minimum:
                return ()
            state = CircuitBreakerState.OPEN
            if 100 * fails >= config.failure_rate_threshold * len(calls):
                threshold = f"failure_rate_threshold={config.failure_rate_threshold:g}"
                detail = f"{fails} of {len(calls)} calls failed, {threshold}"
            elif 100 * slow >= config.slow_call_rate_threshold * len(calls):
                threshold = f"slow_call_rate_threshold={config.slow_call_rate_threshold:g}"
                detail = f"{slow} of {len(calls)} calls were slow, {threshold}"
            elif self._state is CircuitBreakerState.HALF_OPEN:
                detail = f"{len(calls)} trial calls ended below the thresholds"
                state = CircuitBreakerState.CLOSED
            else:
                return ()
            return (self._change(state, self._time(now_ns), detail),)

    def release_permission(self, generation: int) -> None:
        """Give back the permission of a call that did not start, or whose error is ignored."""
        with self._lock:
            if self._state is CircuitBreakerState.HALF_OPEN and generation == self._generation:
                self._trials -= 1

    @property
    def state(self) -> CircuitBreakerState:
        """The state that the breaker is in; it leaves the open one when a call next asks."""
        return self._state

    def is_idle(self, now_ns: int) -> bool:
        """True if a new one in its place would permit the same calls."""
        with self._lock:
            is_trial = self._state is CircuitBreakerState.HALF_OPEN
            return not is_trial and not self._retry_after(self._time(now_ns))

    # The machine, under the lock

    def _time(self, now_ns: int) -> int:
        # Threads read the clock before they get the lock, so a reading may be a little old.
        self._now = max(self._now, now_ns)
        return self._now

    def _enter(self, state: CircuitBreakerState, since: int) -> None:
        config = self.config
        self._state = state
        self._since = since
        self._generation += 1
        self._trials = self._failed = self._slow = 0
        size = config.sliding_window_size
        self._minimum = min(config.minimum_number_of_calls, size)
        if state is CircuitBreakerState.HALF_OPEN:
            size = self._minimum = config.permitted_number_of_calls_in_half_open_state
        # Of each call whether it failed, and whether it was slow.
        self._calls: deque[tuple[bool, bool]] = deque(maxlen=size)

    def _change(self, state: CircuitBreakerState, since: int, detail: str) -> StateTransition:
        before = self._state
        self._enter(state, since)
        return StateTransition(self.name[:_NAME_LENGTH], before.value, state.value, detail)

    def _retry_after(self, now: int) -> float | None:
        if self._state is CircuitBreakerState.OPEN:
            return max(self._since + self._wait_ns - now, 0) / NS_PER_SECOND
        full = self._state is CircuitBreakerState.HALF_OPEN and self._trials >= self._minimum
        return None if full else 0.0
