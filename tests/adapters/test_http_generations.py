"""The newest SDKs and older ones, which send with httpx: the same flows, the same figures.

Needs openai and anthropic alone, so that it runs beside releases that nothing else here takes.
"""

from __future__ import annotations

import asyncio
import warnings

import pytest

import http_loops as loops
from budgetguard_core import Budget, BudgetExceeded
from budgetguard_http import bounded_clients
from provider_server import TOKENS, ProviderServer

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CAP = 3
ASK = {"model": "gpt-4o", "messages": [{"role": "user", "content": "go"}]}


def of_openai(server, make=None, **options):
    return (make or openai.OpenAI)(api_key="key", base_url=server.url + "/v1", **options)


def of_anthropic(server, make=None):
    return (make or anthropic.Anthropic)(api_key="key", base_url=server.url)


def azure(server):
    return loops.chat(
        openai.AzureOpenAI(api_key="key", azure_endpoint=server.url, api_version="2024-10-21")
    )


def raw(server):
    client, messages, loop = of_openai(server), list(ASK["messages"]), loops.Loop()
    while True:
        reply = client.chat.completions.with_raw_response.create(**loops.chat_ask(messages))
        if not loops.chat_step(loop, messages, reply.parse().choices[0].message):
            return loop


FLOWS = {
    "openai": lambda server: loops.chat(of_openai(server)),
    "openai, streamed": lambda server: loops.chat(of_openai(server), stream=True),
    "openai, raw response": raw,
    "openai, Azure": azure,
    "openai, async": lambda server: loops.achat(of_openai(server, openai.AsyncOpenAI)),
    "openai, async, streamed": lambda server: loops.achat(
        of_openai(server, openai.AsyncOpenAI), stream=True
    ),
    "openai, Responses": lambda server: loops.responses(of_openai(server)),
    "openai, Responses, streamed": lambda server: loops.responses(of_openai(server), stream=True),
    "anthropic": lambda server: loops.messages(of_anthropic(server)),
    "anthropic, stream helper": lambda server: loops.messages(of_anthropic(server), stream=True),
    "anthropic, async": lambda server: loops.amessages(
        of_anthropic(server, anthropic.AsyncAnthropic)
    ),
    "anthropic, async, streamed": lambda server: loops.amessages(
        of_anthropic(server, anthropic.AsyncAnthropic), stream=True
    ),
}


def act(flow, server):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ended = flow(server)
        return asyncio.run(ended) if asyncio.iscoroutine(ended) else ended


@pytest.mark.sample(7)
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
@pytest.mark.parametrize("calls", [1, 3])
def test_a_loop_that_never_ends_ends_at_its_cap(flow, calls):
    budget = Budget(max_iterations=CAP, loop_detection=None)
    with ProviderServer(calls=calls) as server, bounded_clients(budget) as block:
        loop = act(flow, server)
    usage = block.outcome.usage
    assert (server.hits, usage.model_calls, usage.iterations) == (CAP, CAP, CAP)
    assert (usage.total_tokens, usage.estimated_calls, usage.failed_calls) == (CAP * TOKENS, 0, 0)
    assert loop.bodies == usage.tool_calls == CAP * calls
    assert loop.text.startswith("This run was stopped before it finished.")
    assert block.guard.open_calls() == ()


@pytest.mark.sample(7)
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
def test_a_loop_within_its_caps_is_what_it_would_be_without(flow):
    with ProviderServer(turns=2) as server:
        alone = act(flow, server)
    with ProviderServer(turns=2) as server, bounded_clients(Budget(max_iterations=20)) as block:
        loop = act(flow, server)
    assert (loop.bodies, loop.text) == (alone.bodies, alone.text) == (2, "All done.")
    assert (block.outcome.status, block.outcome.usage.total_tokens) == ("completed", 3 * TOKENS)


@pytest.mark.sample(7)
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
def test_raise_leaves_every_client_past_its_retries(flow):
    with ProviderServer() as server, pytest.raises(BudgetExceeded) as raised:
        with bounded_clients(Budget(max_iterations=1), on_trip="raise"):
            act(flow, server)
    assert (server.hits, str(raised.value.trip.reason)) == (1, "max_iterations")


def test_retries_are_calls_and_no_iterations():
    with ProviderServer([429, 429, "ok", 500, "ok"], calls=0) as server:
        with bounded_clients(Budget(loop_detection=None)) as block:
            for text in ("one", "two"):
                messages = [{"role": "user", "content": text}]
                of_openai(server).chat.completions.create(model="gpt-4o", messages=messages)
    usage = block.outcome.usage
    assert (usage.iterations, usage.model_calls, usage.failed_calls) == (2, 5, 3)


def test_a_refusal_as_an_error_is_not_tried_again():
    with ProviderServer() as server, bounded_clients(Budget(max_model_calls=1)):
        client = of_openai(server)
        ask = {"model": "text-embedding-3-small", "input": "x", "encoding_format": "float"}
        client.embeddings.create(**ask)
        with pytest.raises(openai.APIStatusError) as raised:
            client.embeddings.create(**ask)
    assert (raised.value.status_code, server.hits) == (402, 1)
