"""Guardrails that call a model: a judge that could not run is never a pass."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrail,
    ModelBehaviorError,
    OutputGuardrail,
    OutputGuardrailTripwireTriggered,
    RunHooks,
    Runner,
    ToolGuardrailFunctionOutput,
    ToolInputGuardrail,
    ToolOutputGuardrail,
)

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.testing import Reply
from budgetguard_openai_agents import BudgetHooks, outcome
from conformance.budgetguard_openai_agents_driver import Answer, MemorySession
from openai_agents_runs import MODES, agent_of, calls, go, says, script_of, tool, unpaired

pytestmark = pytest.mark.anyio
modes = pytest.mark.parametrize("mode", MODES)
judges = pytest.mark.parametrize("structured", [False, True], ids=["text", "structured"])


def judge_of(*, structured: bool) -> Agent[Any]:
    text = '{"value": "safe"}' if structured else "safe"
    return agent_of(says(text), name="judge", output_type=Answer if structured else None)


async def verdict(judge: Agent[Any], *, structured: bool, how: str = "run") -> bool:
    """Ask a judge as a user does; whatever is not `unsafe` passes."""
    if how == "run":
        said = (await Runner.run(judge, "Is it safe?")).final_output
    else:
        streamed = Runner.run_streamed(judge, "Is it safe?")
        async for _ in streamed.stream_events():
            pass
        said = streamed.final_output
    return (said.value if structured else said) == "unsafe"


@judges
@modes
async def test_an_answer_whose_judge_could_not_run_is_not_passed_on(mode, structured):
    judge = judge_of(structured=structured)

    async def check(context: Any, agent: Any, output: Any) -> GuardrailFunctionOutput:
        triggered = await verdict(judge, structured=structured, how=mode)
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=triggered)

    agent = agent_of(says("The secret is 42."), output_guardrails=[OutputGuardrail(check)])
    session = MemorySession("s")
    guard = Guard(Budget(max_iterations=1))
    result = await go(mode, agent, session=session, hooks=BudgetHooks(guard))
    assert outcome(result).status == "terminated"
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS
    assert "secret" not in str(result.final_output)
    assert script_of(judge).calls == 0
    assert guard.usage.model_calls == 1
    stored = await session.get_items()
    assert len(stored) == len(result.to_input_list())


@modes
async def test_a_judge_whose_failure_is_swallowed_is_no_pass_either(mode):
    judge = judge_of(structured=False)

    async def check(context: Any, agent: Any, output: Any) -> GuardrailFunctionOutput:
        try:
            triggered = await verdict(judge, structured=False)
        except Exception:
            triggered = False
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=triggered)

    agent = agent_of(says("The secret is 42."), output_guardrails=[OutputGuardrail(check)])
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=1)))
    assert outcome(result).status == "terminated"
    assert "secret" not in str(result.final_output)


@pytest.mark.parametrize("parallel", [False, True], ids=["blocking", "parallel"])
@judges
@modes
async def test_an_input_whose_judge_could_not_run_is_not_worked_on(mode, structured, parallel):
    judge = judge_of(structured=structured)
    bodies: list[str] = []

    async def check(context: Any, agent: Any, given: Any) -> GuardrailFunctionOutput:
        triggered = False
        for _ in range(5):
            triggered = triggered or await verdict(judge, structured=structured, how=mode)
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=triggered)

    agent = agent_of(
        *(Reply(hang=True) for _ in range(1)),
        tools=[tool("act", bodies)],
        input_guardrails=[InputGuardrail(check, run_in_parallel=parallel)],
    )
    guard = Guard(Budget(max_iterations=3))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS
    assert guard.usage.iterations == 3
    assert bodies == []
    assert guard.open_calls() == ()


@pytest.mark.parametrize("side", ["before", "after"])
@judges
@modes
async def test_a_tool_whose_judge_could_not_run_is_not_passed_on(mode, structured, side):
    judge = judge_of(structured=structured)
    bodies: list[str] = []

    async def check(data: Any) -> ToolGuardrailFunctionOutput:
        if await verdict(judge, structured=structured, how=mode):
            return ToolGuardrailFunctionOutput.reject_content("no")
        return ToolGuardrailFunctionOutput.allow()

    act = tool("act", bodies)
    if side == "before":
        act.tool_input_guardrails = [ToolInputGuardrail(check)]
    else:
        act.tool_output_guardrails = [ToolOutputGuardrail(check)]
    agent = agent_of(calls("act"), says("Acted."), tools=[act])
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=1)))
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS
    assert bodies == ([] if side == "before" else ["act"])
    assert script_of(judge).calls == 0
    assert script_of(agent).calls == 1
    assert not unpaired(result.to_input_list())
    assert result.final_output != "Acted."


@modes
async def test_a_judge_within_the_budget_decides(mode):
    judge = agent_of(says("unsafe"), name="judge")

    async def check(context: Any, agent: Any, output: Any) -> GuardrailFunctionOutput:
        triggered = await verdict(judge, structured=False, how=mode)
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=triggered)

    agent = agent_of(says("The secret is 42."), output_guardrails=[OutputGuardrail(check)])
    seen: list[Any] = []
    guard = Guard(Budget(max_iterations=2))
    with pytest.raises(Exception, match="tripwire"):
        await go(mode, agent, hooks=BudgetHooks(guard, on_outcome=seen.append))
    assert guard.usage.iterations == 2
    assert [one.status for one in seen][-1] == "failed"


@modes
async def test_a_judge_with_an_envelope_of_its_own_gives_its_partial_result(mode):
    judge = agent_of(calls("look"), name="judge", tools=[tool("look", [])])
    said: list[str] = []

    async def check(context: Any, agent: Any, output: Any) -> GuardrailFunctionOutput:
        ran = await Runner.run(judge, "?", hooks=BudgetHooks(Budget(max_iterations=2)))
        said.append(outcome(ran).status)
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

    agent = agent_of(says("Fine."), output_guardrails=[OutputGuardrail(check)])
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=9)))
    assert said == ["terminated"]
    assert result.final_output == "Fine."
    assert outcome(result).status == "completed"


@modes
async def test_a_deadline_in_a_guardrail(mode):
    entered = asyncio.Event()

    async def check(context: Any, agent: Any, output: Any) -> GuardrailFunctionOutput:
        entered.set()
        await asyncio.get_running_loop().create_future()
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

    agent = agent_of(calls("a"), says("Answer."), output_guardrails=[OutputGuardrail(check)])
    agent.tools = [tool("a", [])]
    guard = Guard(Budget(max_seconds=3600))
    session = MemorySession("s")
    task = asyncio.create_task(go(mode, agent, session=session, hooks=BudgetHooks(guard)))
    await entered.wait()
    guard.abort("enough")
    result = await task
    assert outcome(result).stop_reason is StopReason.ABORTED
    stored = await session.get_items()
    ids = [item["id"] for item in stored if item.get("id")]
    assert len(ids) == len(set(ids))
    assert [i.get("content") or i["type"] for i in map(dict, stored)].count("function_call") == 1
    assert len(stored) == len(result.to_input_list())
    assert not unpaired(stored)


def judged(judge: Agent[Any], mode: str) -> OutputGuardrail[Any]:
    async def check(context: Any, agent: Any, output: Any) -> GuardrailFunctionOutput:
        triggered = await verdict(judge, structured=False, how=mode)
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=triggered)

    return OutputGuardrail(check)


@modes
async def test_an_answer_that_nobody_judged_is_in_no_history(mode):
    judge = judge_of(structured=False)
    agent = agent_of(
        calls("a"),
        says("The secret is 42."),
        tools=[tool("a", [])],
        output_guardrails=[judged(judge, mode)],
    )
    session = MemorySession("s")
    guard = Guard(Budget(max_iterations=2))
    result = await go(mode, agent, session=session, hooks=BudgetHooks(guard))
    assert script_of(judge).calls == 0
    stored = await session.get_items()
    for shown in (result.to_input_list(), stored, outcome(result).messages):
        assert "secret" not in str(shown)
        assert len(shown) == 4
        assert not unpaired(shown)
    # What was paid for is kept where nobody takes it for an answer.
    assert "secret" in str(result.raw_responses)
    again = await go(mode, agent, "Go on.", session=session, hooks=BudgetHooks(Budget()))
    assert again.final_output == "The secret is 42."


@pytest.mark.parametrize("own", [None, Budget(max_iterations=1)], ids=["parents", "own"])
@modes
async def test_a_sub_agents_answer_that_nobody_judged_does_not_reach_its_parent(mode, own):
    judge = judge_of(structured=False)
    below = agent_of(
        says("The secret is 42."), name="below", output_guardrails=[judged(judge, mode)]
    )
    hooks = None if own is None else BudgetHooks(own)
    ask = below.as_tool(tool_name="ask", tool_description="Ask.", hooks=hooks)
    agent = agent_of(calls("ask"), says("Thanks."), tools=[ask])
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=2)))
    assert script_of(judge).calls == 0
    assert "secret" not in str(result.to_input_list())
    assert not unpaired(result.to_input_list())


@modes
async def test_an_answer_whose_input_was_not_judged_is_not_passed_on(mode):
    judge = judge_of(structured=False)
    answered = asyncio.Event()

    class Hooks(RunHooks[Any]):
        async def on_llm_end(self, *args: Any) -> None:
            answered.set()

    async def check(context: Any, agent: Any, given: Any) -> GuardrailFunctionOutput:
        await answered.wait()
        triggered = await verdict(judge, structured=False, how=mode)
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=triggered)

    agent = agent_of(says("The secret is 42."), input_guardrails=[InputGuardrail(check)])
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=1), Hooks()))
    assert outcome(result).status == "terminated"
    assert "secret" not in str(result.to_input_list())


@modes
async def test_a_judges_verdict_on_an_answer_that_was_cut_holds(mode):
    async def check(context: Any, agent: Any, output: Any) -> GuardrailFunctionOutput:
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=True)

    agent = agent_of(
        Reply(text="The secret is", cut=True), output_guardrails=[OutputGuardrail(check)]
    )
    ran = await asyncio.gather(
        go(mode, agent, hooks=BudgetHooks(Budget(max_output_tokens_per_call=20))),
        return_exceptions=True,
    )
    if mode == "run":
        assert isinstance(ran[0], OutputGuardrailTripwireTriggered)
    else:
        # The SDK takes the end of such a stream for an error, and asks no judge.
        assert outcome(ran[0]).status == "terminated"
        assert "secret" not in str(ran[0].to_input_list())


@modes
async def test_a_failure_beside_a_judge_that_was_stopped_is_the_runs_own(mode):
    guard = Guard(Budget(max_tool_calls=1, loop_detection=None))

    async def check(*_: Any) -> GuardrailFunctionOutput:
        while guard.trip is None:  # noqa: ASYNC110 - the batch has no event
            await asyncio.sleep(0)
        await verdict(judge_of(structured=False), structured=False)
        raise AssertionError("the judge ran")

    agent = agent_of(
        calls("act", "act", "unknown"),
        tools=[tool("act", [])],
        input_guardrails=[InputGuardrail(check)],
    )
    with pytest.raises(ModelBehaviorError) as raised:
        await go(mode, agent, hooks=BudgetHooks(guard))
    assert outcome(raised.value).stop_reason is StopReason.MAX_TOOL_CALLS
