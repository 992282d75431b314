"""The circuit breakers, rate limiters and bulkheads of a process, shared by its runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from copy import copy
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, cast

from budgetguard_core.breakers.bulkhead import Bulkhead
from budgetguard_core.breakers.circuit_breaker import (
    CircuitBreaker,
    CircuitBreakerState,
)
from budgetguard_core.breakers.rate_limit import RateLimiter
from budgetguard_core.settings import (
    BulkheadConfig,
    CircuitBreakerConfig,
    RateLimit,
    Settings,
    damaged,
)

_MOST = 4096
_LOOKED_AT = 64

_Key: TypeAlias = tuple[str, str, Settings]
_T = TypeVar("_T")


class BreakerRegistry:
    """What runs share: one circuit breaker for a tool, one rate limiter for a pattern, and so on.

    Safe for threads. The same name under other settings, or in another scope, is another one. At
    4,096 of a kind the least recently used that is idle makes room: a closed breaker, a full
    bucket, an empty bulkhead.

    Attributes:
        scope: The profile or tenant that this view of the registry is for; empty for all.
    """

    __slots__ = ("_breakers", "_bulkheads", "_limiters", "_lock", "scope")

    def __init__(self) -> None:
        self.scope = ""
        self._lock = threading.Lock()
        self._breakers: dict[_Key, CircuitBreaker] = {}
        self._limiters: dict[_Key, RateLimiter] = {}
        self._bulkheads: dict[_Key, Bulkhead] = {}

    def scoped(self, scope: str) -> BreakerRegistry:
        """Return the part of this registry that is for one profile or tenant."""
        view = copy(self)
        view.scope = scope
        return view

    def circuit_breaker(
        self, tool: str, config: CircuitBreakerConfig, now_ns: int
    ) -> CircuitBreaker:
        """Return the circuit breaker of a tool; a closed one where there is none yet.

        Args:
            tool: The tool's name.
            config: The settings.
            now_ns: The time.
        """

        def idle(breaker: CircuitBreaker) -> bool:
            return breaker.retry_after(now_ns) == 0 and breaker.circuit_state(now_ns) in (
                CircuitBreakerState.CLOSED,
                CircuitBreakerState.OPEN,
            )

        with self._lock:
            key = (self.scope, tool, config)
            return _kept(self._breakers, key, lambda: CircuitBreaker(tool, config), idle)

    def rate_limiter(self, pattern: str, limit: RateLimit, now_ns: int) -> RateLimiter:
        """Return the rate limiter of a pattern; as `circuit_breaker`."""

        def idle(limiter: RateLimiter) -> bool:
            return limiter.is_full(now_ns)

        with self._lock:
            key = (self.scope, pattern, limit)
            return _kept(self._limiters, key, lambda: RateLimiter(limit), idle)

    def bulkhead(self, pattern: str, config: BulkheadConfig) -> Bulkhead:
        """Return the bulkhead of a pattern; as `circuit_breaker`."""

        def idle(bulkhead: Bulkhead) -> bool:
            return bulkhead.running == 0

        with self._lock:
            key = (self.scope, pattern, config)
            return _kept(self._bulkheads, key, lambda: Bulkhead(config), idle)

    def circuit_breakers(self, tool: str | None = None) -> Mapping[tuple[str, str], CircuitBreaker]:
        """Return all circuit breakers by scope and name; those of one tool, where it is given.

        For a person who opens, closes or disables one by hand, with `transition_to`.
        """
        with self._lock:
            return {
                (scope, name): breaker
                for (scope, name, _), breaker in self._breakers.items()
                if tool is None or name == tool
            }

    def state(self, now_ns: int) -> dict[str, Any]:
        """Return what breakers and limiters of this scope know, ready for JSON, by name.

        Bulkheads are left out: their calls live in this process only.
        """
        with self._lock:
            return {
                "circuit_breakers": {
                    name: breaker.state(now_ns)
                    for (of, name, _), breaker in self._breakers.items()
                    if of == self.scope
                },
                "rate_limiters": {
                    name: limiter.state(now_ns)
                    for (of, name, _), limiter in self._limiters.items()
                    if of == self.scope
                },
            }

    def restore(
        self,
        state: object,
        now_ns: int,
        *,
        circuit_breaker: CircuitBreakerConfig | None = None,
        rate_limits: Mapping[str, RateLimit] = MappingProxyType({}),
    ) -> None:
        """Go on where the registry was whose `state` this is.

        What this registry has already stays as it is: it is newer. What there are no settings for
        any more is left out.

        Raises:
            ValueError: The state is damaged; nothing was changed.
        """
        breakers: dict[_Key, CircuitBreaker] = {}
        limiters: dict[_Key, RateLimiter] = {}
        try:
            data = cast("dict[str, dict[str, Any]]", state)
            for name, one in data["circuit_breakers"].items():
                if circuit_breaker is not None:
                    breakers[self.scope, name, circuit_breaker] = CircuitBreaker.from_state(
                        name, circuit_breaker, one, now_ns
                    )
            for name, one in data["rate_limiters"].items():
                limit = rate_limits.get(name)
                if limit is not None:
                    limiters[self.scope, name, limit] = RateLimiter.from_state(limit, one, now_ns)
        except (AttributeError, KeyError, TypeError):
            raise damaged("breaker registry", state) from None
        with self._lock:
            for breaker_key, breaker in breakers.items():
                self._breakers.setdefault(breaker_key, breaker)
            for limiter_key, limiter in limiters.items():
                self._limiters.setdefault(limiter_key, limiter)


def _kept(kept: dict[_Key, _T], key: _Key, new: Callable[[], _T], idle: Callable[[_T], bool]) -> _T:
    """Return the one that is kept, as the most recently used, or a new one."""
    one = kept.pop(key, None)
    if one is None:
        one = new()
        if len(kept) >= _MOST:
            # Never one that is in use: an open breaker that is forgotten would be a closed one.
            oldest = islice(kept, _LOOKED_AT)
            gone = next((candidate for candidate in oldest if idle(kept[candidate])), None)
            if gone is not None:
                del kept[gone]
    kept[key] = one
    return one
