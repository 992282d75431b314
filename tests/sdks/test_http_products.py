"""Where two things meet at the seam: a refusal in a stream that was to have a form, a block in a
block, a guard in threads, a request that is sent twice."""

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor

import httpx
import httpx2
import openai
import pytest

import http_flows as flows
import http_loops as loops
from budgetguard_core import Budget, BudgetExceeded, Guard
from budgetguard_http import (
    AsyncBudgetTransport,
    BudgetTransport,
    CallRefused,
    bounded_clients,
    install,
    uninstall,
)
from provider_server import TOKENS, ProviderServer

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TURNS = [{"role": "user", "content": "go"}]
CHAT = {"model": "gpt-4o", "messages": TURNS}
MODS = pytest.mark.parametrize("mod", [httpx, httpx2], ids=["httpx", "httpx2"])
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def create(client, **options):
    reply = client.chat.completions.create(**CHAT, **options)
    return list(reply) if options.get("stream") else reply


# A refusal of a call of a tool that is forced


def chat_helper(server):
    ask = loops.chat_ask(TURNS, tool_choice="required")
    with flows.openai_client(server).chat.completions.stream(**ask) as events:
        events.get_final_completion()


def responses_helper(server):
    ask = {"model": "gpt-4o", "input": "go", "tools": loops.RESPONSES_TOOLS}
    ask["tool_choice"] = "required"
    with flows.openai_client(server).responses.stream(**ask) as events:
        events.get_final_response()


def messages_helper(server):
    ask = {"model": loops.MESSAGES_MODEL, "max_tokens": 100, "messages": TURNS}
    choice = {"type": "tool", "name": "read_file"}
    tools = {"tools": loops.MESSAGES_TOOLS, "tool_choice": choice}
    with flows.anthropic_client(server).messages.stream(**ask, **tools) as events:
        events.get_final_message()


@pytest.mark.parametrize("helper", [chat_helper, responses_helper, messages_helper])
def test_a_streamed_call_that_is_forced_is_refused_by_a_status_and_not_tried_again(helper):
    with ProviderServer(calls=0) as server, bounded_clients(Budget(max_model_calls=1)) as block:
        create(flows.openai_client(server))
        with pytest.raises(Exception, match="stopped before this call") as raised:
            helper(server)
    assert raised.value.status_code == 402
    assert server.hits == 1
    assert (block.outcome.stop_reason, block.outcome.usage.model_calls) == ("max_model_calls", 1)


# A stream that is cut, tried again, and refused


@pytest.mark.parametrize("asks", [False, True], ids=["text", "tool calls"])
def test_a_cut_stream_is_a_call_and_what_is_tried_again_is_no_turn(asks):
    tools = {"tools": loops.chat_ask([])["tools"]} if asks else {}
    script = [("cut", 2), ("cut", 2), "ok"]
    with ProviderServer(script, calls=int(asks)) as server:
        with bounded_clients(Budget(max_model_calls=2, max_total_tokens=10**6)) as block:
            client = flows.openai_client(server)
            for _ in range(2):
                with pytest.raises((httpx2.TransportError, openai.APIConnectionError)):
                    create(client, stream=True, **tools)
            refused = create(client, stream=True, **tools)
    usage = block.outcome.usage
    assert server.hits == 2
    assert (usage.iterations, usage.model_calls, usage.failed_calls) == (1, 2, 2)
    assert refused[-1].choices[0].finish_reason == "stop"
    assert usage.reserved_tokens == 0
    assert not block.guard.open_calls()


# Blocks, guards and transports around each other


@STREAM
def test_a_block_in_a_block_spends_both_and_each_ends_at_its_own_cap(stream):
    with ProviderServer(calls=0) as server:
        client = flows.openai_client(server)
        with bounded_clients(Budget(max_model_calls=4)) as outer:
            create(client, stream=stream)
            with bounded_clients(Budget(max_model_calls=2)) as inner:
                for _ in range(3):
                    create(client, stream=stream)
            assert server.hits == 3
            for _ in range(3):
                create(client, stream=stream)
    assert server.hits == 4
    assert (inner.outcome.stop_reason, inner.outcome.usage.model_calls) == ("max_model_calls", 2)
    assert (outer.outcome.stop_reason, outer.outcome.usage.model_calls) == ("max_model_calls", 4)
    assert outer.outcome.usage.total_tokens == 4 * TOKENS
    assert inner.outcome.usage.total_tokens == 2 * TOKENS


