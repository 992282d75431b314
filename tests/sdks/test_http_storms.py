"""A provider that turns every call away, and asks each client to wait for a day.

The waits are those of the clients: what sleeps for them is told here, and moves the clock instead.
"""

import asyncio
import logging
import time

import anyio
import httpx2
import litellm
import openai
import pytest
from google import genai
from google.genai import types
from mistralai.client import Mistral
from mistralai.client.utils import BackoffStrategy, RetryConfig

import http_flows as flows
import http_loops as loops
from budgetguard_core import Budget, Guard
from budgetguard_core.testing import ManualClock
from budgetguard_http import BudgetTransport, bounded_clients
from provider_server import ProviderServer

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

DAY = "86400"
MANY = 30
TURNS = [{"role": "user", "content": "go"}]
CHAT = {"model": "gpt-4o", "messages": TURNS}
MESSAGES = {"model": loops.MESSAGES_MODEL, "max_tokens": 100, "messages": TURNS}
PATIENT = RetryConfig("backoff", BackoffStrategy(1, 10, 1.1, 10**9), retry_connection_errors=True)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR)


@pytest.fixture
def clock(monkeypatch):
    """A clock that what sleeps moves forward, and nothing else does."""
    clock, asleep = ManualClock(), asyncio.sleep
    clock.waits = []

    def sleep(seconds):
        clock.waits.append(seconds)
        clock.advance(seconds)

    async def async_sleep(seconds, *_):
        if seconds:
            sleep(seconds)
        await asleep(0)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(asyncio, "sleep", async_sleep)
    monkeypatch.setattr(anyio, "sleep", async_sleep)
    return clock


def gemini(server, act):
    retries = types.HttpRetryOptions(attempts=MANY, jitter=0)
    options = types.HttpOptions(base_url=server.url, retry_options=retries)
    client = genai.Client(api_key="key", http_options=options)
    return act(client, model="gemini-2.5-flash", contents="go")


def mistral(server):
    return Mistral(api_key="key", server_url=server.url, retry_config=PATIENT)


def of_litellm(server, model, base):
    ask = {"api_base": server.url + base, "api_key": "key", "num_retries": MANY}
    return {"model": model, "messages": TURNS, "max_tokens": 100, **ask}


def openai_over_httpx(server):
    http = openai.DefaultHttpxClient()
    client = flows.openai_client(server, max_retries=MANY, http_client=http)
    return client.chat.completions.create(**CHAT)


CLIENTS = {
    "openai": lambda s: flows.openai_client(s, max_retries=MANY).chat.completions.create(**CHAT),
    "openai, older httpx": openai_over_httpx,
    "openai, async": lambda s: flows.openai_async(s, max_retries=MANY).chat.completions.create(
        **CHAT
    ),
    "anthropic": lambda s: flows.anthropic_client(s, max_retries=MANY).messages.create(**MESSAGES),
    "anthropic, streamed": lambda s: list(
        flows.anthropic_client(s, max_retries=MANY).messages.create(**MESSAGES, stream=True)
    ),
    "anthropic, async": lambda s: flows.anthropic_async(s, max_retries=MANY).messages.create(
        **MESSAGES
    ),
    "google-genai": lambda s: gemini(s, lambda c, **ask: c.models.generate_content(**ask)),
    "google-genai, streamed": lambda s: gemini(
        s, lambda c, **ask: list(c.models.generate_content_stream(**ask))
    ),
    "google-genai, async": lambda s: gemini(
        s, lambda c, **ask: c.aio.models.generate_content(**ask)
    ),
    "mistralai": lambda s: mistral(s).chat.complete(model="mistral-small-latest", messages=TURNS),
    "mistralai, streamed": lambda s: list(
        mistral(s).chat.stream(model="mistral-small-latest", messages=TURNS)
    ),
    "mistralai, async": lambda s: mistral(s).chat.complete_async(
        model="mistral-small-latest", messages=TURNS
    ),
    "litellm": lambda s: litellm.completion(**of_litellm(s, "openai/gpt-4o", "/v1")),
    "litellm, anthropic": lambda s: litellm.completion(
        **of_litellm(s, f"anthropic/{loops.MESSAGES_MODEL}", "")
    ),
}
GIVES_UP = {"openai", "openai, older httpx", "openai, async"}
"""These raise at once what asks them to wait for more than two minutes."""
OWN_WAITS = {name for name in CLIENTS if name.startswith("google")}
"""These wait for as long as they think right, a minute at most, whatever they are told."""
NO_WAITS = {name for name in CLIENTS if name.startswith("litellm")}
"""These try again at once, as often as they may."""


