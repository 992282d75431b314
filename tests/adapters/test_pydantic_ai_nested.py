"""Agents of Pydantic AI inside runs of other adapters, and runs of others inside theirs."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic_ai import Agent

from budgetguard_core import Budget, Guard
from budgetguard_pydantic_ai import BudgetCapability, outcome
from pydantic_ai_agents import DOORS, checked, endless, model_of, ran, run_async

SEARCH = {"search": {"query": "x"}}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("own", [None, Budget(max_iterations=50)], ids=["bare", "with its own"])
def test_a_child_spends_the_budget_of_its_parent(own, door):
    child = endless(*([BudgetCapability(own)] if own else []))

    async def research(query: str) -> str:
        return str((await run_async(child, "run" if door == "run_sync" else door, "Go.")).output)

    parent = Agent(
        model_of({"research": {"query": "x"}}),
        tools=[research],
        capabilities=[BudgetCapability(Budget(max_iterations=5))],
    )
    result = ran(parent, door)
    assert parent.model.answers.calls + child.model.answers.calls == 5
    assert outcome(result).usage.iterations == 5
    assert outcome(result).stop_reason == "max_iterations"
    checked(result.all_messages())


def test_the_trip_of_a_child_is_a_partial_result_for_its_parent():
    child = endless(BudgetCapability(Budget(max_iterations=2)))

    async def research(query: str) -> str:
        return (await child.run("Go.")).output

    parent = Agent(
        model_of({"research": {"query": "x"}}, "Done."),
        tools=[research],
        capabilities=[BudgetCapability(Budget(max_iterations=9))],
    )
    result = ran(parent)
    assert (result.output, outcome(result).usage.iterations) == ("Done.", 4)


def test_parallel_children_share_what_is_left_exactly():
    child = endless()

    async def research(query: str) -> str:
        return (await child.run("Go.")).output

    batch = [("research", {"query": str(number)}) for number in range(8)]
    parent = Agent(
        model_of(batch),
        tools=[research],
        capabilities=[BudgetCapability(Budget(max_model_calls=5))],
    )
    ran(parent)
    assert parent.model.answers.calls + child.model.answers.calls == 5


def test_inside_of_a_loop_it_spends_the_loops_budget():
    from budgetguard_loop import bounded

    child = endless()

    async def main():
        with bounded(Budget(max_iterations=4)) as run:
            for _ in range(3):
                await child.run("Go.")
        return run

    assert asyncio.run(main()).outcome.stop_reason == "max_iterations"
    assert child.model.answers.calls == 4


def test_a_loop_in_a_tool_spends_the_budget_of_the_agent():
    from budgetguard_loop import guarded

    done = []

    @guarded()
    def search(query: str = "") -> str:
        done.append(query)
        return f"page {len(done)}"

    agent = endless(BudgetCapability(Budget(max_tool_calls=3)), tools=[search])
    result = ran(agent)
    assert (len(done), outcome(result).usage.tool_calls) == (3, 3)


def test_inside_of_a_graph_it_spends_the_graphs_budget():
    pytest.importorskip("langgraph.graph")
    from langgraph.graph import END, START, MessagesState, StateGraph

    from budgetguard_langgraph import bounded

    child = endless()

    async def work(state):
        result = await child.run("Go.")
        return {"messages": [("assistant", result.output)]}

    graph = StateGraph(MessagesState)
    graph.add_node("work", work)
    graph.add_edge(START, "work")
    graph.add_conditional_edges("work", lambda state: END if state["messages"][9:] else "work")
    guarded = bounded(graph.compile(), Budget(max_model_calls=4))
    asyncio.run(guarded.ainvoke({"messages": [("user", "Go.")]}))
    assert child.model.answers.calls == 4


def test_a_graph_in_a_tool_spends_the_budget_of_the_agent():
    pytest.importorskip("langgraph.graph")
    from langgraph.graph import END, START, MessagesState, StateGraph

    import budgetguard_langgraph  # noqa: F401 - importing is enough
    from budgetguard_core.testing.scripted import Answers
    from budgetguard_langgraph import scripted

    model = scripted.scripted_model(Answers(["Go on."]))

    async def call(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("call", call)
    graph.add_edge(START, "call")
    graph.add_conditional_edges("call", lambda state: END if state["messages"][3:] else "call")
    compiled = graph.compile()

    async def search(query: str = "") -> str:
        found = await compiled.ainvoke({"messages": [("user", query)]})
        return found["messages"][-1].text

    agent = endless(
        BudgetCapability(Budget(max_model_calls=6, loop_detection=None)), tools=[search]
    )
    result = ran(agent)
    assert agent.model.answers.calls + model.answers.calls == 6
    assert outcome(result).usage.model_calls == 6


def test_a_budget_of_the_run_inside_that_of_the_agent():
    agent = endless(BudgetCapability(Budget(max_iterations=5)))

    def iterations(cap):
        own = BudgetCapability(Budget(max_iterations=cap))
        found = outcome(ran(agent, capabilities=[own]))
        assert found.stop_reason == "max_iterations"
        return found.usage.iterations

    assert [iterations(2), iterations(9)] == [2, 5]


def test_one_guard_over_threads_is_exact():
    guard = Guard(Budget(max_model_calls=7))
    agents = [endless(BudgetCapability(guard)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ran, agents))
    assert sum(agent.model.answers.calls for agent in agents) == 7
