"""Features of the SDK that meet in one run: nobody's list, and what users combine all the same."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from agents import (
    Agent,
    GuardrailFunctionOutput,
    HostedMCPTool,
    InputGuardrail,
    InputGuardrailTripwireTriggered,
    ModelRetrySettings,
    ModelSettings,
    OutputGuardrail,
    OutputGuardrailTripwireTriggered,
    RunConfig,
    RunState,
    ToolSearchTool,
    ToolTimeoutError,
    Usage,
    function_tool,
    handoff,
)
from agents.agent import ToolsToFinalOutputResult
from openai.types.responses import ResponseFunctionWebSearch
from openai.types.responses.response_output_item import McpCall, McpListTools
from pydantic import BaseModel

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.testing import Call, ManualClock, ProviderError, Reply
from budgetguard_openai_agents import BudgetHooks, bounded_run_streamed, outcome
from conformance.budgetguard_openai_agents_driver import MemorySession
from openai_agents_raw import OneToolServer, RawModel, call_of, text_item, toolbox
from openai_agents_runs import MODES, agent_of, calls, go, says, script_of, tool, unpaired
from strict_openai_server import check_responses_input

pytestmark = pytest.mark.anyio
modes = pytest.mark.parametrize("mode", MODES)


def valid(items: Any) -> None:
    """Refuse a history that a provider refuses."""
    check_responses_input(
        [one for one in items if str(one.get("type", "message")).startswith(("func", "mess"))]
    )


def nothing_open(guard: Guard) -> None:
    assert guard.open_calls() == ()
    assert guard.usage.reserved_tokens == 0


async def twice_through_json(agent: Agent[Any], result: Any) -> Any:
    """Give a state on as processes do that have no answer yet, and then the answer."""
    state = result.to_state()
    for _ in range(2):
        state = await RunState.from_string(agent, state.to_string())
    for item in state.get_interruptions():
        state.approve(item)
    return state


# Agents below agents


def tower(depth: int, width: int, bodies: list[str], **options: Any) -> tuple[Any, list[Any]]:
    """Make agents that ask the one below, several times at once, down to a tool."""
    agents: list[Agent[Any]] = []
    below: Any = tool("search", bodies)
    for level in range(depth):
        name = below.name
        asked = [Call(name, f"{level} {n}") for n in range(width)]
        agent = agent_of(
            lambda number, asked=asked: calls(*asked) if number % 2 == 0 else says("Done."),
            tools=[below],
            name=f"agent{level}",
        )
        agents.append(agent)
        below = agent.as_tool(tool_name=f"ask{level}", tool_description="Ask.", **options)
    return agents[-1], agents


@modes
@pytest.mark.parametrize(
    "caps", [{"max_model_calls": 9}, {"max_tool_calls": 7}, {"max_total_tokens": 300}, {}]
)
async def test_three_deep_with_parallel_calls(mode, caps):
    bodies: list[str] = []
    top, agents = tower(4, 2, bodies)
    guard = Guard(Budget(**caps, loop_detection=None))
    result = await go(mode, top, hooks=BudgetHooks(guard))
    made = sum(script_of(agent).calls for agent in agents)
    found = outcome(result)
    assert guard.usage.model_calls == made
    assert guard.tool_counts.get("search", 0) == len(bodies)
    assert made <= caps.get("max_model_calls", 99)
    assert guard.usage.tool_calls <= caps.get("max_tool_calls", 99)
    assert found.status == ("terminated" if caps else "completed")
    nothing_open(guard)
    valid(result.to_input_list())


@modes
async def test_a_stream_of_a_sub_agent_is_seen_and_counted(mode):
    bodies, seen = [], []
    below = agent_of(calls("search"), tools=[tool("search", bodies)], name="below")
    ask = below.as_tool(
        tool_name="ask", tool_description="Ask.", on_stream=lambda event: seen.append(event)
    )
    guard = Guard(Budget(max_model_calls=3, loop_detection=None))
    top = agent_of(calls("ask"), says("Done."), tools=[ask])
    result = await go(mode, top, hooks=BudgetHooks(guard))
    assert script_of(below).calls + script_of(top).calls == 3
    assert outcome(result).stop_reason is StopReason.MAX_MODEL_CALLS
    assert seen
    nothing_open(guard)
    valid(result.to_input_list())


@modes
async def test_a_sub_agent_waits_for_a_person_and_its_sibling_does_not(mode):
    bodies: list[str] = []
    below = agent_of(
        calls("send"), says("Sent."), tools=[tool("send", bodies, needs_approval=True)], name="b"
    )
    ask = below.as_tool(tool_name="ask", tool_description="Ask.")
    top = agent_of(calls("ask", "search"), says("Done."), tools=[ask, tool("search", bodies)])
    hooks = BudgetHooks(Budget(max_iterations=9))
    result = await go(mode, top, hooks=hooks)
    assert outcome(result).status == "paused"
    state = await twice_through_json(top, result)
    result = await go(mode, top, state, hooks=hooks)
    found = outcome(result)
    assert found.status == "completed"
    assert sorted(bodies) == ["search", "send"]
    assert found.usage.model_calls == script_of(below).calls + script_of(top).calls == 4
    assert found.usage.tool_calls == 3
    valid(result.to_input_list())


# Handoffs, filters and sessions


@modes
@pytest.mark.parametrize("stop", [{"max_iterations": 2}, {"max_iterations": 3}, {"max_seconds": 1}])
async def test_a_handoff_with_a_filter_a_session_and_a_callback(mode, stop):
    clock, session, bodies = ManualClock(), MemorySession("s"), []
    await session.add_items([{"role": "user", "content": "Old."}] * 1)
    await session.add_items([{"role": "assistant", "content": "Old answer."}])

    def only_the_last(data: Any) -> Any:
        return data.clone(input_history=tuple(data.input_history)[-1:])

    def combined(history: list[Any], new: list[Any]) -> list[Any]:
        return [*history[-1:], *new]

    def second(number: int) -> Reply:
        if number == 2:
            clock.advance(2)
        return Reply(hang=True) if number == 2 and "max_seconds" in stop else calls("search")

    other = agent_of(second, tools=[tool("search", bodies)], name="other")
    main = agent_of(Reply(handoff="other"), handoffs=[handoff(other, input_filter=only_the_last)])
    guard = Guard(Budget(**stop, loop_detection=None), clock=clock)
    config = RunConfig(session_input_callback=combined)
    result = await go(
        mode,
        main,
        [{"role": "user", "content": "New."}],
        session=session,
        hooks=BudgetHooks(guard),
        run_config=config,
    )
    assert outcome(result).status == "terminated"
    stored = await session.get_items()
    texts = [one["content"] for one in stored if one.get("role") == "user"]
    assert texts == ["Old.", "New."]
    assert not unpaired(stored)
    valid(stored)
    valid(result.to_input_list())
    nothing_open(guard)
    again = agent_of(says("At last."))
    done = await go(
        mode,
        again,
        [{"role": "user", "content": "Go on."}],
        session=session,
        hooks=BudgetHooks(Budget()),
        run_config=config,
    )
    assert done.final_output == "At last."


@modes
async def test_a_callback_that_forgets_and_a_stop_at_the_first_turn(mode):
    session = MemorySession("s")
    await session.add_items([{"role": "user", "content": "Hi."}])
    await session.add_items([{"role": "assistant", "content": "Hello."}])
    config = RunConfig(session_input_callback=lambda history, new: new)
    guard = Guard(Budget(max_model_calls=1))
    guard.abort("no")
    given = [{"role": "user", "content": "Hi."}]
    result = await go(
        mode,
        agent_of(says("?")),
        given,
        session=session,
        hooks=BudgetHooks(guard),
        run_config=config,
    )
    stored = [one["content"] for one in await session.get_items()]
    assert stored[:3] == ["Hi.", "Hello.", "Hi."]
    assert len(stored) == 4
    valid(result.to_input_list())


# Time limits and tripwires


@modes
async def test_a_tools_own_time_limit_is_a_failure_of_the_tool(mode):
    async def slow() -> str:
        await asyncio.get_running_loop().create_future()
        return "never"

    limited = function_tool(slow, timeout=0.01)
    agent = agent_of(calls("slow"), says("Done."), tools=[limited])
    guard = Guard(Budget(max_seconds=3600))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert result.final_output == "Done."
    assert [one.status for one in outcome(result).tool_calls] == ["failed"]
    nothing_open(guard)
    valid(result.to_input_list())


@modes
async def test_a_tools_time_limit_that_raises_leaves_a_failed_run(mode):
    async def slow() -> str:
        await asyncio.get_running_loop().create_future()
        return "never"

    limited = function_tool(slow, timeout=0.01, timeout_behavior="raise_exception")
    agent = agent_of(calls("slow"), tools=[limited])
    guard = Guard(Budget(max_seconds=3600))
    with pytest.raises(ToolTimeoutError) as left:
        await go(mode, agent, hooks=BudgetHooks(guard))
    found = outcome(left.value)
    assert found.status == "failed"
    assert guard.usage.tool_calls == 1
    assert not unpaired(found.messages)
    assert guard.usage.reserved_tokens == 0


@modes
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("moment", ["deadline", "abort"])
async def test_an_input_tripwire_at_the_moment_of_the_stop(mode, parallel, moment):
    clock, session = ManualClock(), MemorySession("s")
    guard = Guard(Budget(max_seconds=1), clock=clock)

    def judge(*_: Any) -> GuardrailFunctionOutput:
        if moment == "deadline":
            clock.advance(2)
        else:
            guard.abort("no")
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=True)

    agent = agent_of(
        calls("search"),
        tools=[tool("search", [])],
        input_guardrails=[InputGuardrail(judge, run_in_parallel=parallel)],
    )
    try:
        result = await go(mode, agent, session=session, hooks=BudgetHooks(guard))
    except InputGuardrailTripwireTriggered as left:
        found = outcome(left)
    else:
        found = outcome(result)
        valid(result.to_input_list())
    assert found.status in ("terminated", "failed")
    valid(found.messages)
    valid(await session.get_items())
    assert guard.usage.reserved_tokens == 0
    nothing_open(guard)


@modes
@pytest.mark.parametrize("moment", ["deadline", "abort"])
async def test_an_output_tripwire_at_the_moment_of_the_stop(mode, moment):
    clock, session = ManualClock(), MemorySession("s")
    guard = Guard(Budget(max_seconds=1), clock=clock)

    async def judge(*_: Any) -> GuardrailFunctionOutput:
        if moment == "deadline":
            clock.advance(2)
        else:
            guard.abort("no")
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=True)

    agent = agent_of(says("Secret."), output_guardrails=[OutputGuardrail(judge)])
    try:
        result = await go(mode, agent, session=session, hooks=BudgetHooks(guard))
    except OutputGuardrailTripwireTriggered as left:
        found = outcome(left)
    else:
        found = outcome(result)
        assert "Secret." not in json.dumps(result.to_input_list())
    assert "Secret." not in str(found.final)
    assert "Secret." not in str(await session.get_items())
    valid(await session.get_items())
    nothing_open(guard)


# Streams that are left


async def test_a_stream_left_after_its_turn_goes_on():
    session, bodies = MemorySession("s"), []
    guard = Guard(Budget(max_iterations=5, loop_detection=None))
    agent = agent_of(
        calls("search"), calls("search"), says("Done."), tools=[tool("search", bodies)]
    )
    result = bounded_run_streamed(agent, "Go.", budget=guard, session=session)
    async for event in result.stream_events():
        if event.type == "run_item_stream_event" and event.name == "tool_called":
            result.cancel(mode="after_turn")
    assert bodies == ["search"]
    assert outcome(result).status == "failed"
    assert guard.trip is None
    nothing_open(guard)
    stored = await session.get_items()
    assert not unpaired(stored)
    valid(stored)
    state = result.to_state()
    done = await go("run_streamed", agent, state, session=session, hooks=BudgetHooks(Budget()))
    assert done.final_output == "Done."
    assert bodies == ["search"] * 2
    valid(await session.get_items())


async def test_a_stream_broken_off_in_the_middle_of_a_tool_is_accounted_for():
    started = asyncio.Event()

    async def slow() -> str:
        started.set()
        await asyncio.get_running_loop().create_future()
        return "never"

    guard, session = Guard(Budget(max_iterations=5)), MemorySession("s")
    agent = agent_of(calls("slow"), tools=[function_tool(slow)])
    result = bounded_run_streamed(agent, "Go.", budget=guard, session=session)
    stream = result.stream_events()
    async for event in stream:
        if event.type == "run_item_stream_event":
            await started.wait()
            break
    await stream.aclose()
    await asyncio.wait({result.run_loop_task})
    found = outcome(result)
    assert found.status == "failed"
    assert not unpaired(found.messages)
    assert guard.usage.tool_calls == 1
    assert [one.status for one in found.tool_calls] == ["failed"]
    valid(await session.get_items())


# Hosted tools


def hosted(kind: str, number: int) -> Any:
    if kind == "web_search":
        return ResponseFunctionWebSearch.model_validate(
            {
                "id": f"ws_{number}",
                "type": "web_search_call",
                "status": "completed",
                "action": {"type": "search", "query": "x"},
            }
        )
    return McpCall(
        id=f"mcp_{number}",
        arguments="{}",
        name="fetch",
        server_label="s",
        type="mcp_call",
        output="page",
    )


@modes
@pytest.mark.parametrize("most", [2, 3, 4])
async def test_hosted_calls_beside_functions(mode, most):
    bodies: list[str] = []
    model = RawModel(
        [hosted("web_search", 1), call_of("function", 1), hosted("mcp", 2), call_of("function", 2)],
        [text_item("Done.")],
    )
    agent = Agent(name="a", model=model, tools=[toolbox(bodies)["function"]])
    guard = Guard(Budget(max_tool_calls=most))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    # They were made already when the reply came.
    assert len(bodies) == most - 2
    assert guard.usage.tool_calls == most
    found = outcome(result)
    assert found.status == ("completed" if most == 4 else "terminated")
    history = result.to_input_list()
    assert sum(one.get("type") in ("web_search_call", "mcp_call") for one in history) == 2
    assert not unpaired([one for one in history if one.get("call_id")])
    nothing_open(guard)


def extras() -> list[Any]:
    return [
        McpListTools(id="mcpl_1", server_label="s", tools=[], type="mcp_list_tools"),
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "x"},
        {
            "type": "tool_search_call",
            "id": "ts_1",
            "arguments": {},
            "execution": "server",
            "status": "completed",
            "call_id": None,
        },
        {
            "type": "tool_search_output",
            "id": "to_1",
            "execution": "server",
            "tools": [],
            "status": "completed",
            "call_id": None,
        },
    ]


@modes
@pytest.mark.parametrize("cut", [False, True])
async def test_what_the_provider_reports_beside_calls_is_kept(mode, cut):
    """A turn that was dropped keeps the same items as one that was not."""

    async def act(id: str) -> str:  # noqa: A002
        return id

    def agent() -> Agent[Any]:
        model = RawModel([*extras(), call_of("function", 1)], [text_item("Done.")], usage=(999, 5))
        mcp = HostedMCPTool(
            tool_config={
                "type": "mcp",
                "server_label": "s",
                "server_url": "http://x",
                "require_approval": "never",
            }
        )
        deferred = function_tool(act)
        return Agent(name="a", model=model, tools=[deferred, mcp, ToolSearchTool()])

    plain = await go(mode, agent())
    kept = [one.get("type", "message") for one in plain.to_input_list()]
    budget = Budget(max_total_tokens=500) if cut else Budget(max_iterations=1)
    result = await go(mode, agent(), hooks=BudgetHooks(budget))
    assert outcome(result).status == "terminated"
    assert [one.get("type", "message") for one in result.to_input_list()] == kept


# Outputs


class Verdict(BaseModel):
    good: bool


@modes
async def test_a_structured_answer_that_overshoots_is_kept(mode):
    agent = agent_of(says('{"good": true}'), output_type=Verdict)
    guard = Guard(Budget(max_total_tokens=100))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert result.final_output == Verdict(good=True)
    assert outcome(result).final == Verdict(good=True)


@modes
async def test_a_structured_answer_in_a_sub_agent_under_a_cap(mode):
    below = agent_of(calls("search"), tools=[tool("search", [])], output_type=Verdict, name="b")
    ask = below.as_tool(
        tool_name="ask",
        tool_description="Ask.",
        hooks=BudgetHooks(Budget(max_iterations=2, loop_detection=None)),
    )
    top = agent_of(calls("ask"), says('{"good": false}'), tools=[ask], output_type=Verdict)
    result = await go(mode, top, hooks=BudgetHooks(Budget(max_iterations=9)))
    assert result.final_output == Verdict(good=False)
    assert "This run was stopped" in json.dumps(result.to_input_list())


@modes
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_function_that_reads_results_never_sees_a_refused_one_as_the_answer(mode, is_async):
    bodies: list[str] = []

    def last(_: Any, results: list[Any]) -> ToolsToFinalOutputResult:
        return ToolsToFinalOutputResult(is_final_output=True, final_output=results[-1].output)

    async def last_async(context: Any, results: list[Any]) -> ToolsToFinalOutputResult:
        return last(context, results)

    agent = agent_of(
        calls("search", "search"),
        tools=[tool("search", bodies)],
        tool_use_behavior=last_async if is_async else last,
    )
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_tool_calls=1)))
    assert bodies == ["search"]
    assert outcome(result).status == "terminated"
    assert "not executed" not in str(result.final_output)
    valid(result.to_input_list())


@modes
async def test_a_quota_and_stop_on_first_tool(mode):
    bodies: list[str] = []
    agent = agent_of(
        calls("search"),
        calls("other"),
        tools=[tool("search", bodies), tool("other", bodies)],
        tool_use_behavior="stop_on_first_tool",
    )
    guard = Guard(Budget(tool_quotas={"search": 1}, max_iterations=9))
    first = await go(mode, agent, hooks=BudgetHooks(guard))
    assert first.final_output == "search 1"
    agent.model = agent_of(calls("search"), says("Done.")).model
    again = await go(mode, agent, hooks=BudgetHooks(guard))
    assert bodies == ["search"]
    valid(again.to_input_list())


# Models, retries, servers


class Silent(RawModel):
    """Reports nothing at all, as models of users' own do."""

    async def get_response(self, *args: Any, **facts: Any) -> Any:
        response = await super().get_response(*args, **facts)
        response.usage = Usage()
        return response

    async def stream_response(self, *args: Any, **facts: Any) -> Any:
        async for event in super().stream_response(*args, **facts):
            event.response.usage = None
            yield event


