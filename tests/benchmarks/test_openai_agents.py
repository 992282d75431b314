"""What a turn of the OpenAI Agents SDK costs with a guard, and without one."""

from __future__ import annotations

import asyncio

import pytest
from agents.run import AgentRunner, get_default_agent_runner, set_default_agent_runner

from benchmarks.framework_arms import compared, judge
from budgetguard_core import Budget
from budgetguard_core.testing import calls, says
from budgetguard_openai_agents import BudgetHooks
from openai_agents_runs import agent_of, go, tool

pytestmark = pytest.mark.benchmark

TURNS = 20
MOST_CALLS = 500
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


def way(runner, on, mode, **options):
    def run():
        set_default_agent_runner(on)
        runner.run(go(mode, agent(), max_turns=100, **options))

    return run


@pytest.mark.parametrize("mode", ["run", "run_streamed"])
def test_a_turn(mode):
    hooks = BudgetHooks(EVERYTHING)
    installed, plain = get_default_agent_runner(), AgentRunner()
    try:
        with asyncio.Runner() as runner:
            times, beyond = compared(
                mode,
                {
                    "bare": way(runner, plain, mode),
                    "null": way(runner, plain, mode),
                    "no guard": way(runner, installed, mode),
                    "hooks": way(runner, installed, mode, hooks=hooks),
                },
                units=TURNS,
            )
    finally:
        set_default_agent_runner(installed)
    assert abs(beyond["null"]) < 10
    assert abs(beyond["no guard"]) < 10
    assert beyond["hooks"] <= MOST_CALLS
    judge(times, "no guard", 1.03)
    judge(times, "hooks", 1.05)
