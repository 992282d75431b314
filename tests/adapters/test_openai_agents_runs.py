"""How runs of the OpenAI Agents SDK end: results, sessions, states, approvals, max_turns."""

from __future__ import annotations

import asyncio

import pytest
from agents import (
    AgentHooks,
    MaxTurnsExceeded,
    RunContextWrapper,
    RunHooks,
    Runner,
    RunState,
    function_tool,
)
from agents.run import AgentRunner, get_default_agent_runner, set_default_agent_runner

from budgetguard_core import (
    AdapterError,
    Budget,
    BudgetExceeded,
    ConfigurationError,
    Guard,
    Mode,
    StopReason,
)
from budgetguard_core.kit import NOT_EXECUTED, OUTCOME_UNKNOWN, ToolCall
from budgetguard_core.testing import ManualClock, Reply
from budgetguard_openai_agents import (
    BudgetHooks,
    RunStopped,
    bounded_run,
    bounded_run_streamed,
    outcome,
)
from conformance.budgetguard_openai_agents_driver import MemorySession
from openai_agents_runs import (
    MODES,
    agent_of,
    calls,
    go,
    kinds,
    says,
    script_of,
    tool,
    unpaired,
)

pytestmark = pytest.mark.anyio
modes = pytest.mark.parametrize("mode", MODES)


# The result


@modes
async def test_a_stopped_run_is_a_normal_result(mode):
    bodies = []
    agent = agent_of(calls("search"), tools=[tool("search", bodies)])
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=2)))
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS
    assert result.final_output.startswith("This run was stopped before it finished.")
    assert result.last_agent is agent
    assert len(result.raw_responses) == 2
    assert result.context_wrapper.usage.total_tokens == 240
    marker = result.new_items[-1].metadata
    assert marker == {
        "synthetic": True,
        "stop_reason": "max_iterations",
        "run_id": outcome(result).run_id,
    }
    assert not unpaired(result.to_input_list())
    assert [item.type for item in result.new_items] == [
        "tool_call_item",
        "tool_call_output_item",
        "tool_call_item",
        "tool_call_output_item",
        "message_output_item",
    ]


async def test_a_stream_that_nobody_consumes_ends_as_well():
    agent = agent_of(calls("search"), tools=[tool("search", [])])
    result = bounded_run_streamed(agent, "Go.", budget=Budget(max_iterations=1))
    await result.run_loop_task
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS


@modes
async def test_an_agent_that_ends_with_a_tool_result_does_not_end_with_a_refused_one(mode):
    bodies = []
    agent = agent_of(
        calls("search", "send"),
        tools=[tool("search", bodies), tool("send", bodies)],
        tool_use_behavior={"stop_at_tool_names": ["send"]},
    )
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_tool_calls=1)))
    assert bodies == ["search"]
    assert outcome(result).stop_reason is StopReason.MAX_TOOL_CALLS
    assert result.final_output.startswith("This run was stopped")
    assert not unpaired(result.to_input_list())


async def test_on_trip_raise_carries_the_outcome():
    agent = agent_of(calls("search"), tools=[tool("search", [])])
    for mode in MODES:
        hooks = BudgetHooks(Budget(max_iterations=1), on_trip="raise")
        with pytest.raises(BudgetExceeded) as raised:
            await go(mode, agent, hooks=hooks)
        assert isinstance(raised.value, RunStopped)
        assert raised.value.outcome.messages


async def test_outcome_says_when_there_is_none():
    agent = agent_of(says("Hello."))
    with pytest.raises(AdapterError, match="had a budget"):
        outcome(await Runner.run(agent, "Go."))
    streamed = bounded_run_streamed(agent, "Go.", budget=Budget())
    with pytest.raises(AdapterError, match="is over"):
        outcome(streamed)
    async for _ in streamed.stream_events():
        pass
    assert outcome(streamed).final == "Hello."


# The user's hooks


class Recording(RunHooks):
    def __init__(self):
        self.seen = []

    async def on_agent_start(self, context, agent):
        self.seen.append("agent_start")

    async def on_llm_start(self, context, agent, system_prompt, input_items):
        self.seen.append("llm_start")

    async def on_llm_end(self, context, agent, response):
        self.seen.append("llm_end")

    async def on_tool_start(self, context, agent, tool):
        self.seen.append(f"start {tool.name}")

    async def on_tool_end(self, context, agent, tool, result):
        self.seen.append(f"end {tool.name} {result}")

    async def on_handoff(self, context, from_agent, to_agent):
        self.seen.append(f"{from_agent.name} to {to_agent.name}")

    async def on_agent_end(self, context, agent, output):
        self.seen.append(f"agent_end {output}")


