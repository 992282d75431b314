"""The circuit breaker: resilience4j's documented behaviour, a naive model, many threads."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from budgetguard_core.breakers import CircuitBreakerConfig
from budgetguard_core.breakers.circuit_breaker import CircuitBreaker, CircuitBreakerState
from budgetguard_core.errors import ConfigurationError

SECOND = 1_000_000_000
CLOSED, OPEN, HALF_OPEN = CircuitBreakerState


def small(**changes):
    """Ten calls, judged from four on, two trial calls, 60 s open, slow above 2 s."""
    fields = {
        "sliding_window_size": 10,
        "minimum_number_of_calls": 4,
        "permitted_number_of_calls_in_half_open_state": 2,
        "slow_call_duration_threshold": 2,
    }
    return CircuitBreakerConfig(**(fields | changes))


class Bench:
    """A breaker and a clock, driven by words."""

    def __init__(self, config):
        self.breaker = CircuitBreaker("search", config)
        self.now = 0
        self.refused = 0
        self.changes = []

    def call(self, kind):
        answer = self.breaker.try_acquire_permission(self.now)
        self.changes += answer.transitions
        if not answer.permitted:
            self.refused += 1
        elif kind == "ignored":
            self.breaker.release_permission(answer.generation)
        else:
            seconds = 3 if "slow" in kind else 1
            failed, duration = "fail" in kind, seconds * SECOND
            self.changes += self.breaker.record(answer.generation, failed, duration, self.now)

    def play(self, script):
        for word in script.split():
            count, _, kind = word.rpartition("*")
            for _ in range(int(count or 1)):
                if kind.startswith("+"):
                    self.now += int(float(kind[1:]) * SECOND)
                else:
                    self.call(kind)
        return self

    @property
    def state(self):
        return self.breaker.state


OPENED = "4*fail"
TRIAL = f"{OPENED} +60"


@pytest.mark.parametrize(
    ("documented", "changes", "script", "state", "refused"),
    [
        ("closed below the minimum of calls, even if all failed", {}, "3*fail", CLOSED, 0),
        ("open at the minimum, all failed", {}, "4*fail", OPEN, 0),
        ("open when the rate is equal to the threshold", {}, "ok ok fail fail", OPEN, 0),
        ("closed below the threshold", {}, "ok ok ok fail", CLOSED, 0),
        ("open when the rate rises above it later", {}, "4*ok 4*fail", OPEN, 0),
        ("a higher threshold", {"failure_rate_threshold": 75}, "ok ok fail fail", CLOSED, 0),
        ("threshold 100: all must fail", {"failure_rate_threshold": 100}, "9*fail ok", OPEN, 6),
        (
            "threshold 100: one success is enough",
            {"failure_rate_threshold": 100},
            "ok 9*fail",
            CLOSED,
            0,
        ),
        ("the oldest call leaves a count-based window", {}, "10*ok 5*fail", OPEN, 0),
        ("so do failures", {"failure_rate_threshold": 40}, "4*ok 2*fail 10*ok 3*fail", CLOSED, 0),
        ("the size is the minimum", {"minimum_number_of_calls": 50}, "10*fail", OPEN, 0),
        ("and is needed then", {"minimum_number_of_calls": 50}, "9*fail", CLOSED, 0),
        ("slow calls: threshold 100 by default, all slow", {}, "4*slow", OPEN, 0),
        ("slow calls: threshold 100 by default, one fast", {}, "ok 3*slow", CLOSED, 0),
        ("slow at the threshold", {"slow_call_rate_threshold": 50}, "ok ok slow slow", OPEN, 0),
        ("slow calls below it", {"slow_call_rate_threshold": 50}, "ok ok ok slow", CLOSED, 0),
        (
            "a slow failure counts as both",
            {"slow_call_rate_threshold": 25, "failure_rate_threshold": 75},
            "ok ok ok slow-fail",
            OPEN,
            0,
        ),
        (
            "a call as long as the threshold is not slow",
            {"slow_call_duration_threshold": 3},
            "4*slow",
            CLOSED,
            0,
        ),
        ("an ignored error is neither", {}, "3*fail 9*ignored", CLOSED, 0),
        ("open: every call is turned away", {}, f"{OPENED} 5*ok", OPEN, 5),
        ("open until the wait is over", {}, f"{OPENED} +59.9 ok", OPEN, 1),
        ("open: without a call it stays open", {}, f"{OPENED} +600", OPEN, 0),
        ("half-open at the next call after the wait", {}, f"{TRIAL} ok", HALF_OPEN, 0),
        ("half-open: closed when the trial calls succeed", {}, f"{TRIAL} ok ok", CLOSED, 0),
        ("half-open: open when the rate reaches the threshold", {}, f"{TRIAL} ok fail", OPEN, 0),
        ("half-open: open again, and turned away", {}, f"{TRIAL} fail fail ok", OPEN, 1),
        ("half-open: slow trial calls open it", {}, f"{TRIAL} slow slow", OPEN, 0),
        ("half-open: one fast one closes it", {}, f"{TRIAL} slow ok", CLOSED, 0),
        ("half-open: an ignored error is no trial", {}, f"{TRIAL} 9*ignored ok ok", CLOSED, 0),
        ("the second wait is as long", {}, f"{TRIAL} fail fail +59 ok", OPEN, 1),
        ("and ends in a second trial", {}, f"{TRIAL} fail fail +60 ok ok", CLOSED, 0),
        ("closed again: it begins with an empty window", {}, f"{TRIAL} ok ok 3*fail", CLOSED, 0),
        ("closed again: and opens as before", {}, f"{TRIAL} ok ok 4*fail", OPEN, 0),
        (
            "all permitted calls are waited for, whatever the minimum",
            {"minimum_number_of_calls": 1, "permitted_number_of_calls_in_half_open_state": 3},
            "fail +60 ok ok",
            HALF_OPEN,
            0,
        ),
    ],
)  # fmt: skip
def test_documented_transition(documented, changes, script, state, refused):
    bench = Bench(small(**changes)).play(script)
    assert (bench.state, bench.refused) == (state, refused), documented


def test_who_is_turned_away_is_told_when_to_come_again():
    bench = Bench(small()).play(OPENED)
    answer = bench.breaker.try_acquire_permission(15 * SECOND)
    assert (answer.permitted, answer.retry_after) == (False, 45)
    first, second, third = (bench.breaker.try_acquire_permission(99 * SECOND) for _ in range(3))
    assert (first.permitted, second.permitted, third.permitted) == (True, True, False)
    assert third.retry_after is None
    assert [change.to_state for change in first.transitions] == [HALF_OPEN]


def test_changes_say_what_decided_them():
    bench = Bench(small(slow_call_rate_threshold=50)).play(f"{TRIAL} ok ok 2*ok 2*slow")
    assert [(c.from_state, c.to_state, c.detail) for c in bench.changes] == [
        (CLOSED, OPEN, "4 of 4 calls failed, failure_rate_threshold=50"),
        (OPEN, HALF_OPEN, "the wait in the open state is over"),
        (HALF_OPEN, CLOSED, "2 trial calls ended below the thresholds"),
        (CLOSED, OPEN, "2 of 4 calls were slow, slow_call_rate_threshold=50"),
    ]


def test_a_call_of_an_earlier_state_neither_decides_a_trial_nor_gives_one_back():
    bench = Bench(small())
    early = bench.breaker.try_acquire_permission(0)
    bench.play(f"{TRIAL}")
    trial = bench.breaker.try_acquire_permission(bench.now)
    for _ in range(5):
        bench.breaker.record(early.generation, True, SECOND, bench.now)
        bench.breaker.release_permission(early.generation)
    assert bench.state is HALF_OPEN
    assert bench.breaker.try_acquire_permission(bench.now).permitted
    assert not bench.breaker.try_acquire_permission(bench.now).permitted
    bench.breaker.record(trial.generation, False, SECOND, bench.now)
    bench.breaker.record(trial.generation, False, SECOND, bench.now)
    assert bench.state is CLOSED


@pytest.mark.parametrize("repetition", range(3))
def test_half_open_under_64_threads_admits_exactly_the_permitted_calls(repetition):
    permitted = 10
    breaker = CircuitBreaker(
        "search", small(permitted_number_of_calls_in_half_open_state=permitted)
    )
    for _ in range(4):
        breaker.record(breaker.try_acquire_permission(0).generation, True, 1, 0)
    barrier = threading.Barrier(64)

    def ask(_):
        barrier.wait()
        return [breaker.try_acquire_permission(60 * SECOND) for _ in range(20)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(64) as pool:
            answers = [one for some in pool.map(ask, range(64)) for one in some]
    finally:
        sys.setswitchinterval(interval)
    assert len(answers) == 64 * 20
    assert sum(answer.permitted for answer in answers) == permitted
    assert sum(len(answer.transitions) for answer in answers) == 1


@pytest.mark.parametrize(
    ("config", "result", "error", "outcome"),
    [
        ({}, "text", None, "success"),
        ({}, None, ValueError(), "failure"),
        ({}, None, "it failed", "failure"),
        ({"record_exceptions": [TimeoutError]}, None, TimeoutError(), "failure"),
        ({"record_exceptions": [OSError]}, None, TimeoutError(), "failure"),
        ({"record_exceptions": [TimeoutError]}, None, ValueError(), "success"),
        ({"record_exceptions": ["*Time*"]}, None, TimeoutError(), "failure"),
        ({"record_exceptions": ["*429*"]}, None, "HTTP 429 Too Many Requests", "failure"),
        ({"record_exceptions": ["*429*"]}, None, "HTTP 404", "success"),
        ({"ignore_exceptions": [ValueError]}, None, ValueError(), "ignored"),
        ({"ignore_exceptions": ["object"]}, None, ValueError(), "failure"),
        (
            {"ignore_exceptions": [LookupError], "record_exceptions": [KeyError]},
            None,
            KeyError(),
            "ignored",
        ),
        ({"record_result": lambda text: "error" in text}, "an error", None, "failure"),
        ({"record_result": lambda text: "error" in text}, "fine", None, "success"),
    ],
)
def test_what_an_error_is_can_be_chosen(config, result, error, outcome):
    assert CircuitBreakerConfig(**config).outcome_of(result, error) == outcome


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"failure_rate_threshold": 0}, "failure_rate_threshold must be a percentage > 0 and "),
        ({"failure_rate_threshold": 101}, "got 101. Use 50 for 50 %"),
        ({"slow_call_rate_threshold": True}, "slow_call_rate_threshold must be a percentage"),
        ({"slow_call_duration_threshold": 0}, "must be a number of seconds > 0"),
        ({"wait_duration_in_open_state": float("nan")}, "wait_duration_in_open_state must be a"),
        ({"sliding_window_size": 0}, "must be a whole number from 1 to 100000, got 0. Leave"),
        ({"sliding_window_size": 10**6}, "must be a whole number from 1 to 100000"),
        ({"minimum_number_of_calls": "5"}, "minimum_number_of_calls must be a whole number >= 1"),
        ({"permitted_number_of_calls_in_half_open_state": 0}, "must be a whole number from 1 to"),
        ({"record_exceptions": TimeoutError}, "record_exceptions must be a list of exception"),
        ({"ignore_exceptions": [int]}, "ignore_exceptions must be a list of exception types"),
        ({"record_result": 1}, "record_result must be a function"),
        ({"failure_rate": 50}, "failure_rate is not a field of CircuitBreakerConfig, got 50. "),
        ({"stop_after_open_rounds": 0}, "stop_after_open_rounds must be a whole number >= 1"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(fields, sentence):
    with pytest.raises(ConfigurationError) as caught:
        CircuitBreakerConfig(**fields)
    assert sentence in str(caught.value)


# Any interleaving, against a model that keeps a list of results and counts it anew each time


class Naive:
    def __init__(self, config):
        self.config = config
        self.state = CLOSED
        self.since = 0
        self.results = []  # (failed, slow) since the state was entered
        self.trials = 0
        self.number = 0

    def go(self, state, since):
        self.state, self.since, self.results, self.trials = state, since, [], 0
        self.number += 1

    def ask(self, now):
        wait = self.config.wait_duration_in_open_state * SECOND
        if self.state is OPEN and now >= self.since + wait:
            self.go(HALF_OPEN, now)
        if self.state is HALF_OPEN:
            if self.trials == self.config.permitted_number_of_calls_in_half_open_state:
                return None
            self.trials += 1
        return None if self.state is OPEN else self.number

    def window(self):
        config = self.config
        if self.state is HALF_OPEN:
            return self.results
        return self.results[-config.sliding_window_size :]

    def end(self, number, now, kind):
        if number != self.number:
            return
        if kind == "ignored":
            self.trials -= self.state is HALF_OPEN
            return
        if self.state not in (CLOSED, HALF_OPEN):
            return
        self.results.append(("fail" in kind, "slow" in kind))
        window = self.window()
        config = self.config
        least = config.minimum_number_of_calls
        if self.state is HALF_OPEN:
            least = config.permitted_number_of_calls_in_half_open_state
        else:
            least = min(least, config.sliding_window_size)
        if len(window) < least:
            return
        failed = 100 * sum(one[0] for one in window) / len(window)
        slow = 100 * sum(one[1] for one in window) / len(window)
        if failed >= config.failure_rate_threshold or slow >= config.slow_call_rate_threshold:
            self.go(OPEN, now)
        elif self.state is HALF_OPEN:
            self.go(CLOSED, now)


class BreakerMachine(RuleBasedStateMachine):
    @initialize(
        config=st.builds(
            CircuitBreakerConfig,
            failure_rate_threshold=st.sampled_from([25, 50, 100]),
            slow_call_rate_threshold=st.sampled_from([50, 100]),
            slow_call_duration_threshold=st.just(2),
            permitted_number_of_calls_in_half_open_state=st.integers(1, 4),
            sliding_window_size=st.integers(1, 6),
            minimum_number_of_calls=st.integers(1, 5),
            wait_duration_in_open_state=st.just(10),
        )
    )
    def begin(self, config):
        self.now = 0
        self.breaker = CircuitBreaker("x", config)
        self.naive = Naive(config)
        self.running = []

    @rule()
    def ask(self):
        number = self.naive.ask(self.now)
        answer = self.breaker.try_acquire_permission(self.now)
        assert answer.permitted == (number is not None)
        if answer.permitted:
            self.running.append((number, answer.generation))
        else:
            after = answer.retry_after
            assert after is None or after > 0

    @precondition(lambda self: self.running)
    @rule(data=st.data(), kind=st.sampled_from(["ok", "fail", "slow", "slow-fail", "ignored"]))
    def end(self, data, kind):
        number, generation = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.naive.end(number, self.now, kind)
        duration = (3 if "slow" in kind else 1) * SECOND
        if kind == "ignored":
            self.breaker.release_permission(generation)
        else:
            self.breaker.record(generation, "fail" in kind, duration, self.now)

    @rule(seconds=st.sampled_from([0.4, 1, 3, 10, 25, 100]))
    def wait(self, seconds):
        self.now += int(seconds * SECOND)

    @invariant()
    def same(self):
        if hasattr(self, "naive"):
            assert self.breaker.state is self.naive.state


TestAnyInterleaving = pytest.mark.slow(BreakerMachine.TestCase)
TestAnyInterleaving.settings = settings(
    derandomize=True, deadline=None, max_examples=40, stateful_step_count=30, database=None
)
