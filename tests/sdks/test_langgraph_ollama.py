"""A local model behind Ollama's own client, which takes its bound among its options, over HTTP."""

from __future__ import annotations

import json

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_ollama import ChatOllama
from werkzeug import Response

from budgetguard_core import Budget, Guard
from budgetguard_langgraph import BudgetCallback, BudgetMiddleware, _models, bounded
from langgraph_graphs import check_request, search, user

WAYS = ["bounded", "callback", "middleware"]


class Server:
    """A model that asks for a search for ever."""

    def __init__(self, httpserver):
        self.bodies = []
        self.url = httpserver.url_for("").rstrip("/")
        httpserver.expect_request("/api/chat").respond_with_handler(self._chat)

    def _chat(self, request):
        self.bodies.append(request.get_json())
        call = {"function": {"name": "search", "arguments": {"value": f"q{len(self.bodies)}"}}}
        message = {"role": "assistant", "content": "Let me look.", "tool_calls": [call]}
        head = {"model": "qwen3", "created_at": "2026-01-01T00:00:00Z"}
        lines = [
            {**head, "message": message, "done": False},
            {
                **head,
                "message": {"role": "assistant", "content": ""},
                "done": True,
                "done_reason": "stop",
                "prompt_eval_count": 200,
                "eval_count": 30,
            },
        ]
        written = "".join(f"{json.dumps(line)}\n" for line in lines)
        return Response(written, mimetype="application/x-ndjson")


@pytest.fixture
def server(httpserver, monkeypatch):
    monkeypatch.setattr(_models, "_REPORTED", set())
    return Server(httpserver)


def attached(server, way, guard, **options):
    model = ChatOllama(model="qwen3", base_url=server.url, **options)
    middleware = [BudgetMiddleware(guard)] if way == "middleware" else []
    graph = create_agent(model, [search], middleware=middleware)
    if way == "bounded":
        return bounded(graph, guard), {}
    return graph, {"callbacks": [BudgetCallback(guard)]} if way == "callback" else {}


async def run(graph, config, mode):
    if mode == "sync":
        graph.invoke(user(), config)
    elif mode == "async":
        await graph.ainvoke(user(), config)
    else:
        async for _ in graph.astream(user(), config, stream_mode="messages"):
            pass


@pytest.mark.sample(4)
@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "async", "streamed"])
@pytest.mark.parametrize("way", WAYS)
async def test_each_call_has_its_bound_among_its_options(server, caplog, way, mode):
    guard = Guard(Budget(max_iterations=3, max_output_tokens_per_call=77, max_seconds=60))
    graph, config = attached(server, way, guard)
    await run(graph, config, mode)
    assert len(server.bodies) == guard.usage.model_calls == 3
    assert guard.usage.total_tokens == 3 * 230
    assert guard.usage.estimated_calls == 0
    assert [body["options"]["num_predict"] for body in server.bodies] == [77] * 3
    assert guard.outcome.stop_reason == "max_iterations"
    check_request(guard.outcome.messages)
    assert not [one for one in caplog.records if one.name == "budgetguard_langgraph"]


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "async", "streamed"])
@pytest.mark.parametrize(
    ("own", "caps"),
    [
        ({"num_predict": 5000}, {"max_total_tokens": 2000}),
        ({}, {"max_total_tokens": 9000, "max_output_tokens_per_call": 1000}),
    ],
)
async def test_other_options_of_the_model_are_kept(server, mode, own, caps):
    guard = Guard(Budget(max_iterations=1, **caps))
    graph, config = attached(server, "bounded", guard, temperature=0.5, num_ctx=4096, **own)
    await run(graph, config, mode)
    options = server.bodies[0]["options"]
    assert 0 < options["num_predict"] < 2000
    assert (options["temperature"], options["num_ctx"]) == (0.5, 4096)


def test_a_bare_model_too(server):
    guard = Guard(Budget(max_model_calls=2, max_output_tokens_per_call=77))
    model = ChatOllama(model="qwen3", base_url=server.url)
    model.invoke([HumanMessage("Go.")], {"callbacks": [BudgetCallback(guard)]})
    assert guard.usage.total_tokens == 230
