"""Runs that wait for a person: counters go on after the answer, wherever it is given."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import (
    Agent,
    HostedMCPTool,
    OpenAIChatCompletionsModel,
    Runner,
    RunState,
    handoff,
)
from agents.extensions import handoff_filters
from openai import AsyncOpenAI
from openai.types.responses import ResponseFunctionToolCall
from openai.types.responses.response_output_item import McpApprovalRequest

from budgetguard_core import Budget, Guard, MemoryStore, Outcome, StopReason
from budgetguard_core.testing import Call, ManualClock
from budgetguard_openai_agents import BudgetHooks, bounded_run, outcome
from conformance.budgetguard_openai_agents_driver import MemorySession
from openai_agents_raw import RawModel, call_of, text_item, toolbox
from openai_agents_runs import MODES, agent_of, calls, go, says, script_of, tool, unpaired
from strict_openai_server import NAME, StrictServer

pytestmark = pytest.mark.anyio
modes = pytest.mark.parametrize("mode", MODES)
places = pytest.mark.parametrize("through_json", [False, True], ids=["object", "json"])


def asking(bodies: list[str], *replies: Any, **options: Any) -> Agent[Any]:
    return agent_of(*replies, tools=[tool("send", bodies, needs_approval=True)], **options)


async def answered(agent: Agent[Any], result: Any, *, through_json: bool, no: bool = False) -> Any:
    state = result.to_state()
    if through_json:
        state = await RunState.from_string(agent, state.to_string())
    for item in state.get_interruptions():
        if no:
            state.reject(item)
        else:
            state.approve(item)
    return state


@pytest.mark.sample(4)
@places
@modes
async def test_twenty_legs_stop_at_the_cap(mode, through_json):
    bodies: list[str] = []
    agent = asking(bodies, lambda number: calls(Call("send", str(number))))
    hooks = BudgetHooks(Budget(max_iterations=3))
    result = await go(mode, agent, hooks=hooks)
    for _ in range(20):
        assert outcome(result).status == "paused"
        state = await answered(agent, result, through_json=through_json)
        result = await go(mode, agent, state, hooks=hooks)
        if not result.interruptions:
            break
    assert script_of(agent).calls == 3
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS
    assert outcome(result).usage.iterations == 3
    assert bodies == ["send"] * 3
    assert not unpaired(result.to_input_list())


@places
async def test_a_stream_that_is_left_after_its_turn_may_wait_for_a_person(through_json):
    bodies: list[str] = []
    agent = asking(bodies, lambda number: calls(Call("send", str(number))))
    hooks = BudgetHooks(Budget(max_iterations=2))
    result = Runner.run_streamed(agent, "Go.", hooks=hooks)
    async for _ in result.stream_events():
        result.cancel(mode="after_turn")
    while result.interruptions:
        assert outcome(result).status == "paused"
        state = await answered(agent, result, through_json=through_json)
        result = await go("run_streamed", agent, state, hooks=hooks)
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS
    assert script_of(agent).calls == len(bodies) == 2


@pytest.mark.sample(4)
@places
@modes
async def test_the_sdks_own_turns_are_not_lifted_by_a_resume(mode, through_json):
    agent = asking([], lambda number: calls(Call("send", str(number))))
    hooks = BudgetHooks(Budget(max_iterations=30))
    result = await go(mode, agent, hooks=hooks, max_turns=4)
    while result.interruptions:
        state = await answered(agent, result, through_json=through_json)
        result = await go(mode, agent, state, hooks=hooks)
    assert script_of(agent).calls == 4
    assert outcome(result).stop_reason is StopReason.FRAMEWORK_LIMIT


@places
@modes
async def test_a_refusal_is_no_tool_call_and_waiting_is_no_run_time(mode, through_json):
    clock = ManualClock()
    bodies: list[str] = []
    agent = asking(bodies, calls("send"), says("As you wish."))
    hooks = BudgetHooks(Budget(max_seconds=60, max_tool_calls=1), clock=clock)
    first = await go(mode, agent, hooks=hooks)
    assert outcome(first).usage.tool_calls == 0
    clock.advance(3600)
    state = await answered(agent, first, through_json=through_json, no=True)
    result = await go(mode, agent, state, hooks=hooks)
    assert result.final_output == "As you wish."
    assert outcome(result).status == "completed"
    assert outcome(result).usage.tool_calls == 0
    assert outcome(result).usage.model_calls == 2
    assert outcome(result).usage.seconds < 60
    assert bodies == []
    assert outcome(result).run_id == outcome(first).run_id


@places
@pytest.mark.parametrize("batch", [("read", "send", "read"), ("send", "read", "read")])
@modes
async def test_a_trip_and_a_pause_in_one_batch_lose_neither(mode, batch, through_json):
    bodies: list[str] = []
    agent = asking(bodies, calls(*batch), says("Never said."))
    agent.tools.append(tool("read", bodies))
    outcomes: list[Outcome] = []
    hooks = BudgetHooks(Budget(max_tool_calls=1), on_outcome=outcomes.append)
    result = await go(mode, agent, hooks=hooks)
    if outcome(result).status == "paused":
        state = await answered(agent, result, through_json=through_json)
        result = await go(mode, agent, state, hooks=hooks)
    assert outcome(result).stop_reason is StopReason.MAX_TOOL_CALLS
    assert [one.status for one in outcomes if one.status != "paused"] == ["terminated"]
    assert bodies == [batch[0]]
    assert script_of(agent).calls == 1
    assert len([i for i in result.to_input_list() if "output" in i]) == 3
    assert not unpaired(result.to_input_list())


@pytest.mark.sample(4)
@places
@modes
async def test_equal_calls_that_are_approved_are_no_repetition_of_themselves(mode, through_json):
    bodies: list[str] = []
    agent = asking(bodies, *[calls("send")] * 6, says("Done."))
    hooks = BudgetHooks(Budget(max_iterations=30))
    result = await go(mode, agent, hooks=hooks)
    while result.interruptions:
        state = await answered(agent, result, through_json=through_json)
        result = await go(mode, agent, state, hooks=hooks)
    # Each result is another one, so nothing repeats.
    assert result.final_output == "Done."
    assert bodies == ["send"] * 6


@places
@modes
async def test_an_approval_in_a_sub_agent(mode, through_json):
    bodies: list[str] = []
    below = asking(bodies, calls("send"), says("Sent."), name="worker")
    ask = below.as_tool(tool_name="ask", tool_description="Ask.")
    agent = agent_of(calls("ask"), says("Done."), tools=[ask])
    hooks = BudgetHooks(Budget(max_iterations=9, max_tool_calls=2))
    result = await go(mode, agent, hooks=hooks)
    assert outcome(result).status == "paused"
    state = await answered(agent, result, through_json=through_json)
    result = await go(mode, agent, state, hooks=hooks)
    assert result.final_output == "Done."
    assert bodies == ["send"]
    found = outcome(result)
    assert found.status == "completed"
    assert (found.usage.iterations, found.usage.tool_calls) == (4, 2)
    assert not unpaired(result.to_input_list())


@modes
async def test_a_paused_run_has_its_events_and_its_checkpoint(mode):
    store, seen, events = MemoryStore(), [], []
    agent = asking([], calls("send"), says("Sent."))
    hooks = BudgetHooks(
        Budget(max_iterations=9), store=store, on_outcome=seen.append, sinks=[events.append]
    )
    session = MemorySession("s")
    first = await go(mode, agent, session=session, hooks=hooks)
    assert store.load(outcome(first).run_id).pauses == 1
    state = await answered(agent, first, through_json=False)
    result = await go(mode, agent, state, session=session, hooks=hooks)
    assert [one.status for one in seen] == ["paused", "completed"]
    kinds = [event.event for event in events]
    assert kinds.count("run_paused") == kinds.count("run_resumed") == 1
    assert [one.guardrail.get_name() for one in result.tool_input_guardrail_results] == []
    stored = await session.get_items()
    assert not unpaired(stored)
    assert len(stored) == len(result.to_input_list())


async def test_a_guard_that_is_shared_goes_on_in_the_same_process():
    bodies: list[str] = []
    agent = asking(bodies, lambda number: calls(Call("send", str(number))))
    guard = Guard(Budget(max_iterations=3))
    result = await bounded_run(agent, "Go.", budget=guard)
    while result.interruptions:
        state = await answered(agent, result, through_json=True)
        result = await bounded_run(agent, state, budget=guard)
    assert guard.usage.iterations == 3
    assert guard.usage.tool_calls == len(bodies) == 3
    assert guard.open_calls() == ()


RESUMES = """
import asyncio, json, sys
from agents import Agent, OpenAIChatCompletionsModel, RunState, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from budgetguard_core import Budget
from budgetguard_openai_agents import bounded_run, outcome

