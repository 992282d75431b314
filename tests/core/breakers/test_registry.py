"""What runs share, and what is kept of it."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from budgetguard_core.breakers import (
    BreakerRegistry,
    BulkheadConfig,
    CircuitBreakerConfig,
    CircuitBreakerState,
    RateLimit,
)

SECOND = 1_000_000_000
QUICK = CircuitBreakerConfig(sliding_window_size=1)
SLOW = RateLimit(rate=1)
MOST = 4096


def opened(registry, name, scope=""):
    breaker = registry.scoped(scope).circuit_breaker(name, QUICK, 0)
    breaker.on_error(breaker.try_acquire_permission(0).generation, 1, 0)
    assert breaker.circuit_state(0) is CircuitBreakerState.OPEN
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
    bulkhead = registry.bulkhead("*", BulkheadConfig())
    assert registry.bulkhead("*", BulkheadConfig()) is bulkhead
    assert acme.bulkhead("*", BulkheadConfig()) is not bulkhead


def test_a_person_finds_the_breakers_of_a_tool():
    registry = BreakerRegistry()
    one = registry.circuit_breaker("search", QUICK, 0)
    other = registry.scoped("acme").circuit_breaker("search", QUICK, 0)
    registry.circuit_breaker("fetch", QUICK, 0)
    assert registry.circuit_breakers("search") == {("", "search"): one, ("acme", "search"): other}
    assert len(registry.circuit_breakers()) == 3


def test_names_without_end_push_out_what_is_idle_and_nothing_that_is_in_use():
    registry = BreakerRegistry()
    kept = opened(registry, "search")
    forced = registry.circuit_breaker("fetch", QUICK, 0)
    forced.transition_to("forced_open", 0)
    limiter = registry.rate_limiter("search", SLOW, 0)
    limiter.acquire(0)
    bulkhead = registry.bulkhead("search", BulkheadConfig())
    place = bulkhead.acquire(0)
    for number in range(MOST + 100):
        registry.circuit_breaker(f"invented_{number}", QUICK, 0)
        registry.rate_limiter(f"invented_{number}", SLOW, 0)
        registry.bulkhead(f"invented_{number}", BulkheadConfig())
    assert len(registry.circuit_breakers()) == MOST
    assert registry.circuit_breaker("search", QUICK, 0) is kept
    assert registry.circuit_breaker("fetch", QUICK, 0) is forced
    assert registry.rate_limiter("search", SLOW, 0) is limiter
    assert registry.bulkhead("search", BulkheadConfig()) is bulkhead
    bulkhead.release(place)


def test_what_is_all_in_use_is_all_kept():
    registry = BreakerRegistry()
    for number in range(MOST + 1):
        opened(registry, f"tool_{number}")
    assert len(registry.circuit_breakers()) == MOST + 1


def test_many_threads_get_the_same_one():
    registry = BreakerRegistry()
    barrier = threading.Barrier(16)

    def ask(_):
        barrier.wait()
        return [registry.circuit_breaker(f"tool_{number}", QUICK, 0) for number in range(50)]

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, range(16)))
    assert len({id(breaker) for some in found for breaker in some}) == 50


def test_another_goes_on_where_a_state_was_taken():
    registry = BreakerRegistry()
    acme = registry.scoped("acme")
    opened(acme, "search", "acme")
    opened(registry, "other", "else")
    acme.rate_limiter("read/*", SLOW, 0).acquire(0)
    acme.rate_limiter("gone", SLOW, 0).acquire(0)
    state = json.loads(json.dumps(acme.state(SECOND // 2)))
    again = BreakerRegistry().scoped("acme")
    fresh = again.circuit_breaker("fetch", QUICK, 0)
    again.restore(state, 0, circuit_breaker=QUICK, rate_limits={"read/*": SLOW})
    assert set(again.circuit_breakers()) == {("acme", "search"), ("acme", "fetch")}
    assert again.circuit_breaker("fetch", QUICK, 0) is fresh
    assert again.circuit_breaker("search", QUICK, 0).retry_after(0) == 59.5
    assert not again.rate_limiter("read/*", SLOW, 0).is_full(0)
    assert again.rate_limiter("gone", SLOW, 0).is_full(0)
    # What it knows already is newer.
    again.circuit_breaker("search", QUICK, 0).reset(0)
    again.restore(state, 0, circuit_breaker=QUICK)
    assert again.circuit_breaker("search", QUICK, 0).retry_after(0) == 0
    nothing = BreakerRegistry()
    nothing.restore(state, 0)
    assert nothing.state(0) == {"circuit_breakers": {}, "rate_limiters": {}}


@pytest.mark.parametrize(
    "state",
    [None, {}, {"circuit_breakers": [], "rate_limiters": {}}, {"circuit_breakers": {}}],
)
def test_a_damaged_state_is_refused(state):
    with pytest.raises(ValueError, match=r"breaker registry must be what state\(\) returned"):
        BreakerRegistry().restore(state, 0)


def test_a_damaged_breaker_in_it_is_named():
    state = {"circuit_breakers": {"search": None}, "rate_limiters": {}}
    with pytest.raises(ValueError, match="the state of a circuit breaker must be"):
        BreakerRegistry().restore(state, 0, circuit_breaker=QUICK)
