"""Budgets of a conversation, by the id that each framework has of it."""

from __future__ import annotations

import itertools

import pytest

from budgetguard_core import Budget, StopReason
from budgetguard_core.testing.scripted import Answers

BUDGET = Budget(max_model_calls=3, per="conversation")
NUMBERS = itertools.count()


def search(query: str = "") -> str:
    """Search."""
    return f"{query} {next(NUMBERS)}"


def answers():
    ask = {"search": {"query": "a"}}
    return Answers([ask, "Done.", ask, "Done, too."])


def check(outcomes):
    assert [one.usage.model_calls for one in outcomes] == [2, 1]
    assert outcomes[0].status == "completed"
    assert outcomes[1].stop_reason is StopReason.MAX_MODEL_CALLS


@pytest.mark.parametrize("way", ["bounded", "callback", "middleware"])
@pytest.mark.parametrize("is_paused", [False, True])
def test_the_thread_of_a_graph(way, is_paused):
    agents = pytest.importorskip("langchain.agents")
    from langchain.agents.middleware import HumanInTheLoopMiddleware
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.types import Command

    from budgetguard_langgraph import BudgetCallback, BudgetMiddleware, bounded, outcome
    from budgetguard_langgraph.scripted import scripted_model

    layers = [BudgetMiddleware(BUDGET)] if way == "middleware" else []
    if is_paused:
        layers.append(HumanInTheLoopMiddleware(interrupt_on={"search": True}))
    saver = InMemorySaver()
    graph = agents.create_agent(
        scripted_model(answers()), [search], checkpointer=saver, middleware=layers
    )
    graph = bounded(graph, BUDGET) if way == "bounded" else graph
    config = {"configurable": {"thread_id": f"graph-{next(NUMBERS)}"}}
    if way == "callback":
        config["callbacks"] = [BudgetCallback(BUDGET)]
    outcomes = []
    for _ in range(2):
        result = graph.invoke({"messages": [("user", "Go.")]}, config)
        if is_paused and "__interrupt__" in result:
            answer = {"decisions": [{"type": "approve"}]}
            result = graph.invoke(Command(resume=answer), config)
        outcomes.append(outcome(result))
    check(outcomes)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_session_of_the_agents_sdk(is_streamed):
    agents = pytest.importorskip("agents")
    from budgetguard_openai_agents import bounded_run, bounded_run_streamed, outcome
    from budgetguard_openai_agents.scripted import scripted_model

    tools = [agents.function_tool(search)]
    agent = agents.Agent(name="a", model=scripted_model(answers()), tools=tools)
    session = agents.SQLiteSession(f"sdk-{next(NUMBERS)}")
    outcomes = []
    for _ in range(2):
        if is_streamed:
            result = bounded_run_streamed(agent, "Go.", budget=BUDGET, session=session)
            async for _ in result.stream_events():
                pass
        else:
            result = await bounded_run(agent, "Go.", budget=BUDGET, session=session)
        outcomes.append(outcome(result))
    session.close()
    check(outcomes)


async def test_the_agent_of_strands():
    strands = pytest.importorskip("strands")
    from budgetguard_strands import BudgetHookProvider, outcome
    from budgetguard_strands.scripted import scripted_model

    agent = strands.Agent(
        model=scripted_model(answers()),
        tools=[strands.tool(search)],
        hooks=[BudgetHookProvider(BUDGET)],
        callback_handler=None,
    )
    check([outcome(await agent.invoke_async("Go.")) for _ in range(2)])


async def test_the_conversation_of_pydantic_ai():
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from budgetguard_pydantic_ai import BudgetCapability, outcome
    from budgetguard_pydantic_ai.scripted import scripted_model

    capabilities = [BudgetCapability(BUDGET)]
    agent = pydantic_ai.Agent(scripted_model(answers()), tools=[search], capabilities=capabilities)
    first = await agent.run("Go.")
    second = await agent.run("Go.", message_history=first.all_messages())
    check([outcome(first), outcome(second)])
    assert outcome(await agent.run("Go.")).usage.model_calls == 1  # another conversation


async def test_a_sub_agent_of_the_agents_sdk_is_a_part_of_it():
    agents = pytest.importorskip("agents")
    from budgetguard_openai_agents import BudgetHooks, outcome
    from budgetguard_openai_agents.scripted import scripted_model

    helper = agents.Agent(name="helper", model=scripted_model(Answers(["Found."])))
    asks = {"helper": {"input": "a"}}
    agent = agents.Agent(
        name="a",
        model=scripted_model(Answers([asks, asks, "Done."])),
        tools=[helper.as_tool("helper", "Helps.")],
    )
    hooks = BudgetHooks(BUDGET, conversation_id=f"sdk-{next(NUMBERS)}")
    result = await agents.Runner.run(agent, "Go.", hooks=hooks)
    assert outcome(result).stop_reason is StopReason.MAX_MODEL_CALLS
    assert outcome(result).usage.model_calls == 3
