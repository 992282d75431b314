"""Conversations that OpenAI keeps, over a stop: the next run brings what they wait for."""

from __future__ import annotations

import httpx2
import openai
import pytest

from budgetguard_core import Budget, Guard
from budgetguard_http import BudgetTransport, bounded_clients
from strict_openai_server import StrictServer

TOOLS = [
    {"type": "function", "name": "search", "parameters": {"type": "object", "properties": {}}},
    {"type": "custom", "name": "note"},
]


@pytest.fixture
def provider(httpserver):
    server = StrictServer(httpserver)
    server.calls = [("search", "{}")] * 3
    yield server
    assert server.refusals == []


@pytest.fixture
def client(httpserver):
    with openai.OpenAI(api_key="k", base_url=httpserver.url_for("/v1"), max_retries=0) as client:
        yield client


def message(text):
    return {"role": "user", "content": text}


def ask(client, given, kept, *, stream):
    made = client.responses.create(model="gpt-4o", input=given, tools=TOOLS, stream=stream, **kept)
    return [*made][-1].response if stream else made


def talk(client, given, kept, *, stream=False):
    """Let the model work until it asks for no tool; return its last reply, and how to go on."""
    for _ in range(20):
        reply = ask(client, given, kept, stream=stream)
        if "conversation" not in kept:
            kept = {"previous_response_id": reply.id}
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply, kept
        given = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
            for call in calls
        ]
    return pytest.fail("nothing ended the conversation")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kept", [{}, {"conversation": "conv_1"}], ids=["response", "conversation"])
@pytest.mark.parametrize(
    "caps",
    [
        {"max_iterations": 2},
        {"max_tool_calls": 2},
        {"max_total_tokens": 100},
    ],
    ids=["iterations", "tool calls", "nothing sent"],
)
def test_a_stopped_conversation_goes_on(provider, client, caps, kept, stream):
    with bounded_clients(Budget(**caps, loop_detection=None)) as block:
        _, after = talk(client, [message("Go.")], kept, stream=stream)
    if not provider.requests:
        after = kept
    provider.texts = dict.fromkeys(range(len(provider.requests), 9), "Here you are.")
    with bounded_clients(Budget()):
        given = [*block.pending_input(), message("Go on.")]
        reply, _ = talk(client, given, after, stream=stream)
    assert reply.output_text == "Here you are."
    said = [one for request in provider.requests for one in request["input"] if "role" in one]
    assert [one["content"] for one in said] == ["Go.", "Go on."]


def test_a_request_that_is_refused_again_is_unsent_as_a_whole(provider, client):
    with bounded_clients(Budget(max_iterations=1)) as block:
        _, kept = talk(client, [message("Go.")], {})
    stopped = Guard(Budget())
    stopped.abort("enough for today")
    with bounded_clients(stopped) as later:
        _, kept = talk(client, [*block.pending_input(), message("Go on.")], kept)
    provider.texts = {1: "Here you are."}
    with bounded_clients(Budget()) as last:
        reply, _ = talk(client, [*later.pending_input(), message("Please.")], kept)
    assert reply.output_text == "Here you are."
    assert [one.get("content") for one in provider.requests[-1]["input"]][-2:] == [
        "Go on.",
        "Please.",
    ]
    assert last.pending_input() == []


def test_a_transport_says_it_too(provider, httpserver):
    transport = BudgetTransport(Budget(max_tool_calls=2))
    with openai.OpenAI(
        api_key="k",
        base_url=httpserver.url_for("/v1"),
        http_client=httpx2.Client(transport=transport),
    ) as client:
        assert transport.pending_input() == []
        talk(client, [message("Go.")], {})
    sent = transport.pending_input()
    assert [one["call_id"] for one in sent] == ["call_0_0", "call_0_1", "call_0_2"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_refused_reply_to_calls_says_how_to_go_on(provider, client, stream):
    """The provider answers every later turn with an error until it has their results."""
    with bounded_clients(Budget(max_iterations=1)):
        reply, _ = talk(client, [message("Go.")], {}, stream=stream)
    assert "unsent_input()" in reply.output_text
    assert "budget" not in reply.output_text
