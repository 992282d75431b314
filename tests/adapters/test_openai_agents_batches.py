"""Batches in which every kind of tool is called beside the others."""

from __future__ import annotations

import asyncio
import base64
import random
from typing import Any

import pytest
from agents import (
    Agent,
    Computer,
    ComputerProvider,
    ComputerTool,
    ModelBehaviorError,
    RunState,
    ShellTool,
    StopAtTools,
    tool_namespace,
)
from openai.types.responses import (
    ResponseFunctionToolCall,
)

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.kit import NOT_AVAILABLE, NOT_EXECUTED, OUTCOME_UNKNOWN, Run
from budgetguard_core.testing import Call
from budgetguard_openai_agents import BudgetHooks, outcome, pending_input
from budgetguard_openai_agents._history import picture_of
from openai_agents_raw import KINDS, RawModel, Screen, call_of, text_item, toolbox
from openai_agents_runs import MODES, agent_of, calls, go, says, tool, unpaired

pytestmark = pytest.mark.anyio
modes = pytest.mark.parametrize("mode", MODES)


def agent_with(bodies: list[str], kinds: Any, *responses: Any) -> Agent[Any]:
    box = toolbox(bodies)
    return Agent(
        name="main",
        model=RawModel(*responses),
        tools=[box[kind] for kind in sorted(set(kinds)) if kind != "mcp"],
        mcp_servers=[box["mcp"]] if "mcp" in kinds else [],
    )


@pytest.mark.sample(5)
@pytest.mark.parametrize("other", KINDS[1:])
@modes
async def test_what_fits_runs_once_and_is_counted_once(mode, other):
    bodies: list[str] = []
    asked = [call_of("function", 1), call_of(other, 2), call_of("function", 3), call_of(other, 4)]
    agent = agent_with(bodies, ["function", other], asked, [text_item("Done.")])
    guard = Guard(Budget(max_tool_calls=9, tool_quotas={"act": 5}))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert result.final_output == "Done."
    assert len(bodies) == guard.usage.tool_calls == 4
    assert guard.tool_counts["act"] == 2
    assert guard.open_calls() == ()
    assert [record.status for record in outcome(result).tool_calls] == ["completed"] * 4
    assert NOT_EXECUTED not in str(result.to_input_list())
    assert not unpaired(result.to_input_list())


@pytest.mark.sample(7)
@pytest.mark.parametrize("seed", range(20))
@modes
async def test_a_mixed_batch_runs_what_fits_in_the_models_order(mode, seed):
    random_ = random.Random(seed)
    kinds = [random_.choice(KINDS) for _ in range(6)]
    cap = random_.randint(1, 6)
    bodies: list[str] = []
    asked = [call_of(kind, number) for number, kind in enumerate(kinds)]
    agent = agent_with(bodies, kinds, asked, [text_item("Done.")])
    guard = Guard(Budget(max_tool_calls=cap))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert sorted(bodies) == [str(number) for number in range(cap)]
    assert guard.usage.tool_calls == cap
    assert guard.open_calls() == ()
    assert not unpaired(result.to_input_list())
    assert outcome(result).status == ("terminated" if cap < 6 else "completed")
    statuses = {record.id: record.status for record in outcome(result).tool_calls}
    assert [statuses[f"c{n}"] for n in range(6)] == ["completed"] * cap + ["refused"] * (6 - cap)


@pytest.mark.parametrize("kind", KINDS)
@modes
async def test_a_quota_refuses_its_tool_and_the_model_goes_on(mode, kind):
    bodies: list[str] = []
    asked = [call_of(kind, 1), call_of(kind, 2)]
    agent = agent_with(bodies, [kind], asked, [text_item("Done.")])
    name = {"function": "act", "mcp": "fetch", "custom": "sql"}.get(kind, kind)
    guard = Guard(Budget(tool_quotas={name: 1}))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert bodies == ["1"]
    assert result.final_output == "Done."
    assert outcome(result).status == "completed"
    # A computer answers with pictures only.
    shown = picture_of(NOT_AVAILABLE) if kind == "computer" else NOT_AVAILABLE
    assert shown in str(result.to_input_list())
    assert shown in str(agent.model.sent[-1])


def pictures(items: Any) -> dict[str, str]:
    return {
        item["call_id"]: item["output"]["image_url"].partition("base64,")[2]
        for item in items
        if item.get("type") == "computer_call_output"
    }


