"""HTTP/2, and both packages that SDKs send with: httpx and httpx2."""

from __future__ import annotations

import asyncio

import httpx
import httpx2
import openai
import pytest

import http_loops as loops
from budgetguard_core import Budget
from budgetguard_http import AsyncBudgetTransport, BudgetTransport, bounded_clients
from http2_server import Http2Server
from provider_server import TOKENS, ProviderServer

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CAP = 3
ASK = {"model": "gpt-4o", "messages": [{"role": "user", "content": "go"}]}
ONLY_HTTP2 = {"http1": False, "http2": True}
BOTH = pytest.mark.parametrize("mod", [httpx, httpx2], ids=["httpx", "httpx2"])
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def path_of(server):
    return server.url + "/v1/chat/completions"


@pytest.mark.sample(4)
@BOTH
@STREAMED
def test_a_loop_over_http2_is_exact(mod, stream):
    budget = Budget(max_iterations=CAP, loop_detection=None)
    with Http2Server() as server, bounded_clients(budget) as block:
        with openai.OpenAI(
            api_key="k", base_url=server.url + "/v1", http_client=mod.Client(**ONLY_HTTP2)
        ) as client:
            loop = loops.chat(client, stream=stream)
    usage = block.outcome.usage
    assert (server.hits, server.connections) == (CAP, 1)
    assert (usage.iterations, usage.total_tokens, usage.estimated_calls) == (CAP, CAP * TOKENS, 0)
    assert loop.text.startswith("This run was stopped")


@pytest.mark.sample(4)
@BOTH
@STREAMED
async def test_many_streams_on_one_connection_share_a_budget(mod, stream):
    ask = {**ASK, "stream": stream}
    with Http2Server(together=30) as server:
        async with bounded_clients(Budget(max_iterations=30)) as block:
            async with mod.AsyncClient(**ONLY_HTTP2) as client:
                posts = [client.post(path_of(server), json=ask) for _ in range(50)]
                replies = await asyncio.gather(*posts)
    usage = block.outcome.usage
    assert (server.hits, server.connections, server.most_at_once) == (30, 1, 30)
    assert (usage.iterations, usage.total_tokens, usage.estimated_calls) == (30, 30 * TOKENS, 0)
    stopped = [one for one in replies if "This run was stopped" in one.text]
    assert len(stopped) == 20
    assert {one.status_code for one in replies} == {200}


@BOTH
def test_a_transport_over_http2_needs_no_patch(mod):
    transport = BudgetTransport(Budget(max_iterations=1), mod.HTTPTransport(**ONLY_HTTP2))
    with Http2Server() as server, mod.Client(transport=transport) as client:
        replies = [client.post(path_of(server), json=ASK).json() for _ in range(2)]
    assert server.hits == 1
    assert replies[1]["id"] == "chatcmpl-synthetic"


@BOTH
async def test_a_cut_stream_leaves_the_others_on_its_connection_alone(mod):
    """The deadline of one run is no reason to shut a connection that others share."""
    inner = mod.AsyncHTTPTransport(**ONLY_HTTP2)
    bounded = AsyncBudgetTransport(Budget(max_seconds=0.3), inner)
    with Http2Server(together=3) as server:
        async with mod.AsyncClient(transport=inner) as free:
            other = asyncio.ensure_future(free.post(path_of(server), json=ASK))
            stopped = await mod.AsyncClient(transport=bounded).post(path_of(server), json=ASK)
            assert not other.done()
            # The third request lets the server answer what is still waiting.
            last = await free.post(path_of(server), json=ASK)
            assert (await other).json()["choices"]
    assert "This run was stopped" in stopped.text
    assert (last.status_code, server.connections) == (200, 1)
    assert str(bounded.run.guard.trip.reason) == "max_seconds"


@BOTH
@pytest.mark.parametrize("way", ["environment", "proxy", "mounts", "inner transport"])
def test_a_proxy_is_no_way_around(way, mod, monkeypatch):
    asked = {"model": "gpt-4o", "messages": [{"role": "user", "content": "go"}]}
    with ProviderServer(calls=0) as proxy:
        options = {}
        if way == "environment":
            monkeypatch.setenv("HTTP_PROXY", proxy.url)
        elif way == "proxy":
            options["proxy"] = proxy.url
        elif way == "mounts":
            options["mounts"] = {"all://": mod.HTTPTransport(proxy=proxy.url)}
        else:
            inner = mod.HTTPTransport(proxy=proxy.url)
            options["transport"] = BudgetTransport(Budget(max_model_calls=2), inner)
        block = bounded_clients(Budget(max_model_calls=2))
        with block, mod.Client(**options) as client:
            for _ in range(4):
                client.post("http://provider.invalid/prefix/v1/chat/completions", json=asked)
    usage = block.outcome.usage
    assert (proxy.hits, usage.model_calls, usage.total_tokens) == (2, 2, 220)


@BOTH
@pytest.mark.parametrize("way", ["block", "transport"])
def test_a_whole_answer_is_there_for_who_reads_its_bytes_by_himself(way, mod):
    raw = []
    budget = Budget(max_model_calls=1)
    with ProviderServer(calls=0, encoding="gzip") as server:
        transport = BudgetTransport(budget) if way == "transport" else None
        block = bounded_clients(budget if way == "block" else Budget())
        with block, mod.Client(transport=transport) as client:
            for _ in range(2):
                with client.stream("POST", path_of(server), json=ASK) as response:
                    raw.append(b"".join(response.iter_raw()))
                assert response.is_closed
            assert client.post(path_of(server), json=ASK).is_closed
    assert [b"All done." in one for one in raw] == [True, False]
    assert b"This run was stopped" in raw[1]
    assert (server.hits, block.outcome.usage.total_tokens) == (1, TOKENS)


@BOTH
def test_the_time_of_an_answer_is_known_below_a_transport(mod):
    transport = BudgetTransport(Budget(max_model_calls=1))
    with ProviderServer(calls=0) as server, mod.Client(transport=transport) as client:
        assert client.post(path_of(server), json=ASK).elapsed.total_seconds() > 0
