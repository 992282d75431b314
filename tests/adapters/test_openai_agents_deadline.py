"""Deadline and abort: hung models, hung tools, sub-agents, streams, nothing left behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from agents import ModelSettings, RunHooks, function_tool

from budgetguard_core import Budget, Guard, Mode, StopReason
from budgetguard_core.kit import OUTCOME_UNKNOWN, SystemClock
from budgetguard_core.testing import ManualClock, Reply
from budgetguard_openai_agents import (
    BudgetHooks,
    bounded_run_streamed,
    bounded_run_sync,
    outcome,
)
from conformance.budgetguard_openai_agents_driver import MemorySession, own_loop
from openai_agents_runs import MODES, agent_of, calls, go, says, script_of, tool, unpaired

pytestmark = pytest.mark.anyio
modes = pytest.mark.parametrize("mode", MODES)
SHORT = 0.05
"""A deadline that passes when a test moves its clock: no machine is too slow for it."""
DEADLINE = 1.0
# In real time. A machine under load is slow, and that is no failure; a run that hangs never ends.
SLOW = 60 * DEADLINE


def late(clock: ManualClock, *replies: Reply) -> Any:
    """Give these replies; the time is over when the last one is asked for."""

    def reply(number: int) -> Reply:
        if number == len(replies) - 1:
            clock.advance(1)
        return replies[min(number, len(replies) - 1)]

    return reply


class Reached(RunHooks[Any]):
    """Says when the model is called for the first time, and when so many tools have ended."""

    def __init__(self, ends: int = 0) -> None:
        self.ends = ends
        self.called, self.ended = asyncio.Event(), asyncio.Event()

    async def on_llm_start(self, *args: Any) -> None:
        self.called.set()

    async def on_tool_end(self, *args: Any) -> None:
        self.ends -= 1
        if self.ends == 0:
            self.ended.set()


def nothing_left() -> set[Any]:
    """Return the tasks beside the test's and those of pytest's own runner."""
    return {
        task
        for task in asyncio.all_tasks() - {asyncio.current_task()}
        if "TestRunner" not in repr(task.get_coro())
    }


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["run", "run_sync", "run_streamed"])
def test_in_real_time(entry):
    clock = SystemClock()
    # What is imported and opened at first use is no part of it.
    asyncio.run(go("run", agent_of(says("Hi.")), hooks=BudgetHooks(Budget())))
    agent = agent_of(Reply(hang=True))
    budget = Budget(max_seconds=DEADLINE)
    began = clock.monotonic_ns()
    if entry == "run_sync":
        with own_loop():
            result = bounded_run_sync(agent, "Go.", budget=budget)
    else:
        result = asyncio.run(go(entry, agent, hooks=BudgetHooks(budget)))
    took = (clock.monotonic_ns() - began) / 1e9
    assert outcome(result).stop_reason is StopReason.MAX_SECONDS
    assert DEADLINE <= took < SLOW


@modes
async def test_a_hung_model_is_cut_and_the_run_goes_on(mode):
    clock, session = ManualClock(), MemorySession("s")
    bodies: list[str] = []
    agent = agent_of(late(clock, calls("search"), Reply(hang=True)), tools=[tool("search", bodies)])
    guard = Guard(Budget(max_seconds=SHORT), clock=clock)
    result = await go(mode, agent, session=session, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.MAX_SECONDS
    assert bodies == ["search"]
    assert not unpaired(result.to_input_list())
    assert len(result.raw_responses) == 1
    assert guard.open_calls() == ()
    assert guard.usage.failed_calls == 1
    await asyncio.sleep(0)
    assert nothing_left() == set()
    items = await session.get_items()
    assert not unpaired(items)
    assert items[-1].get("role") == "assistant"
    assert len(items) == 4
    agent.model = agent_of(says("At last.")).model
    again = await go(mode, agent, "Go on.", session=session, hooks=BudgetHooks(Budget()))
    assert again.final_output == "At last."
    assert bodies == ["search"]


@modes
async def test_a_hung_tool_is_cut_and_its_siblings_results_are_kept(mode):
    clock, session = ManualClock(), MemorySession("s")
    bodies: list[str] = []
    reached = Reached(ends=3)

    async def wait() -> str:
        bodies.append("wait")
        await reached.ended.wait()
        clock.advance(1)
        await asyncio.get_running_loop().create_future()
        return "never"

    agent = agent_of(
        calls("search"),
        calls("search", "wait", "search"),
        tools=[tool("search", bodies), function_tool(wait)],
    )
    hooks = BudgetHooks(Budget(max_seconds=SHORT), reached, clock=clock)
    result = await go(mode, agent, session=session, hooks=hooks)
    assert sorted(bodies) == ["search", "search", "search", "wait"]
    history = result.to_input_list()
    assert not unpaired(history)
    outputs = {
        i["call_id"]: i["output"] for i in history if i.get("type") == "function_call_output"
    }
    assert list(outputs.values()).count(OUTCOME_UNKNOWN) == 1
    assert len(outputs) == 4
    stored = await session.get_items()
    assert not unpaired(stored)
    assert len(stored) == len(history)
    statuses = [record.status for record in outcome(result).tool_calls]
    assert statuses.count("interrupted") == 1
    assert statuses.count("completed") == 3
    agent.model = agent_of(says("At last.")).model
    again = await go(mode, agent, "Go on.", session=session, hooks=BudgetHooks(Budget()))
    assert not unpaired(again.to_input_list())


@modes
async def test_a_sub_agent_at_the_deadline(mode):
    clock = ManualClock()
    below = agent_of(late(clock, Reply(hang=True)), name="worker")
    agent = agent_of(calls("ask"), tools=[below.as_tool(tool_name="ask", tool_description="Ask.")])
    guard = Guard(Budget(max_seconds=SHORT), clock=clock)
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.MAX_SECONDS
    assert not unpaired(result.to_input_list())
    assert guard.usage.failed_calls == 1


@modes
async def test_a_sub_agents_own_deadline_ends_the_sub_agent(mode):
    clock = ManualClock()
    guard = Guard(Budget(max_seconds=3600), clock=clock)
    below = agent_of(late(clock, Reply(hang=True)), name="worker")
    ask = below.as_tool(
        tool_name="ask", tool_description="Ask.", hooks=BudgetHooks(Budget(max_seconds=SHORT))
    )
    agent = agent_of(calls("ask"), says("Thanks."), tools=[ask])
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert result.final_output == "Thanks."


@modes
async def test_an_abort_that_only_looks_on_changes_nothing(mode):
    guard = Guard(Budget(), mode=Mode.OBSERVE)

    async def slow() -> str:
        guard.abort()
        for _ in range(50):
            await asyncio.sleep(0)
        return "slow"

    agent = agent_of(calls("slow"), says("Done."), tools=[function_tool(slow)])
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert result.final_output == "Done."


@modes
async def test_a_tool_that_does_not_let_itself_be_cancelled_does_not_hold_the_run(mode):
    clock, release = ManualClock(), asyncio.Event()

    async def stubborn() -> str:
        clock.advance(1)
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    agent = agent_of(calls("stubborn"), tools=[function_tool(stubborn)])
    hooks = BudgetHooks(Budget(max_seconds=SHORT), clock=clock)
    try:
        # It comes to its end before the tool does.
        result = await go(mode, agent, hooks=hooks)
    finally:
        release.set()
    assert outcome(result).stop_reason is StopReason.MAX_SECONDS
    assert not unpaired(result.to_input_list())
    assert OUTCOME_UNKNOWN in str(result.to_input_list())
    for _ in range(20):
        await asyncio.sleep(0)


@modes
async def test_a_sync_tool_in_its_thread_does_not_hold_the_run(mode):
    clock, release = ManualClock(), threading.Event()

    def slow() -> str:
        clock.advance(1)
        release.wait(60)
        return "late"

    agent = agent_of(calls("slow"), tools=[function_tool(slow)])
    hooks = BudgetHooks(Budget(max_seconds=SHORT), clock=clock)
    result = await go(mode, agent, hooks=hooks)
    assert not release.is_set()
    release.set()
    assert OUTCOME_UNKNOWN in str(result.to_input_list())


@modes
async def test_cancelling_the_callers_task_is_no_trip(mode):
    guard = Guard(Budget(max_seconds=3600))
    agent, reached = agent_of(Reply(hang=True)), Reached()
    task = asyncio.create_task(go(mode, agent, hooks=BudgetHooks(guard, reached)))
    await reached.called.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(10):
        await asyncio.sleep(0)
    assert guard.trip is None
    assert guard.open_calls() == ()
    assert guard.usage.failed_calls == 1
    assert nothing_left() == set()


@pytest.mark.parametrize("how", ["immediate", "after_turn"])
async def test_cancelling_a_stream_is_no_trip(how):
    guard = Guard(Budget(max_seconds=3600))
    agent = agent_of(calls("search"), tools=[tool("search", [])])
    result = bounded_run_streamed(agent, "Go.", budget=guard)
    async for event in result.stream_events():
        if event.type == "run_item_stream_event":
            result.cancel(mode=how)
    assert guard.trip is None
    assert guard.open_calls() == ()
    assert script_of(agent).calls <= 2
    for _ in range(10):
        await asyncio.sleep(0)
    assert nothing_left() == set()


async def test_leaving_a_stream_early_leaks_nothing():
    guard = Guard(Budget(max_iterations=50))
    agent = agent_of(calls("search"), tools=[tool("search", [])])
    result = bounded_run_streamed(agent, "Go.", budget=guard)
    async for _ in result.stream_events():
        break
    for _ in range(50):
        await asyncio.sleep(0)
    assert nothing_left() == set()
    assert guard.open_calls() == ()
    assert script_of(agent).calls <= 2


@modes
async def test_the_models_own_time_limit_stays_its_own(mode):
    if not hasattr(ModelSettings(), "timeout"):
        pytest.skip("this version of the SDK has no time limit of a model call")
    agent = agent_of(Reply(hang=True), model_settings=ModelSettings(timeout=0.1))
    guard = Guard(Budget(max_seconds=3600))
    with pytest.raises(Exception, match="timed out"):
        await go(mode, agent, hooks=BudgetHooks(guard))
    assert guard.trip is None
    assert guard.usage.failed_calls == 1