@modes
async def test_a_computer_is_refused_call_by_call(mode):
    bodies: list[str] = []
    asked = [call_of("function", 1), call_of("computer", 2), call_of("computer", 3)]
    agent = agent_with(bodies, ["function", "computer"], asked)
    guard = Guard(Budget(max_tool_calls=2))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert sorted(bodies) == ["1", "2"]
    assert guard.usage.tool_calls == 2
    assert outcome(result).stop_reason is StopReason.MAX_TOOL_CALLS
    history = result.to_input_list()
    assert not unpaired(history)
    shown = pictures(history)
    assert shown == {"c2": "aW1hZ2U=", "c3": picture_of(NOT_EXECUTED)}
    assert base64.b64decode(shown["c3"]).startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["instance", "factory", "sync"])
@modes
async def test_a_computer_is_the_users_own_and_is_disposed_of_by_the_run(mode, kind):
    bodies: list[str] = []
    made: list[Any] = []

    class Sync(Computer):
        def screenshot(self) -> str:
            return "aW1hZ2U="

        def wait(self) -> None: ...

        click = double_click = scroll = move = keypress = drag = wait

        def type(self, text: str) -> None:
            bodies.append(text)

    async def create(*, run_context: Any) -> Any:
        made.append(Screen(bodies))
        return made[-1]

    async def dispose(*, run_context: Any, computer: Any) -> None:
        made.remove(computer)
        made.append("disposed")

    provider = ComputerProvider(create=create, dispose=dispose)
    computer = {"instance": Screen(bodies), "factory": provider, "sync": Sync()}[kind]
    own = ComputerTool(computer=computer)
    turns = [[call_of("computer", n)] for n in range(3)]
    agent = Agent(name="main", model=RawModel(*turns, [text_item("Done.")]), tools=[own])
    guard = Guard(Budget(max_tool_calls=9, loop_detection=None))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert result.final_output == "Done."
    assert bodies == ["0", "1", "2"]
    assert guard.usage.tool_calls == 3
    assert made == (["disposed"] if kind == "factory" else [])


@modes
async def test_a_computer_that_was_cut_has_a_picture_that_says_so(mode):
    class Hanging(Screen):
        async def type(self, text: str) -> None:
            guard.abort("enough")
            await asyncio.get_running_loop().create_future()

    agent = Agent(
        name="main",
        model=RawModel([call_of("computer", 1)]),
        tools=[ComputerTool(computer=Hanging([]))],
    )
    guard = Guard(Budget())
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert pictures(result.to_input_list()) == {"c1": picture_of(OUTCOME_UNKNOWN)}


class Cut(RawModel):
    """Stops the run in its second call, once."""

    guard = Guard(Budget())

    async def _wait(self) -> None:
        if self.calls == 1 and self.guard.trip is None:
            self.guard.abort("enough")
            await asyncio.get_running_loop().create_future()

    async def get_response(self, *args: Any, **facts: Any) -> Any:
        await self._wait()
        return await super().get_response(*args, **facts)

    async def stream_response(self, *args: Any, **facts: Any) -> Any:
        await self._wait()
        async for event in super().stream_response(*args, **facts):
            yield event


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["handoff", *KINDS])
@modes
async def test_the_state_of_a_run_that_was_cut_is_read_again(mode, kind):
    bodies: list[str] = []
    first = call_of("function" if kind == "handoff" else kind, 1)
    if kind == "handoff":
        first.name, first.arguments = "transfer_to_other", "{}"
    model = Cut([first], [text_item("Done.")])
    agent = agent_with(bodies, [kind] if kind in KINDS else [])
    agent.model = model
    agent.handoffs = [Agent(name="other", model=model)] if kind == "handoff" else []
    guard = model.guard = Guard(Budget())
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.ABORTED
    state = await RunState.from_string(agent, result.to_state().to_string())
    again = await go(mode, agent, state, hooks=BudgetHooks(Budget(max_iterations=3)))
    assert again.final_output == "Done."
    assert len(bodies) == (kind != "handoff")


