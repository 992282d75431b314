"""Streams whose usage comes in every chunk, on the one that ends the answer, last, or twice.

langchain #30429; databricks-ai-bridge #434; litellm #36083. The truth is 1,000 tokens in, 600 of
them cached, and 100 out.
"""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal

import pytest

from budgetguard_core import Budget
from budgetguard_http import bounded_clients

BUDGET = Budget(max_cost_usd=1)
COST = (400 * Decimal("2.5") + 600 * Decimal("1.25") + 100 * 10) / 1_000_000
WORDS = 20
BASE = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "gpt-4o-2024-08-06"}


def usage(done=100):
    details = {"prompt_tokens_details": {"cached_tokens": 600}}
    return {
        "prompt_tokens": 1000,
        "completion_tokens": done,
        "total_tokens": 1000 + done,
        **details,
    }


def choice(delta, reason=None):
    return {**BASE, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def chunks(shape):
    for number in range(1, WORDS + 1):
        chunk = choice({"role": "assistant", "content": "w "})
        yield {**chunk, "usage": usage(number * 100 // WORDS)} if shape == "running" else chunk
    end = choice({}, "stop")
    yield end if shape == "last" else {**end, "usage": usage()}
    if shape in ("last", "twice"):
        yield {**BASE, "choices": [], "usage": usage()}


@pytest.fixture
def url(shape, httpserver):
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks(shape))
    httpserver.expect_request("/v1/chat/completions").respond_with_data(
        events + "data: [DONE]\n\n", content_type="text/event-stream"
    )
    return httpserver.url_for("/v1")


def raw_client(url):
    import openai

    with bounded_clients(BUDGET) as block, openai.OpenAI(api_key="key", base_url=url) as client:
        asked = [{"role": "user", "content": "Go."}]
        list(client.chat.completions.create(model="gpt-4o", messages=asked, stream=True))
    return block.outcome


def graph(url, seam=False):
    pytest.importorskip("langchain_openai")
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    from budgetguard_http import install, uninstall
    from budgetguard_langgraph import bounded, outcome

    model = ChatOpenAI(model="gpt-4o", base_url=url, api_key="key", stream_usage=True)
    agent = bounded(create_agent(model, tools=[]), BUDGET)
    if seam:
        install()
    try:
        stream = agent.stream({"messages": [("user", "Go.")]}, stream_mode="messages")
        list(stream)
    finally:
        if seam:
            uninstall()
    return outcome(stream)


def agents(url):
    pytest.importorskip("agents")
    from agents import Agent, OpenAIChatCompletionsModel
    from openai import AsyncOpenAI

    from budgetguard_openai_agents import bounded_run_streamed, outcome

    async def go():
        async with AsyncOpenAI(base_url=url, api_key="key") as client:
            model = OpenAIChatCompletionsModel("gpt-4o", client)
            result = bounded_run_streamed(Agent(name="a", model=model), "Go.", budget=BUDGET)
            async for _ in result.stream_events():
                pass
            return outcome(result)

    return asyncio.run(go())


def strands(url):
    pytest.importorskip("strands")
    from strands import Agent
    from strands.models.openai import OpenAIModel

    from budgetguard_strands import BudgetHookProvider

    provider = BudgetHookProvider(BUDGET)
    model = OpenAIModel(client_args={"base_url": url, "api_key": "key"}, model_id="gpt-4o")
    agent = Agent(model=model, hooks=[provider], callback_handler=None)
    agent("Go.")
    return provider.outcome(agent)


def graph_above_the_seam(url):
    return graph(url, seam=True)


@pytest.mark.parametrize("shape", ["last", "with the end", "running", "twice"])
@pytest.mark.parametrize("way", [raw_client, graph, graph_above_the_seam, agents, strands])
def test_it_is_read_once_and_in_full(way, shape, url):
    used = way(url).usage
    assert (used.model_calls, used.input_tokens, used.output_tokens) == (1, 1000, 100)
    assert used.cost_usd == COST
