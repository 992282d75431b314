"""A fan-out of calls of unknown length stays within its cap, in each SDK's asynchronous client."""

from __future__ import annotations

import asyncio
import threading

import litellm
import pytest

import http_flows as flows
from budgetguard_core import Budget
from budgetguard_http import BedrockHooks, bounded_clients
from provider_server import ProviderServer

CALLS, MOST = 60, 5
TURNS = [{"role": "user", "content": "go"}]


async def chat(client, stream):
    ask = {"model": "gpt-4o", "messages": TURNS, "stream": stream}
    return await client.chat.completions.create(**ask)


async def responses(client, stream):
    return await client.responses.create(model="gpt-4o", input="go", stream=stream)


async def messages(client, stream):
    ask = {"model": "claude-sonnet-5", "max_tokens": 1_000, "messages": TURNS}
    return await client.messages.create(**ask, stream=stream)


async def gemini(client, stream):
    models, ask = client.aio.models, {"model": "gemini-2.5-pro", "contents": "go"}
    if stream:
        return await models.generate_content_stream(**ask)
    return await models.generate_content(**ask)


async def mistral(client, stream):
    ask = {"model": "mistral-large-2407", "messages": TURNS}
    if stream:
        return await client.chat.stream_async(**ask)
    return await client.chat.complete_async(**ask)


async def lite(server, stream):
    ask = {"model": "openai/gpt-4o", "messages": TURNS, "stream": stream}
    return await litellm.acompletion(**ask, api_base=server.url + "/v1", api_key="k")


CLIENTS = {
    "openai": (flows.openai_async, chat),
    "openai, Responses": (flows.openai_async, responses),
    "anthropic": (flows.anthropic_async, messages),
    "google-genai": (flows.genai_client, gemini),
    "mistralai": (flows.mistral_client, mistral),
    "litellm": (lambda server: server, lite),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("make", "ask"), CLIENTS.values(), ids=CLIENTS)
async def test_calls_of_unknown_length_at_the_same_time_stay_within_the_dollars(make, ask, stream):
    """Answers are held back until every call has been asked for."""
    with ProviderServer(calls=0) as server:
        server.barrier = threading.Event()
        client = make(server)

        async def call():
            answer = await ask(client, stream)
            if stream:
                async for _ in answer:
                    pass

        # Mistral's answer of 1,024 tokens is cheaper.
        cap = 0.03 if ask is mistral else 0.05
        async with bounded_clients(Budget(max_cost_usd=cap, loop_detection=None)) as block:
            waiting = {asyncio.ensure_future(call()) for _ in range(CALLS)}
            while len(waiting) > MOST:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            server.barrier.set()
            await asyncio.gather(*waiting)
        if ask in (chat, responses, messages):
            await client.close()
            await asyncio.sleep(0)  # its connections close in the loop's next turn
        if ask is gemini:
            await client.aio.aclose()  # its own end would use a loop that is closed by then
    assert 1 <= server.hits <= MOST
    assert block.outcome.usage.model_calls == server.hits
    assert block.outcome.stop_reason == "max_cost_usd"


async def test_so_do_those_of_boto3_in_threads():
    import boto3

    session = boto3.Session("key", "secret", region_name="us-east-1")
    with ProviderServer(calls=0) as server:
        server.barrier = threading.Event()
        client = session.client("bedrock-runtime", endpoint_url=server.url)
        with BedrockHooks(Budget(max_cost_usd=0.05, loop_detection=None)) as hooks:
            hooks.register(client)
            turns = [{"role": "user", "content": [{"text": "go"}]}]
            ask = {"modelId": "anthropic.claude-sonnet-4-5-20250929-v1:0", "messages": turns}
            waiting = {
                asyncio.ensure_future(asyncio.to_thread(client.converse, **ask))
                for _ in range(CALLS)
            }
            while len(waiting) > MOST:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            server.barrier.set()
            await asyncio.gather(*waiting)
    assert 1 <= server.hits <= MOST
