"""Agent loops in every flow of the real SDKs, by SDK: the table of the adapter's README."""

from __future__ import annotations

import asyncio
import os
import warnings

# Before the import: without it LiteLLM asks the network for its prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import anthropic
import litellm
import openai
from google import genai
from google.oauth2.credentials import Credentials
from mistralai.client import Mistral

import http_loops as loops


def openai_client(server, **options):
    return openai.OpenAI(api_key="key", base_url=server.url + "/v1", **options)


def openai_async(server, **options):
    return openai.AsyncOpenAI(api_key="key", base_url=server.url + "/v1", **options)


def anthropic_client(server, **options):
    return anthropic.Anthropic(api_key="key", base_url=server.url, **options)


def anthropic_async(server, **options):
    return anthropic.AsyncAnthropic(api_key="key", base_url=server.url, **options)


def genai_client(server):
    return genai.Client(api_key="key", http_options={"base_url": server.url})


def genai_on_vertex(server):
    return genai.Client(
        vertexai=True,
        project="p",
        location="us-central1",
        credentials=Credentials("token"),
        http_options={"base_url": server.url},
    )


def mistral_client(server):
    return Mistral(api_key="key", server_url=server.url)


def openai_raw(server):
    client, messages, loop = (
        openai_client(server),
        [{"role": "user", "content": "go"}],
        loops.Loop(),
    )
    while True:
        raw = client.chat.completions.with_raw_response.create(**loops.chat_ask(messages))
        assert raw.http_response.status_code == 200
        if not loops.chat_step(loop, messages, raw.parse().choices[0].message):
            return loop


def openai_streaming_response(server):
    client, messages, loop = (
        openai_client(server),
        [{"role": "user", "content": "go"}],
        loops.Loop(),
    )
    create = client.chat.completions.with_streaming_response.create
    while True:
        with create(**loops.chat_ask(messages)) as raw:
            message = raw.parse().choices[0].message
        if not loops.chat_step(loop, messages, message):
            return loop


def openai_parse(server):
    client, messages, loop = (
        openai_client(server),
        [{"role": "user", "content": "go"}],
        loops.Loop(),
    )
    strict = {**loops.TOOL, "strict": True, "parameters": {**loops.EMPTY, "required": []}}
    strict["parameters"]["additionalProperties"] = False
    tools = [{"type": "function", "function": strict}]
    while True:
        ask = {"model": loops.CHAT_MODEL, "messages": messages, "tools": tools}
        reply = client.chat.completions.parse(**ask)
        if not loops.chat_step(loop, messages, reply.choices[0].message):
            return loop


def openai_stream_helper(server):
    client, messages, loop = (
        openai_client(server),
        [{"role": "user", "content": "go"}],
        loops.Loop(),
    )
    while True:
        with client.chat.completions.stream(**loops.chat_ask(messages)) as events:
            reply = events.get_final_completion()
        if not loops.chat_step(loop, messages, reply.choices[0].message):
            return loop


def azure(server, make=openai.AzureOpenAI, **options):
    """A resource whose deployments are part of the address, and so is the version of its API."""
    return make(api_key="key", azure_endpoint=server.url, api_version="2024-10-21", **options)


async def openai_stream_async(server):
    client, messages, loop = openai_async(server), [{"role": "user", "content": "go"}], loops.Loop()
    while True:
        async with client.chat.completions.stream(**loops.chat_ask(messages)) as events:
            reply = await events.get_final_completion()
        if not loops.chat_step(loop, messages, reply.choices[0].message):
            return loop


def anthropic_raw(server):
    client, turns, loop = (
        anthropic_client(server),
        [{"role": "user", "content": "go"}],
        loops.Loop(),
    )
    while True:
        raw = client.messages.with_raw_response.create(**loops.messages_ask(turns))
        if not loops.messages_step(loop, turns, raw.parse()):
            return loop


def tool_of(loop, decorate):
    def read_file(path: str) -> str:
        """Read a file.

        Args:
            path: Where.
        """
        return loop.run()

    return decorate(read_file)


