"""Batches of tool calls, every kind of tool, nested agents, handoffs and loops."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrail,
    Runner,
    function_tool,
    handoff,
)
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseFunctionWebSearch,
)

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.testing import Call, Reply
from budgetguard_openai_agents import BudgetHooks, outcome
from conformance.budgetguard_openai_agents_driver import MemorySession
from openai_agents_raw import RawModel, text_item
from openai_agents_runs import MODES, agent_of, calls, go, says, script_of, tool, unpaired

pytestmark = pytest.mark.anyio
modes = pytest.mark.parametrize("mode", MODES)


def results(result: Any) -> list[Any]:
    items = result.to_input_list()
    return [item["output"] for item in items if item.get("type") == "function_call_output"]


# Batches


@modes
async def test_a_repeated_call_id_is_a_loop_and_no_tool_call(mode):
    bodies: list[str] = []
    agent = agent_of(
        calls(Call("search", "same", id="c1")),
        tools=[tool("search", bodies, result="nothing")],
    )
    guard = Guard(Budget(max_iterations=30))
    ran = await asyncio.gather(go(mode, agent, hooks=BudgetHooks(guard)), return_exceptions=True)
    if not isinstance(ran[0], Exception):
        assert outcome(ran[0]).stop_reason is StopReason.NO_PROGRESS
    else:
        # Newer versions of the SDK refuse such a response by themselves.
        assert "call_id" in str(ran[0])
    assert script_of(agent).calls <= 8
    assert guard.usage.tool_calls == len(bodies) >= 1
    assert guard.open_calls() == ()


@modes
async def test_an_unknown_tool_is_no_tool_call(mode):
    guard = Guard(Budget(max_iterations=4))
    agent = agent_of(calls("nosuch"), tools=[tool("a", [])])
    with pytest.raises(Exception, match="nosuch"):
        await go(mode, agent, hooks=BudgetHooks(guard))
    assert guard.usage.tool_calls == 0
    assert guard.open_calls() == ()


async def test_arguments_that_are_not_json():
    model = RawModel(
        [
            ResponseFunctionToolCall(
                call_id="c1", name="a", arguments="{not json", type="function_call"
            )
        ],
        [text_item("Done.")],
    )
    agent = Agent(name="main", model=model, tools=[tool("a", [])])
    guard = Guard(Budget(max_iterations=4))
    ran = await asyncio.gather(go("run", agent, hooks=BudgetHooks(guard)), return_exceptions=True)
    # The SDK tells the model, or its user.
    assert getattr(ran[0], "final_output", None) == "Done." or "JSON" in str(ran[0])
    assert guard.usage.tool_calls == 1
    assert guard.open_calls() == ()


# Kinds of tools


def web_search(number: int) -> ResponseFunctionWebSearch:
    return ResponseFunctionWebSearch.model_validate(
        {
            "id": f"ws_{number}",
            "type": "web_search_call",
            "status": "completed",
            "action": {"type": "search", "query": f"q{number}", "queries": [f"q{number}"]},
        }
    )


async def test_hosted_tools_are_counted_when_reported_and_stop_the_next_call():
    model = RawModel(
        [
            web_search(1),
            web_search(2),
            web_search(3),
            ResponseFunctionToolCall(call_id="c", name="a", arguments="{}", type="function_call"),
        ]
    )
    bodies: list[str] = []
    agent = Agent(name="main", model=model, tools=[tool("a", bodies)])
    guard = Guard(Budget(max_tool_calls=2))
    result = await go("run", agent, hooks=BudgetHooks(guard))
    assert model.calls == 1
    assert bodies == []
    assert guard.usage.tool_calls == 3
    assert outcome(result).stop_reason is StopReason.MAX_TOOL_CALLS
    assert guard.tool_counts == {"web_search": 3}


async def test_a_final_answer_with_hosted_tools_over_the_cap_is_kept():
    model = RawModel([web_search(1), web_search(2), text_item("Found.")])
    agent = Agent(name="main", model=model)
    result = await go("run", agent, hooks=BudgetHooks(Budget(max_tool_calls=1)))
    assert result.final_output == "Found."
    assert outcome(result).status == "completed"


# Nested agents


def worker(bodies: list[str], **options: Any) -> Agent[Any]:
    return agent_of(calls("dig"), tools=[tool("dig", bodies)], name="worker", **options)


@modes
async def test_a_sub_agents_default_of_ten_turns_does_not_cut_it(mode):
    below = agent_of(*[calls("dig")] * 12, says("Gold."), tools=[tool("dig", [])], name="worker")
    agent = agent_of(
        calls(Call("ask", "x")),
        says("Thanks."),
        tools=[below.as_tool(tool_name="ask", tool_description="Ask.")],
    )
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_model_calls=50)))
    assert results(result) == ["Gold."]
    assert result.final_output == "Thanks."


@modes
async def test_the_parent_gets_what_its_sub_agent_had_said_so_far(mode):
    below = agent_of(
        Reply(text="There is gold in the north.", tool_calls=(Call("dig"),)),
        tools=[tool("dig", [])],
        name="worker",
    )
    ask = below.as_tool(
        tool_name="ask", tool_description="Ask.", hooks=BudgetHooks(Budget(max_iterations=1))
    )
    agent = agent_of(calls(Call("ask", "x")), says("Thanks."), tools=[ask])
    guard = Guard(Budget(max_iterations=9))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert result.final_output == "Thanks."
    assert "There is gold in the north." in results(result)[0]
    assert guard.usage.model_calls == 3


@modes
async def test_model_calls_of_guardrails_spend_the_same_budget(mode):
    judge = agent_of(says("fine"), name="judge")

    async def check(context, agent, given):
        await Runner.run(judge, "Is it fine?")
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

    agent = agent_of(says("Hello."), input_guardrails=[InputGuardrail(guardrail_function=check)])
    guard = Guard(Budget(max_model_calls=5))
    await go(mode, agent, hooks=BudgetHooks(guard))
    assert script_of(judge).calls == 1
    assert guard.usage.model_calls == 2


@modes
async def test_runs_started_in_the_thread_of_a_sync_tool_spend_the_same_budget(mode):
    below = worker([])

    def ask() -> str:
        async def run():
            return (await Runner.run(below, "x")).final_output

        return asyncio.run(run())

    agent = agent_of(calls("ask"), tools=[function_tool(ask)])
    guard = Guard(Budget(max_model_calls=4))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert script_of(agent).calls + script_of(below).calls == 4
    assert "This run was stopped" in results(result)[0]


# Handoffs and loops


@modes
async def test_a_nudge_reaches_the_model_and_not_the_session(mode):
    session = MemorySession("s")
    agent = agent_of(
        calls(Call("search", "same")), tools=[tool("search", [], result="nothing found")]
    )
    result = await go(mode, agent, session=session, hooks=BudgetHooks(Budget(max_iterations=20)))
    assert outcome(result).stop_reason is StopReason.NO_PROGRESS
    told = [sent for sent in script_of(agent).sent if "try another approach" in sent]
    assert len(told) == 1
    assert "try another approach" not in json.dumps(await session.get_items())
    assert "try another approach" not in json.dumps(result.to_input_list())


@modes
async def test_a_handoff_after_the_stop_does_not_lead_to_another_call(mode):
    other = agent_of(says("Hello from the other."), name="other")
    agent = agent_of(Reply(handoff="other"), handoffs=[other])
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=1)))
    assert script_of(other).calls == 0
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS
    assert not unpaired(result.to_input_list())


@modes
async def test_a_handoff_when_tokens_are_used_up_is_not_made(mode):
    made: list[str] = []
    other = agent_of(says("Hello."), name="other")
    agent = agent_of(
        Reply(handoff="other"), handoffs=[handoff(other, on_handoff=lambda _: made.append("x"))]
    )
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_total_tokens=100)))
    assert made == []
    assert outcome(result).stop_reason is StopReason.MAX_TOTAL_TOKENS
    assert not unpaired(result.to_input_list())
    assert result.last_agent is agent
