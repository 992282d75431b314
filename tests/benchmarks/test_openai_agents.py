"""What a turn of the OpenAI Agents SDK costs with a guard, beside the same turn without.

The runs are timed in short turns, one after the other, and each counts with its best turn: a
machine that slows down for a while slows down all of them.
"""

from __future__ import annotations

import asyncio
import gc
import time

import pytest
from agents import Runner
from agents.run import AgentRunner, get_default_agent_runner, set_default_agent_runner

from budgetguard_core import Budget
from budgetguard_core.testing import calls, says
from budgetguard_openai_agents import BudgetHooks
from openai_agents_runs import agent_of, go, tool

pytestmark = pytest.mark.benchmark

TURNS = 20
ROUNDS = 40
EVERYTHING = Budget(
    max_iterations=10**9,
    max_model_calls=10**9,
    max_tool_calls=10**9,
    max_total_tokens=10**15,
    max_seconds=10**6,
    tool_quotas={"read_*": 10**9, "*": 10**9},
    max_output_tokens_per_call=4096,
)


def agent():
    return agent_of(*[calls("search")] * (TURNS - 1), says("Done."), tools=[tool("search", [])])


async def best(ways, rounds=ROUNDS):
    """Time the ways in turn; return the best seconds of each per model turn."""
    found = dict.fromkeys(ways, float("inf"))
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, way in ways.items():
                began = time.process_time()
                await way()
                found[name] = min(found[name], (time.process_time() - began) / TURNS)
            gc.collect()
    finally:
        gc.enable()
    return found


@pytest.mark.parametrize("mode", ["run", "run_streamed"])
def test_a_guarded_turn(mode):
    hooks = BudgetHooks(EVERYTHING)

    async def bare():
        await go(mode, agent(), max_turns=100)

    async def guarded():
        await go(mode, agent(), hooks=hooks)

    found = asyncio.run(best({"bare": bare, "guarded": guarded}))
    ratio = found["guarded"] / found["bare"]
    print(f"\n{mode}: {found['bare'] * 1e6:.0f} us a turn, {ratio:.3f} times with a guard")
    assert ratio <= 1.1


def test_without_a_guard_a_run_costs_what_it_did():
    installed = get_default_agent_runner()
    plain = AgentRunner()

    async def before():
        set_default_agent_runner(plain)
        await Runner.run(agent(), "Go.", max_turns=100)

    async def after():
        set_default_agent_runner(installed)
        await Runner.run(agent(), "Go.", max_turns=100)

    BudgetHooks(EVERYTHING)
    try:
        found = asyncio.run(best({"before": before, "after": after}))
    finally:
        set_default_agent_runner(installed)
    ratio = found["after"] / found["before"]
    print(f"\nwithout a guard: {ratio:.3f} times")
    assert ratio <= 1.03