def test_the_stop_of_the_block_around_goes_through_the_one_inside():
    with ProviderServer(calls=0) as server:
        client = flows.openai_client(server)
        with bounded_clients(Budget(max_model_calls=1)) as outer:
            create(client)
            with pytest.raises(BudgetExceeded) as raised, bounded_clients(Budget()):
                create(client)
    assert raised.value.outcome.stop_reason == "max_model_calls"
    assert (server.hits, outer.outcome.usage.model_calls) == (1, 1)


@STREAM
def test_a_guard_bounds_the_threads_that_copy_its_context(stream):
    guard = Guard(Budget(max_model_calls=5))
    install()
    try:
        with ProviderServer(calls=0) as server, ThreadPoolExecutor(8) as pool:
            client = flows.openai_client(server)
            with guard.activate():
                made = [
                    pool.submit(contextvars.copy_context().run, create, client, stream=stream)
                    for _ in range(12)
                ]
            for one in made:
                one.result(60)
            # Beside the block nothing is bounded.
            create(client, stream=stream)
    finally:
        uninstall()
    assert server.hits == 6
    assert (guard.usage.model_calls, guard.usage.total_tokens) == (5, 5 * TOKENS)
    assert not guard.open_calls()


@STREAM
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_transport_on_the_guard_of_its_block_counts_once(kind, stream):
    guard = Guard(Budget(max_model_calls=2))

    async def on_a_loop(server):
        http = openai.DefaultAsyncHttpxClient(transport=AsyncBudgetTransport(guard))
        async with flows.openai_async(server, http_client=http) as client:
            for _ in range(4):
                reply = await client.chat.completions.create(**CHAT, stream=stream)
                if stream:
                    [one async for one in reply]

    def blocking(server):
        http = openai.DefaultHttpxClient(transport=BudgetTransport(guard))
        with flows.openai_client(server, http_client=http) as client:
            for _ in range(4):
                create(client, stream=stream)

    with ProviderServer(calls=0) as server, bounded_clients(guard):
        asyncio.run(on_a_loop(server)) if kind == "async" else blocking(server)
    assert server.hits == 2
    assert (guard.usage.model_calls, guard.usage.total_tokens) == (2, 2 * TOKENS)


@STREAM
@pytest.mark.parametrize("asks", [{}, {"response_format": {"type": "json_object"}}])
def test_what_a_transport_refuses_is_no_call_of_the_block_around(stream, asks):
    transport = BudgetTransport(Budget(max_model_calls=1))
    http = openai.DefaultHttpxClient(transport=transport)
    with ProviderServer(calls=0) as server, bounded_clients(Budget(max_model_calls=3)) as block:
        client = flows.openai_client(server, http_client=http)
        create(client, stream=stream, **asks)
        for _ in range(3):  # a text, or a refusal where JSON is asked for
            create(client, stream=stream, **asks)
    usage = block.outcome.usage
    assert (server.hits, usage.model_calls, usage.iterations) == (1, 1, 1)
    assert (usage.total_tokens, usage.failed_calls, usage.reserved_tokens) == (TOKENS, 0, 0)
    assert not block.guard.open_calls()


@STREAM
def test_nor_is_what_a_transport_stops_by_raising(stream):
    transport = BudgetTransport(Budget(max_model_calls=1), on_trip="raise")
    http = openai.DefaultHttpxClient(transport=transport)
    with ProviderServer(calls=0) as server, bounded_clients(Budget(max_model_calls=3)) as block:
        client = flows.openai_client(server, http_client=http)
        create(client, stream=stream)
        for _ in range(3):
            with pytest.raises(CallRefused):
                create(client, stream=stream)
    usage = block.outcome.usage
    assert (server.hits, usage.model_calls, usage.failed_calls) == (1, 1, 0)
    assert (usage.total_tokens, usage.reserved_tokens) == (TOKENS, 0)


async def test_the_same_on_a_loop_and_where_a_transport_refuses_what_it_does_not_know():
    transport = AsyncBudgetTransport(Budget(), on_unknown="refuse")
    http = openai.DefaultAsyncHttpxClient(transport=transport)
    with ProviderServer(calls=0) as server:
        async with bounded_clients(Budget(max_model_calls=3)) as block:
            client = flows.openai_async(server, http_client=http)
            for _ in range(3):
                with pytest.raises(openai.APIStatusError, match="was not sent"):
                    await client.responses.create(model="gpt-4o", input="go", background=True)
    usage = block.outcome.usage
    assert (server.hits, usage.model_calls, usage.reserved_tokens) == (0, 0, 0)


# What a client leaves early


