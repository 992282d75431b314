"""Real provider packages over HTTP on loopback; the server's log is an independent count."""

from __future__ import annotations

import json
import threading
from decimal import Decimal

import langchain.agents.middleware as middlewares
import pytest
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from werkzeug import Response

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.testing import check_history
from budgetguard_langgraph import BudgetCallback, BudgetMiddleware, bounded
from conformance.budgetguard_langgraph_driver import message, user

# The model's name is only there to be priced; nobody is called.
pytestmark = pytest.mark.filterwarnings("ignore:The model '.*' is deprecated:DeprecationWarning")


@tool
def search(query: str) -> str:
    """Search."""
    return f"nothing about {query}"


@tool
def check(query: str) -> str:
    """Check."""
    return f"search again for {query}"


TOOLS = [search, check]


class Server:
    """A sticky model behind the formats of two providers."""

    def __init__(self, httpserver):
        self.http = httpserver
        self.names = lambda number: ["search"]
        self.arguments = lambda number: {"query": f"q{number}"}
        self.faults = []
        self.hold = threading.Event()
        self.hold.set()
        self.bodies = []
        self._lock = threading.Lock()
        httpserver.expect_request("/v1/chat/completions").respond_with_handler(self._openai)
        httpserver.expect_request("/v1/messages").respond_with_handler(self._anthropic)

    @property
    def requests(self):
        return len(self.http.log)

    def _asked(self, request):
        self.hold.wait(60)
        with self._lock:
            body = request.get_json()
            self.bodies.append(body)
            number = len(self.bodies)
            fault = self.faults.pop(0) if self.faults else None
        wanted = [(f"call_{number}_{n}", name) for n, name in enumerate(self.names(number))]
        return fault, body, wanted, self.arguments(number)

    def _openai(self, request):
        fault, body, wanted, arguments = self._asked(request)
        if fault is not None:
            return fault
        tool_calls = [
            {
                "id": id_,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for id_, name in wanted
        ]
        head = {"id": "x", "created": 0, "model": "gpt-4o-2024-08-06"}
        usage = {
            "prompt_tokens": 200,
            "completion_tokens": 30,
            "total_tokens": 230,
            "prompt_tokens_details": {"cached_tokens": 100},
        }
        if not body.get("stream"):
            answer = {"role": "assistant", "content": None, "tool_calls": tool_calls}
            choice = {"index": 0, "finish_reason": "tool_calls", "message": answer}
            return _json({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        head["object"] = "chat.completion.chunk"
        deltas = [
            {"role": "assistant", "content": "Let me look."},
            {"tool_calls": [{"index": n, **call} for n, call in enumerate(tool_calls)]},
        ]
        chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
        if body.get("stream_options", {}).get("include_usage"):
            chunks.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps({**head, **chunk})}\n\n" for chunk in chunks]
        return Response([*lines, "data: [DONE]\n\n"], mimetype="text/event-stream")

    def _anthropic(self, request):
        fault, body, wanted, arguments = self._asked(request)
        if fault is not None:
            return fault
        usage = {
            "input_tokens": 30,
            "cache_read_input_tokens": 100,
            "cache_creation_input_tokens": 70,
            "cache_creation": {"ephemeral_5m_input_tokens": 40, "ephemeral_1h_input_tokens": 30},
            "output_tokens": 30,
        }
        head = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "claude-sonnet-4-5",
            "stop_sequence": None,
        }
        blocks = [
            {"type": "tool_use", "id": id_, "name": name, "input": arguments}
            for id_, name in wanted
        ]
        if not body.get("stream"):
            return _json({**head, "content": blocks, "stop_reason": "tool_use", "usage": usage})
        start = {**head, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
        events = [("message_start", {"message": start})]
        for index, block in enumerate(blocks):
            opened = {"index": index, "content_block": {**block, "input": {}}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(arguments)}
            events.append(("content_block_start", opened))
            events.append(("content_block_delta", {"index": index, "delta": delta}))
            events.append(("content_block_stop", {"index": index}))
        ended = {"delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": usage}
        events += [("message_delta", ended), ("message_stop", {})]
        lines = [
            f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n"
            for name, data in events
        ]
        return Response(lines, mimetype="text/event-stream")


def _json(body):
    return Response(json.dumps(body), mimetype="application/json")


def too_many():
    error = {"error": {"type": "rate_limit_error", "message": "slow down"}}
    return Response(json.dumps(error), status=429, mimetype="application/json")


@pytest.fixture
def server(httpserver):
    served = Server(httpserver)
    yield served
    served.hold.set()


def chat(provider, server, **options):
    base = server.http.url_for("").rstrip("/")
    options.setdefault("max_retries", 0)
    if provider == "openai":
        return ChatOpenAI(model="gpt-4o", base_url=f"{base}/v1", api_key="sk-test", **options)
    return ChatAnthropic(
        model="claude-sonnet-4-5", base_url=base, api_key="sk-test", max_tokens=500, **options
    )


PROVIDERS = ["openai", "anthropic"]


async def run(graph, mode):
    if mode == "sync":
        return graph.invoke(user("Find it."))
    if mode == "async":
        return await graph.ainvoke(user("Find it."))
    modes = ["messages", "values"]
    parts = [p async for p in graph.astream(user("Find it."), stream_mode=modes)]
    return [value for mode, value in parts if mode == "values"][-1]


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "async", "streamed"])
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_sticky_model_gets_as_many_requests_as_the_cap_says(server, provider, mode):
    options = {"stream_usage": True} if provider == "openai" else {}
    guard = Guard(Budget(max_iterations=4))
    agent = create_agent(chat(provider, server, **options), TOOLS)
    result = await run(bounded(agent, guard), mode)
    assert server.requests == 4
    usage = guard.usage
    assert usage.model_calls == 4
    assert (usage.input_tokens, usage.output_tokens) == (800, 120)
    assert usage.cache_read_tokens == 400
    assert usage.estimated_calls == 0
    assert usage.unpriced_calls == 0
    if provider == "anthropic":
        assert usage.cache_write_tokens == 280
        assert usage.cache_write_1h_tokens == 120
    check_history([message(one) for one in result["messages"][:-1]])
    assert result["stop_reason"] == "max_iterations"
    assert any(body.get("stream") for body in server.bodies) == (mode == "streamed")


