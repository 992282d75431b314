"""Compaction and other housekeeping: charged, and exempt from the run's deadline and iterations."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import pytest

from budgetguard_core import (
    Budget,
    ConfigurationError,
    Guard,
    Mode,
    StopReason,
    read_events,
    replay,
)
from budgetguard_core.kit import (
    Admit,
    ModelCall,
    Stop,
    TokenUsage,
    ToolCall,
    Watch,
    current_guard,
    envelope_of,
)
from budgetguard_core.testing import ManualClock


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def lines():
    return []


@pytest.fixture
def guard(clock, lines):
    return Guard(
        Budget(max_seconds=10, max_iterations=2, max_total_tokens=1_000),
        run_id="r",
        clock=clock,
        sinks=[lambda event: lines.append(event.model_dump_json() + "\n")],
    )


def step(guard, tokens=1, **facts):
    ticket = guard.admit_model_call(ModelCall(input_tokens=1, **facts))
    assert isinstance(ticket, Admit)
    guard.settle_model_call(ticket, TokenUsage(tokens, 0))
    return ticket


def same(one, other):
    assert one.usage == other.usage
    assert (one.trip, one.warnings) == (other.trip, other.warnings)


def test_it_costs_tokens_and_calls_but_no_iteration_and_no_time(guard, clock):
    step(guard)
    clock.advance(4)
    with guard.housekeeping(seconds=8) as keeper:
        clock.advance(5)
        step(keeper, 100)
        clock.advance(2)
    usage = guard.usage
    assert (usage.iterations, usage.model_calls, usage.total_tokens) == (1, 2, 101)
    assert (usage.seconds, guard.time_left()) == (4, 6)
    clock.advance(1)
    assert guard.usage.seconds == 5


def test_neither_a_deadline_that_has_passed_nor_used_up_iterations_bind_it(guard, clock):
    step(guard)
    step(guard)
    clock.advance(10)
    with guard.housekeeping(seconds=5) as keeper:
        assert step(keeper).seconds == 5
        assert guard.trip is None
    assert guard.admit_model_call().trip.violations[0].reason is StopReason.MAX_ITERATIONS


def test_tokens_bind_it(guard):
    with guard.housekeeping(seconds=5) as keeper:
        step(keeper, 1_000)
        decision = keeper.admit_model_call()
    assert isinstance(decision, Stop)
    assert decision.trip.reason is StopReason.MAX_TOTAL_TOKENS
    assert decision.trip.run_id == "r"


@pytest.mark.parametrize(
    ("caps", "reason"),
    [
        ({"max_total_tokens": 1_000}, StopReason.MAX_TOTAL_TOKENS),
        ({"max_cost_usd": Decimal("0.001")}, StopReason.MAX_COST_USD),
    ],
)
def test_what_would_pass_a_cap_does_not_start_in_it(caps, reason):
    guard = Guard(Budget(max_iterations=1, **caps))
    step(guard, cost_usd=Decimal("0.0001"))
    prompt = ModelCall(input_tokens=1_000, cost_usd=Decimal("0.002"))
    with guard.housekeeping(seconds=5) as keeper:
        decision = keeper.admit_model_call(prompt)
    assert isinstance(decision, Stop)
    assert decision.trip.reason is reason


def test_a_tool_does_not_start_in_it_once_the_tokens_are_used_up(guard):
    step(guard)
    step(guard, 999)
    with guard.housekeeping(seconds=5) as keeper:
        decision = keeper.admit_tool_call(ToolCall(name="compact"))
    assert isinstance(decision, Stop)
    assert decision.trip.reason is StopReason.MAX_TOTAL_TOKENS


def test_its_own_deadline_ends_it_and_not_the_run(guard, clock):
    with guard.housekeeping(seconds=5) as keeper:
        step(keeper)
        clock.advance(5)
        stop = keeper.admit_model_call()
        assert (stop.trip.reason, stop.trip.run_id) == (StopReason.MAX_SECONDS, keeper.run_id)
    assert guard.trip is None
    step(guard)


def test_time_runs_while_something_else_of_the_run_is_in_flight(guard, clock):
    (tool,) = guard.admit_tool_calls([ToolCall(name="t")])
    with guard.housekeeping(seconds=5) as keeper:
        clock.advance(3)
        assert guard.usage.seconds == 3
        step(keeper)
        guard.settle_tool_call(tool, "done")
        clock.advance(2)
        assert guard.usage.seconds == 3


def test_a_sub_agent_in_it_has_its_own_bounds_and_none_of_the_runs(guard, clock):
    step(guard)
    step(guard)
    clock.advance(10)
    with guard.housekeeping(seconds=5) as keeper:
        child = keeper.child(Budget(max_iterations=1))
        step(child)
        assert child.admit_model_call().trip.reason is StopReason.MAX_ITERATIONS
        late = keeper.child()
        clock.advance(5)
        assert late.admit_model_call().trip.run_id == keeper.run_id
    assert guard.usage.iterations == 2


def test_it_inside_itself_is_bound_by_the_outer_one(guard, clock):
    with guard.housekeeping(seconds=5) as outer, outer.housekeeping(seconds=50) as inner:
        clock.advance(4)
        assert inner.time_left() == 1
        clock.advance(1)
        assert inner.admit_model_call().trip.run_id == outer.run_id
    assert guard.trip is None


def test_an_abort_ends_it(guard):
    with guard.housekeeping(seconds=5) as keeper:
        guard.abort()
        assert keeper.cancellation.cancelled
        assert keeper.admit_model_call().trip.reason is StopReason.ABORTED


def test_a_guard_that_is_off_has_nothing_to_exempt(clock):
    guard = Guard(Budget(max_seconds=1), mode=Mode.OFF, clock=clock)
    with guard.housekeeping(seconds=5) as keeper:
        clock.advance(9)
        step(keeper)
    assert guard.usage.model_calls == 0


@pytest.mark.parametrize("seconds", [None, 0, -1, "5", True, float("nan")])
def test_seconds_must_be_a_number_above_zero(guard, seconds):
    with pytest.raises(ConfigurationError, match="seconds must be a number of seconds > 0, got"):
        guard.housekeeping(seconds=seconds)


def test_a_replay_has_the_same_time_and_counters(guard, clock, lines):
    (tool,) = guard.admit_tool_calls([ToolCall(name="t")])
    clock.advance(1)
    with guard.housekeeping(seconds=5) as keeper:
        clock.advance(1)
        step(keeper, 7)
        guard.settle_tool_call(tool, "done")
        clock.advance(2)
    step(guard)
    again = replay(read_events("".join(lines).splitlines()), clock=clock)
    clock.advance(7)
    same(again, guard)
    assert guard.usage.seconds == 9


def test_a_snapshot_taken_in_it_goes_on_without_it(guard, clock):
    step(guard)
    clock.advance(3)
    with guard.housekeeping(seconds=5):
        clock.advance(4)
        snapshot = guard.snapshot()
    restored = Guard.restore(snapshot, clock=clock)
    clock.advance(2)
    assert restored.usage.seconds == 5


# Through the kit


def test_a_run_charges_its_housekeeping_to_it(guard, clock):
    run = envelope_of(guard).open()
    opened = run.model_call(ModelCall())
    run.answered(opened, TokenUsage(1, 1))
    (tool,) = run.batch([ToolCall(name="compact")])
    run.start(tool)
    clock.advance(1)
    with run.entered(tool), current_guard().housekeeping(seconds=5):
        clock.advance(4)
        # The tool's body waits for it, so the run's time stands still.
        assert (run.guard.usage.seconds, run.time_left()) == (1, 1)
        assert current_guard().clock.is_housekeeping
        summary = run.model_call(ModelCall())
        assert summary.seconds == 1
        run.answered(summary, TokenUsage(10, 5), text="said before", final=True)
        nested = envelope_of(Budget(max_model_calls=1)).open()
        run_of_another = nested.model_call(ModelCall())
        assert nested.time_left() == 1
        nested.answered(run_of_another, TokenUsage(1, 1))
        nested.end()
    run.finished(tool, "ok")
    assert run.time_left() == 9
    usage = run.guard.usage
    assert (usage.iterations, usage.model_calls, usage.total_tokens) == (1, 3, 19)


def test_a_call_of_late_housekeeping_raises_and_the_run_goes_on(guard, clock):
    run = envelope_of(guard).open()
    with run.entered(), guard.housekeeping(seconds=5):
        clock.advance(5)
        with pytest.raises(TimeoutError, match=r"must end within 5\.0 seconds"):
            run.model_call(ModelCall())
        with pytest.raises(TimeoutError):
            run.batch([ToolCall(name="t")])
    assert run.trip is None
    assert not isinstance(run.model_call(ModelCall()), Stop)


async def test_an_async_block_is_cut_at_its_deadline_and_not_at_the_runs(clock):
    guard = Guard(Budget(max_seconds=10), clock=clock)
    run = envelope_of(guard).open()
    cut = []
    watch = Watch(run, lambda: cut.append(True))
    guard.start()
    never = asyncio.Event()
    block = guard.housekeeping(seconds=20)

    async def compact():
        async with block as keeper:
            clock.advance(19)
            watch._look()
            assert cut == []
            clock.advance(1)
            assert keeper.time_left() == 0
            # What the timer does, which cannot know that this test moved the clock.
            block._limit.reschedule(asyncio.get_running_loop().time())
            await never.wait()

    with pytest.raises(TimeoutError, match=r"within 20\.0 seconds"):
        await compact()
    assert guard.time_left() == 10
    assert guard.check() is None
    watch.close()


async def test_the_timer_cuts_what_hangs():
    with pytest.raises(TimeoutError):
        async with Guard().housekeeping(seconds=0.01):
            await asyncio.Event().wait()


async def test_a_cancellation_of_others_goes_through():
    guard = Guard()
    entered = asyncio.Event()

    async def work():
        async with guard.housekeeping(seconds=60):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_block_without_an_end_of_its_own_needs_a_task_to_cut():
    guard = Guard()
    loop = asyncio.get_running_loop()
    failed = loop.create_future()

    def outside_of_any_task():
        try:
            guard.housekeeping(seconds=1).__aenter__().send(None)
        except RuntimeError as error:
            failed.set_result(str(error))

    loop.call_soon(outside_of_any_task)
    assert "inside a task" in await failed
