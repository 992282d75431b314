"""What belongs to one conversation, and whose a tool call is, in forms that SDKs send as well."""

from __future__ import annotations

import json
from contextlib import contextmanager

import httpx2
import openai
import pytest

import http_loops as loops
from budgetguard_core import Budget
from budgetguard_http import BudgetTransport, bounded_clients
from provider_server import ProviderServer


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_counted_where_the_input_of_a_response_is_a_text(stream):
    with client_of(calls=3) as (_, client), bounded_clients(Budget()) as block:
        ask = {"model": "gpt-4o", "input": "go", "tools": loops.RESPONSES_TOOLS}
        made = client.responses.create(**ask, stream=stream)
        answer = [*made][-1].response if stream else made
    assert sum(item.type == "function_call" for item in answer.output) == 3
    assert block.outcome.usage.tool_calls == 3


USAGE = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
SHELL = {
    "type": "shell_call",
    "call_id": "call_1",
    "status": "completed",
    "action": {"commands": ["ls"]},
    "environment": {"type": "container_reference", "container_id": "c_1"},
}


def response(*items, text="Still waiting."):
    part = {"type": "output_text", "text": text, "annotations": []}
    said = {"type": "message", "role": "assistant", "content": [part]}
    return {"id": "resp_1", "model": "gpt-4o", "output": [*items, said], "usage": USAGE}


def completion(text="Still waiting."):
    message = {"role": "assistant", "content": text}
    return {"id": "1", "model": "gpt-4o", "choices": [{"index": 0, "message": message}]}


def message(*blocks):
    said = {"type": "text", "text": "Still waiting."}
    return {"id": "1", "model": "claude-sonnet-5", "content": [*blocks, said], "usage": USAGE}


def converse(*blocks):
    said = {"role": "assistant", "content": [*blocks, {"text": "Still waiting."}]}
    usage = {"inputTokens": 10, "outputTokens": 5, "totalTokens": 15}
    return {"output": {"message": said}, "stopReason": "end_turn", "usage": usage}


def talk(path, key, answer, turns_of, budget, turns=12):
    """Say the same again and again to who answers the same again and again."""
    asked = []

    def answered(request):
        asked.append(json.loads(request.content))
        return httpx2.Response(200, json=answer)

    said, last = [], None
    text = {"text": "And now?"} if "converse" in path else "And now?"
    spoken = [text] if isinstance(text, dict) else text
    transport = BudgetTransport(budget, httpx2.MockTransport(answered))
    with httpx2.Client(transport=transport) as client:
        for _ in range(turns):
            said.append({"role": "user", "content": spoken})
            last = client.post("http://provider" + path, json={"model": "gpt-4o", key: said}).json()
            said += turns_of(last)
    return asked, last, transport.outcome


CHAT = ("/v1/chat/completions", "messages")
RESPONSES = ("/v1/responses", "input")
MESSAGES = ("/v1/messages", "messages")
CONVERSE = ("/model/amazon.nova-pro-v1:0/converse", "messages")
GROUNDED = {"toolUseId": "s_1", "name": "nova_grounding", "input": {}, "type": "server_tool_use"}
OF_CONVERSE = [{"toolUse": GROUNDED}, {"toolResult": {"toolUseId": "s_1", "content": []}}]
OF_SHELL = [SHELL, {"type": "shell_call_output", "call_id": "call_1", "output": []}]
SEARCH = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}}
OF_MCP = [{"type": "mcp_tool_use", "id": "m_1", "name": "search", "server_name": "s", "input": {}}]


def of_chat(body):
    return [body["choices"][0]["message"]]


def of_responses(body):
    return body["output"]


def of_messages(body):
    return [{"role": "assistant", "content": body["content"]}]


def of_converse(body):
    return [body["output"]["message"]]


@pytest.mark.parametrize(
    ("where", "answer", "turns_of"),
    [
        (CHAT, completion(), of_chat),
        (RESPONSES, response(), of_responses),
        (RESPONSES, response({"type": "reasoning", "summary": []}), of_responses),
        (RESPONSES, response(SEARCH), of_responses),
        (RESPONSES, response(*OF_SHELL), of_responses),
        (RESPONSES, response({"type": "mcp_list_tools", "tools": []}), of_responses),
        (MESSAGES, message(), of_messages),
        (MESSAGES, message(*OF_MCP), of_messages),
        (CONVERSE, converse(), of_converse),
        (CONVERSE, converse(*OF_CONVERSE), of_converse),
    ],
    ids=[
        "chat",
        "Responses",
        "reasoning",
        "search",
        "shell",
        "MCP's list",
        "messages",
        "MCP",
        "Converse",
        "grounding",
    ],
)
def test_replies_that_repeat_are_a_loop_whatever_is_beside_them(where, answer, turns_of):
    asked, _, outcome = talk(*where, answer, turns_of, Budget(), turns=20)
    assert outcome.stop_reason == "no_progress"
    assert len(asked) <= 13


