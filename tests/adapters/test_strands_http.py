"""Strands' own OpenAI model over real HTTP on loopback.

The server's log is an independent count of model calls.
"""

from __future__ import annotations

import json
import threading
from decimal import Decimal
from inspect import signature

import pytest
from strands import Agent, ModelRetryStrategy, tool
from strands.hooks import AfterInvocationEvent
from werkzeug import Response

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.testing import ManualClock, check_history
from budgetguard_strands import BudgetHookProvider
from conformance.budgetguard_strands_driver import history_of

pytest.importorskip("openai", reason="the official client comes with an extra")

from strands.models.openai import OpenAIModel

USAGE = {
    "prompt_tokens": 200,
    "completion_tokens": 30,
    "total_tokens": 230,
    "prompt_tokens_details": {"cached_tokens": 150},
}


class Provider:
    """Answers each request with what `ask` says: the names of the tools to call, or a text."""

    def __init__(self, ask):
        self.ask = ask
        self.lock = threading.Lock()
        self.requests = []
        self.faults = []
        self.hanging = threading.Event()
        self.hung = False

    def __call__(self, request):
        asked = request.get_json()
        with self.lock:
            number = len(self.requests)
            self.requests.append(asked)
            fault = self.faults.pop(0) if self.faults else None
        if fault == "hang":
            return Response(self.hang(), mimetype="text/event-stream")
        if fault is not None:
            return fault
        return Response(self.events(number), mimetype="text/event-stream")

    def events(self, number):
        what = self.ask(number)
        yield from lines({"role": "assistant", "content": "" if isinstance(what, list) else what})
        calls = what if isinstance(what, list) else []
        for place, (name, arguments) in enumerate(calls):
            call = {
                "index": place,
                "id": f"call_{number}_{place}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            yield from lines({"tool_calls": [call]})
        yield from lines({}, finish_reason="tool_calls" if calls else "stop")
        yield chunk(choices=[], usage=USAGE)
        yield "data: [DONE]\n\n"

    def hang(self):
        yield from lines({"role": "assistant", "content": "So far I have"})
        self.hung = not self.hanging.wait(240)


def lines(delta, finish_reason=None):
    yield chunk(choices=[{"index": 0, "delta": delta, "finish_reason": finish_reason}])


def chunk(**facts):
    head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "gpt-4o"}
    return f"data: {json.dumps({**head, **facts})}\n\n"


@pytest.fixture
def serve(httpserver):
    providers = []

    def start(ask):
        provider = Provider(ask)
        providers.append(provider)
        httpserver.expect_request("/v1/chat/completions").respond_with_handler(provider)
        provider.url = httpserver.url_for("/v1")
        return provider

    yield start
    for provider in providers:
        provider.hanging.set()


def agent_at(provider, *tools, budget, **options):
    options.setdefault("callback_handler", None)
    model = OpenAIModel(
        # The client's own retries could not be counted.
        client_args={"base_url": provider.url, "api_key": "none", "max_retries": 0},
        model_id="gpt-4o",
        **options.pop("model_options", {}),
    )
    return Agent(
        model=model,
        tools=list(tools),
        hooks=[BudgetHookProvider(budget)],
        **options,
    )


def counting():
    started = []

    @tool
    def search(query: str = "") -> str:
        """Searches."""
        started.append(query)
        return f"result {len(started)}"

    return search, started


def test_a_sticky_model(serve):
    provider = serve(lambda number: [("search", {"query": "same"})])
    search, started = counting()
    guard = Guard(Budget(max_iterations=4, max_cost_usd=1))
    agent = agent_at(provider, search, budget=guard)
    assert agent("Go.").stop_reason == "max_iterations"
    usage = guard.usage
    assert len(provider.requests) == usage.model_calls == len(started) == 4
    # The oldest releases do not pass on what was cached.
    cached = usage.cache_read_tokens
    assert cached in (0, 600)
    assert usage.total_tokens == 920
    cost = (800 - cached) * Decimal("2.5") + cached * Decimal("1.25") + 120 * Decimal(10)
    assert usage.cost_usd == cost / 10**6
    check_history(history_of(agent.messages))


def test_an_oscillating_model(serve):
    provider = serve(lambda number: [("analyze" if number % 2 else "verify", {})])

    @tool
    def analyze() -> str:
        """Analyzes."""
        return "please verify"

    @tool
    def verify() -> str:
        """Verifies."""
        return "please analyze"

    guard = Guard(Budget(max_iterations=40))
    agent = agent_at(provider, analyze, verify, budget=guard)
    assert agent("Go.").stop_reason == StopReason.OSCILLATION
    assert len(provider.requests) == guard.usage.model_calls < 10
    said = json.dumps(provider.requests[-1]["messages"])
    assert "going round in a circle" in said


def test_parallel_calls(serve):
    provider = serve(lambda number: [("search", {"query": str(n)}) for n in range(8)])
    search, started = counting()
    guard = Guard(Budget(max_tool_calls=11))
    agent = agent_at(provider, search, budget=guard)
    assert agent("Go.").stop_reason == "max_tool_calls"
    assert len(started) == guard.usage.tool_calls == 11
    assert len(provider.requests) == guard.usage.model_calls == 2
    check_history(history_of(agent.messages))


