"""The end has the form that the program asked for: what each provider's client gets for it."""

from __future__ import annotations

import anthropic
import openai
import pydantic
import pytest
from google.genai import errors as genai_errors
from mistralai.client.errors import MistralError

import http_flows as flows
import http_loops as loops
from budgetguard_core import Budget, Guard
from budgetguard_http import bounded_clients
from provider_server import ProviderServer

STOPPED = "This run was stopped before it finished."
TURNS = [{"role": "user", "content": "go"}]
CONVERSE_TOOLS = [{"toolSpec": {"name": "a", "inputSchema": {"json": {"type": "object"}}}}]


class Answer(pydantic.BaseModel):
    x: int


@pytest.fixture
def server():
    """A provider that nobody reaches: the run is over."""
    guard = Guard(Budget())
    guard.abort("enough")
    with ProviderServer(calls=0) as server, bounded_clients(guard):
        yield server
    assert server.hits == 0


def chat(server, **options):
    ask = {"model": "gpt-4o", "messages": TURNS, "tools": loops.CHAT_TOOLS, **options}
    return flows.openai_client(server).chat.completions.create(**ask)


def responses(server, **options):
    ask = {"model": "gpt-4o", "input": "go", "tools": loops.RESPONSES_TOOLS, **options}
    return flows.openai_client(server).responses.create(**ask)


def messages(server, **options):
    return flows.anthropic_client(server).messages.create(**loops.messages_ask(TURNS), **options)


def gemini(server, **config):
    ask = {"model": "gemini-2.5-flash", "contents": "go", "config": config}
    return flows.genai_client(server).models.generate_content(**ask)


def mistral(server, **options):
    ask = {"model": "mistral-large-latest", "messages": TURNS, "tools": loops.CHAT_TOOLS}
    return flows.mistral_client(server).chat.complete(**ask, **options)


def converse(server, **choice):
    import boto3

    session = boto3.Session("key", "secret", region_name="us-east-1")
    client = session.client("bedrock-runtime", endpoint_url=server.url)
    turns = [{"role": "user", "content": [{"text": "go"}]}]
    tools = {"tools": CONVERSE_TOOLS, "toolChoice": choice}
    return client.converse(modelId="amazon.nova-pro-v1:0", messages=turns, toolConfig=tools)


def status_of(error):
    for name in ("status_code", "code"):
        if isinstance(found := getattr(error, name, None), int):
            return found
    return error.response["ResponseMetadata"]["HTTPStatusCode"]


READ = {"type": "function", "function": {"name": "read_file"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [READ]}}
OF_RESPONSES = {"type": "function", "name": "read_file"}
MUST_CALL = {
    "chat, required": (chat, {"tool_choice": "required"}),
    "chat, named": (chat, {"tool_choice": READ}),
    "chat, allowed_tools": (chat, {"tool_choice": ALLOWED}),
    "chat, required and JSON": (
        chat,
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
    ),
    "Responses, required": (responses, {"tool_choice": "required"}),
    "Responses, named": (responses, {"tool_choice": OF_RESPONSES}),
    "Responses, allowed_tools": (
        responses,
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [OF_RESPONSES]}},
    ),
    "Anthropic, any": (messages, {"tool_choice": {"type": "any"}}),
    "Anthropic, named": (messages, {"tool_choice": {"type": "tool", "name": "read_file"}}),
    "Converse, any": (converse, {"any": {}}),
    "Converse, named": (converse, {"tool": {"name": "a"}}),
    "Gemini, ANY": (gemini, {"tool_config": {"function_calling_config": {"mode": "ANY"}}}),
    "Gemini, JSON": (gemini, {"response_mime_type": "application/json"}),
    "Mistral, any": (mistral, {"tool_choice": "any"}),
    "Mistral, JSON": (mistral, {"response_format": {"type": "json_object"}}),
}


