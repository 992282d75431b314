"""What a turn of an agent costs with the callback, bounded, and with the middleware."""

from __future__ import annotations

import asyncio

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

from benchmarks.framework_arms import compared, judge
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
MOST_CALLS = {"callback": 860, "bounded": 950, "middleware": 1_630}


class DoesNothing(BaseCallbackHandler):
    """What LangChain spends on a handler of anybody's."""

    raise_error = True
    run_inline = True


class HandsOn(AgentMiddleware):
    """What `create_agent` spends on a middleware that wraps both kinds of calls."""

    def wrap_model_call(self, request, handler):
        return handler(request)

    async def awrap_model_call(self, request, handler):
        return await handler(request)

    wrap_tool_call, awrap_tool_call = wrap_model_call, awrap_model_call


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
        "any handler": way(agent(turns), {**FREE, "callbacks": [DoesNothing()]}),
        "any middleware": way(agent(turns, middleware=[HandsOn()])),
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
