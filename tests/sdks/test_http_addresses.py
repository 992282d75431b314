"""What costs something and what does not, by the addresses that real clients post to."""

from __future__ import annotations

import json

import anthropic
import boto3
import httpx2
import pytest
from mistralai.client import Mistral

from budgetguard_core import Budget
from budgetguard_http import BedrockHooks, BudgetTransport
from budgetguard_http._policy import bills
from provider_server import ProviderServer

MESSAGES = [{"role": "user", "content": "go"}]
FREE = Budget(loop_detection=None)
READ = {"id": "call_1", "function": {"name": "read_file", "arguments": "{}"}}
SAID = {"role": "assistant", "content": "", "tool_calls": [READ, {**READ, "id": "call_2"}]}
USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
COMPLETION = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "mistral-small",
    "choices": [{"index": 0, "message": SAID, "finish_reason": "tool_calls"}],
    "usage": USAGE,
}
ENTRY = {"type": "message.output", "role": "assistant", "content": "Done."}
CONVERSATION = {"conversation_id": "conv_1", "outputs": [ENTRY], "usage": USAGE}


def bounded_client(answer, budget=FREE):
    """A client whose every request gets one answer, and what bounds it."""
    posted = []

    def answered(request):
        posted.append((request.url.path, json.loads(request.content)))
        return httpx2.Response(200, json=answer)

    transport = BudgetTransport(budget, httpx2.MockTransport(answered))
    return httpx2.Client(transport=transport), transport, posted


def vertex(http_client):
    return anthropic.AnthropicVertex(
        access_token="t", project_id="p", region="us-east5", http_client=http_client
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda http: anthropic.Anthropic(api_key="k", http_client=http),
        vertex,
    ],
    ids=["Anthropic", "Vertex"],
)
def test_counting_tokens_is_free(make):
    http_client, transport, posted = bounded_client({"input_tokens": 1000})
    client = make(http_client)
    ask = {"model": "claude-sonnet-5", "messages": MESSAGES}
    with http_client:
        for _ in range(3):
            assert client.messages.count_tokens(**ask).input_tokens == 1000
    assert len(posted) == 3
    assert transport.outcome.usage.model_calls == 0


def test_counting_tokens_by_boto3_is_free():
    with ProviderServer() as server, BedrockHooks(FREE) as hooks:
        session = boto3.Session("k", "s", region_name="us-east-1")
        client = hooks.register(session.client("bedrock-runtime", endpoint_url=server.url))
        said = [{"role": "user", "content": [{"text": "go"}]}]
        client.count_tokens(modelId="m", input={"converse": {"messages": said}})
    assert server.hits == 1
    assert hooks.outcome.usage.model_calls == 0


def test_a_conversation_of_mistrals_is_a_call():
    http_client, transport, posted = bounded_client(CONVERSATION, Budget(max_model_calls=2))
    client = Mistral(api_key="k", client=http_client)
    with http_client:
        client.beta.conversations.start(model="mistral-small", inputs="go")
        client.beta.conversations.append(conversation_id="conv_1", inputs="go on")
        with pytest.raises(Exception, match="was stopped"):
            client.beta.conversations.append(conversation_id="conv_1", inputs="go on")
    assert len(posted) == 2
    usage = transport.outcome.usage
    assert (usage.model_calls, usage.total_tokens, usage.estimated_calls) == (2, 220, 0)


@pytest.mark.parametrize(
    ("host", "path", "free"),
    [
        ("api.mistral.ai", "/v1/conversations", False),
        ("API.Mistral.AI.", "/v1/conversations/conv_1", False),
        ("api.openai.com", "/v1/conversations/conv_1/items", True),
        ("api.openai.com", "/v1/vector_stores", True),
    ],
)
def test_conversations_are_free_where_they_are_only_stored(host, path, free):
    assert bills(host, path) is not free


def test_tool_calls_of_mistrals_agents_are_counted():
    http_client, transport, _ = bounded_client(COMPLETION)
    tools = [{"type": "function", "function": {"name": "read_file", "parameters": {}}}]
    with http_client:
        client = Mistral(api_key="k", client=http_client)
        made = client.agents.complete(agent_id="ag_1", messages=MESSAGES, tools=tools)
    assert [call.id for call in made.choices[0].message.tool_calls] == ["call_1", "call_2"]
    assert transport.outcome.usage.tool_calls == 2
    assert transport.outcome.usage.estimated_calls == 0


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions/",
        "/v1/chat//completions",
        "//v1//chat/completions//",
        "/openai/deployments/gpt-4o/chat/completions/",
    ],
)
def test_a_gateways_slashes_change_no_format(path):
    http_client, transport, posted = bounded_client(COMPLETION)
    with http_client:
        ask = {"model": "gpt-4o", "messages": MESSAGES}
        assert http_client.post("http://gateway" + path, json=ask).json() == COMPLETION
    assert posted[0][0] == path
    usage = transport.outcome.usage
    assert (usage.total_tokens, usage.tool_calls, usage.estimated_calls) == (110, 2, 0)


def test_what_is_free_is_free_with_a_slash_at_its_end():
    http_client, transport, _ = bounded_client({"input_tokens": 1000})
    with http_client:
        http_client.post("https://api.anthropic.com/v1/messages/count_tokens/", json={})
    assert transport.outcome.usage.model_calls == 0
