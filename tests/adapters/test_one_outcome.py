"""One way to an outcome in every adapter: by what a run returned or raised, or what bounded it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from budgetguard_core import AdapterError, Budget, BudgetExceeded
from budgetguard_core.kit import TokenUsage
from budgetguard_core.testing.scripted import Answers

NEVER_ENDS = Answers([{"search": {"query": "the answer"}}])
BUDGET = Budget(max_iterations=2)


def search(query: str) -> str:
    """Search."""
    return f"nothing about {query}"


def of_loop():
    from budgetguard_loop import bounded, outcome, run_bounded, scripted

    def run(**options):
        model = scripted.scripted_model(NEVER_ENDS)
        return run_bounded(model, BUDGET, messages="Go.", tools={"search": search}, **options)

    with pytest.raises(BudgetExceeded) as raised:
        run(on_trip="raise")
    with bounded(BUDGET) as block:
        for _ in range(3):
            with block.model_call() as call:
                call.settle(TokenUsage(1, 1))
    return outcome, [run(), block, raised.value]


def of_langgraph():
    agents = pytest.importorskip("langchain.agents")
    from budgetguard_langgraph import bounded, outcome, scripted

    model = scripted.scripted_model(NEVER_ENDS)
    graph = bounded(agents.create_agent(model, tools=[search]), BUDGET)
    result = graph.invoke({"messages": [("user", "Find it.")]})
    return outcome, [result, outcome(result)]


def of_openai_agents():
    agents = pytest.importorskip("agents")
    from budgetguard_openai_agents import BudgetHooks, outcome, scripted

    agents.set_tracing_disabled(True)
    model, tools = scripted.scripted_model(NEVER_ENDS), [agents.function_tool(search)]
    agent = agents.Agent(name="a", model=model, tools=tools)
    result = asyncio.run(agents.Runner.run(agent, "Find it.", hooks=BudgetHooks(BUDGET)))
    return outcome, [result, outcome(result)]


def of_strands():
    strands = pytest.importorskip("strands")
    from budgetguard_strands import BudgetHookProvider, outcome, scripted

    agent = strands.Agent(
        model=scripted.scripted_model(NEVER_ENDS),
        tools=[strands.tool(search)],
        hooks=[BudgetHookProvider(BUDGET)],
        callback_handler=None,
    )
    result = agent("Find it.")
    return outcome, [agent, result, outcome(agent)]


def of_pydantic_ai():
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from budgetguard_pydantic_ai import BudgetCapability, outcome, scripted
    from pydantic_ai_agents import ran

    model = scripted.scripted_model(NEVER_ENDS)
    agent = pydantic_ai.Agent(model, tools=[search], capabilities=[BudgetCapability(BUDGET)])
    result = ran(agent, "run_sync")
    return outcome, [result, outcome(result)]


def of_http():
    from budgetguard_http import BudgetTransport, bounded_clients, outcome

    answer = {
        "object": "chat.completion",
        "choices": [{"message": {"role": "assistant", "content": "No."}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }

    def replies(request):
        return httpx.Response(200, json=answer)

    def ask(client):
        body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Find it."}]}
        for _ in range(3):
            client.post("https://api.openai.com/v1/chat/completions", json=body)

    transport = BudgetTransport(BUDGET, httpx.MockTransport(replies))
    with httpx.Client(transport=transport) as client:
        ask(client)
    with bounded_clients(BUDGET) as block:
        ask(httpx.Client(transport=httpx.MockTransport(replies)))
    return outcome, [transport, block]


@pytest.mark.parametrize(
    "adapter", [of_loop, of_langgraph, of_openai_agents, of_strands, of_pydantic_ai, of_http]
)
def test_the_outcome_of_whatever_a_run_gave(adapter):
    outcome, given = adapter()
    for one in given:
        ended = outcome(one)
        assert (ended.status, ended.stop_reason) == ("terminated", "max_iterations")
    for nothing in (object(), None, ValueError("no run")):
        with pytest.raises(AdapterError, match="outcome"):
            outcome(nothing)