@modes
async def test_a_model_that_reports_nothing_is_estimated(mode):
    bodies: list[str] = []

    def answers() -> Any:
        return [call_of("function", 1)]

    model = Silent(answers())
    agent = Agent(name="a", model=model, tools=[toolbox(bodies)["function"]])
    guard = Guard(Budget(max_total_tokens=400, loop_detection=None))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.MAX_TOTAL_TOKENS
    assert 200 <= guard.usage.total_tokens <= 400
    assert guard.usage.model_calls == model.calls
    nothing_open(guard)


@modes
async def test_retries_of_a_sub_agent_spend_the_parents_calls(mode):
    retry = ModelRetrySettings(
        max_retries=5,
        backoff={"initial_delay": 0, "jitter": False},
        policy=lambda context: True,
    )
    below = agent_of(
        Reply(error=ProviderError("down")), name="b", model_settings=ModelSettings(retry=retry)
    )
    ask = below.as_tool(tool_name="ask", tool_description="Ask.")
    top = agent_of(calls("ask"), says("Done."), tools=[ask])
    guard = Guard(Budget(max_model_calls=4))
    result = await go(mode, top, hooks=BudgetHooks(guard))
    assert script_of(below).calls + script_of(top).calls == guard.usage.model_calls == 4
    assert outcome(result).stop_reason is StopReason.MAX_MODEL_CALLS
    nothing_open(guard)
    valid(result.to_input_list())