@pytest.mark.parametrize(
    ("where", "answer", "turns_of"),
    [
        (RESPONSES, response(*OF_SHELL), of_responses),
        (MESSAGES, message(*OF_MCP), of_messages),
        (CONVERSE, converse(*OF_CONVERSE), of_converse),
    ],
    ids=["shell", "MCP", "grounding"],
)
def test_what_the_provider_has_run_is_counted_and_stays_in_its_answer(where, answer, turns_of):
    budget = Budget(max_tool_calls=2, loop_detection=None)
    asked, last, outcome = talk(*where, answer, turns_of, budget, turns=2)
    assert (outcome.usage.tool_calls, len(asked)) == (2, 2)
    assert last == answer
    budget = Budget(tool_quotas={"*": 1}, loop_detection=None)
    asked, _, outcome = talk(*where, answer, turns_of, budget, turns=3)
    assert (outcome.stop_reason, len(asked)) == ("tool_quota", 2)


# Responses that go on from what the provider keeps


KEPT = {
    "prompt": {"prompt": {"id": "pmpt_1", "variables": {"city": "Bern"}}},
    "conversation": {"conversation": "conv_1"},
    "conversation object": {"conversation": {"id": "conv_1"}},
    "previous": {"previous_response_id": "resp_0"},
}


@contextmanager
def client_of(*, calls):
    with (
        ProviderServer(calls=calls) as server,
        openai.OpenAI(api_key="k", base_url=server.url + "/v1") as client,
    ):
        yield server, client


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_without_an_input_is_bounded_as_any_other(kept, stream):
    budget = Budget(max_tool_calls=2, max_total_tokens=10_000, loop_detection=None)
    with client_of(calls=3) as (server, client), bounded_clients(budget) as block:
        ask = {"model": "gpt-4o", "tools": loops.RESPONSES_TOOLS, **kept}
        made = client.responses.create(**ask, stream=stream)
        answer = [*made][-1].response if stream else made
        refused = client.responses.create(**ask)
    assert sum(item.type == "function_call" for item in answer.output) == 3
    assert refused.output_text.startswith("This run was stopped")
    usage = block.outcome.usage
    assert (server.hits, usage.tool_calls, usage.total_tokens) == (1, 3, 110)
    assert (usage.estimated_calls, usage.reserved_tokens) == (0, 0)


def test_the_variables_of_a_prompt_template_are_projected():
    sizes = []
    for text in ("Bern", "Bern " * 2_000):
        budget = Budget(max_total_tokens=1_000)
        with client_of(calls=0) as (server, client), bounded_clients(budget) as block:
            client.responses.create(prompt={"id": "pmpt_1", "variables": {"city": text}})
        sizes.append((server.hits, block.outcome.stop_reason))
    assert sizes == [(1, "completed"), (0, "max_total_tokens")]


def test_a_background_response_that_is_streamed_is_read_and_bounded():
    with client_of(calls=3) as (_, client), bounded_clients(Budget()) as block:
        ask = {"model": "gpt-4o", "input": "go", "tools": loops.RESPONSES_TOOLS}
        events = [*client.responses.create(**ask, background=True, stream=True)]
    assert sum(item.type == "function_call" for item in events[-1].response.output) == 3
    usage = block.outcome.usage
    assert (usage.tool_calls, usage.total_tokens, usage.estimated_calls) == (3, 110, 0)


def of_anthropic(results):
    return [
        {"type": "tool_result", "tool_use_id": f"toolu_{one}", "content": "same"} for one in results
    ]


def of_gemini(results):
    return [{"functionResponse": {"name": "poll", "response": {"x": "same"}}} for _ in results]


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "before words"])
@pytest.mark.parametrize(
    ("path", "field", "results"),
    [
        ("/v1/messages", "content", of_anthropic),
        ("/models/gemini-2.5-flash:generateContent", "parts", of_gemini),
    ],
)
def test_results_are_read_wherever_they_stand_after_the_reply(path, field, results, apart):
    made = 0

    def answered(_):
        nonlocal made
        made += 2
        calls = [
            {"type": "tool_use", "id": f"toolu_{made - n}", "name": "poll", "input": {}}
            for n in (1, 0)
        ]
        parts = [{"functionCall": {"name": "poll", "args": {}}}] * 2
        content = {"role": "model", "parts": parts}
        usage = {"usage": {"input_tokens": 9, "output_tokens": 5}}
        found = {"usageMetadata": {"promptTokenCount": 9, "candidatesTokenCount": 5}}
        answer = {"role": "assistant", "content": calls, "candidates": [{"content": content}]}
        return httpx2.Response(200, json={**answer, **usage, **found})

    transport = BudgetTransport(Budget(max_iterations=9), httpx2.MockTransport(answered))
    text = [{"text": "Go on."}] if field == "parts" else "Go on."
    turns = [{"role": "user", field: text}]
    with httpx2.Client(transport=transport, base_url="http://provider") as client:
        for _ in range(9):
            ask = {"messages": turns, "contents": turns, "max_tokens": 9}
            answer = client.post(path, json=ask).json()
            reply = {"role": "assistant", "content": answer.get("content")}
            reply = answer["candidates"][0]["content"] if field == "parts" else reply
            if "Go on." in str(reply) or "This run" in str(reply):
                break
            found = results([made - 1, made])
            given = [{"role": "user", field: [one]} for one in found]
            if not apart:
                given = [{"role": "user", field: found}, turns[0]]
            turns = [*turns, reply, *given]
    outcome = transport.outcome
    assert str(outcome.stop_reason) in ("no_progress", "oscillation")
    assert {call.status for call in outcome.tool_calls} == {"completed"}