def act(call, server):
    made = call(server)
    return asyncio.run(_awaited(made)) if asyncio.iscoroutine(made) else made


async def _awaited(made):
    return await made


@pytest.mark.parametrize("name", CLIENTS)
def test_the_cap_ends_a_storm(name, clock):
    wait = "1" if name in GIVES_UP else DAY
    server = ProviderServer([429] * 60, wait=wait)
    with server, bounded_clients(Budget(max_model_calls=4), clock=clock) as block:
        act(CLIENTS[name], server)
    usage = block.outcome.usage
    assert server.hits == 4
    assert (usage.iterations, usage.model_calls, usage.failed_calls) == (1, 4, 4)
    assert usage.total_tokens == 0
    assert block.outcome.stop_reason == "max_model_calls"
    assert not block.guard.open_calls()


@pytest.mark.parametrize("name", [one for one in CLIENTS if one not in NO_WAITS])
def test_the_deadline_ends_a_storm(name, clock):
    server = ProviderServer([429] * 60, wait=DAY)
    with server, bounded_clients(Budget(max_seconds=100), clock=clock) as block:
        act(CLIENTS[name], server)
    late = 60 if name in OWN_WAITS else 0
    assert sum(clock.waits) <= 101 + late
    assert block.outcome.stop_reason == "max_seconds"
    assert block.outcome.usage.model_calls == server.hits
    assert block.outcome.usage.iterations == 1
    assert not block.guard.open_calls()


@pytest.mark.parametrize("name", sorted(NO_WAITS))
def test_every_attempt_of_who_does_not_wait_is_a_call(name, clock):
    server = ProviderServer([429] * 60, wait=DAY)
    with (
        server,
        bounded_clients(Budget(max_seconds=100), clock=clock) as block,
        pytest.raises(litellm.RateLimitError),
    ):
        act(CLIENTS[name], server)
    usage = block.outcome.usage
    assert (usage.iterations, usage.model_calls) == (1, server.hits)
    assert server.hits > MANY
    assert sum(clock.waits) == 0


def test_the_same_below_a_transport(clock):
    transport = BudgetTransport(Budget(max_seconds=100), clock=clock)
    http = openai.DefaultHttpxClient(transport=transport)
    with ProviderServer([429] * 60, wait="110") as server:
        with flows.openai_client(server, max_retries=MANY, http_client=http) as client:
            client.chat.completions.create(**CHAT)
    assert transport.outcome.stop_reason == "max_seconds"
    assert sum(clock.waits) <= 101


def test_what_is_turned_away_after_an_abort_is_tried_again_at_once(clock):
    guard = Guard()

    def answer(_):
        guard.abort("enough")
        return httpx2.Response(429, headers={"retry-after": "30"}, json={})

    transport = BudgetTransport(guard, httpx2.MockTransport(answer))
    http = httpx2.Client(transport=transport)
    with openai.OpenAI(api_key="key", base_url="http://server", http_client=http) as client:
        client.chat.completions.create(**CHAT)
    assert (transport.outcome.stop_reason, clock.waits) == ("aborted", [1])


@pytest.mark.parametrize(
    ("wait", "waited"), [("30", [30]), ("Wed, 01 Jan 2200 00:00:00 GMT", [100])]
)
def test_a_wait_within_the_run_is_as_the_provider_says(wait, waited, clock):
    server = ProviderServer([429], calls=0, wait=wait)
    with server, bounded_clients(Budget(max_seconds=100), clock=clock):
        flows.anthropic_client(server, max_retries=1).messages.create(**MESSAGES)
    assert clock.waits == waited
