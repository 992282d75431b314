"""Real SDKs over real HTTP: requests and tokens are the guard's in every flow, and loops end."""

from __future__ import annotations

import anthropic
import httpx2
import openai
import pytest

import http_loops as loops
from budgetguard_core import Budget
from budgetguard_http import AsyncBudgetTransport, BudgetTransport, bounded_clients
from http_flows import FLOWS, act, anthropic_client, openai_async, openai_client
from provider_server import TOKENS, ProviderServer

# Users leave their clients to the collector as well; what that says is none of ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


CAP = 3


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
def test_a_batch_over_the_cap_is_stopped_at_the_next_call(flow):
    budget = Budget(max_tool_calls=7, loop_detection=None)
    with ProviderServer(calls=3) as server, bounded_clients(budget) as block:
        loop = act(flow, server)
    assert (loop.bodies, block.outcome.usage.tool_calls, server.hits) == (9, 9, 3)
    assert str(block.outcome.stop_reason) == "max_tool_calls"


@pytest.mark.sample(4)
@pytest.mark.parametrize(("stream", "encoding"), [(False, None), (False, "gzip"), (True, None)])
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


def test_a_compressed_answer_is_read():
    budget = Budget(max_iterations=CAP, loop_detection=None)
    with ProviderServer(encoding="gzip") as server, bounded_clients(budget) as block:
        loops.chat(openai_client(server), stream=False)
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


def test_a_synthetic_answer_is_marked():
    with ProviderServer(calls=0) as server, bounded_clients(Budget(max_iterations=1)) as block:
        client = openai_client(server)
        for _ in range(2):
            ask = {"model": "gpt-4o", "messages": [{"role": "user", "content": "go"}]}
            reply = client.chat.completions.with_raw_response.create(**ask)
    completion = reply.parse()
    mark = completion.model_extra["budgetguard"]
    assert mark["synthetic"] is True
    assert (mark["stop_reason"], mark["run_id"]) == ("max_iterations", block.outcome.run_id)
    assert reply.headers["x-budgetguard-stop-reason"] == "max_iterations"


def test_a_client_of_httpx2_without_any_sdk_is_bounded():
    with ProviderServer() as server, bounded_clients(Budget(max_iterations=1)):
        ask = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
        replies = [httpx2.post(server.url + "/v1/chat/completions", json=ask) for _ in range(2)]
    assert [reply.json()["id"] for reply in replies] == ["chatcmpl-1", "chatcmpl-synthetic"]
    assert server.hits == 1
