"""A stream that ends in its middle, in each SDK: by the provider, by the deadline, by an abort."""

from __future__ import annotations

import threading

import httpx2
import litellm
import pytest

import http_flows as flows
import http_loops as loops
from budgetguard_core import Budget
from budgetguard_http import bounded_clients
from provider_server import TOKENS, ProviderServer

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TURNS = [{"role": "user", "content": "go"}]
CHAT = {"model": loops.CHAT_MODEL, "messages": TURNS}
MESSAGES = {"model": loops.MESSAGES_MODEL, "max_tokens": 100, "messages": TURNS}
MISTRAL = {"model": "mistral-large-latest", "messages": TURNS}
GEMINI = {"model": "gemini-2.5-flash", "contents": "go"}
STOPPED = "This run was stopped before it finished."


def chat(server):
    chunks = flows.openai_client(server, max_retries=0).chat.completions.create(**CHAT, stream=True)
    return [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]


def chat_helper(server):
    with flows.openai_client(server, max_retries=0).chat.completions.stream(**CHAT) as events:
        return [events.get_final_completion().choices[0].message.content]


async def chat_async(server):
    client = flows.openai_async(server, max_retries=0)
    chunks = await client.chat.completions.create(**CHAT, stream=True)
    return [chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices]


def responses(server):
    client = flows.openai_client(server, max_retries=0)
    with client.responses.stream(model=loops.CHAT_MODEL, input="go") as events:
        return [events.get_final_response().output_text]


async def responses_async(server):
    client = flows.openai_async(server, max_retries=0)
    async with client.responses.stream(model=loops.CHAT_MODEL, input="go") as events:
        return [(await events.get_final_response()).output_text]


def messages(server):
    with flows.anthropic_client(server, max_retries=0).messages.stream(**MESSAGES) as events:
        return [block.text for block in events.get_final_message().content]


async def messages_async(server):
    client = flows.anthropic_async(server, max_retries=0)
    async with client.messages.stream(**MESSAGES) as events:
        return [block.text for block in (await events.get_final_message()).content]


def gemini(server):
    client = flows.genai_client(server)
    return [chunk.text or "" for chunk in client.models.generate_content_stream(**GEMINI)]


async def gemini_async(server):
    client = flows.genai_client(server)
    chunks = await client.aio.models.generate_content_stream(**GEMINI)
    return [chunk.text or "" async for chunk in chunks]


def mistral(server):
    with flows.mistral_client(server).chat.stream(**MISTRAL) as events:
        return [event.data.choices[0].delta.content or "" for event in events if event.data.choices]


async def mistral_async(server):
    async with await flows.mistral_client(server).chat.stream_async(**MISTRAL) as events:
        chunks = [event.data async for event in events]
        return [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]


def lite(server, model="openai/gpt-4o"):
    ask = flows.litellm_ask(server, TURNS, model, stream=True)
    chunks = litellm.completion(**{**ask, "tools": None})
    return [chunk.choices[0].delta.content or "" for chunk in chunks]


async def lite_async(server, model="openai/gpt-4o"):
    ask = flows.litellm_ask(server, TURNS, model, stream=True)
    chunks = await litellm.acompletion(**{**ask, "tools": None})
    return [chunk.choices[0].delta.content or "" async for chunk in chunks]


STREAMS = {
    "openai": chat,
    "openai, helper": chat_helper,
    "openai, async": chat_async,
    "openai, Responses": responses,
    "openai, Responses, async": responses_async,
    "anthropic": messages,
    "anthropic, async": messages_async,
    "google-genai": gemini,
    "google-genai, async": gemini_async,
    "mistralai": mistral,
    "mistralai, async": mistral_async,
    "litellm": lite,
    "litellm, async": lite_async,
    "litellm, anthropic": lambda server: lite(server, flows.CLAUDE),
    "litellm, anthropic, async": lambda server: lite_async(server, flows.CLAUDE),
}
PLACES = {name: (0,) if "genai" in name else (0, 1, 2, 3, 4, 5) for name in STREAMS}
EVERYWHERE = [(name, place) for name, places in PLACES.items() for place in places]


def middle(name):
    return PLACES[name][len(PLACES[name]) // 2]


def is_over(block, server):
    """What holds after every ending: one request, one call, nothing reserved, nothing open."""
    usage = block.outcome.usage
    assert (server.hits, usage.model_calls, usage.reserved_tokens) == (1, 1, 0)
    assert block.guard.open_calls() == ()
    return usage


@pytest.mark.parametrize(("name", "place"), EVERYWHERE, ids=lambda one: str(one))
def test_an_abort_ends_a_stream_as_its_provider_would_have(name, place):
    budget = Budget(max_total_tokens=10_000)
    with ProviderServer([("hang_mid", place)], calls=0) as server:
        with bounded_clients(budget) as block:

            def abort():
                server.hung.wait(60)
                block.guard.abort()

            thread = threading.Thread(target=abort)
            thread.start()
            texts = flows.act(STREAMS[name], server)
            thread.join()
    usage = is_over(block, server)
    assert (str(block.outcome.stop_reason), usage.failed_calls) == ("aborted", 1)
    said = "".join(texts)
    assert said.startswith(STOPPED) or "All done.".startswith(said)
    assert said


@pytest.mark.parametrize("name", STREAMS)
def test_the_deadline_ends_a_stream_the_same_way(name):
    script = [("hang_mid", middle(name))]
    with ProviderServer(script, calls=0) as server:
        with bounded_clients(Budget(max_seconds=0.5)) as block:
            texts = flows.act(STREAMS[name], server)
    # Where the machine is so slow that the time was over before the first byte, it is no other.
    assert str(block.outcome.stop_reason) == "max_seconds"
    assert block.guard.open_calls() == ()
    said = "".join(texts)
    assert said.startswith(STOPPED) or "All done.".startswith(said)


def raised_by(name, server):
    try:
        flows.act(STREAMS[name], server)
    except Exception as error:
        assert "budget" not in f"{error}".lower()  # noqa: PT017 - some raise, some do not
        return type(error)
    return None


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_its_provider_cuts_raises_what_it_raises_without_a_block(name):
    script = [("cut", middle(name))]
    with ProviderServer(script, calls=0) as server:
        alone = raised_by(name, server)
    with ProviderServer(script, calls=0) as server, bounded_clients(Budget()) as block:
        bounded = raised_by(name, server)
    # Alone, the asynchronous half of google-genai goes over aiohttp.
    assert bounded is (httpx2.RemoteProtocolError if name == "google-genai, async" else alone)
    usage = is_over(block, server)
    assert usage.estimated_calls == 1
    assert (block.outcome.status, usage.iterations) == ("completed", 1)


@pytest.mark.parametrize("name", [name for name in STREAMS if "genai" not in name])
def test_an_answer_without_its_end_is_estimated(name):
    """Some proxies end a broken answer in good order: what it began with are not its figures."""
    script = [("end", middle(name))]
    with ProviderServer(script, calls=0) as server, bounded_clients(Budget()) as block:
        raised_by(name, server)
    usage = is_over(block, server)
    assert usage.estimated_calls == 1
    assert 0 < usage.total_tokens < 2 * TOKENS
