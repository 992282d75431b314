"""Real SDKs over real HTTP: requests and tokens are the guard's in every flow, and loops end."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings

# Before the import: without it LiteLLM asks the network for its prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import anthropic
import httpx2
import litellm
import openai
import pydantic
import pytest
from google import genai
from mistralai.client import Mistral

import http_loops as loops
from budgetguard_core import Budget
from budgetguard_http import AsyncBudgetTransport, BudgetTransport, bounded_clients
from provider_server import TOKENS, ProviderServer

# Users leave their clients to the collector as well; what that says is none of ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def collected():
    yield
    gc.collect()


CAP = 3


class Answer(pydantic.BaseModel):
    x: int


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


def azure(server):
    client = openai.AzureOpenAI(
        api_key="key", azure_endpoint=server.url, api_version="2024-10-21", azure_deployment="mine"
    )
    return loops.chat(client)


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


def bedrock(server):
    client = anthropic.AnthropicBedrock(
        aws_access_key="a", aws_secret_key="b", aws_region="us-east-1", base_url=server.url
    )
    return loops.messages(client)


def bedrock_streamed(server):
    client = anthropic.AnthropicBedrock(
        aws_access_key="a", aws_secret_key="b", aws_region="us-east-1", base_url=server.url
    )
    return loops.messages(client, stream=True)


def vertex(server):
    client = anthropic.AnthropicVertex(
        region="us", project_id="p", access_token="t", base_url=server.url
    )
    return loops.messages(client, stream=True)


def genai_ask(loop):
    config = {
        "tools": [tool_of(loop, lambda function: function)],
        "automatic_function_calling": {"maximum_remote_calls": 20},
    }
    return {"model": "gemini-2.5-flash", "contents": "go", "config": config}


def gemini(server):
    loop, client = loops.Loop(), genai_client(server)
    loop.text = client.models.generate_content(**genai_ask(loop)).text
    return loop


def gemini_streamed(server):
    loop, client = loops.Loop(), genai_client(server)
    for chunk in client.models.generate_content_stream(**genai_ask(loop)):
        loop.text = chunk.text or loop.text
    return loop


async def gemini_async(server):
    loop, client = loops.Loop(), genai_client(server)
    answer = await client.aio.models.generate_content(**genai_ask(loop))
    loop.text = answer.text
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


def mistral_streamed(server):
    return mistral(server, stream=True)


def litellm_loop(server, stream=False):
    messages, loop = [{"role": "user", "content": "go"}], loops.Loop()
    while True:
        ask = {**loops.chat_ask(messages), "model": "openai/gpt-4o", "stream": stream}
        reply = litellm.completion(**ask, api_key="key", api_base=server.url + "/v1")
        if stream:
            message = loops.Whole()
            for chunk in reply:
                message.take(chunk)
        else:
            message = reply.choices[0].message
        if not loops.chat_step(loop, messages, message):
            return loop


def litellm_streamed(server):
    return litellm_loop(server, stream=True)


async def litellm_async(server):
    messages, loop = [{"role": "user", "content": "go"}], loops.Loop()
    while True:
        ask = {**loops.chat_ask(messages), "model": "openai/gpt-4o"}
        reply = await litellm.acompletion(**ask, api_key="key", api_base=server.url + "/v1")
        if not loops.chat_step(loop, messages, reply.choices[0].message):
            return loop


FLOWS = {
    "openai": lambda server: loops.chat(openai_client(server)),
    "openai, streamed": lambda server: loops.chat(openai_client(server), stream=True),
    "openai, async": lambda server: loops.achat(openai_async(server)),
    "openai, async, streamed": lambda server: loops.achat(openai_async(server), stream=True),
    "openai, raw response": openai_raw,
    "openai, streaming response": openai_streaming_response,
    "openai, parse": openai_parse,
    "openai, stream helper": openai_stream_helper,
    "openai, async stream helper": openai_stream_async,
    "openai, Azure": azure,
    "openai, Responses": lambda server: loops.responses(openai_client(server)),
    "openai, Responses, streamed": lambda server: loops.responses(
        openai_client(server), stream=True
    ),
    "anthropic": lambda server: loops.messages(anthropic_client(server)),
    "anthropic, stream helper": lambda server: loops.messages(
        anthropic_client(server), stream=True
    ),
    "anthropic, async": lambda server: loops.amessages(anthropic_async(server)),
    "anthropic, async, streamed": lambda server: loops.amessages(
        anthropic_async(server), stream=True
    ),
    "anthropic, raw response": anthropic_raw,
    "anthropic, tool runner": anthropic_tool_runner,
    "anthropic, Bedrock": bedrock,
    "anthropic, Bedrock, streamed": bedrock_streamed,
    "anthropic, Vertex, streamed": vertex,
    "google-genai, function calling": gemini,
    "google-genai, streamed": gemini_streamed,
    "google-genai, async": gemini_async,
    "mistralai": mistral,
    "mistralai, streamed": mistral_streamed,
    "litellm": litellm_loop,
    "litellm, streamed": litellm_streamed,
    "litellm, async": litellm_async,
}


def act(flow, server):
    with warnings.catch_warnings():
        # What the SDKs say of models and of their own plumbing is none of ours.
        warnings.simplefilter("ignore")
        ended = flow(server)
        return asyncio.run(ended) if asyncio.iscoroutine(ended) else ended


@pytest.mark.sample(7)
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
def test_a_loop_that_never_ends_ends_at_its_cap(flow):
    budget = Budget(max_iterations=CAP, loop_detection=None)
    with ProviderServer() as server, bounded_clients(budget) as block:
        loop = act(flow, server)
    usage = block.outcome.usage
    assert (server.hits, usage.model_calls, usage.iterations) == (CAP, CAP, CAP)
    assert (usage.total_tokens, usage.cache_read_tokens) == (CAP * TOKENS, CAP * 20)
    assert (usage.estimated_calls, usage.failed_calls) == (0, 0)
    assert loop.bodies == usage.tool_calls == CAP
    assert loop.text.startswith("This run was stopped before it finished.")
    assert str(block.outcome.stop_reason) == "max_iterations"
    assert block.guard.open_calls() == ()


@pytest.mark.sample(7)
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
def test_a_loop_within_its_caps_is_what_it_would_be_without(flow):
    with ProviderServer(turns=2) as server:
        alone = act(flow, server)
        hits = server.hits
    with ProviderServer(turns=2) as server, bounded_clients(Budget(max_iterations=20)) as block:
        loop = act(flow, server)
    assert (
        (loop.bodies, loop.text, server.hits)
        == (alone.bodies, alone.text, hits)
        == (2, "All done.", 3)
    )
    assert block.outcome.status == "completed"
    assert block.outcome.usage.total_tokens == 3 * TOKENS


@pytest.mark.sample(7)
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
def test_exactly_so_many_tool_bodies_run(flow):
    budget = Budget(max_tool_calls=7, loop_detection=None)
    with ProviderServer(calls=3) as server, bounded_clients(budget) as block:
        loop = act(flow, server)
    assert (loop.bodies, block.outcome.usage.tool_calls, server.hits) == (7, 7, 3)
    assert str(block.outcome.stop_reason) == "max_tool_calls"


@pytest.mark.sample(4)
@pytest.mark.parametrize("encoding", [None, "gzip"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_an_explicit_transport_needs_no_patch(kind, stream, encoding):
    budget = Budget(max_iterations=CAP, loop_detection=None)
    transport = BudgetTransport(budget)
    with ProviderServer(encoding=encoding) as server:
        if kind == "openai":
            http = openai.DefaultHttpxClient(transport=transport)
            with openai_client(server, http_client=http) as client:
                loop = loops.chat(client, stream=stream)
        else:
            http = anthropic.DefaultHttpxClient(transport=transport)
            with anthropic_client(server, http_client=http) as client:
                loop = loops.messages(client, stream=stream)
    assert (server.hits, transport.outcome.usage.total_tokens) == (CAP, CAP * TOKENS)
    assert transport.outcome.usage.estimated_calls == 0
    assert loop.text.startswith("This run was stopped")
    assert str(transport.outcome.stop_reason) == "max_iterations"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_on_an_event_loop(stream):
    transport = AsyncBudgetTransport(Budget(max_iterations=CAP, loop_detection=None))
    with ProviderServer() as server:
        http = openai.DefaultAsyncHttpxClient(transport=transport)
        async with openai_async(server, http_client=http) as client:
            loop = await loops.achat(client, stream=stream)
    assert (server.hits, transport.outcome.usage.total_tokens) == (CAP, CAP * TOKENS)
    assert loop.text.startswith("This run was stopped")


@pytest.mark.parametrize("encoding", ["gzip"])
@pytest.mark.parametrize("stream", [False, True])
def test_compressed_answers_are_read(stream, encoding):
    budget = Budget(max_iterations=CAP, loop_detection=None)
    with ProviderServer(encoding=encoding) as server, bounded_clients(budget) as block:
        loops.chat(openai_client(server), stream=stream)
    assert block.outcome.usage.total_tokens == CAP * TOKENS
    assert block.outcome.usage.estimated_calls == 0


def test_usage_that_was_asked_for_on_the_callers_behalf_is_not_shown():
    with ProviderServer() as server, bounded_clients(Budget(max_iterations=2)) as block:
        ask = {"model": "gpt-4o", "messages": [{"role": "user", "content": "go"}], "stream": True}
        chunks = list(openai_client(server).chat.completions.create(**ask))
    assert server.posts[0]["body"]["stream_options"] == {"include_usage": True}
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert block.outcome.usage.total_tokens == TOKENS


def test_usage_is_not_asked_for_where_that_is_switched_off():
    with (
        ProviderServer() as server,
        bounded_clients(Budget(max_iterations=2), ask_for_usage=False) as block,
    ):
        ask = {"model": "gpt-4o", "messages": [{"role": "user", "content": "go"}], "stream": True}
        list(openai_client(server).chat.completions.create(**ask))
    assert "stream_options" not in server.posts[0]["body"]
    assert block.outcome.usage.estimated_calls == 1


def test_structured_output_is_refused_by_an_error_that_nobody_tries_again():
    with ProviderServer(calls=0) as server, bounded_clients(Budget(max_iterations=1)):
        client = openai_client(server)
        ask = {"model": "gpt-4o", "messages": [{"role": "user", "content": "go"}]}
        assert (
            client.chat.completions.parse(**ask, response_format=Answer).choices[0].message.parsed
        )
        with pytest.raises(openai.APIStatusError) as raised:
            client.chat.completions.parse(**ask, response_format=Answer)
    assert (raised.value.status_code, server.hits) == (402, 1)
    assert raised.value.response.headers["x-budgetguard-stop-reason"] == "max_iterations"
    # A tool's error goes to the model, which may see nothing of the budget.
    assert "budget" not in str(raised.value).lower()
    assert "max_" not in str(raised.value)


def test_a_synthetic_answer_is_marked_and_has_no_usage():
    with ProviderServer(calls=0) as server, bounded_clients(Budget(max_iterations=1)) as block:
        client = openai_client(server)
        for _ in range(2):
            ask = {"model": "gpt-4o", "messages": [{"role": "user", "content": "go"}]}
            reply = client.chat.completions.with_raw_response.create(**ask)
    completion = reply.parse()
    mark = completion.model_extra["budgetguard"]
    assert mark["synthetic"] is True
    assert (mark["stop_reason"], mark["run_id"]) == ("max_iterations", block.outcome.run_id)
    assert completion.usage is None
    assert reply.headers["x-budgetguard-stop-reason"] == "max_iterations"


def test_a_client_of_httpx2_without_any_sdk_is_bounded():
    with ProviderServer() as server, bounded_clients(Budget(max_iterations=1)):
        ask = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
        replies = [httpx2.post(server.url + "/v1/chat/completions", json=ask) for _ in range(2)]
    assert [reply.json()["id"] for reply in replies] == ["chatcmpl-1", "chatcmpl-synthetic"]
    assert server.hits == 1
