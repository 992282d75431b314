"""The SDK with the official client over real HTTP on loopback: chat completions and Responses.

The server's log is an independent count of model calls.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from agents import (
    Agent,
    ModelRetrySettings,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunState,
)
from openai import AsyncOpenAI

from budgetguard_core import Budget, FinalizeReserve, Guard, StopReason
from budgetguard_openai_agents import BudgetHooks, outcome, pending_input
from conformance.budgetguard_openai_agents_driver import MemorySession
from openai_agents_runs import MODES, go, tool, unpaired
from strict_openai_server import NAME, StrictServer, stream, too_many

pytestmark = pytest.mark.anyio
modes = pytest.mark.parametrize("mode", MODES)
apis = pytest.mark.parametrize("api", ["chat", "responses"])
MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


@pytest.fixture
def provider(httpserver):
    server = StrictServer(httpserver)
    yield server
    assert server.refusals == []


@pytest.fixture
async def client(httpserver):
    # Retries inside the client are seen by nobody, so the SDK makes them here.
    async with AsyncOpenAI(
        base_url=httpserver.url_for("/v1"), api_key="none", max_retries=0
    ) as client:
        yield client


def agent_of(api: str, client: AsyncOpenAI, *tools: Any, **options: Any) -> Agent[Any]:
    model = MODELS[api](NAME, client)
    return Agent(name=options.pop("name", "main"), model=model, tools=list(tools), **options)


@pytest.mark.sample(4)
@apis
@modes
async def test_a_sticky_model(provider, client, api, mode):
    provider.calls = [("search", "{}")] * 2
    settings = ModelSettings(include_usage=True)
    agent = agent_of(api, client, tool("search", []), model_settings=settings)
    session = MemorySession("s")
    guard = Guard(Budget(max_iterations=4, max_output_tokens_per_call=300, max_cost_usd=1))
    result = await go(mode, agent, session=session, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS
    assert len(provider.server.log) == guard.usage.model_calls == 4
    assert guard.usage.total_tokens == 4 * 230
    assert guard.usage.cache_read_tokens == 4 * 150
    assert guard.usage.cost_usd > 0
    assert {r.get("max_tokens", r.get("max_output_tokens")) for r in provider.requests} == {300}
    # What the client sends next, the provider has to take: no open call, no unknown field.
    provider.texts = dict.fromkeys(range(4, 9), "Here you are.")
    again = await go(mode, agent, "Go on.", session=session, hooks=BudgetHooks(Budget()))
    assert again.final_output == "Here you are."
    sent = json.dumps(provider.requests[-1])
    assert "synthetic" not in sent
    assert "budget" not in sent
    if api == "responses":
        assert not unpaired(provider.requests[-1]["input"])
        assert [i.get("id") for i in provider.requests[-1]["input"] if i.get("role")] == [None] * 3


@pytest.mark.sample(4)
@apis
@modes
async def test_parallel_calls_past_the_cap(provider, client, api, mode):
    provider.calls = [("search", "{}")] * 5
    bodies: list[str] = []
    agent = agent_of(api, client, tool("search", bodies))
    guard = Guard(Budget(max_tool_calls=7))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert len(bodies) == 7
    assert len(provider.server.log) == guard.usage.model_calls == 2
    assert not unpaired(result.to_input_list())


@pytest.mark.sample(4)
@apis
@modes
async def test_ping_pong_handoffs(provider, client, api, mode):
    left = agent_of(api, client, name="left")
    right = agent_of(api, client, name="right", handoffs=[left])
    left.handoffs = [right]
    provider.calls = [("transfer_to_right", "{}")]
    asked = provider.asked

    def in_turn(number: int) -> Any:
        provider.calls = [(("transfer_to_right", "transfer_to_left")[number % 2], "{}")]
        return asked(number)

    provider.asked = in_turn
    guard = Guard(Budget(max_iterations=40))
    result = await go(mode, left, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.OSCILLATION
    assert len(provider.server.log) == guard.usage.model_calls <= 12


@pytest.mark.sample(4)
@apis
@modes
async def test_a_repeated_tool_call_id(provider, client, api, mode):
    provider.ids = ["call_1"]
    bodies: list[str] = []
    agent = agent_of(api, client, tool("search", bodies, result="nothing"))
    guard = Guard(Budget(max_iterations=30))
    ran = await asyncio.gather(go(mode, agent, hooks=BudgetHooks(guard)), return_exceptions=True)
    assert len(provider.server.log) == guard.usage.model_calls <= 10
    assert guard.open_calls() == ()
    assert guard.usage.tool_calls == len(bodies)
    if not isinstance(ran[0], BaseException):
        assert outcome(ran[0]).status == "terminated"


@pytest.mark.sample(4)
@apis
@modes
async def test_429s(provider, client, api, mode):
    provider.faults = [too_many(), too_many(), too_many()]
    retry = ModelRetrySettings(
        max_retries=5, policy=lambda _: True, backoff={"initial_delay": 0.0, "jitter": False}
    )
    agent = agent_of(api, client, tool("search", []), model_settings=ModelSettings(retry=retry))
    guard = Guard(Budget(max_iterations=2))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS
    assert len(provider.server.log) == guard.usage.model_calls == 5
    assert guard.usage.iterations == 2
    assert guard.usage.failed_calls == 3

    provider.faults = [too_many() for _ in range(9)]
    guard = Guard(Budget(max_model_calls=3))
    provider.server.clear_log()
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.MAX_MODEL_CALLS
    assert len(provider.server.log) == guard.usage.model_calls == 3


@apis
@modes
async def test_a_provider_that_fails(provider, client, api, mode):
    provider.faults = [too_many()]
    guard = Guard(Budget(max_iterations=2))
    with pytest.raises(Exception, match="slow down"):
        await go(mode, agent_of(api, client), hooks=BudgetHooks(guard))
    assert len(provider.server.log) == guard.usage.model_calls == 1
    assert guard.usage.failed_calls == 1
    assert guard.open_calls() == ()


@apis
@modes
async def test_without_usage_tokens_are_estimated(provider, client, api, mode):
    provider.usage = False
    agent = agent_of(api, client, tool("search", []))
    guard = Guard(Budget(max_iterations=3, max_total_tokens=10_000))
    result = await go(mode, agent, "word " * 300, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS
    assert len(provider.server.log) == guard.usage.model_calls == 3
    assert guard.usage.estimated_calls == 3
    assert guard.usage.total_tokens > 900


async def test_an_incomplete_stream_is_charged_what_it_reports(provider, client):
    body = {
        "id": "r",
        "object": "response",
        "created_at": 0,
        "model": NAME,
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 500,
            "output_tokens": 6000,
            "total_tokens": 6500,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 6000},
        },
    }
    provider.faults = [
        stream([{"type": "response.incomplete", "response": body, "sequence_number": 0}])
    ]
    agent = agent_of("responses", client, model_settings=ModelSettings(max_tokens=600))
    guard = Guard(Budget(max_total_tokens=100_000))
    with pytest.raises(Exception, match="incomplete"):
        await go("run_streamed", agent, hooks=BudgetHooks(guard))
    assert guard.usage.total_tokens == 6500
    assert guard.open_calls() == ()


@modes
async def test_a_conversation_that_the_server_keeps_goes_on(provider, client, mode):
    bodies: list[str] = []
    agent = agent_of("responses", client, tool("search", bodies))
    provider.calls = [("search", "{}")] * 2
    result = await go(
        mode,
        agent,
        conversation_id="conv_1",
        hooks=BudgetHooks(Budget(max_tool_calls=3)),
    )
    assert bodies == ["search"] * 3
    unsent = pending_input(result)
    assert [item["call_id"] for item in unsent] == ["call_1_0", "call_1_1"]
    provider.texts = dict.fromkeys(range(2, 9), "Here you are.")
    again = await go(
        mode,
        agent,
        [*unsent, {"role": "user", "content": "Go on."}],
        conversation_id="conv_1",
        hooks=BudgetHooks(Budget()),
    )
    assert again.final_output == "Here you are."
    sent = provider.requests[-1]["input"]
    assert [item.get("type", "message") for item in sent] == [
        "function_call_output",
        "function_call_output",
        "message",
    ]


@modes
async def test_what_a_conversation_was_not_told_before_its_run_was_stopped_is_unsent(
    provider, client, mode
):
    agent = agent_of("responses", client, tool("search", []))
    kept = {"conversation_id": "conv_1"}
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=1)), **kept)
    stopped = Guard(Budget())
    stopped.abort("enough for today")
    given = [*pending_input(result), {"role": "user", "content": "Go on."}]
    result = await go(mode, agent, given, hooks=BudgetHooks(stopped), **kept)
    assert (outcome(result).stop_reason, len(provider.requests)) == (StopReason.ABORTED, 1)
    provider.texts = {1: "Here you are."}
    given = [*pending_input(result), {"role": "user", "content": "Please."}]
    again = await go(mode, agent, given, hooks=BudgetHooks(Budget()), **kept)
    assert again.final_output == "Here you are."
    sent = provider.requests[-1]["input"]
    assert [item.get("content", item.get("call_id")) for item in sent] == [
        "call_0_0",
        "Go on.",
        "Please.",
    ]


@modes
@pytest.mark.parametrize(
    "kept", [{"conversation_id": "conv_1"}, {"auto_previous_response_id": True}]
)
async def test_the_state_of_a_stopped_run_knows_the_servers_conversation(
    provider, client, mode, kept
):
    agent = agent_of("responses", client, tool("search", [], needs_approval=True))
    paused = await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=1)), **kept)
    state = paused.to_state()
    state.approve(state.get_interruptions()[0])
    reserve = Budget(max_iterations=1, finalize_reserve=FinalizeReserve(tokens=4000))
    stopped = await go(mode, agent, state, hooks=BudgetHooks(reserve))
    assert (outcome(stopped).status, len(provider.requests)) == ("terminated", 1)
    refused = Guard(Budget())
    refused.abort("enough for today")
    state = await RunState.from_json(agent, stopped.to_state().to_json())
    stopped = await go(mode, agent, state, hooks=BudgetHooks(refused))
    assert [item["call_id"] for item in pending_input(stopped)] == ["call_0_0"]
    provider.texts = dict.fromkeys(range(1, 9), "Here you are.")
    again = await go(mode, agent, stopped.to_state(), hooks=BudgetHooks(Budget()))
    assert again.final_output == "Here you are."
    sent = provider.requests[-1]["input"]
    assert [item["call_id"] for item in sent if "call_id" in item] == ["call_0_0"]


@modes
async def test_a_state_that_no_model_has_answered_to_is_sent_to_the_servers_conversation(
    provider, client, mode
):
    agent = agent_of("responses", client)
    stopped = Guard(Budget())
    stopped.abort("enough for today")
    seen: list[Any] = []

    class Seeing(BudgetHooks):
        async def on_agent_start(self, context, agent):
            seen.append(context.context)

    result = await go(
        mode, agent, conversation_id="conv_1", context="mine", hooks=BudgetHooks(stopped)
    )
    provider.texts = {0: "Here you are."}
    again = await go(mode, agent, result.to_state(), hooks=Seeing(Budget()))
    assert (again.final_output, seen) == ("Here you are.", ["mine"])
    (request,) = provider.requests
    assert (request["conversation"], request["input"][0]["content"]) == ("conv_1", "Go.")


@modes
async def test_a_chain_of_responses_goes_on_from_its_state(provider, client, mode):
    bodies: list[str] = []
    agent = agent_of("responses", client, tool("search", bodies))
    result = await go(
        mode,
        agent,
        auto_previous_response_id=True,
        hooks=BudgetHooks(Budget(max_iterations=2)),
    )
    assert outcome(result).status == "terminated"
    assert result.last_response_id == "resp_1"
    provider.texts = dict.fromkeys(range(2, 9), "Here you are.")
    again = await go(
        mode,
        agent,
        [*pending_input(result), {"role": "user", "content": "Go on."}],
        previous_response_id=result.last_response_id,
        hooks=BudgetHooks(Budget()),
    )
    assert again.final_output == "Here you are."
    assert provider.requests[-1]["previous_response_id"] == "resp_1"


@pytest.mark.sample(2)
@apis
async def test_50_concurrent_runs_on_one_guard(provider, client, api):
    agent = agent_of(api, client, tool("search", []))
    guard = Guard(Budget(max_model_calls=120))
    results = await asyncio.gather(*(go("run", agent, hooks=BudgetHooks(guard)) for _ in range(50)))
    assert len(provider.server.log) == guard.usage.model_calls == 120
    assert guard.usage.total_tokens == 120 * 230
    assert {outcome(one).stop_reason for one in results} == {StopReason.MAX_MODEL_CALLS}
    assert all(not unpaired(one.to_input_list()) for one in results)
