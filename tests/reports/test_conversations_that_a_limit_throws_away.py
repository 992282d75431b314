"""A limit that raises loses the conversation; pydantic-ai #1083, #931, #650, #2593."""

from __future__ import annotations

import asyncio

import pytest

from budgetguard_core import Budget
from budgetguard_http import bounded_clients
from provider_server import TOKENS, ProviderServer

pytest.importorskip("pydantic_ai")


async def run(agent, mode):
    if mode == "async":
        return await agent.run("Go.")
    async with agent.run_stream("Go.") as stream:
        async for _ in stream.stream_text():
            pass
        return stream


def pairs(messages):
    parts = [part for message in messages for part in message.parts]
    asked = [part.tool_call_id for part in parts if part.part_kind == "tool-call"]
    answered = [part.tool_call_id for part in parts if part.part_kind == "tool-return"]
    return asked, answered


@pytest.mark.parametrize("mode", ["async", "streamed"])
@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize(
    ("budget", "calls", "bodies"),
    [
        (Budget(max_iterations=3), (3, 3), (3, 24)),
        # The seam stops at the next call: the batch that goes over the cap has run.
        (Budget(max_tool_calls=6), (7, 1), (7, 8)),
        (Budget(max_total_tokens=4 * TOKENS), (3, 2), (3, 16)),
    ],
)
def test_the_conversation_is_kept_closed_and_counted(budget, calls, bodies, width, mode):
    from openai import AsyncOpenAI
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    ran = []

    def fetch(path: str) -> str:
        """Fetch."""
        ran.append(path)
        return f"page {len(ran)}"

    async def go(url):
        async with AsyncOpenAI(base_url=url, api_key="key") as client:
            provider = OpenAIProvider(openai_client=client)
            agent = Agent(OpenAIChatModel("gpt-4o", provider=provider), tools=[fetch])
            with bounded_clients(budget) as block:
                return await run(agent, mode), block

    with ProviderServer(calls=width) as server:
        result, block = asyncio.run(go(server.url + "/v1"))
        hits = server.hits
    used = block.outcome.usage
    assert block.outcome.status == "terminated"
    assert (used.model_calls, used.total_tokens) == (hits, TOKENS * hits)
    assert len(ran) == used.tool_calls
    wide = width == 8
    assert (hits, len(ran)) == (calls[wide], bodies[wide])
    asked, answered = pairs(result.all_messages())
    assert sorted(asked) == sorted(answered)
