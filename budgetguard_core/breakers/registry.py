"""The circuit breakers, rate limiters and bulkheads of a process, shared by its runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import copy
from itertools import islice
from typing import Any, TypeVar

from budgetguard_core.breakers.bulkhead import Bulkhead
from budgetguard_core.breakers.circuit_breaker import CircuitBreaker
from budgetguard_core.breakers.rate_limit import RateLimiter
from budgetguard_core.settings import BulkheadConfig, CircuitBreakerConfig, RateLimit

_MOST = 4096
_LOOKED_AT = 64
_T = TypeVar("_T", CircuitBreaker, RateLimiter, Bulkhead)


class BreakerRegistry:
    """The breakers that runs share: one circuit breaker a tool, one rate limiter a pattern, ...

    Safe for threads. The same name under other settings, or in another scope, is another one. At
    4,096 of a kind the least recently used that is idle makes room: a closed breaker, a full
    bucket, an empty bulkhead.
    """

    def __init__(self) -> None:
        self.scope = ""
        self._lock = threading.Lock()
        self._kept: dict[type, dict[Any, Any]] = {CircuitBreaker: {}, RateLimiter: {}, Bulkhead: {}}

    def scoped(self, scope: str) -> BreakerRegistry:
        """Return the part of this registry that is for one profile or tenant."""
        view = copy(self)
        view.scope = scope
        return view

    def circuit_breaker(
        self, tool: str, config: CircuitBreakerConfig, now_ns: int
    ) -> CircuitBreaker:
        """Return the circuit breaker of a tool; a closed one where there is none yet."""
        return self._of(CircuitBreaker, tool, config, now_ns, lambda: CircuitBreaker(tool, config))

    def rate_limiter(self, pattern: str, limit: RateLimit, now_ns: int) -> RateLimiter:
        """Return the rate limiter of a pattern; a full one where there is none yet."""
        return self._of(RateLimiter, pattern, limit, now_ns, lambda: RateLimiter(limit))

    def bulkhead(self, pattern: str, config: BulkheadConfig, now_ns: int) -> Bulkhead:
        """Return the bulkhead of a pattern; an empty one where there is none yet."""
        return self._of(Bulkhead, pattern, config, now_ns, lambda: Bulkhead(config))

    def _of(
        self, kind: type[_T], name: str, settings: object, now_ns: int, new: Callable[[], _T]
    ) -> _T:
        """Return the one that is kept, as the most recently used, or a new one."""
        with self._lock:
            kept = self._kept[kind]
            key = (self.scope, name, settings)
            one: _T | None = kept.pop(key, None)
            if one is None:
                one = new()
                if len(kept) >= _MOST:
                    # None that is in use: an open breaker, once forgotten, would be a closed one.
                    oldest = islice(kept.items(), _LOOKED_AT)
                    gone = next((key for key, other in oldest if other.is_idle(now_ns)), None)
                    kept.pop(gone, None)
            kept[key] = one
            return one
