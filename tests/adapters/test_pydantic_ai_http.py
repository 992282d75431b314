"""Agents with Pydantic AI's own OpenAI model over HTTP on loopback."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel
from werkzeug import Response

from budgetguard_core import Budget
from budgetguard_pydantic_ai import BudgetCapability, outcome
from pydantic_ai_agents import DOORS, checked, endless, ran

pytest.importorskip("openai")
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 20,
    "total_tokens": 120,
    "prompt_tokens_details": {"cached_tokens": 40},
}


class Report(BaseModel):
    summary: str


class Provider:
    """Answers every chat request with a tool call, as a strict provider."""

    def __init__(self, server) -> None:
        self.requests: list[dict] = []
        self.finish = "tool_calls"
        server.expect_request("/v1/chat/completions").respond_with_handler(self.answer)
        self.url = server.url_for("/v1")

    def answer(self, request):
        sent = request.get_json()
        self.requests.append(sent)
        due: list[str] = []
        for message in sent["messages"]:
            if message["role"] == "tool":
                if message["tool_call_id"] not in due:
                    return Response(json.dumps({"error": {"message": "no such call"}}), 400)
                due.remove(message["tool_call_id"])
            elif due:
                return Response(json.dumps({"error": {"message": "a call has no result"}}), 400)
            due += [call["id"] for call in message.get("tool_calls") or ()]
        number = len(self.requests)
        call = {
            "index": 0,
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "search", "arguments": json.dumps({"query": str(number)})},
        }
        base = {"id": "c", "created": 1, "model": "gpt-4o"}
        reply = {"role": "assistant", "content": None, "tool_calls": [call]}
        if self.finish == "length":
            reply = {"role": "assistant", "content": "It has fo"}
        if not sent.get("stream"):
            choice = {"index": 0, "finish_reason": self.finish, "message": reply}
            whole = {**base, "object": "chat.completion", "usage": USAGE, "choices": [choice]}
            return Response(json.dumps(whole), content_type="application/json")
        chunk = {**base, "object": "chat.completion.chunk"}
        chunks = [
            {**chunk, "choices": [{"index": 0, "delta": reply, "finish_reason": None}]},
            {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": self.finish}]},
        ]
        if (sent.get("stream_options") or {}).get("include_usage"):
            chunks.append({**chunk, "choices": [], "usage": USAGE})
        text = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"
        return Response(text, content_type="text/event-stream")

    def run(self, door, budget, **options):

        agent = endless(BudgetCapability(budget), **options)
        made = OpenAIProvider(base_url=self.url, api_key="none")
        agent.model = OpenAIChatModel("gpt-4o", provider=made)
        return ran(agent, door)


@pytest.fixture
def provider(httpserver):
    return Provider(httpserver)


@pytest.mark.parametrize("door", DOORS)
def test_a_runaway_is_stopped_and_charged(provider, door):
    result = provider.run(door, Budget(max_iterations=3))
    found = outcome(result)
    assert (len(provider.requests), found.stop_reason) == (3, "max_iterations")
    used = found.usage
    assert (used.input_tokens, used.output_tokens, used.cache_read_tokens) == (300, 60, 120)
    checked(result.all_messages())


@pytest.mark.parametrize("door", DOORS)
def test_the_completion_bound_is_on_the_wire_and_its_cut_is_a_stop(provider, door):
    provider.finish = "length"
    result = provider.run(door, Budget(max_output_tokens_per_call=20, max_total_tokens=10_000))
    (sent,) = provider.requests
    assert sent["max_completion_tokens"] == 20
    assert outcome(result).status == "terminated"
    assert "It has fo" in result.output


@pytest.mark.parametrize("door", DOORS)
def test_a_typed_agent_is_stopped_with_none(provider, door):
    result = provider.run(door, Budget(max_iterations=2), output_type=Report)
    assert (len(provider.requests), result.output) == (2, None)
    checked(result.all_messages())
