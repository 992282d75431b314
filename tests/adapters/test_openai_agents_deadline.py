"""Deadline and abort: hung models, hung tools, sub-agents, streams, nothing left behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from agents import Agent, ModelSettings, function_tool

from budgetguard_core import OUTCOME_UNKNOWN, Budget, Guard, Mode, StopReason, SystemClock
from budgetguard_core.testing import Reply
from budgetguard_openai_agents import BudgetHooks, bounded_run_streamed, outcome
from conformance.budgetguard_openai_agents_driver import MemorySession
from openai_agents_runs import MODES, agent_of, calls, go, says, script_of, tool, unpaired

pytestmark = pytest.mark.anyio
modes = pytest.mark.parametrize("mode", MODES)
DEADLINE = 0.4
# Hung calls here would hang for ever; a machine under load is slow, and that is no failure.
SLOW = 10 * DEADLINE


def hanging_tool(bodies: list[str], name: str = "wait") -> Any:
    async def body() -> str:
        bodies.append(name)
        await asyncio.get_running_loop().create_future()
        return "never"

    return function_tool(body, name_override=name)


async def timed(run: Any) -> tuple[Any, float]:
    clock = SystemClock()
    began = clock.monotonic_ns()
    result = await run
    return result, (clock.monotonic_ns() - began) / 1e9


def nothing_left() -> set[Any]:
    """Return the tasks beside the test's and those of pytest's own runner."""
    return {
        task
        for task in asyncio.all_tasks() - {asyncio.current_task()}
        if "TestRunner" not in repr(task.get_coro())
    }


@modes
async def test_a_hung_model_is_cut_within_a_second_and_the_run_goes_on(mode):
    session = MemorySession("s")
    bodies: list[str] = []
    agent = agent_of(
        calls("search"), Reply(hang=True), says("At last."), tools=[tool("search", bodies)]
    )
    guard = Guard(Budget(max_seconds=DEADLINE))
    result, took = await timed(go(mode, agent, session=session, hooks=BudgetHooks(guard)))
    assert DEADLINE <= took < SLOW
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
    assert [item.get("role", item["type"]) if "type" in item else item["role"] for item in items][
        -1
    ] == "assistant"
    assert len(items) == 4
    again = await go(mode, agent, "Go on.", session=session, hooks=BudgetHooks(Budget()))
    assert again.final_output == "At last."
    assert bodies == ["search"]


@modes
async def test_a_hung_model_at_the_first_turn_keeps_the_users_words(mode):
    session = MemorySession("s")
    agent = agent_of(Reply(hang=True))
    result, took = await timed(
        go(mode, agent, "Hi.", session=session, hooks=BudgetHooks(Budget(max_seconds=DEADLINE)))
    )
    assert took < SLOW
    assert [item["role"] for item in await session.get_items()] == ["user", "assistant"]
    assert [item["role"] for item in result.to_input_list()] == ["user", "assistant"]


@modes
async def test_a_hung_tool_is_cut_and_its_siblings_results_are_kept(mode):
    session = MemorySession("s")
    bodies: list[str] = []
    agent = agent_of(
        calls("search"),
        calls("search", "wait", "search"),
        tools=[tool("search", bodies), hanging_tool(bodies)],
    )
    guard = Guard(Budget(max_seconds=DEADLINE))
    result, took = await timed(go(mode, agent, session=session, hooks=BudgetHooks(guard)))
    assert took < SLOW
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
    again = await go(
        mode, agent, "Go on.", session=session, hooks=BudgetHooks(Budget(max_seconds=DEADLINE))
    )
    assert not unpaired(again.to_input_list())


@modes
async def test_a_sub_agent_at_the_deadline(mode):
    below = agent_of(Reply(hang=True), name="worker")
    agent = agent_of(calls("ask"), tools=[below.as_tool(tool_name="ask", tool_description="Ask.")])
    guard = Guard(Budget(max_seconds=DEADLINE))
    result, took = await timed(go(mode, agent, hooks=BudgetHooks(guard)))
    assert took < SLOW
    assert outcome(result).stop_reason is StopReason.MAX_SECONDS
    assert not unpaired(result.to_input_list())
    assert guard.usage.failed_calls == 1


@modes
async def test_a_sub_agents_own_deadline_ends_the_sub_agent(mode):
    below = agent_of(calls("wait"), name="worker", tools=[hanging_tool([])])
    ask = below.as_tool(
        tool_name="ask", tool_description="Ask.", hooks=BudgetHooks(Budget(max_seconds=0.2))
    )
    agent = agent_of(calls("ask"), says("Thanks."), tools=[ask])
    result, took = await timed(go(mode, agent, hooks=BudgetHooks(Budget(max_seconds=20))))
    assert took < SLOW
    assert result.final_output == "Thanks."


@modes
async def test_an_abort_ends_a_hung_run_at_once(mode):
    guard = Guard(Budget(max_iterations=5))
    timer = threading.Timer(0.2, guard.abort, ["a person said no"])
    timer.start()
    agent = agent_of(calls("wait"), tools=[hanging_tool([])])
    result, took = await timed(go(mode, agent, hooks=BudgetHooks(guard)))
    timer.join()
    assert took < SLOW
    assert outcome(result).stop_reason is StopReason.ABORTED
    assert outcome(result).detail == "a person said no"
    assert not unpaired(result.to_input_list())


@modes
async def test_an_abort_that_only_looks_on_changes_nothing(mode):
    guard = Guard(Budget(), mode=Mode.OBSERVE)

    async def slow() -> str:
        guard.abort()
        await asyncio.sleep(0.05)
        return "slow"

    agent = agent_of(calls("slow"), says("Done."), tools=[function_tool(slow)])
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert result.final_output == "Done."


@modes
async def test_a_tool_that_does_not_let_itself_be_cancelled_does_not_hold_the_run(mode):
    release = asyncio.Event()

    async def stubborn() -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    agent = agent_of(calls("stubborn"), tools=[function_tool(stubborn)])
    try:
        result, took = await timed(go(mode, agent, hooks=BudgetHooks(Budget(max_seconds=0.2))))
    finally:
        release.set()
    assert took < 3.0
    assert outcome(result).stop_reason is StopReason.MAX_SECONDS
    assert not unpaired(result.to_input_list())
    assert OUTCOME_UNKNOWN in str(result.to_input_list())
    for _ in range(20):
        await asyncio.sleep(0)


@modes
async def test_a_sync_tool_in_its_thread_does_not_hold_the_run(mode):
    release = threading.Event()

    def slow() -> str:
        release.wait(5)
        return "late"

    agent = agent_of(calls("slow"), tools=[function_tool(slow)])
    result, took = await timed(go(mode, agent, hooks=BudgetHooks(Budget(max_seconds=0.2))))
    release.set()
    assert took < 2.5
    assert OUTCOME_UNKNOWN in str(result.to_input_list())


@modes
async def test_cancelling_the_callers_task_is_no_trip(mode):
    guard = Guard(Budget(max_seconds=20))
    agent = agent_of(Reply(hang=True))
    task = asyncio.create_task(go(mode, agent, hooks=BudgetHooks(guard)))
    await asyncio.sleep(0.1)
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
    guard = Guard(Budget(max_seconds=20))
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
    guard = Guard(Budget(max_seconds=20))
    with pytest.raises(Exception, match="timed out"):
        await go(mode, agent, hooks=BudgetHooks(guard))
    assert guard.trip is None
    assert guard.usage.failed_calls == 1


@modes
async def test_a_run_that_hangs_before_its_first_call_is_cut_as_well(mode):
    async def instructions(context: Any, agent: Agent[Any]) -> str:
        await asyncio.get_running_loop().create_future()
        return "never"

    agent = agent_of(says("Hi."), instructions=instructions)
    guard = Guard(Budget(max_seconds=0.2))
    guard.start()
    result, took = await timed(go(mode, agent, "Hello?", hooks=BudgetHooks(guard)))
    assert took < SLOW
    assert outcome(result).stop_reason is StopReason.MAX_SECONDS
    assert [item["role"] for item in result.to_input_list()] == ["user", "assistant"]
