"""What runs share, and what is kept of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from budgetguard_core.breakers import (
    BreakerRegistry,
    BulkheadConfig,
    CircuitBreakerConfig,
    RateLimit,
)
from budgetguard_core.breakers.circuit_breaker import CircuitBreaker, CircuitBreakerState

QUICK = CircuitBreakerConfig(sliding_window_size=1)
SLOW = RateLimit(rate=1)
MOST = 4096


def opened(registry, name, scope=""):
    breaker = registry.scoped(scope).circuit_breaker(name, QUICK, 0)
    breaker.record(breaker.try_acquire_permission(0).generation, True, 1, 0)
    assert breaker.state is CircuitBreakerState.OPEN
    return breaker


def test_the_same_name_scope_and_settings_are_the_same_one():
    registry = BreakerRegistry()
    acme = registry.scoped("acme")
    one = acme.circuit_breaker("search", QUICK, 0)
    assert registry.scoped("acme").circuit_breaker("search", QUICK.model_copy(), 9) is one
    others = [
        registry.circuit_breaker("search", QUICK, 0),
        acme.circuit_breaker("fetch", QUICK, 0),
        acme.circuit_breaker("search", CircuitBreakerConfig(), 0),
    ]
    assert len({id(breaker) for breaker in [one, *others]}) == 4
    assert registry.rate_limiter("*", SLOW, 0) is registry.rate_limiter("*", SLOW, 1)
    bulkhead = registry.bulkhead("*", BulkheadConfig(), 0)
    assert registry.bulkhead("*", BulkheadConfig(), 0) is bulkhead
    assert acme.bulkhead("*", BulkheadConfig(), 0) is not bulkhead


def test_names_without_end_push_out_what_is_idle_and_nothing_that_is_in_use():
    registry = BreakerRegistry()
    kept = opened(registry, "search")
    limiter = registry.rate_limiter("search", SLOW, 0)
    limiter.acquire(0)
    bulkhead = registry.bulkhead("search", BulkheadConfig(), 0)
    place = bulkhead.acquire(0)
    for number in range(MOST + 100):
        registry.circuit_breaker(f"invented_{number}", QUICK, 0)
        registry.rate_limiter(f"invented_{number}", SLOW, 0)
        registry.bulkhead(f"invented_{number}", BulkheadConfig(), 0)
    assert all(len(kept) == MOST for kept in registry._kept.values())
    assert registry.circuit_breaker("search", QUICK, 0) is kept
    assert registry.rate_limiter("search", SLOW, 0) is limiter
    assert registry.bulkhead("search", BulkheadConfig(), 0) is bulkhead
    bulkhead.release(place)


def test_what_is_all_in_use_is_all_kept():
    registry = BreakerRegistry()
    for number in range(MOST + 1):
        opened(registry, f"tool_{number}")
    assert len(registry._kept[CircuitBreaker]) == MOST + 1


def test_many_threads_get_the_same_one():
    registry = BreakerRegistry()
    barrier = threading.Barrier(16)

    def ask(_):
        barrier.wait()
        return [registry.circuit_breaker(f"tool_{number}", QUICK, 0) for number in range(50)]

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, range(16)))
    assert len({id(breaker) for some in found for breaker in some}) == 50
