"""What a turn of an agent costs with the callback, and with the middleware, side by side."""

from __future__ import annotations

import gc
import time

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

from budgetguard_core import Budget
from budgetguard_core.testing import Call, Script, calls, says
from budgetguard_langgraph import BudgetCallback, BudgetMiddleware, bounded
from conformance.budgetguard_langgraph_driver import ScriptedChat

pytestmark = pytest.mark.benchmark

TURNS = 20
ROUNDS = 60
BUDGET = Budget(
    max_iterations=10**6, max_tool_calls=10**6, max_seconds=10**6, max_total_tokens=10**12
)


@tool
def search(value: str = "") -> str:
    """Search."""
    return f"found {value}"


def runaway():
    def reply(n):
        last = n % TURNS == TURNS - 1
        return says("Done.") if last else calls(Call("search", f"q{n}"))

    return ScriptedChat(script=Script(reply))


def agent(**options):
    return create_agent(runaway(), [search], **options)


def seconds(run):
    """Time that the processor worked: what the graph's threads wait for is not in it."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def ratio(plain, guarded):
    """Compare two runs, taken in turns, each by its best: others use the machine too."""
    runs = (plain, guarded)
    for run in runs:
        run()
    times = [[], []]
    for _ in range(ROUNDS):
        gc.collect()
        gc.disable()
        for run, taken in zip(runs, times, strict=True):
            taken.append(seconds(run))
        gc.enable()
    bare, bound = (min(taken) for taken in times)
    print(f"\n{bare / TURNS * 1e3:.2f} ms a turn; {bound / bare:.3f} times")
    return bound / bare


def given():
    return {"messages": [HumanMessage("Go.")]}


def test_the_callback_costs_at_most_8_percent():
    graph, guarded = agent(), agent()
    config = {"callbacks": [BudgetCallback(BUDGET)]}
    assert ratio(lambda: graph.invoke(given()), lambda: guarded.invoke(given(), config)) <= 1.08


def test_the_middleware_costs_at_most_15_percent():
    graph = agent()
    guarded = agent(middleware=[BudgetMiddleware(BUDGET)])
    assert ratio(lambda: graph.invoke(given()), lambda: guarded.invoke(given())) <= 1.15


def test_a_bounded_graph_costs_at_most_15_percent():
    graph, guarded = agent(), bounded(agent(), BUDGET)
    assert ratio(lambda: graph.invoke(given()), lambda: guarded.invoke(given())) <= 1.15