@modes
async def test_inner_hooks_see_what_happens_and_not_what_was_refused(mode):
    other = agent_of(says("Done."), name="other")
    agent = agent_of(
        calls("search"),
        calls("search", "search"),
        tools=[tool("search", [])],
        handoffs=[other],
    )
    inner = Recording()
    await go(mode, agent, hooks=BudgetHooks(Budget(max_tool_calls=2), inner))
    assert inner.seen == [
        "agent_start",
        "llm_start",
        "llm_end",
        "start search",
        "end search search 1",
        "llm_start",
        "llm_end",
        "start search",
        "end search search 2",
    ]


@modes
async def test_inner_hooks_see_the_same_as_without_a_budget(mode):
    def build():
        other = agent_of(says("Done."), name="other")
        return agent_of(
            calls("search"), Reply(handoff="other"), tools=[tool("search", [])], handoffs=[other]
        )

    bare, bounded = Recording(), Recording()
    await go(mode, build(), hooks=bare)
    await go(mode, build(), hooks=BudgetHooks(Budget(max_iterations=10), bounded))
    assert bounded.seen == bare.seen
    assert "main to other" in bounded.seen


@modes
async def test_hooks_of_the_agent_go_on_working(mode):
    seen = []

    class Own(AgentHooks):
        async def on_tool_end(self, context, agent, tool, result):
            seen.append(result)

    agent = agent_of(calls("search"), says("Done."), tools=[tool("search", [])], hooks=Own())
    await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=5)))
    assert seen == ["search 1"]


@modes
async def test_a_users_hook_that_fails_fails_the_run_as_without_a_budget(mode):
    class Broken(RunHooks):
        async def on_llm_start(self, context, agent, system_prompt, input_items):
            raise RuntimeError("broken")

    guard = Guard(Budget(max_iterations=5))
    with pytest.raises(RuntimeError, match="broken"):
        await go(mode, agent_of(says("Hi.")), hooks=BudgetHooks(guard, Broken()))
    assert guard.open_calls() == ()


def test_what_cannot_be_a_budget_is_refused():
    with pytest.raises(
        ConfigurationError, match="must be a Budget, a Guard or an Envelope, got int"
    ):
        BudgetHooks(25)
    with pytest.raises(ConfigurationError, match="must be left out with a Guard"):
        BudgetHooks(Guard(Budget()), mode=Mode.OBSERVE)
    with pytest.raises(ConfigurationError, match="one budget"):
        BudgetHooks(Budget(max_iterations=1), BudgetHooks(Budget(max_iterations=2)))


async def test_hooks_without_their_runner_refuse_to_run():
    hooks = BudgetHooks(Budget(max_iterations=1))
    installed = get_default_agent_runner()
    set_default_agent_runner(AgentRunner())
    try:
        with pytest.raises(AdapterError, match="set_default_agent_runner"):
            await Runner.run(agent_of(says("Hi.")), "Go.", hooks=hooks)
    finally:
        set_default_agent_runner(installed)


async def test_a_runner_that_was_set_before_is_wrapped_and_not_replaced():
    seen = []

    class Own(AgentRunner):
        async def run(self, starting_agent, input, **options):  # noqa: A002
            seen.append("run")
            return await super().run(starting_agent, input, **options)

    installed = get_default_agent_runner()
    set_default_agent_runner(Own())
    try:
        agent = agent_of(calls("search"), tools=[tool("search", [])])
        result = await bounded_run(agent, "Go.", budget=Budget(max_iterations=1))
        assert outcome(result).status == "terminated"
        await Runner.run(agent_of(says("Hi.")), "Go.")
    finally:
        set_default_agent_runner(installed)
    assert seen == ["run", "run"]


# The SDK's own cap


@modes
async def test_the_default_of_ten_turns_does_not_cut_a_larger_budget(mode):
    agent = agent_of(calls("search"), tools=[tool("search", [])])
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=15)))
    assert script_of(agent).calls == 15
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS


