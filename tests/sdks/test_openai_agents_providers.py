"""Models and tools from elsewhere, end to end on loopback: LiteLLM, and a server of tools."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from agents import Agent, ModelSettings
from agents.mcp import MCPServerStdio

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.kit import NOT_AVAILABLE, NOT_EXECUTED
from budgetguard_openai_agents import BudgetHooks, outcome
from conformance.budgetguard_openai_agents_driver import MemorySession
from openai_agents_raw import RawModel, call_of, text_item
from openai_agents_runs import MODES, go, tool, unpaired
from strict_openai_server import StrictServer

# Nothing is asked of the net for the prices that LiteLLM knows already.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

pytestmark = pytest.mark.anyio
modes = pytest.mark.parametrize("mode", MODES)

TOOLS = """
import sys
from mcp.server import MCPServer

server = MCPServer("tools")

@server.tool()
def fetch(id: str) -> str:
    with open(sys.argv[1], "a") as log:
        log.write(id + "\\n")
    return f"page {id}"

server.run()
"""


@pytest.fixture
def server(httpserver):
    server = StrictServer(httpserver)
    yield server
    assert server.refusals == []


@pytest.mark.filterwarnings("ignore")
@modes
async def test_a_model_of_litellm(mode, server, httpserver):
    litellm = pytest.importorskip("agents.extensions.models.litellm_model")
    server.calls = [("search", "{}")] * 2
    model = litellm.LitellmModel(
        model="openai/gpt-4o", base_url=httpserver.url_for("/v1"), api_key="none"
    )
    agent = Agent(name="main", model=model, tools=[tool("search", [])])
    session = MemorySession("s")
    guard = Guard(Budget(max_iterations=3, max_cost_usd=1, max_output_tokens_per_call=300))
    result = await go(mode, agent, session=session, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS
    assert len(httpserver.log) == guard.usage.model_calls == 3
    # Streams are asked for their usage, whatever the provider's address.
    assert guard.usage.total_tokens == 3 * 230
    assert guard.usage.estimated_calls == 0
    assert guard.usage.cost_usd > 0
    assert {request.get("max_tokens") for request in server.requests} == {300}
    server.texts = dict.fromkeys(range(3, 9), "Here you are.")
    again = await go(mode, agent, "Go on.", session=session, hooks=BudgetHooks(Budget()))
    assert again.final_output == "Here you are."


@pytest.mark.slow
@modes
async def test_a_server_of_tools_in_a_process_of_its_own(mode, tmp_path):
    log = tmp_path / "log"
    log.touch()
    parameters: Any = {"command": sys.executable, "args": ["-c", TOOLS, str(log)]}
    async with MCPServerStdio(params=parameters, client_session_timeout_seconds=60) as tools:
        batch = [call_of("mcp", number) for number in range(4)]
        agent = Agent(name="main", model=RawModel(batch), mcp_servers=[tools])
        guard = Guard(Budget(max_tool_calls=3))
        result = await go(mode, agent, hooks=BudgetHooks(guard))
        assert sorted(log.read_text().split()) == ["0", "1", "2"]
        assert guard.usage.tool_calls == 3
        assert outcome(result).stop_reason is StopReason.MAX_TOOL_CALLS
        assert NOT_EXECUTED in str(result.to_input_list())
        assert not unpaired(result.to_input_list())

        model = RawModel([call_of("mcp", 7), call_of("mcp", 8)], [text_item("Done.")])
        agent = Agent(name="main", model=model, mcp_servers=[tools])
        budget = Budget(tool_quotas={"fetch": 1})
        result = await go(mode, agent, hooks=BudgetHooks(budget))
        assert result.final_output == "Done."
        assert NOT_AVAILABLE in str(model.sent[-1])


@modes
async def test_a_chat_that_reports_no_usage_is_estimated(mode, server, httpserver):
    from agents import OpenAIChatCompletionsModel
    from openai import AsyncOpenAI

    server.usage = False
    server.texts = {0: "word " * 100}
    async with AsyncOpenAI(base_url=httpserver.url_for("/v1"), api_key="none") as client:
        model = OpenAIChatCompletionsModel("gpt-4o", client)
        agent = Agent(name="main", model=model, model_settings=ModelSettings(include_usage=None))
        guard = Guard(Budget(max_total_tokens=10_000))
        await go(mode, agent, "word " * 400, hooks=BudgetHooks(guard))
    if mode == "run_streamed":
        assert server.requests[0]["stream_options"] == {"include_usage": True}
    assert guard.usage.estimated_calls == 1
    assert 350 <= guard.usage.total_tokens <= 750
