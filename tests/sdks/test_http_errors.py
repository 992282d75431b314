"""What a user of each SDK sees where a call may not start and no answer would do."""

from __future__ import annotations

import json

import anthropic
import httpx2
import litellm
import openai
import pydantic
import pytest
from botocore.exceptions import ClientError
from google.genai import errors as genai_errors
from mistralai.client.errors import MistralError

import http_flows as flows
import http_loops as loops
from budgetguard_core import Budget
from budgetguard_http import BudgetTransport, bounded_clients
from provider_server import ProviderServer

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TURNS = [{"role": "user", "content": "go"}]
SAID = "This run was stopped before this call started."


class Answer(pydantic.BaseModel):
    x: int


def chat(server):
    ask = loops.chat_ask(TURNS, tool_choice="required")
    flows.openai_client(server).chat.completions.create(**ask)


def responses(server):
    ask = {"model": "gpt-4o", "input": "go", "tools": loops.RESPONSES_TOOLS}
    flows.openai_client(server).responses.create(**ask, tool_choice="required")


def messages(server):
    ask = {"model": loops.MESSAGES_MODEL, "max_tokens": 100, "messages": TURNS}
    choice = {"type": "tool", "name": "read_file"}
    flows.anthropic_client(server).messages.create(
        **ask, tools=loops.MESSAGES_TOOLS, tool_choice=choice
    )


def gemini(server):
    config = {"response_mime_type": "application/json", "response_schema": Answer}
    client = flows.genai_client(server)
    client.models.generate_content(model="gemini-2.5-flash", contents="go", config=config)


def mistral(server):
    form = {"type": "json_object"}
    ask = {"model": "mistral-large-latest", "messages": TURNS, "response_format": form}
    flows.mistral_client(server).chat.complete(**ask)


def lite(server):
    ask = flows.litellm_ask(server, TURNS, "openai/gpt-4o", stream=False)
    litellm.completion(**{**ask, "tool_choice": "required"})


def bedrock_client(server):
    import boto3
    from botocore.config import Config

    session = boto3.Session("key", "secret", region_name="us-east-1")
    config = Config(retries={"mode": "standard", "total_max_attempts": 5})
    return session.client("bedrock-runtime", endpoint_url=server.url, config=config)


FORCED = {
    "modelId": "anthropic.claude-sonnet-4-5-20250929-v1:0",
    "messages": [{"role": "user", "content": [{"text": "go"}]}],
    "toolConfig": {
        "tools": [{"toolSpec": {"name": "read_file", "inputSchema": {"json": {"type": "object"}}}}],
        "toolChoice": {"tool": {"name": "read_file"}},
    },
}


def converse(server):
    bedrock_client(server).converse(**FORCED)


def converse_stream(server):
    list(bedrock_client(server).converse_stream(**FORCED)["stream"])


def invoke(server):
    body = {"anthropic_version": "bedrock-2023-05-31", "max_tokens": 9, "messages": TURNS}
    body |= {"tools": loops.MESSAGES_TOOLS, "tool_choice": {"type": "tool", "name": "read_file"}}
    bedrock_client(server).invoke_model(modelId=FORCED["modelId"], body=json.dumps(body))


# Each with the type of its SDK's own error for a status, and where that keeps the status.
REFUSED = {
    "openai, chat": (chat, openai.APIStatusError, lambda error: error.status_code),
    "openai, Responses": (responses, openai.APIStatusError, lambda error: error.status_code),
    "anthropic": (messages, anthropic.APIStatusError, lambda error: error.status_code),
    "google-genai": (gemini, genai_errors.ClientError, lambda error: error.code),
    "mistralai": (mistral, MistralError, lambda error: error.status_code),
    "litellm": (lite, litellm.exceptions.APIError, lambda error: error.status_code),
    "boto3, converse": (
        converse,
        ClientError,
        lambda error: error.response["ResponseMetadata"]["HTTPStatusCode"],
    ),
    "boto3, converse_stream": (
        converse_stream,
        ClientError,
        lambda error: error.response["ResponseMetadata"]["HTTPStatusCode"],
    ),
    "boto3, invoke_model": (
        invoke,
        ClientError,
        lambda error: error.response["ResponseMetadata"]["HTTPStatusCode"],
    ),
}


@pytest.mark.parametrize(("ask", "kind", "status"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_is_the_sdks_own_error_with_a_clear_text_and_is_not_tried_again(
    ask, kind, status
):
    with ProviderServer() as server, bounded_clients(Budget(max_model_calls=1)) as block:
        # The one call of the budget, by no SDK.
        httpx2.post(server.url + "/v1/chat/completions", json={"model": "m", "messages": TURNS})
        with pytest.raises(kind) as raised:
            flows.act(ask, server)
    assert (status(raised.value), server.hits) == (402, 1)
    assert SAID in str(raised.value)
    assert "budget" not in str(raised.value).lower()
    assert "max_" not in str(raised.value)
    assert (block.outcome.usage.model_calls, block.guard.open_calls()) == (1, ())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/elsewhere"])
@pytest.mark.parametrize("everywhere", [True, False], ids=["block", "transport"])
def test_a_redirect_to_another_host_is_one_call_and_takes_no_key_along(everywhere, path):
    sent = []
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    message = {"role": "assistant", "content": "ok"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}

    def answer(request):
        sent.append(request)
        if request.url.host == "one":
            return httpx2.Response(308, headers={"location": "http://two" + path})
        return httpx2.Response(200, json={"choices": [choice], "usage": usage})

    inner = httpx2.MockTransport(answer)
    budget = Budget(max_model_calls=2, loop_detection=None)
    block = bounded_clients(budget) if everywhere else BudgetTransport(budget, inner)
    with (
        block,
        httpx2.Client(transport=inner if everywhere else block, follow_redirects=True) as http,
    ):
        client = openai.OpenAI(
            api_key="sk-secret", base_url="http://one/v1", http_client=http, max_retries=0
        )
        replies = [client.chat.completions.create(model="gpt-4o", messages=TURNS) for _ in range(3)]
    assert [request.url.host for request in sent] == ["one", "two"] * 2
    assert "authorization" not in sent[1].headers
    assert replies[2].id == "chatcmpl-synthetic"
    used = block.outcome.usage
    assert (used.model_calls, used.total_tokens, used.failed_calls) == (2, 220, 0)
