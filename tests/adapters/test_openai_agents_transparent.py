"""Within its caps a run asks its model exactly what it would ask without a budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from agents import (
    Agent,
    GuardrailFunctionOutput,
    HostedMCPTool,
    MCPToolApprovalFunctionResult,
    ModelRetrySettings,
    ModelSettings,
    OutputGuardrail,
    RunConfig,
    ToolExecutionConfig,
    ToolOutputImage,
    ToolOutputText,
    UserError,
    function_tool,
    handoff,
)
from agents.agent import ToolsToFinalOutputResult
from openai.types.responses.response_output_item import McpApprovalRequest
from openai.types.shared import Reasoning

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_openai_agents import BudgetHooks, outcome, pending_input
from conformance.budgetguard_openai_agents_driver import MemorySession
from openai_agents_raw import RawModel, call_of, text_item, toolbox
from openai_agents_runs import MODES, agent_of, calls, go, says, script_of, tool, unpaired

pytestmark = pytest.mark.anyio
modes = pytest.mark.parametrize("mode", MODES)
WIDE = Budget(max_iterations=50, max_total_tokens=10**9, max_tool_calls=50, max_seconds=3600)


class Noting(RawModel):
    """Writes down all that it is given."""

    def __init__(self, *responses: list[Any]) -> None:
        super().__init__(*responses)
        self.noted: list[Any] = []

    def _note(self, given: Any, facts: Any) -> None:
        system, sent, settings, tools, schema, handoffs = (*given, *facts.values())[:6]
        said = {n: v for n, v in vars(settings).items() if n != "include_usage"}
        # The policy of retries is wrapped.
        said["retry"] = None if settings.retry is None else settings.retry.max_retries
        names = [[one.name for one in tools], [one.tool_name for one in handoffs]]
        self.noted.append(copy.deepcopy([system, sent, said, names, schema and schema.name()]))

    async def get_response(self, *given: Any, **facts: Any) -> Any:
        self._note(given, facts)
        return await super().get_response(*given, **facts)

    async def stream_response(self, *given: Any, **facts: Any) -> Any:
        self._note(given, facts)
        async for event in super().stream_response(*given, **facts):
            yield event


RETRY = ModelRetrySettings(max_retries=2, policy=lambda context: False)
SETTINGS = {
    "none": (ModelSettings(), None),
    "the agent's": (
        ModelSettings(temperature=0.5, max_tokens=99, tool_choice="required", retry=RETRY),
        None,
    ),
    "the run's": (ModelSettings(), ModelSettings(top_p=0.3, max_tokens=77, store=False)),
    "both": (
        ModelSettings(
            temperature=0.5,
            extra_args={"a": 1, "b": 1},
            retry=ModelRetrySettings(max_retries=5),
            reasoning=Reasoning(effort="low"),
            tool_choice="act",
        ),
        ModelSettings(extra_args={"b": 2}, retry=RETRY, metadata={"k": "v"}, max_tokens=50),
    ),
    "a mapping": (ModelSettings(temperature=0.1), {"temperature": 0.9, "extra_args": {"c": 3}}),
}


@modes
@pytest.mark.parametrize("kind", SETTINGS)
async def test_what_the_model_is_sent(mode, kind):
    own, of_run = SETTINGS[kind]

    async def run(**options: Any) -> list[Any]:
        act = toolbox([])["function"]
        model = Noting([call_of("function", 1)], [call_of("function", 2)], [text_item("Done.")])
        other = Agent(name="other", model=model)
        agent = Agent(
            name="main",
            instructions="Work.",
            model=model,
            tools=[act],
            handoffs=[handoff(other)],
            model_settings=own,
        )
        config = RunConfig(model_settings=of_run) if of_run is not None else None
        result = await go(mode, agent, run_config=config, **options)
        assert result.final_output == "Done."
        return model.noted

    bare = await run()
    assert await run(hooks=BudgetHooks(WIDE)) == bare
    assert len(bare) == 3


@modes
async def test_the_users_configuration_is_not_changed(mode):
    config = RunConfig(model_settings=ModelSettings(top_p=0.3))
    before = dict(vars(config))
    agent = agent_of(says("Hi."))
    settings = agent.model_settings
    await go(mode, agent, run_config=config, hooks=BudgetHooks(WIDE))
    assert vars(config) == before
    assert agent.model_settings is settings


@modes
async def test_settings_that_are_made_in_a_tool_change_nothing(mode):
    """Code of the user's may ask for settings too."""
    made: list[Any] = []

    async def look() -> str:
        made.append(ModelSettings(temperature=0.2).resolve(ModelSettings(top_p=0.1)))
        return "looked"

    model = Noting([call_of("function", 1)], [text_item("Done.")])
    agent = Agent(name="main", model=model, tools=[function_tool(look, name_override="act")])
    model.responses[0][0].arguments = "{}"
    budget = Budget(max_iterations=5, max_output_tokens_per_call=64)
    result = await go(mode, agent, hooks=BudgetHooks(budget))
    assert result.final_output == "Done."
    assert (made[0].temperature, made[0].top_p) == (0.2, 0.1)
    assert [one[2]["max_tokens"] for one in model.noted] == [64, 64]


# More of what an agent may have


