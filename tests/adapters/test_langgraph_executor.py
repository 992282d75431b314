"""LangChain's older `AgentExecutor`: the callback enforces, the wrapper returns."""

from __future__ import annotations

import pytest
from langchain_classic.agents import AgentExecutor, create_tool_calling_agent
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import StructuredTool, tool

from budgetguard_core import (
    AdapterError,
    Budget,
    BudgetExceeded,
    FinalizeReserve,
    Guard,
    MemoryStore,
    StopReason,
)
from budgetguard_core.testing import Script, calls, check_history, hang, says
from budgetguard_langgraph import BudgetCallback, bounded_executor
from conformance.budgetguard_langgraph_driver import ScriptedChat, message

PROMPT = ChatPromptTemplate.from_messages(
    [("human", "{input}"), ("placeholder", "{agent_scratchpad}")]
)
BODIES: list[str] = []


@pytest.fixture(autouse=True)
def bodies():
    BODIES.clear()


@tool
def search(value: str = "") -> str:
    """Search."""
    BODIES.append("search")
    return f"result {len(BODIES)}"


def executor(script, *tools, **options):
    tools = [*tools] or [search]
    model = ScriptedChat(script=script)
    agent = create_tool_calling_agent(model, tools, PROMPT)
    return AgentExecutor(agent=agent, tools=tools, max_iterations=None, **options)


async def run(bounded, mode):
    given = {"input": "Go."}
    return bounded.invoke(given) if mode == "sync" else await bounded.ainvoke(given)


MODES = pytest.mark.parametrize("mode", ["sync", "async"])


@pytest.mark.anyio
@MODES
async def test_a_stopped_run_returns_its_steps(mode):
    script, guard = Script([calls("search")]), Guard(Budget(max_iterations=3))
    result = await run(bounded_executor(executor(script), guard, store=MemoryStore()), mode)
    assert script.calls == 3
    assert result["stop_reason"] == "max_iterations"
    assert [observed for _, observed in result["intermediate_steps"]] == [
        "result 1",
        "result 2",
        "result 3",
    ]
    assert result["input"] == "Go."
    assert "stopped before it finished" in result["output"]
    assert guard.outcome.stop_reason is StopReason.MAX_ITERATIONS
    check_history([message(one) for one in guard.outcome.messages])


@pytest.mark.anyio
@MODES
async def test_a_selector_of_a_profile_sees_input_and_configuration(mode):
    seen = []

    def chosen(task):
        seen.append((task.input_tokens > 0, task.config["configurable"]["kind"]))
        return "quick_qa"

    bounded = bounded_executor(executor(Script([says("Done.")])), profile=chosen)
    asked = bounded.with_config(configurable={"kind": "short"})
    await run(asked, mode)
    assert seen == [(True, "short")]
    assert bounded.outcome.profile.name == "quick_qa"


@pytest.mark.anyio
@MODES
async def test_a_completed_run_is_as_it_would_be(mode):
    replies = [calls("search"), says("Done.")]
    plain = executor(Script(replies)).invoke({"input": "Go."})
    BODIES.clear()
    bounded = bounded_executor(executor(Script(replies)), Budget(max_iterations=9))
    assert await run(bounded, mode) == plain
    assert bounded.outcome.status == "completed"


@pytest.mark.anyio
@MODES
async def test_the_call_over_the_cap_never_starts(mode):
    script, guard = Script([calls("search", "search", "search")]), Guard(Budget(max_tool_calls=4))
    result = await run(bounded_executor(executor(script), guard), mode)
    # The thread of the last one may still be on its way when the run has ended.
    assert guard.usage.tool_calls == 4 >= len(BODIES)
    assert result["stop_reason"] == "max_tool_calls"


@pytest.mark.anyio
async def test_the_deadline_ends_a_hung_tool():
    async def never(value: str = "") -> str:
        await hang()

    slow = StructuredTool.from_function(
        coroutine=never, func=lambda value="": "", name="slow", description="Slow."
    )
    guard = Guard(Budget(max_seconds=1))
    bounded = bounded_executor(executor(Script([calls("slow")]), slow), guard)
    result = await bounded.ainvoke({"input": "Go."})
    assert result["stop_reason"] == "max_seconds"
    assert guard.usage.seconds < 30


def test_the_callback_alone_stops_before_the_call_and_raises():
    script, callback = Script([calls("search")]), BudgetCallback(Budget(max_iterations=2))
    with pytest.raises(BudgetExceeded) as stopped:
        executor(script).invoke({"input": "Go."}, {"callbacks": [callback]})
    assert script.calls == 2
    assert stopped.value.outcome.stop_reason is StopReason.MAX_ITERATIONS
    assert callback.outcome is stopped.value.outcome


def test_raise_carries_the_outcome():
    bounded = bounded_executor(
        executor(Script([calls("search")])), Budget(max_iterations=1), on_trip="raise"
    )
    with pytest.raises(BudgetExceeded) as stopped:
        bounded.invoke({"input": "Go."})
    assert stopped.value.outcome.usage.model_calls == 1


def test_a_failing_tool_is_raised_as_it_is():
    def broken(value: str = "") -> str:
        raise ValueError("broken")

    bad = StructuredTool.from_function(broken, name="bad", description="Bad.")
    guard = Guard(Budget(max_iterations=5))
    with pytest.raises(ValueError, match="broken"):
        bounded_executor(executor(Script([calls("bad")]), bad), guard).invoke({"input": "Go."})
    assert guard.open_calls() == ()


def test_only_an_executor_is_taken():
    with pytest.raises(AdapterError, match="takes an AgentExecutor, got str"):
        bounded_executor("agent", Budget())


@pytest.mark.anyio
@MODES
async def test_a_stopped_executor_asks_for_no_last_answer(mode):
    reserve = FinalizeReserve(tokens=9000)
    script, guard = (
        Script([calls("search")]),
        Guard(Budget(max_iterations=2, finalize_reserve=reserve)),
    )
    result = await run(bounded_executor(executor(script), guard), mode)
    assert script.calls == 2
    assert "stopped before it finished" in result["output"]
    assert guard.outcome.finalized is False