@pytest.mark.parametrize(("ask", "options"), MUST_CALL.values(), ids=MUST_CALL)
def test_where_no_text_would_do_the_client_gets_its_own_error(server, ask, options):
    from botocore.exceptions import ClientError

    errors = (openai.APIStatusError, anthropic.APIStatusError, genai_errors.APIError)
    with pytest.raises((*errors, MistralError, ClientError)) as raised:
        ask(server, **options)
    assert status_of(raised.value) == 402


ALLOWED_AUTO = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [READ]}}
MAY_CALL = {
    "chat, auto": (chat, {"tool_choice": "auto"}, lambda got: got.choices[0].message.content),
    "chat, allowed_tools": (
        chat,
        {"tool_choice": ALLOWED_AUTO},
        lambda got: got.choices[0].message.content,
    ),
    "Responses, hosted": (
        responses,
        {"tool_choice": {"type": "web_search_preview"}},
        lambda got: got.output_text,
    ),
    "Anthropic, auto": (
        messages,
        {"tool_choice": {"type": "auto"}},
        lambda got: got.content[0].text,
    ),
    "Gemini, AUTO": (
        gemini,
        {"tool_config": {"function_calling_config": {"mode": "AUTO"}}},
        lambda got: got.text,
    ),
    "Converse, auto": (
        converse,
        {"auto": {}},
        lambda got: got["output"]["message"]["content"][0]["text"],
    ),
}


@pytest.mark.parametrize(("ask", "options", "said"), MAY_CALL.values(), ids=MAY_CALL)
def test_where_a_text_will_do_the_client_gets_one(server, ask, options, said):
    assert said(ask(server, **options)).startswith(STOPPED)


def test_json_of_chat_completions_is_refused_as_its_model_refuses(server):
    client = flows.openai_client(server)
    ask = {"model": "gpt-4o", "messages": TURNS}
    parsed = client.chat.completions.parse(**ask, response_format=Answer).choices[0].message
    assert (parsed.parsed, parsed.content) == (None, None)
    assert parsed.refusal.startswith(STOPPED)
    whole = client.chat.completions.create(**ask, response_format={"type": "json_object"})
    assert whole.choices[0].message.refusal == parsed.refusal
    with client.chat.completions.stream(**ask, response_format=Answer) as events:
        assert events.get_final_completion().choices[0].message.refusal == parsed.refusal


def test_json_of_responses_is_refused_as_its_model_refuses(server):
    client = flows.openai_client(server)
    parsed = client.responses.parse(model="gpt-4o", input="go", text_format=Answer)
    assert parsed.output_parsed is None
    assert parsed.output[0].content[0].refusal.startswith(STOPPED)
    with client.responses.stream(model="gpt-4o", input="go", text_format=Answer) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert "response.refusal.done" in kinds
    assert final.output[0].content[0].type == "refusal"


def test_json_of_anthropic_is_refused_as_its_model_refuses(server):
    client = flows.anthropic_client(server)
    ask = {"model": loops.MESSAGES_MODEL, "max_tokens": 100, "messages": TURNS}
    parsed = client.messages.parse(**ask, output_format=Answer)
    assert (parsed.parsed_output, parsed.stop_reason) == (None, "refusal")
    with client.messages.stream(**ask, output_format=Answer) as events:
        assert events.get_final_message().stop_reason == "refusal"


def test_a_synthetic_answer_has_a_usage_of_zero(server):
    assert chat(server).usage.total_tokens == 0
    assert chat(server).usage.prompt_tokens_details.cached_tokens == 0
    chunks = [*chat(server, stream=True, stream_options={"include_usage": True})]
    assert [chunk.usage and chunk.usage.total_tokens for chunk in chunks] == [None, None, 0]
    assert all(chunk.choices for chunk in chat(server, stream=True))
    response = responses(server)
    assert response.usage.total_tokens == 0
    assert response.usage.input_tokens_details.cached_tokens == 0
    (*_, completed) = responses(server, stream=True)
    assert completed.response.usage.output_tokens_details.reasoning_tokens == 0
    assert messages(server).usage.output_tokens == 0
    assert mistral(server).usage.total_tokens == 0
    assert gemini(server).usage_metadata.total_token_count == 0
    assert converse(server, auto={})["usage"]["totalTokens"] == 0