def anthropic_tool_runner(server):
    loop = loops.Loop()
    runner = anthropic_client(server).beta.messages.tool_runner(
        model=loops.MESSAGES_MODEL,
        max_tokens=1_000,
        tools=[tool_of(loop, anthropic.beta_tool)],
        messages=[{"role": "user", "content": "go"}],
    )
    for message in runner:
        loop.text = message.content[0].text if message.content[0].type == "text" else None
    return loop


def bedrock(server, make=anthropic.AnthropicBedrock):
    return make(aws_access_key="a", aws_secret_key="b", aws_region="us-east-1", base_url=server.url)


def vertex(server, make=anthropic.AnthropicVertex):
    return make(region="us", project_id="p", access_token="t", base_url=server.url)


def genai_ask(loop):
    config = {
        "tools": [tool_of(loop, lambda function: function)],
        "automatic_function_calling": {"maximum_remote_calls": 20},
    }
    return {"model": "gemini-2.5-flash", "contents": "go", "config": config}


def gemini(server, make=genai_client):
    loop, client = loops.Loop(), make(server)
    loop.text = client.models.generate_content(**genai_ask(loop)).text
    return loop


def gemini_streamed(server, make=genai_client):
    loop, client = loops.Loop(), make(server)
    for chunk in client.models.generate_content_stream(**genai_ask(loop)):
        loop.text = chunk.text or loop.text
    return loop


async def gemini_async(server, make=genai_client):
    loop, client = loops.Loop(), make(server)
    answer = await client.aio.models.generate_content(**genai_ask(loop))
    loop.text = answer.text
    return loop


async def gemini_async_streamed(server, make=genai_client):
    loop, client = loops.Loop(), make(server)
    async for chunk in await client.aio.models.generate_content_stream(**genai_ask(loop)):
        loop.text = chunk.text or loop.text
    return loop


def mistral(server, stream=False):
    client, messages, loop = (
        mistral_client(server),
        [{"role": "user", "content": "go"}],
        loops.Loop(),
    )
    while True:
        ask = {**loops.chat_ask(messages), "model": "mistral-large-latest"}
        if stream:
            message = loops.Whole()
            with client.chat.stream(**ask) as events:
                for event in events:
                    message.take(event.data)
        else:
            message = client.chat.complete(**ask).choices[0].message
        if not loops.chat_step(loop, messages, message):
            return loop


async def mistral_async(server, stream=False):
    client, messages, loop = (
        mistral_client(server),
        [{"role": "user", "content": "go"}],
        loops.Loop(),
    )
    while True:
        ask = {**loops.chat_ask(messages), "model": "mistral-large-latest"}
        if stream:
            message = loops.Whole()
            async with await client.chat.stream_async(**ask) as events:
                async for event in events:
                    message.take(event.data)
        else:
            message = (await client.chat.complete_async(**ask)).choices[0].message
        if not loops.chat_step(loop, messages, message):
            return loop


def litellm_ask(server, messages, model, stream):
    base = server.url + "/v1" if model.startswith("openai/") else server.url
    ask = {**loops.chat_ask(messages), "model": model, "stream": stream}
    return {**ask, "api_key": "key", "api_base": base}


def litellm_loop(server, model="openai/gpt-4o", stream=False):
    messages, loop = [{"role": "user", "content": "go"}], loops.Loop()
    while True:
        reply = litellm.completion(**litellm_ask(server, messages, model, stream))
        if stream:
            message = loops.Whole()
            for chunk in reply:
                message.take(chunk)
        else:
            message = reply.choices[0].message
        if not loops.chat_step(loop, messages, message):
            return loop


async def litellm_async(server, model="openai/gpt-4o", stream=False):
    messages, loop = [{"role": "user", "content": "go"}], loops.Loop()
    while True:
        reply = await litellm.acompletion(**litellm_ask(server, messages, model, stream))
        if stream:
            message = loops.Whole()
            async for chunk in reply:
                message.take(chunk)
        else:
            message = reply.choices[0].message
        if not loops.chat_step(loop, messages, message):
            return loop