@modes
async def test_max_turns_of_the_user_ends_the_run_as_framework_limit(mode):
    agent = agent_of(calls("search"), tools=[tool("search", [])])
    guard = Guard(Budget(max_iterations=15))
    result = await go(mode, agent, hooks=BudgetHooks(guard), max_turns=4)
    assert script_of(agent).calls == 4
    assert outcome(result).stop_reason is StopReason.FRAMEWORK_LIMIT
    assert outcome(result).status == "terminated"
    assert not unpaired(result.to_input_list())
    assert result.new_items[-1].metadata["stop_reason"] == "framework_limit"
    # It was this run's limit, not that of every run on the guard.
    assert guard.trip is None


@modes
async def test_without_a_cap_the_sdks_ten_turns_stand_and_are_reported(mode):
    agent = agent_of(calls("search"), tools=[tool("search", [])])
    result = await go(mode, agent, hooks=BudgetHooks(Budget()))
    assert script_of(agent).calls == 10
    assert outcome(result).stop_reason is StopReason.FRAMEWORK_LIMIT


async def test_a_run_without_a_budget_still_raises():
    agent = agent_of(calls("search"), tools=[tool("search", [])])
    BudgetHooks(Budget())
    with pytest.raises(MaxTurnsExceeded):
        await Runner.run(agent, "Go.", max_turns=2)


# Sessions, states and approvals


@modes
async def test_a_run_stopped_at_its_first_turn_keeps_the_users_words(mode):
    session = MemorySession("s")
    guard = Guard(Budget(max_iterations=5))
    guard.abort()
    agent = agent_of(says("Hello."))
    result = await go(mode, agent, "Good morning.", session=session, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.ABORTED
    items = await session.get_items()
    assert [item["role"] for item in items] == ["user", "assistant"]
    assert items[0]["content"] == "Good morning."
    again = await go(mode, agent, "And now?", session=session, hooks=BudgetHooks(Budget()))
    assert again.final_output == "Hello."
    assert "Good morning." in script_of(agent).sent[0]


@modes
async def test_a_session_that_fails_does_not_hide_the_result(mode):
    class Failing(MemorySession):
        async def add_items(self, items):
            if any("stopped before" in str(item) for item in items):
                raise OSError(28, "No space left on device")
            await super().add_items(items)

    agent = agent_of(calls("search"), tools=[tool("search", [])])
    hooks = BudgetHooks(Budget(max_iterations=1))
    result = await go(mode, agent, session=Failing("s"), hooks=hooks)
    assert outcome(result).status == "terminated"
    assert any("session: OSError" in error for error in outcome(result).errors)


@modes
async def test_a_stopped_run_goes_on_from_its_state_even_through_json(mode):
    bodies = []
    agent = agent_of(
        calls("first"),
        calls("second"),
        says("Both."),
        tools=[tool("first", bodies), tool("second", bodies)],
    )
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=1)))
    text = result.to_state().to_string()
    state = await RunState.from_string(agent, text)
    result = await go(mode, agent, state, hooks=BudgetHooks(Budget(max_iterations=2)))
    assert result.final_output == "Both."
    assert bodies == ["first", "second"]
    assert outcome(result).usage.iterations == 2
    assert not unpaired(result.to_input_list())


@modes
@pytest.mark.parametrize("stored", [False, True])
async def test_a_stop_while_an_approval_is_resumed_leaves_no_unpaired_call(mode, stored):
    bodies = []
    agent = agent_of(
        calls("search"),
        calls("send"),
        says("Later, then."),
        tools=[tool("search", bodies), tool("send", bodies, needs_approval=True)],
    )
    session = MemorySession("s") if stored else None
    guard = Guard(Budget(max_tool_calls=1))
    # The place for the second call is taken by someone else while a person thinks it over.
    first = await go(mode, agent, session=session, hooks=BudgetHooks(Budget()))
    state = first.to_state()
    state.approve(first.interruptions[0])
    guard.admit_tool_call(ToolCall(name="other"))
    result = await go(mode, agent, state, session=session, hooks=BudgetHooks(guard))
    assert bodies == ["search"]
    assert outcome(result).stop_reason is StopReason.MAX_TOOL_CALLS
    assert result.interruptions == []
    assert not unpaired(result.to_input_list())
    assert result.to_input_list()[-1]["role"] == "assistant"
    assert kinds(result)[-2].startswith("function_call_output")
    assert result.to_input_list()[-2]["output"] == NOT_EXECUTED
    if session is not None:
        items = await session.get_items()
        assert not unpaired(items)
        assert items[-1]["role"] == "assistant"
    again = await go(
        mode,
        agent,
        result.to_input_list() if session is None else "Go on.",
        session=session,
        hooks=BudgetHooks(Budget(max_iterations=1)),
    )
    assert again.final_output == "Later, then."
    assert not unpaired(again.to_input_list())