@pytest.mark.parametrize("provider", PROVIDERS)
def test_two_tools_in_a_circle_are_stopped(server, provider):
    server.names = lambda number: [("search", "check")[number % 2]]
    server.arguments = lambda number: {"query": "the same"}
    guard = Guard(Budget(max_iterations=40))
    result = bounded(create_agent(chat(provider, server), TOOLS), guard).invoke(user("Go."))
    assert result["stop_reason"] == "oscillation"
    assert server.requests == guard.usage.model_calls <= 9


@pytest.mark.anyio
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_of_parallel_calls_those_that_fit_are_made(server, provider):
    server.names = lambda number: ["search", "check", "search"]
    guard = Guard(Budget(max_tool_calls=4))
    agent = create_agent(chat(provider, server), TOOLS, middleware=[BudgetMiddleware(guard)])
    result = await agent.ainvoke(user("Go."))
    assert result["stop_reason"] == "max_tool_calls"
    assert server.requests == guard.usage.model_calls == 2
    assert guard.usage.tool_calls == 4
    check_history([message(one) for one in result["messages"][:-1]])


@pytest.mark.anyio
async def test_a_stream_without_usage_is_estimated(server):
    # ChatOpenAI does not ask for usage at another address than OpenAI's own.
    guard = Guard(Budget(max_iterations=2))
    agent = create_agent(chat("openai", server), TOOLS)
    await run(bounded(agent, guard), "streamed")
    assert server.requests == 2
    assert guard.usage.estimated_calls == 2
    assert guard.usage.input_tokens > 0
    assert guard.usage.output_tokens > 0


