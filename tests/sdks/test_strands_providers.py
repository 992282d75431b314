"""Strands' models of several providers, end to end on loopback, and tools of an MCP server.

Each server speaks its provider's own protocol; the requests that it saw are the count.
"""

from __future__ import annotations

import binascii
import json
import os
import re
import struct
import sys

import pytest
from strands import Agent, tool
from werkzeug import Response

from budgetguard_core import Budget, Guard
from budgetguard_strands import BudgetHookProvider
from strands_agents import check_request

# Nothing is asked of the net for the prices that LiteLLM knows already.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

GO_ON = {"role": "user", "content": [{"text": "And now?"}]}

# LiteLLM 1.83 asks each of its own objects for a name that pydantic deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the 'model_.*fields:DeprecationWarning")


def events(*pairs):
    """Server-sent events: a name, and its data."""
    return "".join(
        f"{'' if name is None else f'event: {name}' + chr(10)}data: {json.dumps(data)}\n\n"
        for name, data in pairs
    )


def openai_stream(number, bound):
    head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "gpt-4o"}
    use = {"index": 0, "id": f"call_{number}", "type": "function"}
    use["function"] = {"name": "search", "arguments": json.dumps({"value": str(number)})}
    usage = {"prompt_tokens": 200, "completion_tokens": 30, "total_tokens": 230}

    def choice(delta, reason=None):
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

    body = events(
        (None, choice({"role": "assistant", "content": ""})),
        (None, choice({"tool_calls": [use]})),
        (None, choice({}, "tool_calls")),
        (None, {**head, "choices": [], "usage": usage}),
    )
    return Response(body + "data: [DONE]\n\n", mimetype="text/event-stream")


def anthropic_stream(number, bound):
    message = {"id": "m", "type": "message", "role": "assistant", "content": [], "model": "claude"}
    message |= {"stop_reason": None, "stop_sequence": None}
    message["usage"] = {"input_tokens": 200, "output_tokens": 1}
    block = {"type": "tool_use", "id": f"toolu_{number}", "name": "search", "input": {}}
    part = {"type": "input_json_delta", "partial_json": json.dumps({"value": str(number)})}
    body = [
        ("message_start", {"message": message}),
        ("content_block_start", {"index": 0, "content_block": block}),
        ("content_block_delta", {"index": 0, "delta": part}),
        ("content_block_stop", {"index": 0}),
        (
            "message_delta",
            {
                "delta": {"stop_reason": "tool_use", "stop_sequence": None},
                "usage": {"output_tokens": 30},
            },
        ),
        ("message_stop", {}),
    ]
    typed = [(name, {"type": name, **data}) for name, data in body]
    return Response(events(*typed), mimetype="text/event-stream")


def ollama_stream(number, bound):
    use = {"function": {"name": "search", "arguments": {"value": str(number)}}}
    head = {"model": "m", "created_at": "2025-01-01T00:00:00Z"}
    lines = [
        {
            **head,
            "message": {"role": "assistant", "content": "", "tool_calls": [use]},
            "done": False,
        },
        {
            **head,
            "message": {"role": "assistant", "content": ""},
            "done": True,
            "done_reason": "stop",
            "prompt_eval_count": 200,
            "eval_count": 30,
            "total_duration": 1,
        },
    ]
    return Response("\n".join(map(json.dumps, lines)) + "\n", mimetype="application/x-ndjson")


def aws_event(name, data):
    """One message of an AWS event stream."""
    headers = b""
    for key, value in (
        (":event-type", name),
        (":content-type", "application/json"),
        (":message-type", "event"),
    ):
        headers += bytes([len(key)]) + key.encode() + b"\x07"
        headers += struct.pack(">H", len(value)) + value.encode()
    payload = json.dumps(data).encode()
    prelude = struct.pack(">II", 16 + len(headers) + len(payload), len(headers))
    start = prelude + struct.pack(">I", binascii.crc32(prelude)) + headers + payload
    return start + struct.pack(">I", binascii.crc32(start))


def bedrock_stream(number, bound):
    use = {"toolUse": {"toolUseId": f"tooluse_{number}", "name": "search"}}
    part = {"toolUse": {"input": json.dumps({"value": str(number)})}}
    usage = {"inputTokens": 200, "outputTokens": 30, "totalTokens": 230}
    body = b"".join(
        aws_event(name, data)
        for name, data in (
            ("messageStart", {"role": "assistant"}),
            ("contentBlockStart", {"contentBlockIndex": 0, "start": use}),
            ("contentBlockDelta", {"contentBlockIndex": 0, "delta": part}),
            ("contentBlockStop", {"contentBlockIndex": 0}),
            ("messageStop", {"stopReason": "tool_use"}),
            ("metadata", {"usage": usage, "metrics": {"latencyMs": 1}}),
        )
    )
    return Response(body, mimetype="application/vnd.amazon.eventstream")


