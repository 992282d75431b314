"""Once the window is nearly full, a graph's model is sent what `prune` keeps."""

from __future__ import annotations

import asyncio

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver

from budgetguard_core import Budget, Price, PriceBook
from budgetguard_core.kit import TokenUsage, keep_turns
from budgetguard_core.testing import MODEL, Script, calls, says
from budgetguard_langgraph import BudgetCallback, BudgetMiddleware, bounded
from conformance.budgetguard_langgraph_driver import ScriptedChat
from langgraph_graphs import search, thread, user

FULL = TokenUsage(9000, 10)
OPTIONS = {
    "prune": keep_turns(1),
    "price_book": PriceBook({MODEL: Price(input=1, output=1, context_window=10_000)}),
}


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("kind", ["callback", "bounded", "middleware"])
def test_the_model_is_sent_less_and_the_state_stays_whole(kind, way):
    script = Script(
        [calls("search"), calls("search", usage=FULL), calls("search", "search"), says("Done.")]
    )
    budget, config = Budget(max_iterations=9), {}
    middleware = [BudgetMiddleware(budget, **OPTIONS)] if kind == "middleware" else []
    agent = create_agent(
        ScriptedChat(script=script), [search], system_prompt="Be brief.", middleware=middleware
    )
    if kind == "bounded":
        agent = bounded(agent, budget, **OPTIONS)
    if kind == "callback":
        config = {"callbacks": [BudgetCallback(budget, **OPTIONS)]}
    if way == "sync":
        result = agent.invoke(user(), config)
    else:
        result = asyncio.run(agent.ainvoke(user(), config))
    assert [len(one) for one in script.requests] == [2, 4, 4, 5]
    assert [one.role for one in script.requests[-1][:2]] == ["system", "user"]
    assert len(result["messages"]) == 9


def test_a_first_prompt_that_is_too_large_is_cut_and_the_thread_is_not():
    script = Script([says("Done.")])
    agent = create_agent(ScriptedChat(script=script), [search], checkpointer=InMemorySaver())
    graph = bounded(agent, Budget(max_iterations=9), **OPTIONS)
    said = [("user", "word " * 9000), ("ai", "Yes."), ("user", "More."), ("ai", "Yes.")]
    config = thread()
    result = graph.invoke({"messages": [*said, ("user", "Go.")]}, config)
    assert [len(one) for one in script.requests] == [3]
    assert len(result["messages"]) == len(graph.get_state(config).values["messages"]) == 6