@pytest.mark.parametrize("provider", PROVIDERS)
def test_each_attempt_after_a_429_is_a_call_but_no_iteration(server, provider):
    server.faults = [too_many(), too_many()]
    guard = Guard(Budget(max_iterations=2))
    if not hasattr(middlewares, "ModelRetryMiddleware"):
        pytest.skip("this LangChain has no middleware that retries")
    retry = middlewares.ModelRetryMiddleware(max_retries=3, initial_delay=0.001, jitter=False)
    agent = create_agent(chat(provider, server), TOOLS, middleware=[retry, BudgetMiddleware(guard)])
    result = agent.invoke(user("Go."))
    assert result["stop_reason"] == "max_iterations"
    assert server.requests == guard.usage.model_calls == 4
    assert guard.usage.failed_calls == 2
    assert guard.usage.total_tokens == 2 * 230


def test_a_retry_inside_the_client_is_seen_by_the_server_alone(server):
    """Why `max_retries=0` is advised: no hook fires for these."""
    server.faults = [Response("{}", status=500, headers={"retry-after-ms": "1"})]
    guard = Guard(Budget(max_model_calls=1))
    agent = create_agent(chat("openai", server, max_retries=2), TOOLS)
    bounded(agent, guard).invoke(user("Go."))
    assert server.requests == 2
    assert guard.usage.model_calls == 1


def test_dollars_are_exact_and_stop_before_the_next_call(server):
    # gpt-4o: $2.50 in, $1.25 from the cache, $10.00 out, per million.
    each = (100 * Decimal("2.5") + 100 * Decimal("1.25") + 30 * 10) / 1_000_000
    guard = Guard(Budget(max_cost_usd=3 * each))
    callback = BudgetCallback(guard)
    agent = create_agent(chat("openai", server), TOOLS)
    agent.invoke(user("Go."), {"callbacks": [callback]})
    assert guard.outcome.stop_reason is StopReason.MAX_COST_USD
    assert server.requests == guard.usage.model_calls
    assert guard.usage.cost_usd == guard.usage.model_calls * each <= 3 * each


@pytest.mark.anyio
async def test_the_deadline_closes_a_request_that_hangs(server):
    server.hold.clear()
    guard = Guard(Budget(max_seconds=1))
    result = await bounded(create_agent(chat("openai", server), TOOLS), guard).ainvoke(user("Go."))
    assert result["stop_reason"] == "max_seconds"
    assert guard.usage.seconds < 30
    assert guard.open_calls() == ()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_middleware_hands_over_the_time_left_and_the_bound(server, provider):
    guard = Guard(Budget(max_iterations=1, max_output_tokens_per_call=77, max_seconds=60))
    seen = []
    model = chat(provider, server)

    class Look(type(model)):
        def _generate(self, messages, stop=None, run_manager=None, **settings):
            seen.append(settings)
            return super()._generate(messages, stop, run_manager, **settings)

    model.__class__ = Look
    create_agent(model, TOOLS, middleware=[BudgetMiddleware(guard)]).invoke(user("Go."))
    assert 0 < seen[0]["timeout"] <= 60
    body = server.bodies[0]
    assert (body.get("max_tokens") or body.get("max_completion_tokens")) == 77


@pytest.mark.parametrize("way", ["bounded", "callback", "middleware"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_bound_of_the_output_reaches_the_request_in_every_way(server, provider, way):
    """Also of calls that no middleware wraps: by what is left of the tokens, and per call."""
    guard = Guard(Budget(max_iterations=2, max_output_tokens_per_call=77, max_total_tokens=5000))
    middleware = [BudgetMiddleware(guard)] if way == "middleware" else []
    graph = create_agent(chat(provider, server), TOOLS, middleware=middleware)
    config = {"callbacks": [BudgetCallback(guard)]} if way == "callback" else {}
    (bounded(graph, guard) if way == "bounded" else graph).invoke(user("Go."), config)
    bounds = [one.get("max_tokens") or one.get("max_completion_tokens") for one in server.bodies]
    assert bounds == [77, 77]
