"""Calls that wait: for the pace, a rate limit or a place; not past the deadline or an abort."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from budgetguard_core import Budget, ConfigurationError, Guard, StopReason
from budgetguard_core.breakers import BreakerRegistry, BulkheadConfig, RateLimit, VelocityLimits
from budgetguard_core.clock import SystemClock
from budgetguard_core.kit import NOT_EXECUTED, Envelope, ModelCall, OpenModelCall, Stop, ToolCall
from budgetguard_core.kit.delay import waited
from budgetguard_core.kit.flow import run_awaited, run_blocking

NOW = SystemClock().monotonic_ns
SHORT = 0.05
LONG = 30
TOO_LONG = 5


def opened(**fields):
    return Envelope(budget=Budget(loop_detection=None, **fields)).open()


def waits(run, call, way):
    """Wait in one of the two ways; the trip, and the seconds that it took."""
    began = NOW()
    flow = waited(run, call)
    trip = run_blocking(flow) if way == "sync" else asyncio.run(run_awaited(flow))
    return trip, (NOW() - began) / 1e9


def slow(run):
    """A tool call that has to wait for its token."""
    return run.batch([ToolCall(name="x"), ToolCall(name="x")])[1]


def late(call):
    return call.tickets[0].breakers.start_ns > NOW()


def limited(seconds, **fields):
    limit = RateLimit(rate=1 / seconds, max_wait_duration=2 * seconds)
    return opened(rate_limits={"*": limit}, **fields)


ways = pytest.mark.parametrize("way", ["sync", "async"])


@ways
def test_a_call_that_nothing_holds_starts_at_once(way):
    run = opened()
    call = run.model_call(ModelCall())
    assert waits(run, call, way)[0] is None
    assert waits(run, run.tool_call(ToolCall(name="x")), way)[0] is None
    run = opened(velocity=VelocityLimits(max_tokens_per_minute=100))
    assert waits(run, run.model_call(ModelCall()), way)[0] is None


@ways
def test_a_call_waits_for_its_turn(way):
    run = limited(SHORT)
    call = slow(run)
    trip, took = waits(run, call, way)
    assert trip is None
    assert not late(call)
    assert took < TOO_LONG
    assert run.start(call) is None


@ways
def test_a_model_call_in_the_band_waits_until_its_deadline_and_is_taken_back(way):
    run = opened(
        velocity=VelocityLimits(max_tokens_per_minute=10, throttle_at=0.5), max_seconds=SHORT
    )
    run.model_call(ModelCall(input_tokens=6))
    call = run.model_call(ModelCall(input_tokens=1))
    assert isinstance(call, OpenModelCall)
    trip, took = waits(run, call, way)
    assert trip.reason is StopReason.MAX_SECONDS
    assert took < TOO_LONG
    assert not call.is_open
    assert run.guard.usage.model_calls == 1


@ways
def test_an_abort_ends_the_wait(way):
    run = limited(LONG)
    call = slow(run)
    abort = threading.Timer(SHORT, run.guard.abort)
    abort.start()
    trip, took = waits(run, call, way)
    abort.join()
    assert trip.reason is StopReason.ABORTED
    assert took < TOO_LONG
    assert run.start(call) == NOT_EXECUTED
    assert (call.state, call.trip) == ("refused", trip)
    assert run.guard.usage.tool_calls == 1


@ways
def test_a_deadline_that_is_moved_in_the_last_moment_does_not_end_the_run(way):
    run = limited(LONG, max_seconds=SHORT)
    call = slow(run)
    run.check = lambda: None
    assert waits(run, call, way)[0] is None
    assert run.start(call) is None


@ways
def test_a_call_waits_for_its_place_and_gets_it(way):
    run = opened(bulkheads={"*": BulkheadConfig(max_concurrent_calls=1, max_wait_duration=LONG)})
    first, second = run.batch([ToolCall(name="x"), ToolCall(name="x")])
    assert waits(run, first, way)[0] is None
    assert run.start(first) is None
    end = threading.Timer(SHORT, run.finished, (first, "r"))
    end.start()
    trip, took = waits(run, second, way)
    end.join()
    assert trip is None
    assert took < TOO_LONG
    assert run.start(second) is None


def test_a_place_that_is_granted_while_one_looks_is_taken():
    run = opened(bulkheads={"*": BulkheadConfig(max_concurrent_calls=1, max_wait_duration=LONG)})
    first, second = run.batch([ToolCall(name="x"), ToolCall(name="x")])
    place = second.tickets[0].breakers.queued
    run.start(first)

    wake = property(lambda self: lambda: None, lambda self, wake: run.finished(first, "r"))
    place.__class__ = type("Eager", (type(place),), {"wake": wake})
    assert run_blocking(waited(run, second)) is None
    assert run.start(second) is None


@ways
def test_a_call_that_gets_no_place_in_time_is_refused_and_the_run_goes_on(way):
    run = opened(bulkheads={"*": BulkheadConfig(max_concurrent_calls=1, max_wait_duration=SHORT)})
    first, second = run.batch([ToolCall(name="x"), ToolCall(name="x")])
    trip, took = waits(run, second, way)
    assert trip is None
    assert took < TOO_LONG
    assert json.loads(run.start(second))["error"] == "busy"
    assert (second.state, second.reason, second.trip) == ("refused", StopReason.VELOCITY, None)
    assert run.start(first) is None
    assert run.guard.usage.tool_calls == 1


@pytest.mark.parametrize("kind", ["tool", "model"])
def test_a_wait_that_is_cancelled_takes_the_call_back(kind):
    run = limited(LONG, velocity=VelocityLimits(max_tokens_per_minute=10, throttle_at=0.5))
    if kind == "tool":
        call = slow(run)
    else:
        run.model_call(ModelCall(input_tokens=6))
        call = run.model_call(ModelCall(input_tokens=1))

    async def cancelled():
        task = asyncio.create_task(run_awaited(waited(run, call)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    usage = run.guard.usage
    assert (usage.tool_calls, usage.model_calls) == ((1, 0) if kind == "tool" else (0, 1))


def test_an_abort_after_the_loop_is_over_is_heard_by_nobody():
    run = limited(LONG)
    call = slow(run)
    callbacks = []
    run.on_abort = lambda callback: callbacks.append(callback) or (lambda: None)
    loop = asyncio.new_event_loop()
    task = loop.create_task(run_awaited(waited(run, call)))
    loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
    callbacks[0]()


def test_the_runs_of_one_envelope_share_their_limits():
    envelope = Envelope(budget=Budget(rate_limits={"*": RateLimit(rate=0.001)}))
    assert envelope.open().tool_call(ToolCall(name="x")).refusal is None
    assert envelope.open().tool_call(ToolCall(name="x")).refusal is not None
    outer = Envelope(budget=Budget()).open()
    with outer.entered():
        assert envelope.open().tool_call(ToolCall(name="x")).refusal is not None
    other = Envelope(budget=envelope.budget)
    assert other == envelope
    assert other.open().tool_call(ToolCall(name="x")).refusal is None


def test_envelopes_and_guards_share_a_registry():
    registry = BreakerRegistry()
    budget = Budget(rate_limits={"*": RateLimit(rate=0.001)})
    one, other = (Envelope(budget=budget, breakers=registry) for _ in range(2))
    assert one.open().tool_call(ToolCall(name="x")).refusal is None
    assert other.open().tool_call(ToolCall(name="x")).refusal is not None
    assert Guard(budget, breakers=registry).admit_tool_call(ToolCall(name="x")).message


@pytest.mark.parametrize("make", [Envelope, Guard])
def test_a_registry_that_is_none_is_refused(make):
    with pytest.raises(ConfigurationError, match="breakers must be a BreakerRegistry, got dict"):
        make(budget=Budget(), breakers={})


def test_a_guard_has_its_own_registry():
    with pytest.raises(ConfigurationError, match="breakers must be left out with a Guard"):
        Envelope(budget=Guard(), breakers=BreakerRegistry())


@ways
def test_a_run_gives_back_what_waited_or_says_that_it_ended(way):
    def waited(run, call):
        return run.wait(call) if way == "sync" else asyncio.run(run.wait_async(call))

    run = limited(SHORT)
    call = slow(run)
    assert waited(run, call) is call
    assert run.start(call) is None
    pace = VelocityLimits(max_tokens_per_minute=10, throttle_at=0.5)
    run = opened(velocity=pace, max_seconds=SHORT)
    first = run.model_call(ModelCall(input_tokens=6))
    assert waited(run, first) is first
    stop = waited(run, run.model_call(ModelCall(input_tokens=1)))
    assert isinstance(stop, Stop)
    assert stop.trip.reason is StopReason.MAX_SECONDS
    assert waited(run, stop) is stop
