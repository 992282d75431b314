"""The plain loop around the official OpenAI client, over real HTTP on loopback.

The server's log is an independent count of model calls.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress

import pytest
from werkzeug import Response

from budgetguard_core import Budget, StopReason
from budgetguard_core.testing import check_history
from budgetguard_loop import bounded, guarded, run_bounded, run_bounded_async, run_bounded_stream
from conformance.budgetguard_loop_driver import normal
from ledger_servers import wait_until

openai = pytest.importorskip("openai", reason="the official client comes with an extra")

TOOL = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {}}},
}
USAGE = {"prompt_tokens": 200, "completion_tokens": 30, "total_tokens": 230}


def message(number):
    function = {"name": "search", "arguments": "{}"}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def completion(number, **changes):
    return {
        "id": f"cmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": "gpt-4o-2024-08-06",
        "choices": [{"index": 0, "finish_reason": "tool_calls", "message": message(number)}],
        "usage": USAGE,
        **changes,
    }


def events(number, *, usage):
    call = {"index": 0, **message(number)["tool_calls"][0]}
    deltas = [{"role": "assistant", "content": "Let me "}, {"content": "look."}]
    deltas.append({"tool_calls": [call]})
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    if usage:
        chunks.append({"choices": [], "usage": USAGE})
    for chunk in chunks:
        head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "gpt-4o"}
        yield f"data: {json.dumps({**head, **chunk})}\n\n"
    yield "data: [DONE]\n\n"


@pytest.fixture
def server(httpserver):
    """Serve the sticky model; `httpserver.faults` holds answers to give first."""
    httpserver.faults = []
    lock = threading.Lock()

    def answer(request):
        with lock:
            fault = httpserver.faults.pop(0) if httpserver.faults else None
        if fault is not None:
            return fault
        asked = request.get_json()
        number = len(asked["messages"])
        if asked.get("stream"):
            usage = bool(asked.get("stream_options"))
            return Response(events(number, usage=usage), mimetype="text/event-stream")
        return Response(json.dumps(completion(number)), mimetype="application/json")

    httpserver.expect_request("/v1/chat/completions").respond_with_handler(answer)
    return httpserver


def results():
    return iter(range(10**6))


def client_of(kind, server):
    # The client's own retries could not be counted.
    return kind(base_url=server.url_for("/v1"), api_key="none", max_retries=0)


def test_a_sticky_model_is_stopped(server):
    found = results()
    with client_of(openai.OpenAI, server) as client:

        def step(messages, *, max_output_tokens):
            return client.chat.completions.create(
                model="gpt-4o", messages=messages, tools=[TOOL], max_tokens=max_output_tokens
            )

        outcome = run_bounded(
            step,
            Budget(max_iterations=3, max_output_tokens_per_call=300, max_cost_usd=1),
            messages="Go",
            tools={"search": lambda: str(next(found))},
            model="gpt-4o",
        )
    assert outcome.stop_reason is StopReason.MAX_ITERATIONS
    assert len(server.log) == 3
    assert outcome.usage.total_tokens == 690
    assert outcome.usage.cost_usd > 0
    check_history(normal(outcome.messages))
    for request, _ in server.log:
        assert request.get_json()["max_tokens"] == 300


def test_the_closed_history_is_taken_by_the_client_again(server):
    with client_of(openai.OpenAI, server) as client:

        def step(messages):
            return client.chat.completions.create(model="gpt-4o", messages=messages, tools=[TOOL])

        tools = {"search": lambda: "nothing"}
        first = run_bounded(step, Budget(max_tool_calls=1), messages="Go", tools=tools)
        run_bounded(step, Budget(max_iterations=1), messages="On", resume=first, tools=tools)
    sent = server.log[-1][0].get_json()["messages"]
    assert [m["role"] for m in sent] == [
        *["user", "assistant", "tool", "assistant", "tool", "assistant", "user"]
    ]
    assert set(sent[-2]) == {"role", "content"}


def test_throttling_is_charged_where_each_attempt_is_guarded(server):
    """As with stamina or tenacity around the guarded function."""
    server.faults += [Response("{}", status=429) for _ in range(2)]
    found = results()

    def run(budget, attempts):
        with client_of(openai.OpenAI, server) as client:

            @guarded(kind="model")
            def ask(messages):
                return client.chat.completions.create(
                    model="gpt-4o", messages=messages, tools=[TOOL]
                )

            def step(messages):
                for _ in range(attempts):
                    with suppress(openai.RateLimitError):
                        return ask(messages)
                raise AssertionError

            tools = {"search": lambda: str(next(found))}
            return run_bounded(step, budget, messages="Go", tools=tools)

    outcome = run(Budget(max_iterations=2), 3)
    assert len(server.log) == outcome.usage.model_calls == 4
    assert (outcome.usage.iterations, outcome.usage.failed_calls) == (2, 2)

    server.faults += [Response("{}", status=429) for _ in range(9)]
    outcome = run(Budget(max_model_calls=3), 50)
    assert outcome.stop_reason is StopReason.MAX_MODEL_CALLS
    assert len(server.log) == 4 + 3


@pytest.mark.parametrize("usage", [True, False])
async def test_a_stream_is_counted_with_and_without_usage(server, usage):
    found = results()
    options = {"stream_options": {"include_usage": True}} if usage else {}
    async with client_of(openai.AsyncOpenAI, server) as client:

        async def step(messages):
            return await client.chat.completions.create(
                model="gpt-4o", messages=messages, tools=[TOOL], stream=True, **options
            )

        stream = run_bounded_stream(
            step,
            Budget(max_iterations=2),
            messages="Go",
            tools={"search": lambda: str(next(found))},
        )
        chunks = [chunk async for chunk in stream]
    outcome = stream.outcome
    assert outcome.stop_reason is StopReason.MAX_ITERATIONS
    assert len(server.log) == 2
    assert chunks[-1] is outcome.messages[-1]
    assert outcome.messages[1]["content"] == "Let me look."
    assert outcome.usage.estimated_calls == (0 if usage else 2)
    assert outcome.usage.total_tokens == 460 if usage else outcome.usage.total_tokens > 0
    check_history(normal(outcome.messages))


async def test_a_provider_that_hangs_is_cut_and_its_connection_closed(httpserver):
    release = threading.Event()

    def hang(request):
        release.wait(60)
        return Response("{}")

    httpserver.expect_request("/v1/chat/completions").respond_with_handler(hang)
    async with client_of(openai.AsyncOpenAI, httpserver) as client:
        outcome = await run_bounded_async(
            lambda messages: client.chat.completions.create(model="gpt-4o", messages=messages),
            Budget(max_seconds=0.3),
            messages="Go",
        )
    release.set()
    wait_until(lambda: httpserver.log)  # or the next test would find it there
    assert outcome.stop_reason is StopReason.MAX_SECONDS
    assert outcome.usage.seconds < 30
    check_history(normal(outcome.messages))


def test_a_hand_written_loop(server):
    messages = [{"role": "user", "content": "Go"}]
    with (
        client_of(openai.OpenAI, server) as client,
        bounded(Budget(max_cost_usd=0.005), messages=messages) as run,
    ):
        while True:
            with run.model_call("gpt-4o") as call:
                response = client.chat.completions.create(
                    model="gpt-4o", messages=call.messages, tools=[TOOL]
                )
                call.settle(response, model=response.model)
            reply = response.choices[0].message
            messages.append(reply)
            for wanted in run.tool_calls(reply.tool_calls):
                text = wanted.refusal or f"result {len(messages)}"
                wanted.settle(text)
                messages.append({"role": "tool", "tool_call_id": wanted.id, "content": text})
    assert run.outcome.stop_reason is StopReason.MAX_COST_USD
    assert len(server.log) == run.outcome.usage.model_calls
    assert 0 < run.outcome.usage.cost_usd <= 0.005
    check_history(normal(run.outcome.messages))