CLAUDE = f"anthropic/{loops.MESSAGES_MODEL}"
BY_SDK = {
    "openai": {
        "create": lambda server: loops.chat(openai_client(server)),
        "streamed": lambda server: loops.chat(openai_client(server), stream=True),
        "async": lambda server: loops.achat(openai_async(server)),
        "async streamed": lambda server: loops.achat(openai_async(server), stream=True),
        "raw response": openai_raw,
        "streaming response": openai_streaming_response,
        "`parse`": openai_parse,
        "stream helper": openai_stream_helper,
        "async stream helper": openai_stream_async,
        "Responses": lambda server: loops.responses(openai_client(server)),
        "Responses streamed": lambda server: loops.responses(openai_client(server), stream=True),
        "Azure": lambda server: loops.chat(azure(server)),
        "Azure deployment": lambda server: loops.chat(azure(server, azure_deployment="mine")),
        "Azure streamed": lambda server: loops.chat(azure(server), stream=True),
        "Azure async": lambda server: loops.achat(azure(server, openai.AsyncAzureOpenAI)),
        "Azure Responses": lambda server: loops.responses(azure(server)),
    },
    "anthropic": {
        "create": lambda server: loops.messages(anthropic_client(server)),
        "stream helper": lambda server: loops.messages(anthropic_client(server), stream=True),
        "async": lambda server: loops.amessages(anthropic_async(server)),
        "async stream helper": lambda server: loops.amessages(anthropic_async(server), stream=True),
        "raw response": anthropic_raw,
        "tool runner": anthropic_tool_runner,
        "Bedrock": lambda server: loops.messages(bedrock(server)),
        "Bedrock streamed": lambda server: loops.messages(bedrock(server), stream=True),
        "Bedrock async streamed": lambda server: loops.amessages(
            bedrock(server, anthropic.AsyncAnthropicBedrock), stream=True
        ),
        "Vertex": lambda server: loops.messages(vertex(server)),
        "Vertex streamed": lambda server: loops.messages(vertex(server), stream=True),
        "Vertex async": lambda server: loops.amessages(
            vertex(server, anthropic.AsyncAnthropicVertex)
        ),
    },
    "google-genai": {
        "function calling": gemini,
        "streamed": gemini_streamed,
        "async": gemini_async,
        "async streamed": gemini_async_streamed,
        "Vertex": lambda server: gemini(server, genai_on_vertex),
        "Vertex streamed": lambda server: gemini_streamed(server, genai_on_vertex),
        "Vertex async": lambda server: gemini_async(server, genai_on_vertex),
    },
    "mistralai": {
        "complete": mistral,
        "streamed": lambda server: mistral(server, stream=True),
        "async": mistral_async,
        "async streamed": lambda server: mistral_async(server, stream=True),
    },
    "litellm": {
        "openai/": litellm_loop,
        "openai/ streamed": lambda server: litellm_loop(server, stream=True),
        "openai/ async": litellm_async,
        "openai/ async streamed": lambda server: litellm_async(server, stream=True),
        "anthropic/": lambda server: litellm_loop(server, CLAUDE),
        "anthropic/ streamed": lambda server: litellm_loop(server, CLAUDE, stream=True),
        # Its own client, which sends over aiohttp below httpx.
        "anthropic/ async": lambda server: litellm_async(server, CLAUDE),
        "anthropic/ async streamed": lambda server: litellm_async(server, CLAUDE, stream=True),
    },
}
FLOWS = {f"{sdk}, {name}": flow for sdk, flows in BY_SDK.items() for name, flow in flows.items()}


def act(flow, server):
    with warnings.catch_warnings():
        # What the SDKs say of models and of their own plumbing is none of ours.
        warnings.simplefilter("ignore")
        ended = flow(server)
        return asyncio.run(ended) if asyncio.iscoroutine(ended) else ended