@pytest.mark.parametrize("kind", ["shell", "local_shell", "apply_patch", "computer"])
@modes
async def test_a_call_that_is_refused_in_the_middle_leaves_those_after_it_alone(mode, kind):
    """Their hooks say no id, so each call is found by its place."""
    bodies: list[str] = []
    numbers = [1, 2, 3]
    agent = agent_with(
        bodies, [kind], [call_of(kind, number) for number in numbers], [text_item("Done.")]
    )
    hooks = BudgetHooks(guard := Guard(Budget(max_tool_calls=9)))
    refuse = Run.batch

    def second_refused(run: Run, given: Any) -> Any:
        batch = refuse(run, given)
        second = list(batch)[1]
        run.withdrawn(second)
        second.state, second.refusal = "refused", NOT_AVAILABLE
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "batch", second_refused)
        result = await go(mode, agent, hooks=hooks)
    assert result.final_output == "Done."
    assert bodies == ["1", "3"]
    assert guard.usage.tool_calls == 2
    assert not unpaired(result.to_input_list())


@modes
async def test_a_shell_of_the_providers_is_hosted_and_keeps_its_result(mode):
    output = [{"stdout": "ok", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
    answered = {"type": "shell_call_output", "id": "so1", "call_id": "c1", "output": output}
    answered |= {"status": "completed", "max_output_length": None}
    agent = Agent(
        name="main",
        model=RawModel([call_of("shell", 1), answered, call_of("function", 2)]),
        tools=[
            ShellTool(environment={"type": "container_auto"}),
            toolbox(bodies := [])["function"],
        ],
    )
    guard = Guard(Budget(max_tool_calls=1))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert bodies == []
    assert guard.usage.tool_calls == 1
    assert not unpaired(result.to_input_list())
    # A server that keeps the conversation has its own tool's result already.
    assert [item["type"] for item in pending_input(result)] == ["function_call_output"]


@modes
async def test_two_tools_of_one_name_in_two_namespaces(mode):
    bodies: list[str] = []

    def named(space: str) -> Any:
        return tool_namespace(
            name=space, description=f"The {space}.", tools=[tool("search", bodies, result=space)]
        )

    def asked(space: str, number: int) -> Any:
        return ResponseFunctionToolCall(
            call_id=f"c{number}",
            name="search",
            namespace=space,
            arguments='{"value": ""}',
            type="function_call",
        )

    model = RawModel([asked("web", 1), asked("mail", 2), asked("web", 3)], [text_item("Done.")])
    agent = Agent(name="main", model=model, tools=[*named("web"), *named("mail")])
    guard = Guard(Budget(tool_quotas={"web.search": 1}))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    outputs = [i["output"] for i in result.to_input_list() if i.get("output")]
    assert outputs == ["web", "mail", NOT_AVAILABLE]
    assert guard.tool_counts == {"web.search": 1, "mail.search": 1}


def first_result(context: Any, results: Any) -> Any:
    from agents import ToolsToFinalOutputResult

    return ToolsToFinalOutputResult(is_final_output=True, final_output=results[0].output)


@pytest.mark.parametrize(
    "behavior", ["stop_on_first_tool", StopAtTools(stop_at_tool_names=["a"]), first_result]
)
@modes
async def test_an_answer_that_is_the_result_of_a_call_that_fitted_is_kept(mode, behavior):
    bodies: list[str] = []
    agent = agent_of(
        calls("a", "b"),
        tools=[tool("a", bodies), tool("b", bodies)],
        tool_use_behavior=behavior,
    )
    guard = Guard(Budget(max_tool_calls=1))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert bodies == ["a"]
    assert result.final_output == "a 1"
    assert outcome(result).final == "a 1"
    assert not unpaired(result.to_input_list())


@modes
async def test_repeated_ids_in_a_batch_and_across_turns(mode):
    bodies: list[str] = []
    agent = agent_of(
        calls(Call("a", "1", id="x")),
        calls(Call("a", "2", id="x")),
        says("Done."),
        tools=[tool("a", bodies)],
    )
    guard = Guard(Budget(max_tool_calls=5))
    ran: Any = await asyncio.gather(
        go(mode, agent, hooks=BudgetHooks(guard)), return_exceptions=True
    )
    assert guard.usage.tool_calls == len(bodies)
    assert guard.open_calls() == ()
    # Newer versions of the SDK refuse such a response.
    if not isinstance(ran[0], ModelBehaviorError):
        assert not unpaired(ran[0].to_input_list())
