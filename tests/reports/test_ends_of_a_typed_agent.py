"""A program that reads a typed result never finds a text in its place.

openai-agents-python #844, #2054; pydantic-ai #1083; public code that reads `final_output.field`.
"""

from __future__ import annotations

import httpx
import pytest
from pydantic import BaseModel

from budgetguard_core import Budget
from budgetguard_core.testing.scripted import Answers
from budgetguard_http import BudgetTransport
from reports.ways import AGENT_WAYS, GRAPH_WAYS, MODES, run_agents, run_graph, run_strands

BUDGET = Budget(max_iterations=2)
each_mode = pytest.mark.parametrize("mode", MODES)


class Report(BaseModel):
    summary: str


def runaway():
    return Answers([{"look": {"place": f"p{n}"}} for n in range(9)])


def look(place: str) -> str:
    """Look."""
    return f"a fact about {place}"


@each_mode
@pytest.mark.parametrize("way", GRAPH_WAYS)
def test_langgraph(way, mode):
    pytest.importorskip("langchain")
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ToolStrategy

    from budgetguard_langgraph.scripted import scripted_model

    def make(middleware):
        model, form = scripted_model(runaway()), ToolStrategy(Report)
        return create_agent(model, [look], middleware=middleware, response_format=form)

    result, outcome = run_graph(way, mode, make, BUDGET, {"messages": [("user", "Go.")]})
    assert outcome.stop_reason == "max_iterations"
    assert result.get("structured_response") is None


@each_mode
@pytest.mark.parametrize("way", AGENT_WAYS)
def test_openai_agents(way, mode):
    pytest.importorskip("agents")
    from agents import Agent, function_tool

    from budgetguard_openai_agents import outcome
    from budgetguard_openai_agents.scripted import scripted_model

    model, tools = scripted_model(runaway()), [function_tool(look)]
    agent = Agent(name="a", model=model, tools=tools, output_type=Report)
    result = run_agents(way, mode, agent, BUDGET, "Go.")
    assert outcome(result).stop_reason == "max_iterations"
    assert not isinstance(result.final_output, str)


@each_mode
def test_strands(mode):
    pytest.importorskip("strands")
    from strands import Agent, tool

    from budgetguard_strands import BudgetHookProvider
    from budgetguard_strands.scripted import scripted_model

    agent = Agent(
        model=scripted_model(runaway()),
        tools=[tool(look)],
        hooks=[BudgetHookProvider(BUDGET)],
        structured_output_model=Report,
        callback_handler=None,
    )
    result = run_strands(mode, agent, "Go.")
    assert (result.stop_reason, result.structured_output) == ("max_iterations", None)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_pydantic_ai(mode):
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent

    from budgetguard_pydantic_ai import BudgetCapability, outcome
    from budgetguard_pydantic_ai.scripted import scripted_model
    from pydantic_ai_agents import ran

    agent = Agent(
        scripted_model(runaway()),
        tools=[look],
        output_type=Report,
        capabilities=[BudgetCapability(BUDGET)],
    )
    result = ran(agent, "run_sync" if mode == "sync" else "run")
    assert outcome(result).stop_reason == "max_iterations"
    assert not isinstance(result.output, str)


# A request of a raw client that has to be answered by a tool: typed agents send it.

CHAT, RESPONSES = "api.openai.com/v1/chat/completions", "api.openai.com/v1/responses"
CLAUDE = "api.anthropic.com/v1/messages"
BEDROCK = "bedrock-runtime.us-east-1.amazonaws.com/model/anthropic.claude-sonnet-4-5/converse"
GEMINI = "generativelanguage.googleapis.com/v1beta/models/gemini-2.5-pro:generateContent"
FUNCTION = {"type": "function", "function": {"name": "answer", "parameters": {"type": "object"}}}
ALLOWED = {"mode": "required", "tools": [FUNCTION]}
USER = [{"role": "user", "content": "x"}]
OF_CHAT = {"model": "gpt-4o", "messages": USER, "tools": [FUNCTION]}
OF_RESPONSES = {"model": "gpt-4o", "input": "x", "tools": [{"type": "function", "name": "answer"}]}
OF_CLAUDE = {
    "model": "claude-sonnet-4-5",
    "max_tokens": 50,
    "messages": USER,
    "tools": [{"name": "answer", "input_schema": {}}],
}
SPEC = {"toolSpec": {"name": "answer", "inputSchema": {"json": {}}}}
OF_GEMINI = {
    "contents": [{"role": "user", "parts": [{"text": "x"}]}],
    "tools": [{"functionDeclarations": [{"name": "answer"}, {"name": "other"}]}],
}


def converse(choice):
    config = {"tools": [SPEC], "toolChoice": choice}
    return {"messages": [{"role": "user", "content": [{"text": "x"}]}], "toolConfig": config}


def gemini(**config):
    return {**OF_GEMINI, "toolConfig": {"functionCallingConfig": {"mode": "ANY", **config}}}


NAMED = {"type": "function", "function": {"name": "answer"}}
FORCED = {
    "openai, named": (CHAT, {**OF_CHAT, "tool_choice": NAMED}),
    "openai, required": (CHAT, {**OF_CHAT, "tool_choice": "required"}),
    "openai, allowed": (
        CHAT,
        {**OF_CHAT, "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}},
    ),
    "responses, named": (
        RESPONSES,
        {**OF_RESPONSES, "tool_choice": {"type": "function", "name": "answer"}},
    ),
    "responses, required": (RESPONSES, {**OF_RESPONSES, "tool_choice": "required"}),
    "anthropic, named": (CLAUDE, {**OF_CLAUDE, "tool_choice": {"type": "tool", "name": "answer"}}),
    "anthropic, any": (CLAUDE, {**OF_CLAUDE, "tool_choice": {"type": "any"}}),
    "bedrock, named": (BEDROCK, converse({"tool": {"name": "answer"}})),
    "bedrock, any": (BEDROCK, converse({"any": {}})),
    "gemini, one": (GEMINI, gemini(allowedFunctionNames=["answer"])),
    "gemini, any": (GEMINI, gemini()),
}


@pytest.mark.parametrize("case", FORCED)
def test_a_request_that_forces_a_tool_is_answered_by_no_text(case):
    url, body = FORCED[case]
    inner = httpx.MockTransport(lambda _: httpx.Response(500, json={}))
    with httpx.Client(transport=BudgetTransport(Budget(max_model_calls=1), inner=inner)) as client:
        client.post(f"https://{url}", json=body)
        stopped = client.post(f"https://{url}", json=body)
    assert (stopped.status_code, "stopped" in stopped.text) == (402, True)