@modes
async def test_the_deadline_ends_the_wait_before_a_retry(mode):
    clock = ManualClock()

    def policy(context: Any) -> bool:
        clock.advance(2)
        return True

    retry = ModelRetrySettings(
        max_retries=5, backoff={"initial_delay": 3600, "max_delay": 3600}, policy=policy
    )
    agent = agent_of(Reply(error=ProviderError("down")), model_settings=ModelSettings(retry=retry))
    guard = Guard(Budget(max_seconds=1), clock=clock)
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.MAX_SECONDS
    assert script_of(agent).calls == guard.usage.model_calls == 1
    nothing_open(guard)


@modes
async def test_an_approval_of_a_server_of_tools_survives_json(mode):
    class Asking(OneToolServer):
        def __init__(self, bodies: list[str]) -> None:
            super().__init__(bodies)
            self._needs_approval_policy = True

    bodies: list[str] = []
    agent = agent_of(calls("fetch", "fetch"), says("Done."), mcp_servers=[Asking(bodies)])
    budget = Budget(max_tool_calls=1)
    result = await go(mode, agent, hooks=BudgetHooks(budget))
    assert outcome(result).status == "paused"
    assert bodies == []
    state = await twice_through_json(agent, result)
    result = await go(mode, agent, state, hooks=BudgetHooks(budget))
    assert bodies == ["fetch"]
    found = outcome(result)
    assert (found.status, found.stop_reason) == ("terminated", StopReason.MAX_TOOL_CALLS)
    assert found.usage.tool_calls == 1
    valid(result.to_input_list())