def test_the_closed_history_is_sent_again_as_it_is(serve):
    provider = serve(lambda number: [("search", {})] if number < 3 else "Found it.")
    search, _ = counting()
    agent = agent_at(provider, search, budget=Budget(max_iterations=2, max_tool_calls=1))
    assert agent("Go.").stop_reason == "max_tool_calls"
    result = agent("And now?", invocation_state={"budgetguard": Budget(max_iterations=5)})
    assert result.stop_reason == "end_turn"
    sent = provider.requests[-1]["messages"]
    assert all(
        set(message) <= {"role", "content", "tool_calls", "tool_call_id"} for message in sent
    )
    asked = [call["id"] for message in sent for call in message.get("tool_calls", [])]
    answered = [message["tool_call_id"] for message in sent if message["role"] == "tool"]
    assert asked == answered
    for word in ("budget", "max_", "stop_reason", "iteration"):
        assert word not in json.dumps(sent)


def test_a_rate_limit_is_a_retry_and_no_iteration(serve):
    provider = serve(lambda number: "Done.")
    provider.faults = [
        Response(json.dumps({"error": {"message": "slow down"}}), 429, mimetype="application/json")
    ] * 2
    guard = Guard(Budget(max_iterations=1))
    agent = agent_at(
        provider,
        budget=guard,
        retry_strategy=ModelRetryStrategy(max_attempts=4, initial_delay=0),
    )
    assert agent("Go.").stop_reason == "end_turn"
    usage = guard.usage
    assert len(provider.requests) == usage.model_calls == 3
    assert (usage.iterations, usage.failed_calls, usage.total_tokens) == (1, 2, 230)


def test_a_stream_that_hangs_is_left_in_time_and_the_connection_is_closed(serve):
    provider = serve(lambda number: "Here I am.")
    provider.faults = ["hang"]
    clock = ManualClock()
    guard = Guard(Budget(max_seconds=0.05), clock=clock)

    def on_event(**event):
        if event.get("data"):
            clock.advance(60)

    agent = agent_at(provider, budget=guard, callback_handler=on_event)
    result = agent("Go.")
    assert not provider.hung
    provider.hanging.set()
    assert result.stop_reason == "max_seconds"
    assert agent.messages[-1]["content"][0]["text"] == "So far I have"
    assert guard.usage.estimated_calls == 1
    result = agent("Again.", invocation_state={"budgetguard": Budget(max_iterations=1)})
    assert result.stop_reason == "end_turn"
    check_history(history_of(agent.messages))


@pytest.mark.parametrize(
    ("params", "asked"),
    [
        ({}, {"max_completion_tokens": 300}),
        ({"max_tokens": 5000, "seed": 7}, {"max_tokens": 300, "seed": 7}),
        ({"max_completion_tokens": 100}, {"max_completion_tokens": 100}),
    ],
)
def test_the_completion_bound_is_in_the_request(serve, params, asked):
    provider = serve(lambda number: [("search", {})])
    search, _ = counting()
    budget = Budget(max_iterations=2, max_output_tokens_per_call=300)
    agent = agent_at(provider, search, budget=budget, model_options={"params": params})
    agent("Go.")
    assert len(provider.requests) == 2
    for request in provider.requests:
        assert request.items() >= asked.items()
    assert agent.model.config["params"] == params


def summarizing(number):
    """Ask for tools, then for a summary; the summary itself is the fifth request."""
    if number < 3:
        return [("search", {"query": f"{number}"})]
    return [("summarize_context", {"keep_recent": 2})] if number == 3 else "Said."


@pytest.fixture
def below():
    """The seam at HTTP below all adapters."""
    budgetguard_http = pytest.importorskip("budgetguard_http")
    budgetguard_http.install()
    yield
    budgetguard_http.uninstall()


@pytest.mark.skipif(
    "context_manager" not in signature(Agent.__init__).parameters, reason="younger releases only"
)
@pytest.mark.parametrize(("cap", "reason"), [(9, "end_turn"), (4, "max_model_calls")])
def test_the_seam_at_http_counts_what_strands_calls_without_its_hooks(serve, below, cap, reason):
    provider = serve(summarizing)
    search, _ = counting()
    guard = Guard(Budget(max_model_calls=cap))
    options = {"model_options": {"context_window_limit": 100_000}, "context_manager": "agentic"}
    agent = agent_at(provider, search, budget=guard, **options)
    assert agent("Go.").stop_reason == reason
    assert len(provider.requests) == guard.usage.model_calls == min(cap, 6)


async def test_the_seam_at_http_counts_what_a_memory_extracts(serve, below):
    extraction = pytest.importorskip("strands.memory.extraction.model_extractor")
    provider = serve(lambda number: '[{"content": "It is 42."}]' if number else "It is 42.")
    guard = Guard(Budget(max_model_calls=2))
    agent = agent_at(provider, budget=guard)
    found = []

    async def extract(event):
        extractor = extraction.ModelExtractor(event.agent.model)
        found.extend(await extractor.extract(event.agent.messages))

    agent.hooks.add_callback(AfterInvocationEvent, extract)
    with guard.activate():  # it runs after the agent's own run
        await agent.invoke_async("Go.")
    assert [one.content for one in found] == ["It is 42."]
    assert len(provider.requests) == guard.usage.model_calls == 2