@pytest.mark.parametrize("where", ["headers", "first line"])
async def test_a_streaming_response_that_is_left_early_on_a_loop_leaves_nothing(where):
    with ProviderServer(calls=0, text="word " * 50) as server:
        async with bounded_clients(Budget(max_total_tokens=10**6)) as block:
            client = flows.openai_async(server)
            create = client.chat.completions.with_streaming_response.create
            async with create(**CHAT, stream=True) as raw:
                if where == "first line":
                    async for _ in raw.iter_lines():
                        break
            await client.chat.completions.create(**CHAT)
    usage = block.outcome.usage
    assert (usage.model_calls, usage.estimated_calls, usage.reserved_tokens) == (2, 1, 0)
    assert not block.guard.open_calls()


# Requests as such


@MODS
def test_a_request_that_is_sent_twice_goes_out_as_it_was_made(mod):
    seen = []

    def answer(request):
        seen.append((request.content, dict(request.extensions["timeout"])))
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": TOKENS}
        message = {"role": "assistant", "content": "hi"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return mod.Response(200, json={"choices": choices, "usage": usage, "model": "gpt-4o"})

    with mod.Client(transport=mod.MockTransport(answer), timeout=500) as client:
        request = client.build_request("POST", "http://provider/chat/completions", json=CHAT)
        made = request.content, dict(request.headers), dict(request.extensions)
        for seconds in (50, 100):
            with bounded_clients(Budget(max_seconds=seconds, max_output_tokens_per_call=7)):
                client.send(request)
        client.send(request)
    assert (request.content, dict(request.headers), dict(request.extensions)) == made
    assert [b'"max_completion_tokens": 7' in content for content, _ in seen] == [True, True, False]
    assert 50 < seen[1][1]["read"] <= 100
    assert seen[2][1]["read"] == 500


@MODS
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-16-be"])
def test_what_is_written_into_a_request_fits_its_encoding(mod, encoding):
    raw = ' {"model": "gpt-4o", "messages": [{"role": "user", "content": "世"}]}\n'.encode(encoding)
    seen = []

    def answer(request):
        seen.append(request)
        return mod.Response(200, json={"choices": [], "model": "gpt-4o"})

    with mod.Client(transport=mod.MockTransport(answer)) as client:
        with bounded_clients(Budget(max_output_tokens_per_call=7)):
            client.post("http://provider/chat/completions", content=raw)
    (request,) = seen
    sent = httpx.Response(200, content=request.content).json()
    assert sent == {**CHAT, "messages": [{"role": "user", "content": "世"}]} | {
        "max_completion_tokens": 7
    }
    assert request.headers["content-length"] == str(len(request.content))


@MODS
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_upload_in_parts_passes_and_what_it_may_cost_is_counted(mod, kind):
    seen = []

    def answer(request):
        seen.append(request.content)
        return mod.Response(200, json={"text": "hello", "usage": {"total_tokens": TOKENS}})

    parts = {"files": {"file": ("a.wav", b"sound" * 100)}, "data": {"model": "whisper-1"}}
    address = "https://api.openai.com/v1/audio/transcriptions"

    async def on_a_loop():
        async with mod.AsyncClient(transport=mod.MockTransport(answer)) as client:
            return [await client.post(address, **parts) for _ in range(3)]

    with bounded_clients(Budget(max_model_calls=2)) as block:
        if kind == "async":
            replies = asyncio.run(on_a_loop())
        else:
            with mod.Client(transport=mod.MockTransport(answer)) as client:
                replies = [client.post(address, **parts) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 402]
    assert len(seen) == 2
    assert all(b"sound" * 100 in content and b"whisper-1" in content for content in seen)
    assert block.outcome.stop_reason == "max_model_calls"


@MODS
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/files"])
def test_a_request_that_is_nested_too_deeply_to_be_read_passes_as_it_came(mod, path):
    deep = b'{"messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    inner = mod.MockTransport(lambda request: mod.Response(200, content=request.content))
    with bounded_clients(Budget(max_total_tokens=10_000)) as block:
        with mod.Client(transport=inner) as client:
            assert client.post("https://api.openai.com" + path, content=deep).content == deep
    assert block.outcome.usage.reserved_tokens == 0


def test_an_answer_that_is_nested_too_deeply_leaves_no_reservation():
    deep = b'{"id":' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    inner = httpx2.MockTransport(lambda _: httpx2.Response(200, content=deep))
    transport = BudgetTransport(Budget(max_total_tokens=10_000), inner)
    with httpx2.Client(transport=transport) as client:
        assert client.post("http://provider/v1/chat/completions", json=CHAT).content == deep
    usage = transport.outcome.usage
    assert (usage.model_calls, usage.estimated_calls, usage.reserved_tokens) == (1, 1, 0)