@modes
async def test_tools_that_run_one_after_the_other(mode):
    bodies: list[str] = []
    agent = agent_of(calls(*["search"] * 5), tools=[tool("search", bodies)])
    config = RunConfig(tool_execution=ToolExecutionConfig(max_function_tool_concurrency=1))
    hooks = BudgetHooks(Budget(max_tool_calls=3))
    result = await go(mode, agent, run_config=config, hooks=hooks)
    assert len(bodies) == 3
    assert outcome(result).stop_reason is StopReason.MAX_TOOL_CALLS
    assert not unpaired(result.to_input_list())


@modes
async def test_results_that_are_pictures_stay_what_they_are(mode):
    def look() -> list[Any]:
        return [ToolOutputText(text="a"), ToolOutputImage(image_url="data:image/png;base64,aa")]

    def agent() -> Any:
        return agent_of(calls("look"), says("Done."), tools=[function_tool(look)])

    bare = await go(mode, agent())
    result = await go(mode, agent(), hooks=BudgetHooks(Budget(max_iterations=1)))
    outputs = [
        [one["output"] for one in each.to_input_list() if "output" in one]
        for each in (bare, result)
    ]
    assert outputs[0] == outputs[1]
    assert isinstance(outputs[0][0], list)


@modes
async def test_a_tool_that_is_switched_off_while_the_run_goes_on(mode):
    bodies: list[str] = []
    search = tool("search", bodies, is_enabled=lambda context, agent: len(bodies) < 2)
    agent = agent_of(calls("search"), calls("search"), says("Done."), tools=[search])
    result = await go(mode, agent, hooks=BudgetHooks(WIDE))
    assert result.final_output == "Done."
    assert bodies == ["search"] * 2


@modes
async def test_a_hosted_server_asks_and_code_answers(mode):
    asked: list[Any] = []

    def approve(request: Any) -> MCPToolApprovalFunctionResult:
        asked.append(request.data.name)
        return {"approve": True}

    request = McpApprovalRequest(
        id="mcpr_1", arguments="{}", name="fetch", server_label="s", type="mcp_approval_request"
    )
    model = RawModel([request], [text_item("Done.")])
    server = HostedMCPTool(
        tool_config={"type": "mcp", "server_label": "s", "server_url": "http://x"},
        on_approval_request=approve,
    )
    agent = Agent(name="main", model=model, tools=[server])
    guard = Guard(Budget(max_iterations=5))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert result.final_output == "Done."
    assert asked == ["fetch"]
    assert (guard.usage.model_calls, guard.usage.tool_calls) == (2, 0)
    assert guard.open_calls() == ()
    model.calls = 0
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=1)))
    assert [item["type"] for item in pending_input(result)] == ["mcp_approval_response"]


@modes
async def test_code_that_fails_between_the_steps_leaves_a_failed_run(mode):
    def decide(*_: Any) -> ToolsToFinalOutputResult:
        raise UserError("no decision")

    guard, session = Guard(Budget(max_iterations=5)), MemorySession("s")
    agent = agent_of(calls("search"), tools=[tool("search", [])], tool_use_behavior=decide)
    with pytest.raises(UserError, match="no decision") as left:
        await go(mode, agent, session=session, hooks=BudgetHooks(guard))
    found = outcome(left.value)
    assert found.status == "failed"
    assert found.usage.tool_calls == 1
    assert not unpaired(found.messages)
    assert guard.open_calls() == ()
    assert not unpaired(await session.get_items())


@modes
async def test_a_callback_of_the_session_that_fails_leaves_a_failed_run(mode):
    def combine(history: Any, new: Any) -> Any:
        raise UserError("no memory")

    guard, session = Guard(Budget(max_iterations=5)), MemorySession("s")
    config = RunConfig(session_input_callback=combine)
    given = [{"role": "user", "content": "Hi."}]
    agent = agent_of(says("Hi."))
    with pytest.raises(UserError, match="no memory") as left:
        await go(mode, agent, given, session=session, run_config=config, hooks=BudgetHooks(guard))
    assert outcome(left.value).status == "failed"
    assert script_of(agent).calls == guard.usage.model_calls == 0


@modes
async def test_the_session_of_a_sub_agent_at_the_parents_stop(mode):
    session, bodies = MemorySession("below"), []
    below = agent_of(calls("search"), tools=[tool("search", bodies)], name="below")
    ask = below.as_tool(tool_name="ask", tool_description="Ask.", session=session)
    top = agent_of(calls("ask"), says("Done."), tools=[ask])
    result = await go(mode, top, hooks=BudgetHooks(Budget(max_model_calls=3, loop_detection=None)))
    assert outcome(result).stop_reason is StopReason.MAX_MODEL_CALLS
    stored = await session.get_items()
    assert not unpaired(stored)
    assert stored[-1]["role"] == "assistant"
    assert len(bodies) == 2


@modes
async def test_a_judged_answer_of_a_tool_over_a_cap(mode):
    judged: list[Any] = []

    def judge(_: Any, __: Any, output: Any) -> GuardrailFunctionOutput:
        judged.append(output)
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

    bodies: list[str] = []
    agent = agent_of(
        calls("search", "search"),
        tools=[tool("search", bodies)],
        tool_use_behavior="stop_on_first_tool",
        output_guardrails=[OutputGuardrail(judge)],
    )
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_tool_calls=1)))
    assert result.final_output == "search 1"
    assert judged == ["search 1"]
    assert len(bodies) == 1