set_tracing_disabled(True)
bodies = []

def send() -> str:
    bodies.append("send")
    return f"sent {len(bodies)}"

async def main(url, text):
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        model = OpenAIChatCompletionsModel("gpt-4o", client)
        agent = Agent(name="main", model=model, tools=[function_tool(send, needs_approval=True)])
        state = await RunState.from_string(agent, text)
        for item in state.get_interruptions():
            state.approve(item)
        result = await bounded_run(agent, state, budget=Budget(max_iterations=3))
        found = outcome(result)
        print(json.dumps({
            "bodies": bodies, "status": found.status, "reason": found.stop_reason,
            "iterations": found.usage.iterations, "state": result.to_state().to_string(),
        }))

asyncio.run(main(sys.argv[1], sys.stdin.read()))
"""


@pytest.mark.slow
async def test_a_second_process_answers_and_the_counters_go_on(httpserver):
    server = StrictServer(httpserver)
    server.calls = [("send", "{}")]
    url = httpserver.url_for("/v1")
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        bodies: list[str] = []
        agent = Agent(
            name="main",
            model=OpenAIChatCompletionsModel(NAME, client),
            tools=[tool("send", bodies, needs_approval=True)],
        )
        first = await bounded_run(agent, "Go.", budget=Budget(max_iterations=3))
        text = first.to_state().to_string()
    reports = []
    for _ in range(3):
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", RESUMES, url],
            input=text,
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        )
        reports.append(json.loads(done.stdout))
        text = reports[-1].pop("state")
    assert [one["status"] for one in reports] == ["paused", "paused", "terminated"]
    assert reports[-1]["reason"] == "max_iterations"
    assert [one["iterations"] for one in reports] == [2, 3, 3]
    assert [one["bodies"] for one in reports] == [["send"]] * 3
    assert bodies == []
    assert len(httpserver.log) == 3
    assert server.refusals == []


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", ["shell", "apply_patch", "custom"])
@places
@modes
async def test_approved_calls_of_every_kind_are_asked_for_one_by_one(mode, kind, through_json):
    bodies: list[str] = []
    own = toolbox(bodies)[kind]
    own.needs_approval = True
    agent = Agent(
        name="main",
        model=RawModel([call_of(kind, 1), call_of(kind, 2)], [text_item("Done.")]),
        tools=[own],
    )
    name = "sql" if kind == "custom" else kind
    hooks = BudgetHooks(Budget(tool_quotas={name: 1}))
    result = await go(mode, agent, hooks=hooks)
    assert outcome(result).status == "paused"
    assert bodies == []
    state = await answered(agent, result, through_json=through_json)
    result = await go(mode, agent, state, hooks=hooks)
    assert bodies == ["1"]
    assert result.final_output == "Done."
    assert outcome(result).usage.tool_calls == 1
    assert not unpaired(result.to_input_list())


@pytest.mark.parametrize("answer", ["approve", "reject", "nothing"])
@places
@modes
async def test_a_hosted_server_asks_and_a_person_answers(mode, answer, through_json):
    """Its request is no call of a tool on this side and has no call id."""
    bodies: list[str] = []
    request = McpApprovalRequest(
        id="mcpr_1", arguments="{}", name="fetch", server_label="s", type="mcp_approval_request"
    )
    model = RawModel([request, call_of("function", 1)], [text_item("Done.")])
    config: Any = {"server_label": "s", "server_url": "http://x", "require_approval": "always"}
    server = HostedMCPTool(tool_config={"type": "mcp", **config})
    agent = Agent(name="main", model=model, tools=[server, toolbox(bodies)["function"]])
    hooks = BudgetHooks(Budget(max_iterations=5))
    result = await go(mode, agent, hooks=hooks)
    assert outcome(result).status == "paused"
    state = result.to_state()
    if through_json:
        state = await RunState.from_string(agent, state.to_string())
    for item in state.get_interruptions():
        if answer != "nothing":
            getattr(state, answer)(item)
    result = await go(mode, agent, state, hooks=hooks)
    found = outcome(result)
    assert found.status == ("paused" if answer == "nothing" else "completed")
    assert found.usage.model_calls == model.calls
    assert (found.usage.tool_calls, bodies) == (1, ["1"])


@places
@modes
async def test_a_state_holds_no_result_whose_call_a_handoff_has_filtered(mode, through_json):
    send = call_of("function", 1)
    hand = ResponseFunctionToolCall(
        call_id="c2", name="transfer_to_other", arguments="{}", type="function_call"
    )
    model = RawModel([send, hand], [text_item("Done.")])
    box = toolbox([])["function"]
    box.needs_approval = True
    other = Agent(name="other", model=model)
    filtered = handoff(other, input_filter=handoff_filters.remove_all_tools)
    agent = Agent(name="main", model=model, tools=[box], handoffs=[filtered])
    hooks = BudgetHooks(Budget(max_iterations=1))
    result = await go(mode, agent, hooks=hooks)
    state = await answered(agent, result, through_json=through_json)
    result = await go(mode, agent, state, hooks=hooks)
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS
    result = await go(mode, agent, result.to_state(), hooks=BudgetHooks(Budget()))
    assert result.final_output == "Done."
    assert not unpaired(model.sent[-1])
