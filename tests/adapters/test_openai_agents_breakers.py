"""The adapter waits where a breaker holds a call back, and offers `report_progress`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunHooks, function_tool
from openai import AsyncOpenAI

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.breakers import BulkheadConfig, ProgressReports, RateLimit, VelocityLimits
from budgetguard_core.kit import PROGRESS_TOOL, Admit, SystemClock, ToolCall
from budgetguard_core.testing import ManualClock
from budgetguard_openai_agents import BudgetHooks, outcome
from openai_agents_raw import RawModel, call_of, text_item, toolbox
from openai_agents_runs import MODES, go, unpaired
from strict_openai_server import NAME, StrictServer

pytestmark = pytest.mark.anyio
modes = pytest.mark.parametrize("mode", MODES)
apis = pytest.mark.parametrize("api", ["chat", "responses"])
SHORT = 0.05


def now() -> float:
    return SystemClock().monotonic_ns() / 1e9


@pytest.fixture
def server(httpserver):
    server = StrictServer(httpserver)
    yield server
    assert server.refusals == []


@pytest.fixture
async def client(httpserver):
    async with AsyncOpenAI(
        base_url=httpserver.url_for("/v1"), api_key="none", max_retries=0
    ) as client:
        yield client


def agent_at(client: Any, api: str, *tools: Any) -> Agent[Any]:
    kind = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
    return Agent(name="main", model=kind(NAME, client), tools=list(tools))


class Answered(RunHooks[Any]):
    """Notes when the model has answered."""

    def __init__(self) -> None:
        self.at: list[float] = []

    async def on_llm_end(self, *args: Any) -> None:
        self.at.append(now())


@pytest.mark.sample(4)
@apis
@modes
async def test_a_tool_call_waits_for_its_token(mode, api, server, client):
    at: list[float] = []

    async def act() -> str:
        at.append(now())
        return f"acted {len(at)}"

    server.calls = [("act", "{}")] * 3
    server.texts = {1: "Done."}
    limit = RateLimit(rate=1 / SHORT, max_wait_duration=9)
    agent = agent_at(client, api, function_tool(act))
    guard = Guard(Budget(rate_limits={"act": limit}))
    answered = Answered()
    result = await go(mode, agent, hooks=BudgetHooks(guard, answered))
    assert result.final_output == "Done."
    assert len(at) == guard.usage.tool_calls == 3
    assert max(at) - answered.at[0] >= 2 * SHORT


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", ["custom", "shell", "local_shell", "apply_patch", "computer"])
@modes
async def test_calls_of_every_kind_wait(mode, kind):
    bodies: list[str] = []
    name = {"custom": "sql"}.get(kind, kind)
    limit = RateLimit(rate=1 / SHORT, max_wait_duration=9)
    agent = Agent(
        name="main",
        model=RawModel([call_of(kind, n) for n in range(3)], [text_item("Done.")]),
        tools=[toolbox(bodies)[kind]],
    )
    began = now()
    guard = Guard(Budget(rate_limits={name: limit}))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert result.final_output == "Done."
    assert now() - began >= 1.9 * SHORT
    assert bodies == ["0", "1", "2"]
    assert guard.usage.tool_calls == 3


@pytest.mark.parametrize("kind", ["function", "custom", "shell", "apply_patch", "computer"])
@modes
async def test_a_call_that_gets_no_place_in_time_is_refused_and_the_run_goes_on(mode, kind):
    bodies: list[str] = []
    name = {"function": "act", "custom": "sql"}.get(kind, kind)
    place = BulkheadConfig(max_concurrent_calls=1, max_wait_duration=SHORT)
    guard = Guard(Budget(bulkheads={name: place}))
    hog = guard.child().admit_tool_call(ToolCall(name=name))
    assert isinstance(hog, Admit)
    agent = Agent(
        name="main",
        model=RawModel([call_of(kind, 1)], [text_item("Done.")]),
        tools=[toolbox(bodies)[kind]],
    )
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    guard.withdraw(hog)
    assert result.final_output == "Done."
    assert bodies == []
    assert guard.usage.tool_calls == 0
    assert kind == "computer" or '"busy"' in str(result.to_input_list()).replace("\\", "")
    assert not unpaired(result.to_input_list())


@apis
@modes
async def test_a_model_call_in_the_band_waits_until_the_run_ends(mode, api, server, client):
    async def act() -> str:
        asyncio.get_running_loop().call_later(SHORT, guard.abort, "enough")
        return "acted"

    agent = agent_at(client, api, function_tool(act))
    server.calls = [("act", "{}")]
    guard = Guard(Budget(velocity=VelocityLimits(max_tokens_per_minute=10**6, throttle_at=1e-6)))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.ABORTED
    assert outcome(result).usage.model_calls == len(server.server.log) == 1
    assert not unpaired(result.to_input_list())


@modes
async def test_a_deadline_ends_a_wait(mode, server, client):
    clock = ManualClock()

    async def act() -> str:
        clock.advance(60)
        return "acted"

    server.calls = [("act", "{}")] * 2
    limit = RateLimit(rate=1 / 3600, max_wait_duration=7200)
    agent = agent_at(client, "responses", function_tool(act))
    guard = Guard(Budget(rate_limits={"act": limit}, max_seconds=SHORT), clock=clock)
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.MAX_SECONDS
    assert guard.usage.tool_calls == 1
    assert not unpaired(result.to_input_list())
    assert guard.open_calls() == ()


@modes
async def test_an_abort_ends_a_wait(mode, server, client):
    acted: list[int] = []

    async def act() -> str:
        acted.append(1)
        guard.abort("enough")
        return "acted"

    server.calls = [("act", "{}")] * 2
    limit = RateLimit(rate=1 / 3600, max_wait_duration=7200)
    agent = agent_at(client, "responses", function_tool(act))
    guard = Guard(Budget(rate_limits={"act": limit}))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.ABORTED
    assert acted == [1]
    assert not unpaired(result.to_input_list())


@pytest.mark.sample(4)
@apis
@modes
async def test_a_run_that_asks_for_reports_offers_the_tool_for_them(mode, api, server, client):
    report = {"claims_so_far": ["one"], "next_subgoal": "two", "estimated_remaining_steps": 3}
    server.calls = [(PROGRESS_TOOL.name, json.dumps(report))]
    agent = agent_at(client, api)
    events: list[Any] = []
    budget = Budget(
        progress=ProgressReports(every_iterations=1), max_tool_calls=1, max_iterations=30
    )
    result = await go(mode, agent, hooks=BudgetHooks(budget, sinks=[events.append]))
    assert outcome(result).stop_reason is StopReason.STALLED
    assert outcome(result).usage.tool_calls == 0
    assert agent.tools == []
    tools = server.requests[0]["tools"]
    assert [(tool.get("function") or tool)["name"] for tool in tools] == [PROGRESS_TOOL.name]
    assert "progress_reported" in {event.event for event in events}
    assert not unpaired(result.to_input_list())


@modes
async def test_a_run_that_asks_for_none_offers_no_tool(mode, server, client):
    server.texts = {0: "Done."}
    agent = agent_at(client, "responses")
    await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=3)))
    assert server.requests[0]["tools"] == []
