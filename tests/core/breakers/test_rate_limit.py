"""The token bucket, against one that counts tokens in fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetguard_core.breakers import RateLimit
from budgetguard_core.breakers.rate_limit import RateLimiter, Turn
from budgetguard_core.errors import ConfigurationError

SECOND = 1_000_000_000
fixed = settings(derandomize=True, deadline=None, max_examples=150, database=None)


class Bucket:
    """Tokens that come back one by one; a call that waits has its token before it is there."""

    def __init__(self, limit):
        # What a nanosecond brings: rounded as the limiter does, or the two drift apart.
        self.speed = Fraction(1, -int(-SECOND // limit.rate))
        self.burst = limit.burst
        self.longest = limit.max_wait_duration * SECOND
        self.tokens = Fraction(limit.burst)
        self.then = 0

    def look(self, now):
        self.tokens = min(self.tokens + (now - self.then) * self.speed, Fraction(self.burst))
        self.then = now

    def take(self, now):
        self.look(now)
        wait = max((1 - self.tokens) / self.speed, Fraction(0))
        if wait > self.longest:
            return False, wait - self.longest
        self.tokens -= 1
        return True, wait


@fixed
@given(
    rate=st.sampled_from([0.1, 1, 3, 7.5]),
    burst=st.integers(1, 5),
    longest=st.sampled_from([0, 0.5, 4]),
    traffic=st.lists(st.tuples(st.sampled_from([0, 0.01, 0.3, 1, 20]), st.booleans()), max_size=60),
)
def test_it_admits_what_a_bucket_of_tokens_does(rate, burst, longest, traffic):
    limit = RateLimit(rate=rate, burst=burst, max_wait_duration=longest)
    limiter, bucket = RateLimiter(limit), Bucket(limit)
    now = 0
    for pause, given_back in traffic:
        now += int(pause * SECOND)
        turn = limiter.acquire(now)
        assert turn == bucket.take(now)
        if turn.admitted and given_back:
            limiter.release()
            bucket.tokens += 1


def test_a_burst_then_the_rate():
    limiter = RateLimiter(RateLimit(rate=2, burst=3))
    assert [limiter.acquire(0).admitted for _ in range(5)] == [True, True, True, False, False]
    assert limiter.acquire(0) == Turn(False, SECOND // 2)
    assert limiter.acquire(0).seconds == 0.5
    assert limiter.acquire(SECOND // 2) == Turn(True, 0)
    assert not limiter.acquire(SECOND // 2).admitted


def test_those_who_wait_are_served_in_the_order_of_asking():
    limiter = RateLimiter(RateLimit(rate=1, max_wait_duration=3))
    assert [limiter.acquire(0).seconds for _ in range(4)] == [0, 1, 2, 3]
    assert limiter.acquire(0) == Turn(False, SECOND)


def test_who_asks_again_when_told_to_is_admitted():
    limiter = RateLimiter(RateLimit(rate=0.3, burst=2, max_wait_duration=1))
    now = 0
    for _ in range(50):
        turn = limiter.acquire(now)
        if not turn.admitted:
            now += turn.wait_ns
            assert limiter.acquire(now).admitted


def test_it_is_idle_when_nothing_was_taken_or_all_is_back():
    limiter = RateLimiter(RateLimit(rate=1))
    limiter.release()
    assert limiter.is_idle(0)
    limiter.acquire(0)
    assert not limiter.is_idle(SECOND - 1)
    assert limiter.is_idle(SECOND)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "rate must be given, got nothing. Pass rate=..."),
        ({"rate": 0}, "rate must be a number of calls per second from 1E-6 to 1E+6, got 0. "),
        ({"rate": float("nan")}, "rate must be a number of calls per second"),
        ({"rate": True}, "rate must be a number of calls per second"),
        ({"rate": 1, "burst": 0}, "burst must be a whole number >= 1, got 0."),
        ({"rate": 1, "max_wait_duration": "1"}, "max_wait_duration must be a number of seconds"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(fields, sentence):
    with pytest.raises(ConfigurationError) as caught:
        RateLimit(**fields)
    assert sentence in str(caught.value)
