"""What a turn of an agent costs with the callback, bounded, and with the middleware."""

from __future__ import annotations

import asyncio

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

from benchmarks.framework_arms import calls_of, compared, judge
from budgetguard_core import Budget
from budgetguard_core.testing import Call, Script, calls, says
from budgetguard_langgraph import BudgetCallback, BudgetMiddleware, bounded
from conformance.budgetguard_langgraph_driver import ScriptedChat

pytestmark = pytest.mark.benchmark

TURNS = 20
BUDGET = Budget(
    max_iterations=10**6, max_tool_calls=10**6, max_seconds=10**6, max_total_tokens=10**12
)
FREE = {"recursion_limit": 10**6}
GOALS = {"callback": 1.08, "bounded": 1.08, "middleware": 1.15}
MOST_CALLS = {"callback": 1_250, "bounded": 1_500, "middleware": 2_000}


@tool
def search(value: str = "") -> str:
    """Search."""
    return f"found {value}"


def agent(turns=TURNS, **options):
    def reply(n):
        last = n % turns == turns - 1
        return says("Done.") if last else calls(Call("search", f"q{n}"))

    return create_agent(ScriptedChat(script=Script(reply)), [search], **options)


def arms(turns=TURNS, runner=None):
    """Return the ways to run the same agent, each with an agent of its own."""

    def way(graph, config=FREE):
        def run():
            given = {"messages": [HumanMessage("Go.")]}
            if runner is not None:
                return runner.run(graph.ainvoke(given, config))
            return graph.invoke(given, config)

        return run

    return {
        "bare": way(agent(turns)),
        "null": way(agent(turns)),
        "callback": way(agent(turns), {**FREE, "callbacks": [BudgetCallback(BUDGET)]}),
        "bounded": way(bounded(agent(turns), BUDGET)),
        "middleware": way(agent(turns, middleware=[BudgetMiddleware(BUDGET)])),
    }


def held(name, ways):
    times, beyond = compared(name, ways, units=TURNS, rounds=40)
    assert abs(beyond["null"]) < 10
    for way, most in MOST_CALLS.items():
        assert beyond[way] <= most
    for way, most in GOALS.items():
        judge(times, way, most)


def test_a_turn():
    held("invoke", arms())


def test_an_awaited_turn():
    with asyncio.Runner() as runner:
        held("ainvoke", arms(runner=runner))


@pytest.mark.parametrize("way", ["callback", "middleware"])
def test_a_turn_late_in_a_run_costs_what_an_early_one_does(way):
    beyond = []
    for turns in (5, 15, 105, 115):
        ways = arms(turns)
        beyond.append(calls_of(ways[way]) - calls_of(ways["bare"]))
    early, late = (beyond[1] - beyond[0]) / 10, (beyond[3] - beyond[2]) / 10
    print(f"\n{way}: {early:.0f} calls more at turn 10, {late:.0f} at turn 110")
    assert late <= 1.1 * early
