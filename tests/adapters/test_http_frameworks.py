"""Frameworks above the seam, with and without their adapters: exact, and nothing twice."""

from __future__ import annotations

import warnings

import openai
import pytest

from budgetguard_core import Budget
from budgetguard_core.kit import Envelope
from budgetguard_http import bounded_clients, install, uninstall
from provider_server import TOKENS, ProviderServer

# Users leave their clients to the collector as well; what that says is none of ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


CAP = 3
BUDGET = Budget(max_iterations=CAP, loop_detection=None)
SCRIPT = [429, "ok", "ok", 500, "ok"]
"""Two of the five attempts fail; the 500 may have been at work, so its prompt is charged."""


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: Where.
    """
    return f"nothing new in {path}"


def langchain(server, guard=None):
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    from budgetguard_langgraph import BudgetCallback

    model = ChatOpenAI(model="gpt-4o", api_key="key", base_url=server.url + "/v1")
    graph = create_agent(model, [read_file])
    callbacks = [] if guard is None else [BudgetCallback(guard)]
    result = graph.invoke({"messages": [("user", "go")]}, {"callbacks": callbacks})
    return result["messages"][-1].text


async def agents_sdk(server, guard=None):
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    from budgetguard_openai_agents import bounded_run

    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(api_key="key", base_url=server.url + "/v1")
    model = OpenAIChatCompletionsModel("gpt-4o", client)
    agent = Agent(name="a", model=model, tools=[function_tool(read_file)])
    if guard is None:
        return (await Runner.run(agent, "go")).final_output
    return (await bounded_run(agent, "go", budget=guard)).final_output


async def strands(server, guard=None):
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    from budgetguard_strands import BudgetHookProvider

    arguments = {"api_key": "key", "base_url": server.url + "/v1"}
    model = OpenAIModel(client_args=arguments, model_id="gpt-4o")
    hooks = [] if guard is None else [BudgetHookProvider(guard)]
    agent = Agent(model=model, tools=[tool(read_file)], hooks=hooks, callback_handler=None)
    return str(await agent.invoke_async("go"))


async def pydantic_ai(server, guard=None):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    client = openai.AsyncOpenAI(api_key="key", base_url=server.url + "/v1")
    model = OpenAIChatModel("gpt-4o", provider=OpenAIProvider(openai_client=client))
    return (await Agent(model, tools=[read_file]).run("go")).output


FRAMEWORKS = {
    "langchain": langchain,
    "openai-agents": agents_sdk,
    "strands": strands,
    "pydantic-ai": pydantic_ai,
}


async def act(framework, server, guard=None):
    with warnings.catch_warnings():
        # What the frameworks say of themselves is none of ours.
        warnings.simplefilter("ignore")
        ended = framework(server, guard)
        return ended if isinstance(ended, str) else await ended


@pytest.mark.sample(4)
@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
async def test_without_an_adapter_a_framework_ends_at_the_cap(framework):
    text = None
    with ProviderServer() as server:
        async with bounded_clients(BUDGET) as block:
            text = await act(framework, server)
    usage = block.outcome.usage
    assert (server.hits, usage.model_calls, usage.iterations) == (CAP, CAP, CAP)
    assert (usage.total_tokens, usage.estimated_calls) == (CAP * TOKENS, 0)
    # An adapter that was imported bounds its framework in the block by itself: its stop leaves it.
    assert text is None or text.startswith("This run was stopped before it finished.")


@pytest.mark.sample(4)
@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
async def test_without_an_adapter_retries_are_calls_and_no_iterations(framework):
    with ProviderServer(SCRIPT) as server:
        async with bounded_clients(BUDGET) as block:
            await act(framework, server)
    usage = block.outcome.usage
    assert (server.hits, usage.model_calls, usage.iterations, usage.failed_calls) == (5, 5, CAP, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["langchain", "openai-agents", "strands"])
async def test_below_an_adapter_every_attempt_is_counted_once(name):
    outcomes = []
    envelope = Envelope(budget=BUDGET, on_outcome=outcomes.append)
    install()
    try:
        with ProviderServer(SCRIPT) as server:
            await act(FRAMEWORKS[name], server, envelope)
    finally:
        uninstall()
    (outcome,) = outcomes
    usage = outcome.usage
    assert (server.hits, usage.model_calls, usage.iterations, usage.failed_calls) == (5, 5, CAP, 2)
    # Beside the three answers, the prompt of the attempt that ended in a 500.
    assert usage.estimated_calls == 1
    assert usage.total_tokens > CAP * TOKENS
    assert str(outcome.stop_reason) == "max_iterations"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["langchain", "openai-agents", "strands"])
async def test_below_an_adapter_nothing_counts_twice(name):
    outcomes = []
    envelope = Envelope(budget=BUDGET, on_outcome=outcomes.append)
    install()
    try:
        with ProviderServer() as server:
            await act(FRAMEWORKS[name], server, envelope)
    finally:
        uninstall()
    (outcome,) = outcomes
    usage = outcome.usage
    assert (server.hits, usage.model_calls, usage.iterations) == (CAP, CAP, CAP)
    assert (usage.total_tokens, usage.estimated_calls) == (CAP * TOKENS, 0)
    assert usage.tool_calls == CAP