def openai_model(url):
    module = pytest.importorskip("strands.models.openai")
    arguments = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    return module.OpenAIModel(client_args=arguments, model_id="gpt-4o")


def anthropic_model(url):
    module = pytest.importorskip("strands.models.anthropic")
    arguments = {"base_url": url, "api_key": "none", "max_retries": 0}
    return module.AnthropicModel(client_args=arguments, model_id="claude", max_tokens=4096)


def ollama_model(url):
    module = pytest.importorskip("strands.models.ollama")
    return module.OllamaModel(url, model_id="llama3")


def litellm_model(url):
    module = pytest.importorskip("strands.models.litellm")
    arguments = {"api_base": f"{url}/v1", "api_key": "none"}
    return module.LiteLLMModel(client_args=arguments, model_id="openai/gpt-4o")


def bedrock_model(url):
    boto3 = pytest.importorskip("boto3")
    from strands.models.bedrock import BedrockModel

    session = boto3.Session("id", "secret", region_name="us-east-1")
    return BedrockModel(boto_session=session, endpoint_url=url, model_id="claude")


# How to make each, what answers it, and where a request keeps the bound of the completion.
PROVIDERS = {
    "anthropic": (anthropic_model, anthropic_stream, ("max_tokens",)),
    "bedrock": (bedrock_model, bedrock_stream, ("inferenceConfig", "maxTokens")),
    "litellm": (litellm_model, openai_stream, ("max_tokens",)),
    "ollama": (ollama_model, ollama_stream, ("options", "num_predict")),
    "openai": (openai_model, openai_stream, ("max_completion_tokens",)),
}


class Served:
    """A server's side: what it was asked."""

    def __init__(self, answer):
        self.answer = answer
        self.requests = []

    def __call__(self, request):
        self.requests.append(json.loads(request.data))
        return self.answer(len(self.requests), None)


def searching():
    started = []

    @tool
    def search(value: str = "") -> str:
        """Searches."""
        started.append(value)
        return f"result {len(started)}"

    return search, started


@pytest.fixture(params=list(PROVIDERS))
def provided(request, httpserver):
    model, answer, bound = PROVIDERS[request.param]
    server = Served(answer)
    made = model(httpserver.url_for("").rstrip("/"))
    httpserver.expect_request(re.compile(".*"), method="POST").respond_with_handler(server)
    return made, server, bound


@pytest.mark.sample(5)
@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_sticky_model_of_each_provider(provided, way):
    import asyncio

    model, server, _ = provided
    search, started = searching()
    guard = Guard(Budget(max_iterations=3, loop_detection=None))
    agent = Agent(
        model=model, tools=[search], hooks=[BudgetHookProvider(guard)], callback_handler=None
    )
    result = agent("Go.") if way == "sync" else asyncio.run(agent.invoke_async("Go."))
    assert result.stop_reason == "max_iterations"
    assert len(server.requests) == len(started) == 3
    usage = guard.usage
    figures = (usage.input_tokens, usage.output_tokens)
    assert figures == (600, 90)
    assert usage.model_calls == 3
    assert usage.estimated_calls == 0
    check_request([*agent.messages, GO_ON])


@pytest.mark.sample(4)
def test_the_bound_of_each_provider_is_in_its_requests(provided):
    model, server, place = provided
    search, _ = searching()
    budget = Budget(max_iterations=2, max_output_tokens_per_call=300)
    agent = Agent(
        model=model, tools=[search], hooks=[BudgetHookProvider(budget)], callback_handler=None
    )
    agent("Go.")
    for request in server.requests:
        for name in place:
            request = request[name]
        assert request == 300


# Tools of a server


TOOLS = """
try:
    from mcp.server import MCPServer as Server
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server

server = Server("tools")


@server.tool()
def search(value: str = "") -> str:
    "Searches."
    return "found " + value


server.run()
"""


@pytest.mark.slow
@pytest.mark.parametrize("provided", ["openai"], indirect=True)
def test_tools_of_an_mcp_server_over_stdio(provided, tmp_path):
    mcp = pytest.importorskip("mcp")
    client = pytest.importorskip("strands.tools.mcp")
    model, server, _ = provided
    script = tmp_path / "server.py"
    script.write_text(TOOLS)
    parameters = mcp.StdioServerParameters(command=sys.executable, args=[str(script)])
    guard = Guard(Budget(max_tool_calls=2, loop_detection=None))
    with client.MCPClient(lambda: mcp.stdio_client(parameters)) as tools:
        agent = Agent(
            model=model,
            tools=tools.list_tools_sync(),
            hooks=[BudgetHookProvider(guard)],
            callback_handler=None,
        )
        assert agent("Go.").stop_reason == "max_tool_calls"
    assert guard.usage.tool_calls == 2
    assert len(server.requests) == 3  # the third asks for one more, which is refused
    assert "found 1" in json.dumps(agent.messages)
    check_request([*agent.messages, GO_ON])
