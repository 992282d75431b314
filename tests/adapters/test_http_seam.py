"""What the seam does with limits, faults and other layers: requests and tokens stay exact."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import httpx2
import openai
import pytest

import http_loops as loops
from budgetguard_core import Budget, BudgetExceeded, ConfigurationError, Guard
from budgetguard_core.kit import outcome_of
from budgetguard_http import (
    AsyncBudgetTransport,
    BudgetTransport,
    bounded_clients,
    install,
    is_installed,
    uninstall,
)
from budgetguard_loop import bounded
from provider_server import TOKENS, ProviderServer

# Users leave their clients to the collector as well; what that says is none of ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


ASK = {"model": "gpt-4o", "messages": [{"role": "user", "content": "go"}]}
FREE = Budget(loop_detection=None)


def client_of(server, **options):
    return openai.OpenAI(api_key="key", base_url=server.url + "/v1", **options)


def async_of(server, **options):
    return openai.AsyncOpenAI(api_key="key", base_url=server.url + "/v1", **options)


def create(client, text="go", **options):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="gpt-4o", messages=messages, **options)


# Limits


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_is_seen_in_the_results_of_the_next_request(stream):
    with ProviderServer() as server, bounded_clients(Budget()) as block:
        loop = loops.chat(client_of(server), stream=stream)
    assert str(block.outcome.stop_reason) == "no_progress"
    last = [post["body"]["messages"][-1]["content"] for post in server.posts]
    told = [text for text in last if text != "nothing new" and text != "go"]
    # The correction is in one request, and says nothing of the budget; the history is untouched.
    assert len(told) == 1
    assert told[0].startswith("nothing new\n\n")
    assert loop.bodies == server.hits


@pytest.mark.slow
def test_results_that_change_are_progress():
    with ProviderServer(turns=30) as server, bounded_clients(Budget()) as block:
        loops.chat(client_of(server), loops.Loop(lambda number: f"line {number}"))
    assert block.outcome.status == "completed"
    assert server.hits == 31


def test_conversations_that_go_on_side_by_side_are_no_loop():
    with ProviderServer(turns=None) as server, bounded_clients(Budget()) as block:
        client = client_of(server)
        for _ in range(12):
            loops.chat_step(
                loops.Loop(),
                [],
                client.chat.completions.create(**loops.chat_ask(ASK["messages"]))
                .choices[0]
                .message,
            )
    assert block.outcome.status == "completed"
    assert server.hits == 12


@pytest.mark.slow
def test_single_calls_with_the_same_answer_are_no_loop():
    with ProviderServer(calls=0, text="yes") as server, bounded_clients(Budget()) as block:
        for number in range(20):
            create(client_of(server), str(number))
    assert (block.outcome.status, server.hits) == ("completed", 20)


@pytest.mark.slow
def test_the_completion_bound_is_written_into_the_request():
    budget = Budget(max_output_tokens_per_call=50)
    with ProviderServer(calls=0) as server, bounded_clients(budget):
        create(client_of(server))
        create(client_of(server), max_tokens=80)
        create(client_of(server), max_completion_tokens=20)
        anthropic.Anthropic(api_key="k", base_url=server.url).messages.create(
            model=loops.MESSAGES_MODEL, max_tokens=900, messages=ASK["messages"]
        )
    first, second, third, fourth = [post["body"] for post in server.posts]
    assert first["max_completion_tokens"] == 50
    assert second["max_tokens"] == 50
    assert third["max_completion_tokens"] == 20
    assert fourth["max_tokens"] == 50


@pytest.mark.parametrize(
    "cap", [{"tool_quotas": {"read_file": 2}}, {"max_tool_calls": 2}], ids=["quota", "calls"]
)
def test_a_batch_over_a_cap_is_stopped_at_the_next_call(cap):
    budget = Budget(**cap, loop_detection=None)
    with ProviderServer(calls=3) as server, bounded_clients(budget) as block:
        loop = loops.chat(client_of(server))
    assert (loop.bodies, server.hits) == (3, 1)
    assert loop.text.startswith("This run was stopped")
    assert block.outcome.usage.tool_calls == 3
    assert block.outcome.stop_reason in ("tool_quota", "max_tool_calls")


@pytest.mark.slow
def test_raise_leaves_the_block_past_every_except():
    budget = Budget(max_iterations=1)
    with ProviderServer(calls=0) as server:
        with pytest.raises(BudgetExceeded) as raised, bounded_clients(budget, on_trip="raise"):
            client = client_of(server)
            while True:
                try:
                    create(client)
                except Exception:
                    continue
    assert str(raised.value.trip.reason) == "max_iterations"
    assert raised.value.outcome.status == "terminated"
    assert server.hits == 1


# Faults


def test_retries_of_the_client_are_calls_and_no_iterations():
    with ProviderServer([429, 429, "ok", 500, "ok"], calls=0) as server:
        with bounded_clients(FREE) as block:
            client = client_of(server)
            create(client, "one")
            create(client, "two")
    usage = block.outcome.usage
    assert (usage.iterations, usage.model_calls, usage.failed_calls) == (2, 5, 3)
    assert server.hits == 5


def test_a_storm_of_429_ends_at_max_model_calls():
    budget = Budget(max_model_calls=4)
    with ProviderServer([429] * 40) as server, bounded_clients(budget) as block:
        reply = create(client_of(server, max_retries=30))
    assert server.hits == 4
    assert reply.choices[0].message.content.startswith("This run was stopped")
    assert block.outcome.usage.total_tokens == 0


@pytest.mark.slow
def test_a_redirect_is_one_call():
    with ProviderServer(calls=0) as server, bounded_clients(FREE) as block:
        create(openai.OpenAI(api_key="k", base_url=server.url + "/redirect/v1"))
    assert (server.hits, block.outcome.usage.model_calls) == (2, 1)


def test_a_redirect_below_a_transport_is_one_call():
    transport = BudgetTransport(FREE)
    with ProviderServer(calls=0) as server:
        http = openai.DefaultHttpxClient(transport=transport)
        with openai.OpenAI(
            api_key="k", base_url=server.url + "/redirect/v1", http_client=http
        ) as client:
            create(client)
    assert (server.hits, transport.outcome.usage.model_calls) == (2, 1)


@pytest.mark.slow
def test_a_stream_that_is_cut_is_charged_for_what_came():
    with ProviderServer(["cut"], calls=0) as server, bounded_clients(FREE) as block:
        with pytest.raises((httpx2.HTTPError, openai.APIError)):
            list(create(client_of(server, max_retries=0), stream=True))
    usage = block.outcome.usage
    assert (usage.failed_calls, usage.estimated_calls, usage.model_calls) == (1, 1, 1)
    assert block.guard.open_calls() == ()


def five_calls(server, **options):
    client = client_of(server)
    for number in range(5):
        reply = create(client, str(number), **options)
        if options:
            list(reply)
    return server.hits, len(server.connections)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"stream": True}], ids=["whole", "streamed"])
def test_connections_are_kept_as_they_are_without_a_block(options):
    with ProviderServer(calls=0) as server:
        alone = five_calls(server, **options)
    with ProviderServer(calls=0) as server, bounded_clients(FREE):
        assert five_calls(server, **options) == alone


@pytest.mark.slow
@pytest.mark.parametrize("way", ["close", "collect"])
def test_a_stream_that_is_left_early_leaves_no_reservation(way):
    budget = Budget(max_total_tokens=10_000)
    with ProviderServer(calls=0) as server, bounded_clients(budget) as block:
        stream = create(client_of(server), stream=True)
        next(iter(stream))
        if way == "close":
            stream.close()
        del stream
        gc.collect()
        assert block.guard.open_calls() == ()
        assert block.guard.usage.reserved_tokens == 0
    assert block.outcome.usage.estimated_calls == 1
    assert block.outcome.usage.failed_calls == 0


async def test_a_cancelled_call_leaves_no_reservation():
    with ProviderServer(["hang"]) as server:
        async with bounded_clients(Budget(max_total_tokens=10_000)) as block:
            task = asyncio.ensure_future(create(async_of(server)))
            await asyncio.to_thread(server.asked.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert block.guard.open_calls() == ()
    assert block.outcome.usage.failed_calls == 1


@pytest.mark.parametrize("step", ["hang", "hang_mid"])
def test_the_deadline_ends_a_call_that_hangs(step):
    budget = Budget(max_seconds=0.5)
    with ProviderServer([step], calls=0) as server, bounded_clients(budget) as block:
        reply = create(client_of(server, max_retries=0), stream=step == "hang_mid")
        chunks = list(reply) if step == "hang_mid" else [reply]
    assert chunks
    assert str(block.outcome.stop_reason) == "max_seconds"
    assert block.guard.open_calls() == ()


@pytest.mark.slow
@pytest.mark.parametrize("step", ["hang", "hang_mid"])
async def test_the_deadline_ends_a_call_that_hangs_on_a_loop(step):
    with ProviderServer([step], calls=0) as server:
        async with bounded_clients(Budget(max_seconds=0.5)) as block:
            reply = await create(async_of(server, max_retries=0), stream=step == "hang_mid")
            chunks = [one async for one in reply] if step == "hang_mid" else [reply]
        assert chunks
    assert str(block.outcome.stop_reason) == "max_seconds"
    assert block.guard.open_calls() == ()


def test_an_abort_ends_a_blocking_stream_at_once():
    with ProviderServer(["hang_mid"], calls=0) as server, bounded_clients(FREE) as block:
        stream = create(client_of(server), stream=True)
        first = next(iter(stream))
        server.once_hung(block.guard.abort)
        rest = list(stream)
    assert first.choices
    assert rest[-1].choices[0].finish_reason == "stop"
    assert str(block.outcome.stop_reason) == "aborted"


async def test_an_abort_ends_a_blocking_stream_that_blocks_an_event_loop():
    with ProviderServer(["hang_mid"], calls=0) as server, bounded_clients(FREE) as block:
        stream = create(client_of(server), stream=True)
        next(iter(stream))
        server.once_hung(block.guard.abort)
        clock = block.guard.tree.clock
        began = clock.monotonic_ns()
        rest = list(stream)
    # The server holds the answer for 60 seconds.
    assert clock.monotonic_ns() - began < 45e9
    assert rest[-1].choices[0].finish_reason == "stop"
    assert str(block.outcome.stop_reason) == "aborted"


async def test_an_abort_ends_a_call_on_a_loop_at_once():
    with ProviderServer(["hang"], calls=0) as server:
        async with bounded_clients(FREE) as block:
            task = asyncio.ensure_future(create(async_of(server)))
            await asyncio.to_thread(server.asked.wait, 10)
            block.guard.abort()
            reply = await task
    assert reply.choices[0].message.content.startswith("This run was stopped")


# Many at once


def test_threads_without_a_context_share_the_budget_of_a_block_that_is_everywhere():
    budget = Budget(max_iterations=37)
    with ProviderServer(calls=0) as server, bounded_clients(budget, everywhere=True) as block:
        client = client_of(server)
        with ThreadPoolExecutor(24) as pool:
            replies = list(pool.map(lambda number: create(client, str(number)), range(120)))
    assert server.hits == block.outcome.usage.iterations == 37
    stopped = [one for one in replies if one.choices[0].message.content.startswith("This run")]
    assert len(stopped) == 83


def test_threads_share_the_budget_of_a_transport():
    transport = BudgetTransport(Budget(max_iterations=37))
    with ProviderServer(calls=0) as server:
        http = openai.DefaultHttpxClient(transport=transport)
        with client_of(server, http_client=http) as client, ThreadPoolExecutor(24) as pool:
            list(pool.map(lambda number: create(client, str(number)), range(120)))
    assert server.hits == transport.outcome.usage.iterations == 37


@pytest.mark.slow
async def test_a_thousand_tasks_share_a_budget():
    class Provider(httpx2.AsyncBaseTransport):
        hits = 0

        async def handle_async_request(self, request):
            self.hits += 1
            await asyncio.sleep(0)
            choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}}
            usage = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
            body = {"choices": [{**choice, "finish_reason": "stop"}], "usage": usage}
            return httpx2.Response(200, json=body)

    provider = Provider()
    transport = AsyncBudgetTransport(Budget(max_iterations=300), provider)
    async with httpx2.AsyncClient(transport=transport) as client:
        url = "http://provider/v1/chat/completions"
        await asyncio.gather(*[client.post(url, json=ASK) for _ in range(1_000)])
    assert provider.hits == transport.outcome.usage.iterations == 300
    assert transport.outcome.usage.total_tokens == 300 * 11


# The ambient way in


@pytest.mark.slow
def test_importing_patches_nothing():
    code = (
        "import httpx, httpx2\n"
        "before = [m.send for c in (httpx, httpx2) for m in (c.Client, c.AsyncClient)]\n"
        "import budgetguard_http\n"
        "after = [m.send for c in (httpx, httpx2) for m in (c.Client, c.AsyncClient)]\n"
        "assert before == after and not budgetguard_http.is_installed()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_uninstalling_restores_everything():
    classes = [httpx.Client, httpx.AsyncClient, httpx2.Client, httpx2.AsyncClient]
    before = [one.send for one in classes]
    install()
    install(on_unknown="pass")
    assert is_installed()
    assert all(one.send is not own for one, own in zip(classes, before, strict=True))
    with bounded_clients(FREE):
        uninstall()
        assert is_installed()
    assert not is_installed()
    uninstall()
    assert [one.send for one in classes] == before


@pytest.fixture
def installed():
    install()
    yield
    uninstall()


def test_an_active_guard_bounds_the_clients_in_its_block(installed):
    guard = Guard(Budget(max_iterations=2))
    with ProviderServer(calls=0) as server:
        client = client_of(server)
        create(client, "outside")
        with guard.activate():
            for number in range(4):
                create(client, str(number))
    assert (server.hits, guard.usage.model_calls, guard.usage.total_tokens) == (3, 2, 2 * TOKENS)


def test_a_call_that_an_adapter_admitted_passes_as_that_call(installed):
    with ProviderServer(["ok", 429, 500, "ok"], calls=0) as server:
        client = client_of(server)
        with bounded(FREE) as run:
            for text in ("one", "two"):
                with run.model_call("gpt-4o") as call:
                    call.settle(create(client, text))
    usage = run.outcome.usage
    assert (server.hits, usage.model_calls, usage.iterations, usage.failed_calls) == (4, 4, 2, 2)
    # The 500 may have been at work: its prompt is charged, as an estimate.
    assert usage.estimated_calls == 1


def test_what_an_adapter_does_not_measure_is_measured_below_it(installed):
    with ProviderServer(calls=0) as server:
        client = client_of(server)
        with bounded(FREE) as run, run.model_call("gpt-4o"):
            list(create(client, stream=True))
    usage = run.outcome.usage
    assert (server.hits, usage.model_calls) == (1, 1)
    assert (usage.total_tokens, usage.estimated_calls) == (TOKENS, 0)


def test_a_call_beside_those_of_an_adapter_is_admitted_like_any_other(installed):
    with ProviderServer(calls=0) as server:
        client = client_of(server)
        with bounded(Budget(max_model_calls=2)) as run:
            create(client, "one")
            create(client, "two")
            # A stop of the run around is no answer.
            with pytest.raises(openai.APIStatusError) as raised:
                create(client, "three")
    assert raised.value.status_code == 402
    assert (server.hits, run.outcome.usage.model_calls) == (2, 2)
    assert str(run.outcome.stop_reason) == "max_model_calls"


def test_a_transport_inside_a_block_is_charged_beside_it():
    transport = BudgetTransport(Budget(max_iterations=2))
    with ProviderServer(calls=0) as server, bounded_clients(Budget(max_iterations=9)) as block:
        client = client_of(server, http_client=openai.DefaultHttpxClient(transport=transport))
        for number in range(4):
            create(client, str(number))
    assert server.hits == 2
    assert block.outcome.usage.model_calls == 2


@pytest.mark.parametrize("around", [bounded_clients, bounded, Guard.activate])
def test_its_outcome_tells_of_its_own_cap_there(around):
    transport = BudgetTransport(Budget(max_iterations=2))
    with ProviderServer(calls=0) as server, around(Guard(FREE)):
        http = openai.DefaultHttpxClient(transport=transport)
        with client_of(server, http_client=http) as client:
            for number in range(4):
                create(client, str(number))
    assert server.hits == 2
    assert str(transport.outcome.stop_reason) == "max_iterations"


def test_a_block_without_a_budget_is_refused_unless_it_is_a_part_of_a_run():
    with pytest.raises(ConfigurationError, match="bounded_clients needs a budget"):
        bounded_clients().__enter__()
    assert not is_installed()
    with bounded_clients(FREE), bounded_clients() as inner:
        assert inner.run is not None
    with Guard(FREE).activate(), bounded_clients() as inner:
        assert inner.run is not None


@pytest.mark.parametrize("around", [bounded_clients, bounded, Guard.activate])
@pytest.mark.parametrize("is_closed_first", [True, False], ids=["client", "block"])
def test_its_run_there_ends_with_the_client_or_with_the_run_around(around, is_closed_first):
    told, outcomes = [], []
    guard = Guard(FREE, sinks=[lambda event: told.append(event.event)])
    transport = BudgetTransport(
        Budget(max_iterations=2),
        sinks=[lambda event: told.append(f"own {event.event}")],
        on_outcome=outcomes.append,
    )
    with ProviderServer(calls=0) as server:
        client = client_of(server, http_client=openai.DefaultHttpxClient(transport=transport))
        with around(guard):
            for number in range(3):
                create(client, str(number))
            if is_closed_first:
                client.close()
        if around is not Guard.activate:
            assert told.count("run_started") == told.count("run_ended")
        client.close()
    assert [event for event in told if event.startswith("own run_")] == [
        "own run_started",
        "own run_ended",
    ]
    assert [(one.status, one.usage.model_calls) for one in outcomes] == [("terminated", 2)]


async def test_and_on_a_loop():
    told = []
    transport = AsyncBudgetTransport(FREE, sinks=[lambda event: told.append(event.event)])
    http = openai.DefaultAsyncHttpxClient(transport=transport)
    with ProviderServer(calls=0) as server:
        async with async_of(server, http_client=http) as client:
            with Guard(FREE).activate():
                await client.chat.completions.create(**ASK)
    assert (told[0], told[-1], transport.run) == ("run_started", "run_ended", None)


CHOICES = {
    "chat": ("/v1/chat/completions", {"messages": ASK["messages"], "n": 4, "max_tokens": 100}),
    "gemini": (
        "/models/gemini-2.5-flash:generateContent",
        {
            "contents": [{"role": "user", "parts": [{"text": "go"}]}],
            "generationConfig": {"candidateCount": 4, "maxOutputTokens": 100},
        },
    ),
}


@pytest.mark.parametrize(("path", "ask"), CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize(("most", "shares"), [(1000, [100, 100]), (600, [100, 46]), (300, [73])])
def test_each_of_several_choices_has_its_share_of_what_is_left(path, ask, most, shares):
    bounds = []

    def answer(request):
        body = json.loads(request.content)
        bounds.append(body.get("max_tokens") or body["generationConfig"]["maxOutputTokens"])
        usage = {"prompt_tokens": 8, "completion_tokens": 4 * bounds[-1]}
        found = {"promptTokenCount": 8, "candidatesTokenCount": 4 * bounds[-1]}
        return httpx2.Response(200, json={"usage": usage, "usageMetadata": found})

    transport = BudgetTransport(Budget(max_total_tokens=most), httpx2.MockTransport(answer))
    with httpx2.Client(transport=transport, base_url="http://server") as client:
        for _ in range(2):
            client.post(path, json={"model": "gpt-4o", **ask})
    assert bounds == shares
    assert transport.outcome.usage.total_tokens <= most


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_has_as_many_choices_as_were_asked_for(stream):
    guard = Guard()
    guard.abort("enough")
    with httpx2.Client(transport=BudgetTransport(guard)) as http:
        client = openai.OpenAI(api_key="key", base_url="http://server", http_client=http)
        made = create(client, n=3, stream=stream)
        choices = [one for chunk in made for one in chunk.choices] if stream else made.choices
        ask = {"contents": [], "generationConfig": {"candidateCount": 3}}
        gemini = http.post("http://server/models/gemini-2.5-flash:generateContent", json=ask).json()
    assert [one.index for one in choices if one.finish_reason] == [0, 1, 2]
    assert [one["index"] for one in gemini["candidates"]] == [0, 1, 2]


def test_two_blocks_cannot_both_be_everywhere():
    with bounded_clients(FREE, everywhere=True):
        with pytest.raises(Exception, match="only one block at a time"):
            bounded_clients(FREE, everywhere=True).__enter__()
    assert not is_installed()


def test_observing_refuses_nothing():
    with ProviderServer(calls=0) as server:
        with bounded_clients(Budget(max_iterations=1), mode="observe") as block:
            for number in range(3):
                create(client_of(server), str(number))
    assert (server.hits, block.outcome.status) == (3, "completed")
    assert block.outcome.observed


# What is not understood, and what must not be seen


def test_embeddings_are_priced_and_no_iterations():
    with ProviderServer() as server, bounded_clients(Budget(max_cost_usd=1)) as block:
        client_of(server).embeddings.create(
            model="text-embedding-3-small", input="x", encoding_format="float"
        )
    usage = block.outcome.usage
    assert (usage.model_calls, usage.iterations, usage.total_tokens) == (1, 0, 5)
    assert 0 < usage.cost_usd < 0.001
    assert block.outcome.status == "completed"


def test_an_embedding_over_the_cap_is_refused_by_an_error():
    with ProviderServer() as server, bounded_clients(Budget(max_model_calls=1)):
        for number in range(2):
            ask = {"model": "text-embedding-3-small", "input": "x", "encoding_format": "float"}
            if number:
                with pytest.raises(openai.APIStatusError, match="402"):
                    client_of(server).embeddings.create(**ask)
            else:
                client_of(server).embeddings.create(**ask)
    assert server.hits == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_unknown", "hits", "calls"), [("admit", 1, 1), ("pass", 2, 0), ("refuse", 0, 0)]
)
def test_what_is_not_understood_is_admitted_passed_or_refused(on_unknown, hits, calls):
    sent = []

    def answer(request):
        sent.append(request)
        return httpx2.Response(200, json={"id": "batch_1"})

    budget = Budget(max_model_calls=1)
    transport = BudgetTransport(budget, httpx2.MockTransport(answer), on_unknown=on_unknown)
    with httpx2.Client(transport=transport) as client:
        url = "https://api.openai.com/v1/batches"
        replies = [client.post(url, json={"input_file_id": "f"}) for _ in range(2)]
        client.post("https://api.openai.com/v1/files", json={})
        client.post("https://example.com/v1/batches", json={})
        client.get("https://api.openai.com/v1/models")
    assert len(sent) == hits + 3
    assert [reply.status_code for reply in replies] == [200] * hits + [402] * (2 - hits)
    used = 0 if transport.outcome is None else transport.outcome.usage.model_calls
    assert used == calls


def test_a_dollar_cap_refuses_what_has_no_price_unless_it_is_exempt():
    def answer(request):
        return httpx2.Response(200, json={"id": "x", "choices": []})

    for exempt, status in (((), 200), (("mine-*",), 200)):
        transport = BudgetTransport(
            Budget(max_cost_usd=1), httpx2.MockTransport(answer), exempt=exempt
        )
        with httpx2.Client(transport=transport) as client:
            ask = {**ASK, "model": "mine-1"}
            reply = client.post("http://gateway/v1/chat/completions", json=ask)
        assert reply.status_code == status
        reason = str(transport.outcome.stop_reason)
        assert reason == ("completed" if exempt else "unpriced_model")


def test_a_wrong_setting_is_said_where_it_is_given():
    with pytest.raises(ConfigurationError, match="on_unknown must be"):
        bounded_clients(FREE, on_unknown="perhaps")
    with pytest.raises(ConfigurationError, match="exempt must be a list"):
        BudgetTransport(FREE, exempt="model")


@pytest.mark.slow
def test_secrets_are_in_no_log_event_or_error(caplog):
    secret, events = "sk-very-secret", []
    caplog.set_level(logging.DEBUG, logger="budgetguard_core")
    with ProviderServer([500, 500, 500, "ok"], calls=0) as server:
        with bounded_clients(Budget(max_iterations=1), sinks=[events.append]) as block:
            client = openai.OpenAI(api_key=secret, base_url=server.url + "/v1")
            with pytest.raises(openai.InternalServerError):
                create(client)
            create(client)
    said = f"{events} {block.outcome!r} {caplog.text}"
    assert events
    assert secret not in said


def test_the_outcome_is_on_an_exception_of_the_block():
    with ProviderServer(calls=0) as server:
        with pytest.raises(ValueError) as raised, bounded_clients(FREE):
            create(client_of(server))
            raise ValueError("mine")
    assert outcome_of(raised.value).status == "failed"
    assert outcome_of(raised.value).usage.model_calls == 1
