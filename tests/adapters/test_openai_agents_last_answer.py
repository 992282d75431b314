"""A last answer of a stopped run: what its model is sent, and what is kept."""

from __future__ import annotations

import asyncio
import json

import pytest
from agents import (
    Agent,
    GuardrailFunctionOutput,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    SQLiteSession,
    output_guardrail,
)
from agents.run import ModelInputData
from openai import AsyncOpenAI

from budgetguard_core import Budget, FinalizeReserve
from budgetguard_core.kit import ANSWER_NOW
from budgetguard_openai_agents import BudgetHooks, outcome
from openai_agents_runs import MODES, agent_of, calls, go, says, script_of, tool
from provider_server import ProviderServer

BUDGET = Budget(max_iterations=1, finalize_reserve=FinalizeReserve(tokens=9000))


def stopping(**options):
    replies = [calls("search"), says("It is 42.")]
    return agent_of(*replies, tools=[tool("search", [])], instructions="Be brief.", **options)


@pytest.mark.parametrize("mode", MODES)
def test_what_the_session_held_is_sent_and_the_answer_is_kept(mode):
    agent = stopping()
    session = SQLiteSession("one")
    earlier = {"role": "user", "content": "My name is Ada."}

    async def main():
        await session.add_items([earlier, {"role": "assistant", "content": "Hello Ada."}])
        result = await go(mode, agent, hooks=BudgetHooks(BUDGET), session=session)
        return result, await session.get_items()

    result, kept = asyncio.run(main())
    assert (outcome(result).finalized, result.final_output) == (True, "It is 42.")
    request = script_of(agent).sent[-1]
    assert request.count("My name is Ada.") == 1
    assert "Be brief." in request
    assert kept[0] == earlier
    assert "It is 42." in str(kept[-1])
    assert ANSWER_NOW not in str(kept)


def test_the_users_filter_sees_the_request_and_its_failure_is_reported():
    seen = []

    def shorten(data):
        seen.append(len(data.model_data.input))
        if len(seen) == 3:
            return ModelInputData(input=data.model_data.input[:1], instructions="Be kind.")
        return data.model_data

    config = RunConfig(call_model_input_filter=shorten)
    agent = stopping()
    result = asyncio.run(go("run", agent, hooks=BudgetHooks(BUDGET), run_config=config))
    assert outcome(result).finalized
    assert "Be kind." in script_of(agent).sent[-1]

    seen.clear()

    async def later(data):
        seen.append(data)
        if len(seen) == 3:
            raise LookupError("no such rule")
        return data.model_data

    agent = stopping()
    config = RunConfig(call_model_input_filter=later)
    result = asyncio.run(go("run", agent, hooks=BudgetHooks(BUDGET), run_config=config))
    assert not outcome(result).finalized
    assert outcome(result).errors == ("last answer: LookupError: no such rule",)


def test_only_the_outermost_run_answers_for_a_budget_that_is_shared():
    inner = agent_of(calls("search"), name="inner", tools=[tool("search", [])])
    outer = agent_of(
        calls("ask"),
        says("It is 42."),
        tools=[inner.as_tool(tool_name="ask", tool_description="Asks.")],
    )
    budget = Budget(max_iterations=3, finalize_reserve=FinalizeReserve(tokens=9000))
    result = asyncio.run(go("run", outer, hooks=BudgetHooks(budget)))
    assert result.final_output == "It is 42."
    assert ANSWER_NOW not in "".join(script_of(inner).sent)
    assert outcome(result).usage.model_calls == 4


def test_what_a_guardrail_would_have_to_judge_is_not_asked_for():
    @output_guardrail
    def judge(context, agent, answer):
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

    agent = stopping(output_guardrails=[judge])
    result = asyncio.run(go("run", agent, hooks=BudgetHooks(BUDGET)))
    assert not outcome(result).finalized
    assert script_of(agent).calls == 1


@pytest.mark.parametrize("kind", ["chat", "responses"])
@pytest.mark.parametrize("mode", MODES)
def test_the_model_is_told_the_history_in_words(mode, kind):
    async def main():
        with ProviderServer() as server:
            client = AsyncOpenAI(api_key="key", base_url=server.url + "/v1", max_retries=0)
            make = OpenAIChatCompletionsModel if kind == "chat" else OpenAIResponsesModel
            agent = Agent(
                name="main", model=make("gpt-4o", client), tools=[tool("search", [], result="é")]
            )
            result = await go(mode, agent, hooks=BudgetHooks(BUDGET))
            await client.close()
            return result, server.posts

    result, posts = asyncio.run(main())
    assert (outcome(result).finalized, result.final_output) == (True, "All done.")
    assert len(posts) == 2
    body = posts[-1]["body"]
    assert not body.get("tools")
    sent = json.dumps(body, ensure_ascii=False)
    assert "search returned: é" in sent
    assert "tool_calls" not in sent
    assert "function_call" not in sent


def test_whoever_reads_the_stream_sees_the_answer():
    result = asyncio.run(go("run_streamed", stopping(), hooks=BudgetHooks(BUDGET)))
    items = [one.item for one in result.events if one.type == "run_item_stream_event"]
    assert "It is 42." in str(items[-1].to_input_item())
