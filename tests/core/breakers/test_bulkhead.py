"""The bulkhead, against a list of those inside and a list of those in front of the door."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetguard_core.breakers import BulkheadConfig
from budgetguard_core.breakers.bulkhead import Bulkhead

SECOND = 1_000_000_000
fixed = settings(derandomize=True, deadline=None, max_examples=150, database=None)


@pytest.mark.slow
@fixed
@given(
    places=st.integers(1, 4),
    waiting=st.sampled_from([0, 5]),
    traffic=st.lists(st.one_of(st.just("come"), st.integers(0, 20)), max_size=60),
)
def test_it_admits_what_two_lists_do(places, waiting, traffic):
    bulkhead = Bulkhead(BulkheadConfig(max_concurrent_calls=places, max_wait_duration=waiting))
    everybody, inside, outside, woken = [], [], [], []
    for step, what in enumerate(traffic):
        if what == "come":
            place = bulkhead.acquire(step)
            if place is not None:
                place.wake = partial(woken.append, len(everybody))
            if len(inside) < places:
                inside.append(place)
                assert place.granted
            elif waiting:
                outside.append(place)
                assert not place.granted
                assert place.wait_until_ns == step + waiting * SECOND
            else:
                assert place is None
            everybody.append(place)
        elif everybody:
            place = everybody[what % len(everybody)]
            if place is None:
                continue
            bulkhead.release(place)
            if place in outside:
                outside.remove(place)
            elif place in inside:
                inside.remove(place)
                if outside:
                    inside.append(outside.pop(0))
                    assert woken.pop() == everybody.index(inside[-1])
        assert woken == []
        assert bulkhead.load == (len(inside), len(outside))
        assert all(place.granted for place in inside)
        assert not any(place.granted for place in outside)


def test_never_more_at_once_than_there_are_places_and_all_get_one():
    bulkhead = Bulkhead(BulkheadConfig(max_concurrent_calls=3, max_wait_duration=60))
    barrier = threading.Barrier(24)
    at_once, most = 0, 0
    lock = threading.Lock()

    def call(_):
        nonlocal at_once, most
        ready = threading.Event()
        barrier.wait()
        for _ in range(20):
            place = bulkhead.acquire(0)
            assert place is not None
            place.wake = ready.set
            assert place.granted or ready.wait(10)
            ready.clear()
            with lock:
                at_once += 1
                most = max(most, at_once)
            with lock:
                at_once -= 1
            bulkhead.release(place)

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(call, range(24)))
    assert most <= 3
    assert bulkhead.load == (0, 0)


def test_who_waits_without_a_wake_sees_the_place_granted():
    bulkhead = Bulkhead(BulkheadConfig(max_concurrent_calls=1, max_wait_duration=1))
    first, second = bulkhead.acquire(0), bulkhead.acquire(0)
    bulkhead.release(first)
    assert second.granted