@modes
async def test_an_abort_while_an_approval_is_resumed(mode):
    agent = agent_of(calls("send"), tools=[tool("send", [], needs_approval=True)])
    first = await go(mode, agent, hooks=BudgetHooks(Budget()))
    state = first.to_state()
    state.approve(first.interruptions[0])
    guard = Guard(Budget())
    guard.abort()
    result = await go(mode, agent, state, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.ABORTED
    assert not unpaired(result.to_input_list())


@modes
async def test_a_guards_context_reaches_the_result_of_a_run_that_never_called(mode):
    agent = agent_of(says("Hi."))
    guard = Guard(Budget())
    guard.abort()
    result = await go(mode, agent, context={"user": 1}, hooks=BudgetHooks(guard))
    assert isinstance(result.context_wrapper, RunContextWrapper)
    assert result.context_wrapper.context == {"user": 1}


@modes
async def test_approved_calls_are_admitted_together_before_any_of_them_starts(mode):
    bodies = []
    agent = agent_of(
        calls("send", "send", "send"), tools=[tool("send", bodies, needs_approval=True)]
    )
    first = await go(mode, agent, hooks=BudgetHooks(Budget()))
    state = first.to_state()
    for interruption in first.interruptions:
        state.approve(interruption)
    guard = Guard(Budget(max_tool_calls=2))
    result = await go(mode, agent, state, hooks=BudgetHooks(guard))
    assert bodies == ["send", "send"]
    assert guard.usage.tool_calls == 2
    assert outcome(result).stop_reason is StopReason.MAX_TOOL_CALLS
    outputs = [i["output"] for i in result.to_input_list() if "output" in i]
    assert outputs == ["send 1", "send 2", NOT_EXECUTED]


@modes
async def test_an_approved_call_that_hangs_may_have_taken_effect(mode):
    clock = ManualClock()

    async def send() -> str:
        clock.advance(1)
        await asyncio.get_running_loop().create_future()
        return "never"

    agent = agent_of(calls("send"), tools=[function_tool(send, needs_approval=True)])
    first = await go(mode, agent, hooks=BudgetHooks(Budget()))
    state = first.to_state()
    state.approve(first.interruptions[0])
    guard = Guard(Budget(max_seconds=0.3), clock=clock)
    result = await go(mode, agent, state, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.MAX_SECONDS
    assert [i["output"] for i in result.to_input_list() if "output" in i] == [OUTCOME_UNKNOWN]
    assert [record.status for record in outcome(result).tool_calls] == ["interrupted"]


@modes
async def test_a_guard_that_is_off_does_nothing(mode):
    agent = agent_of(calls("search"), calls("search"), says("Done."), tools=[tool("search", [])])
    guard = Guard(Budget(max_iterations=1), mode=Mode.OFF)
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert result.final_output == "Done."
    assert outcome(result).status == "completed"
    assert guard.usage.model_calls == 0


@pytest.mark.parametrize("setting", [Mode.OBSERVE, Mode.OFF])
@modes
async def test_a_run_that_is_only_looked_on_is_left_by_the_sdk_s_own_limit(mode, setting):
    agent = agent_of(*[calls("search")] * 4, says("Done."), tools=[tool("search", [])])
    hooks = BudgetHooks(Budget(max_iterations=50), mode=setting, on_trip="raise")
    with pytest.raises(MaxTurnsExceeded) as left:
        await go(mode, agent, hooks=hooks, max_turns=2)
    assert outcome(left.value).status == "failed"


@modes
async def test_the_sdk_s_own_limit_of_one_run_leaves_a_shared_guard_to_the_others(mode):
    guard = Guard(Budget(max_iterations=50))
    agent = agent_of(*[calls("search")] * 4, says("Done."), tools=[tool("search", [])])
    first = await go(mode, agent, hooks=BudgetHooks(guard), max_turns=2)
    assert outcome(first).stop_reason is StopReason.FRAMEWORK_LIMIT
    second = await go(mode, agent, hooks=BudgetHooks(guard))
    assert second.final_output == "Done."
