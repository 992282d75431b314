"""The loop adapter waits where a breaker holds a call back, and offers `report_progress`."""

from __future__ import annotations

import asyncio
import threading

import pytest

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.breakers import BulkheadConfig, ProgressReports, RateLimit
from budgetguard_core.clock import SystemClock
from budgetguard_core.events import ProgressReported
from budgetguard_core.kit import PROGRESS_TOOL, ToolCall
from budgetguard_loop import (
    ToolRefused,
    bounded,
    guarded,
    report_progress,
    run_bounded,
    run_bounded_async,
    run_bounded_stream,
)

SHORT = 0.05


def now():
    return SystemClock().monotonic_ns() / 1e9


USER = {"role": "user", "content": "Go."}
DONE = {"role": "assistant", "content": "Done."}


def asking(*names, arguments="{}"):
    """A reply that calls these tools."""
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


async def streamed(step, budget, **options):
    stream = run_bounded_stream(step, budget, **options)
    async for _ in stream:
        pass
    return stream.outcome


def ran(way, step, budget, **options):
    if way == "sync":
        return run_bounded(step, budget, **options)
    run = run_bounded_async if way == "async" else streamed
    return asyncio.run(run(step, budget, **options))


ways = pytest.mark.parametrize("way", ["sync", "async", "streamed"])


class Model:
    """Answers in turn, and notes when it was asked."""

    def __init__(self, *replies):
        self.replies = iter(replies)
        self.at = []

    def __call__(self, messages):
        self.at.append(now())
        return next(self.replies, DONE)


@ways
def test_who_gets_no_place_in_time_is_refused_and_the_run_goes_on(way):
    guard = Guard(
        Budget(bulkheads={"x": BulkheadConfig(max_concurrent_calls=1, max_wait_duration=SHORT)})
    )
    hog = guard.child().admit_tool_call(ToolCall(name="x"))
    outcome = ran(way, Model(asking("x")), guard, messages="Go.", tools={"x": lambda: 1})
    guard.withdraw(hog)
    assert outcome.status == "completed"
    assert '"error": "busy"' in outcome.messages[2]["content"]
    assert guard.usage.tool_calls == 0


@ways
def test_reports_are_taken_and_cost_no_place(way):
    report = '{"claims_so_far": [], "next_subgoal": "a", "estimated_remaining_steps": 7}'
    events = []
    model = Model(*(asking(PROGRESS_TOOL.name, arguments=report) for _ in range(2)))
    outcome = ran(
        way,
        model,
        Budget(progress=ProgressReports(every_iterations=1), max_tool_calls=1),
        messages="Go.",
        sinks=[events.append],
    )
    assert outcome.status == "completed"
    assert [e.estimate for e in events if isinstance(e, ProgressReported)] == [7, 7]
    assert outcome.usage.tool_calls == 0


# Guarded functions

SLOW = Budget(rate_limits={"x": RateLimit(rate=1 / SHORT, max_wait_duration=9)})


def test_a_guarded_function_waits_in_each_of_its_forms():
    def took(call):
        began = now()
        call()
        return now() - began

    @guarded(SLOW, name="x")
    def plain():
        return 1

    @guarded(SLOW, name="x")
    def items():
        yield 1

    @guarded(SLOW, name="x")
    async def coroutine():
        return 1

    @guarded(SLOW, name="x")
    async def async_items():
        yield 1

    async def both(call):
        return [await call(), await call()]

    async def listed():
        return [item async for item in async_items()]

    assert took(lambda: (plain(), plain())) >= SHORT * 0.9
    assert took(lambda: (list(items()), list(items()))) >= SHORT * 0.9
    assert took(lambda: asyncio.run(both(coroutine))) >= SHORT * 0.9
    assert took(lambda: asyncio.run(both(listed))) >= SHORT * 0.9


def test_a_guarded_function_that_may_not_start_says_so():
    @guarded(Budget(rate_limits={"x": RateLimit(rate=0.001)}), name="x")
    def plain():
        return 1

    assert plain() == 1
    with pytest.raises(ToolRefused, match="rate_limited"):
        plain()


# Blocks


def block(**fields):
    return bounded(Budget(**fields), messages=[USER])


PLACE = {"x": BulkheadConfig(max_concurrent_calls=1, max_wait_duration=SHORT)}


def test_a_block_waits_and_hands_the_refusal_over():
    with block(bulkheads=PLACE) as run:
        first, second = run.tool_calls(asking("x", "x")["tool_calls"])
        with first:
            assert second.refusal is None
            assert "busy" in second.run(lambda: 1)
            assert "busy" in second.refusal
    assert run.outcome.usage.tool_calls == 1
    with block(bulkheads=PLACE) as run:
        first, second = run.tool_calls(asking("x", "x")["tool_calls"])
        with first, pytest.raises(ToolRefused, match="busy"), second:
            pass
        run.final = "Done."


async def test_an_async_block_waits_without_blocking_the_loop():
    limit = RateLimit(rate=1 / SHORT, max_wait_duration=9)
    turns = []

    async def tick():
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    async with block(rate_limits={"x": limit}) as run:
        async with run.model_call("m"):
            pass
        first, second, third = run.tool_calls(asking("x", "x", "x")["tool_calls"])

        async def work():
            return "r"

        assert await first.run(work) == "r"
        before = len(turns)
        assert await second.run(work) == "r"
        assert len(turns) > before + 10
        async with third:
            third.settle("r")
        run.final = "Done."
    ticking.cancel()
    assert run.outcome.usage.tool_calls == 3


def test_an_abort_in_a_wait_ends_the_block():
    limit = RateLimit(rate=0.001, max_wait_duration=9999)
    with block(rate_limits={"x": limit}) as run:
        first, second = run.tool_calls(asking("x", "x")["tool_calls"])
        first.run(lambda: 1)
        threading.Timer(SHORT, run.guard.abort).start()
        second.run(lambda: 1)
    assert run.outcome.stop_reason == StopReason.ABORTED
    assert run.outcome.usage.tool_calls == 1


def test_the_function_is_offered_by_name():
    assert report_progress.__name__ == PROGRESS_TOOL.name
