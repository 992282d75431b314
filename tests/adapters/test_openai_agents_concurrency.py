"""Fifty runs at the same time: on one guard, and with a guard each on one agent object."""

from __future__ import annotations

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.testing import ProviderError, Reply, says
from budgetguard_openai_agents import BudgetHooks, bounded_run, bounded_run_sync, outcome
from conformance.budgetguard_openai_agents_driver import MemorySession, own_loop
from openai_agents_runs import MODES, agent_of, calls, go, script_of, tool, unpaired

RUNS = 50
modes = pytest.mark.parametrize("mode", MODES)


@pytest.mark.slow
@pytest.mark.anyio
@modes
async def test_50_runs_with_a_guard_each_on_one_agent_do_not_mix(mode):
    bodies: list[str] = []
    search = tool("search", bodies)
    agent = agent_of(calls("search", "search", "search"), tools=[search])
    guards = [Guard(Budget(max_tool_calls=1 + n % 7)) for n in range(RUNS)]
    sessions = [MemorySession(f"s{n}") for n in range(RUNS)]
    results = await asyncio.gather(
        *(
            go(mode, agent, session=session, hooks=BudgetHooks(guard))
            for guard, session in zip(guards, sessions, strict=True)
        )
    )
    for n, (guard, result) in enumerate(zip(guards, results, strict=True)):
        assert guard.usage.tool_calls == 1 + n % 7
        assert outcome(result).stop_reason is StopReason.MAX_TOOL_CALLS
        assert not unpaired(result.to_input_list())
        assert not unpaired(await sessions[n].get_items())
        assert result.tool_input_guardrail_results == []
    assert len(bodies) == sum(1 + n % 7 for n in range(RUNS))
    assert not search.tool_input_guardrails


def test_threads_with_a_loop_each_share_a_guard():
    agent = agent_of(calls("search"), tools=[tool("search", [])])
    guard = Guard(Budget(max_model_calls=40))

    def run(_: int) -> str:
        with own_loop():
            return outcome(bounded_run_sync(agent, "Go.", budget=guard)).stop_reason

    with ThreadPoolExecutor(8) as pool:
        reasons = set(pool.map(run, range(16)))
    assert reasons == {StopReason.MAX_MODEL_CALLS}
    assert script_of(agent).calls == guard.usage.model_calls == 40


@pytest.mark.anyio
@modes
async def test_what_several_runs_ask_for_at_the_same_time_is_no_repetition(mode):
    agent = agent_of(calls("search"), tools=[tool("search", [], result="the same for all")])
    agent.tool_use_behavior = "stop_on_first_tool"
    guard = Guard(Budget(max_model_calls=100))
    results = await asyncio.gather(*(go(mode, agent, hooks=BudgetHooks(guard)) for _ in range(20)))
    assert {outcome(result).status for result in results} == {"completed"}
    assert guard.usage.model_calls == 20


@pytest.mark.anyio
@modes
async def test_a_guard_is_free_again_after_a_run_however_it_ended(mode):
    guard = Guard(Budget(max_iterations=50), run_id="mine")
    agent = agent_of(Reply(error=ProviderError("no such model")), says("Hi."))
    with pytest.raises(ProviderError):
        await go(mode, agent, hooks=BudgetHooks(guard))
    assert outcome(await go(mode, agent, hooks=BudgetHooks(guard))).run_id == "mine"
    assert guard.usage.model_calls == 2


@pytest.mark.anyio
async def test_a_run_is_freed_when_it_is_over_without_a_garbage_collection():
    """Runs that end as fast as they come would pile up until the next one."""
    agent = agent_of(*[calls("search")] * 3, says("Done."), tools=[tool("search", [])])
    budget = Budget(max_iterations=9, max_seconds=60)
    gc.collect()
    gc.disable()
    try:
        result = await bounded_run(agent, "Go.", budget=budget)
        kept = [weakref.ref(result), *map(weakref.ref, result.raw_responses)]
        # The callbacks of the tasks that have ended.
        await asyncio.sleep(0)
        del result
        assert [one for one in kept if one() is not None] == []
    finally:
        gc.enable()
