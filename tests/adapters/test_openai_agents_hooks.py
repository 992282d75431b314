"""Hooks as users write them: subclasses, composites, own guardrails; and what stays of runs."""

from __future__ import annotations

import ast
import asyncio
import gc
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from agents import (
    RunHooks,
    Runner,
    ToolGuardrailFunctionOutput,
    ToolInputGuardrail,
    function_tool,
)
from agents.agent import AgentBase
from agents.run import AgentRunner, get_default_agent_runner, set_default_agent_runner

from budgetguard_core import AdapterError, Budget, Guard, SqliteStore, StopReason
from budgetguard_core.testing import Call, ManualClock
from budgetguard_openai_agents import (
    BudgetHooks,
    bounded_run,
    bounded_run_streamed,
    outcome,
    uninstall,
)
from budgetguard_openai_agents import _seams as seams
from budgetguard_openai_agents._runner import install
from openai_agents_runs import MODES, agent_of, calls, go, says, script_of, tool, unpaired

pytestmark = pytest.mark.anyio
modes = pytest.mark.parametrize("mode", MODES)
STEPS = ["agent_start", "llm_start", "llm_end", "tool_start", "tool_end", "llm_start", "llm_end"]


class Noting:
    """Writes down what it is called for, and calls the next hooks."""

    def __init__(self, seen: list[str], *args: Any) -> None:
        super().__init__(*args)
        self.seen = seen

    async def on_agent_start(self, *args: Any) -> None:
        self.seen.append("agent_start")
        await super().on_agent_start(*args)  # type: ignore[misc]

    async def on_agent_end(self, *args: Any) -> None:
        self.seen.append("agent_end")
        await super().on_agent_end(*args)  # type: ignore[misc]

    async def on_llm_start(self, *args: Any) -> None:
        self.seen.append("llm_start")
        await super().on_llm_start(*args)  # type: ignore[misc]

    async def on_llm_end(self, *args: Any) -> None:
        self.seen.append("llm_end")
        await super().on_llm_end(*args)  # type: ignore[misc]

    async def on_tool_start(self, *args: Any) -> None:
        self.seen.append("tool_start")
        await super().on_tool_start(*args)  # type: ignore[misc]

    async def on_tool_end(self, *args: Any) -> None:
        self.seen.append("tool_end")
        await super().on_tool_end(*args)  # type: ignore[misc]


class NotingBudget(Noting, BudgetHooks):
    pass


class NotingHooks(Noting, RunHooks[Any]):
    pass


@modes
async def test_a_subclass_with_its_own_methods_is_called_and_so_are_its_inner_hooks(mode):
    seen: list[str] = []
    inner: list[str] = []
    hooks = NotingBudget(seen, Budget(max_iterations=9), NotingHooks(inner))
    agent = agent_of(calls("a"), says("Done."), tools=[tool("a", [])])
    result = await go(mode, agent, hooks=hooks)
    assert seen == inner == [*STEPS, "agent_end"]
    assert outcome(result).usage.iterations == 2


@modes
async def test_a_composite_says_exactly_why_not(mode):
    class Both(RunHooks[Any]):
        def __init__(self, *all_of_them: RunHooks[Any]) -> None:
            self.all_of_them = all_of_them

        async def on_llm_start(self, *args: Any) -> None:
            for hooks in self.all_of_them:
                await hooks.on_llm_start(*args)

    agent = agent_of(says("Hi."))
    budget = BudgetHooks(Budget(max_iterations=1))
    with pytest.raises(AdapterError, match="inner hooks"):
        await go(mode, agent, hooks=Both(budget, RunHooks()))
    assert script_of(agent).calls == 0
    result = await go(mode, agent, hooks=BudgetHooks(Budget(), Both(RunHooks(), RunHooks())))
    assert result.final_output == "Hi."


@pytest.mark.parametrize("failing", [None, lambda _, error: f"oh: {error}"])
@modes
async def test_a_failing_tool_is_reported_as_failed(mode, failing):
    def broken() -> str:
        raise ValueError("no disk")

    options = {} if failing is None else {"failure_error_function": failing}
    agent = agent_of(calls("broken"), says("Bad."), tools=[function_tool(broken, **options)])
    events: list[Any] = []
    result = await go(mode, agent, hooks=BudgetHooks(Budget(), sinks=[events.append]))
    assert [record.status for record in outcome(result).tool_calls] == ["failed"]
    settled = [event for event in events if event.event == "tool_call_settled"]
    assert settled[0].error == "ValueError"
    assert result.final_output == "Bad."


@modes
async def test_guardrails_of_the_users_own_tools_are_not_edited(mode):
    checked: list[str] = []

    def check(data: Any) -> ToolGuardrailFunctionOutput:
        checked.append(data.context.tool_call_id)
        return ToolGuardrailFunctionOutput.allow()

    guardrail = ToolInputGuardrail(check)
    owned = tool("a", [])
    owned.tool_input_guardrails = mine = [guardrail]
    during: list[Any] = []

    async def look() -> str:
        during.append((owned.tool_input_guardrails, list(mine)))
        return "seen"

    agent = agent_of(calls("a", "look", "a"), tools=[owned, function_tool(look)])
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_tool_calls=2)))
    assert during == [(mine, [guardrail])]
    assert owned.tool_input_guardrails is mine
    assert mine == [guardrail]
    assert len(checked) == 2
    # Older releases do not report these of a run that was stopped.
    reported = [one.guardrail for one in result.tool_input_guardrail_results]
    assert all(one is guardrail for one in reported)


async def test_the_default_runner_and_the_tools_can_be_put_back():
    install()
    before = get_default_agent_runner()
    assert isinstance(before.previous, AgentRunner)
    try:
        uninstall()
        assert get_default_agent_runner() is before.previous
        with pytest.raises(AdapterError, match="set_default_agent_runner"):
            await Runner.run(agent_of(says("Hi.")), "Go.", hooks=_made(before))
    finally:
        uninstall()
        install()
    result = await Runner.run(agent_of(says("Hi.")), "Go.", hooks=BudgetHooks(Budget()))
    assert outcome(result).status == "completed"


def _made(runner: Any) -> BudgetHooks:
    hooks = BudgetHooks(Budget(max_iterations=1))
    uninstall()
    return hooks


SEAMS = [(owner, name) for owner, names in seams.NEEDED.items() for name in names.split()]


@pytest.fixture
def uninstalled():
    previous = get_default_agent_runner()
    uninstall()
    yield
    set_default_agent_runner(previous)
    install()


@pytest.mark.parametrize(("owner", "name"), SEAMS, ids=lambda one: getattr(one, "__name__", one))
def test_a_release_that_lacks_a_seam_is_refused_with_what_is_supported(owner, name, uninstalled):
    with pytest.MonkeyPatch.context() as patch:
        fields = getattr(owner, "__dataclass_fields__", {})
        patch.delitem(fields, name, raising=False)
        for base in getattr(owner, "__mro__", (owner,)):
            if name in vars(base):
                patch.delattr(base, name)
        with pytest.raises(AdapterError, match=rf"{name}.*openai-agents>="):
            BudgetHooks(Budget())
    BudgetHooks(Budget())


def test_a_release_that_lacks_a_part_is_refused(uninstalled, monkeypatch):
    made = function_tool(lambda: "", name_override="made")
    made.on_invoke_tool = made.on_invoke_tool.__call__
    monkeypatch.setattr(seams.agents, "function_tool", lambda *_, **__: made)
    with pytest.raises(AdapterError, match="_invoke_tool_impl"):
        BudgetHooks(Budget())


def test_every_private_name_that_is_used_is_looked_for():
    tree = ast.parse(Path(seams.__file__).read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    needed = {name for names in seams.NEEDED.values() for name in names.split()}
    assert {name for name in used if name.startswith("_") and not name.startswith("__")} <= needed
    # Elsewhere there are none: ruff's SLF001 sees to that, but for keywords.
    private = {name for name in needed if name.startswith("_")}
    for path in Path(seams.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and (node.arg or "").startswith("_"):
                assert node.arg in private


# What stays


@pytest.mark.filterwarnings("ignore:coroutine 'run_single_turn' was never awaited")
@modes
async def test_a_guard_is_free_after_a_run_that_never_began(mode):
    guard = Guard(Budget(max_iterations=5))
    agent = agent_of(says("Hi."))
    if mode == "run_streamed":
        result = bounded_run_streamed(agent, "Go.", budget=guard)
        result.run_loop_task.cancel()
        await asyncio.gather(result.run_loop_task, return_exceptions=True)
    else:
        task = asyncio.create_task(bounded_run(agent, "Go.", budget=guard))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    with pytest.raises(Exception, match="conversation_id"):
        await bounded_run(agent, "Go.", budget=guard, session=object(), conversation_id="x")
    # The SDK leaves a coroutine behind when it is cancelled there.
    gc.collect()
    # The seat is free: the next run is on the guard itself.
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert outcome(result).run_id == guard.run_id


# How a run ends


@modes
async def test_max_turns_given_to_bounded_run_holds_even_at_the_sdks_default(mode):
    agent = agent_of(lambda n: calls(Call("a", str(n))), tools=[tool("a", [])])
    run = bounded_run if mode == "run" else bounded_run_streamed
    result: Any = run(agent, "Go.", budget=Budget(max_iterations=30), max_turns=10)
    if mode == "run":
        result = await result
    else:
        async for _ in result.stream_events():
            pass
    assert script_of(agent).calls == 10
    assert outcome(result).stop_reason is StopReason.FRAMEWORK_LIMIT


@modes
async def test_a_guard_of_its_own_on_a_sub_agent_is_charged_beside_the_parents(mode):
    below = agent_of(lambda n: calls(Call("look", str(n))), name="worker", tools=[tool("look", [])])
    own = Guard(Budget(max_iterations=50))
    ask = below.as_tool(tool_name="ask", tool_description="Ask.", hooks=BudgetHooks(own))
    agent = agent_of(calls("ask"), tools=[ask])
    guard = Guard(Budget(max_model_calls=5))
    result = await go(mode, agent, hooks=BudgetHooks(guard))
    assert script_of(agent).calls + script_of(below).calls == 5
    assert outcome(result).stop_reason is StopReason.MAX_MODEL_CALLS
    assert not unpaired(result.to_input_list())


@pytest.mark.parametrize("shape", ["text", "structured", "extractor"])
@modes
async def test_a_partial_result_of_a_child_is_one_text(mode, shape):
    from conformance.budgetguard_openai_agents_driver import Answer

    async def extract(result: Any) -> str:
        return str(result.final_output.value)

    below = agent_of(
        lambda n: calls(Call("look", str(n))),
        name="worker",
        tools=[tool("look", [])],
        output_type=None if shape == "text" else Answer,
    )
    ask = below.as_tool(
        tool_name="ask",
        tool_description="Ask.",
        hooks=BudgetHooks(Budget(max_iterations=2)),
        custom_output_extractor=extract if shape == "extractor" else None,
    )
    agent = agent_of(calls("ask"), says("Thanks."), tools=[ask])
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=9)))
    outputs = [i["output"] for i in result.to_input_list() if "output" in i]
    assert len(outputs) == 1
    assert outputs[0].count("This run was stopped") == 1
    assert result.final_output == "Thanks."
    assert outcome(result).status == "completed"


# The deadline


@pytest.mark.parametrize("where", ["guardrail", "instructions", "mcp", "session", "model", "tool"])
@modes
async def test_the_deadline_begins_with_the_run_wherever_it_hangs(mode, where):
    """The clock is moved by hand, so that no machine is too slow for it."""
    from agents import GuardrailFunctionOutput, InputGuardrail

    from conformance.budgetguard_openai_agents_driver import MemorySession
    from openai_agents_raw import OneToolServer

    clock = ManualClock()
    guard = Guard(Budget(max_seconds=0.05), clock=clock)

    async def hang(*given: Any, **facts: Any) -> Any:
        clock.advance(1)
        await asyncio.get_running_loop().create_future()

    async def wait() -> str:
        return await hang()

    async def check(*_: Any) -> GuardrailFunctionOutput:
        await hang()
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

    options: dict[str, Any] = {}
    session = MemorySession("s")
    if where == "guardrail":
        options["input_guardrails"] = [InputGuardrail(check, run_in_parallel=False)]
    elif where == "instructions":

        async def instructions(context: Any, agent: Any) -> str:
            return await hang()

        options["instructions"] = instructions
    elif where == "mcp":
        server = OneToolServer([])
        server.list_tools = hang  # type: ignore[method-assign]
        options["mcp_servers"] = [server]
    elif where == "session":
        load = session.get_items

        async def once(*args: Any, **facts: Any) -> Any:
            session.get_items = load  # type: ignore[method-assign]
            await hang()

        session.get_items = once  # type: ignore[method-assign]
    agent = agent_of(calls("wait"), says("Never."), **options)
    if where == "model":
        agent.model.get_response = hang  # type: ignore[method-assign]

        async def stream(*_: Any, **__: Any) -> Any:
            await hang()
            yield None

        agent.model.stream_response = stream  # type: ignore[method-assign]
    agent.tools = [function_tool(wait)]
    result = await go(mode, agent, "Hello?", session=session, hooks=BudgetHooks(guard))
    assert outcome(result).stop_reason is StopReason.MAX_SECONDS
    stored = await session.get_items()
    assert stored[0]["content"] == "Hello?"
    assert stored[-1]["role"] == "assistant"
    assert not unpaired(stored)
    assert len(stored) == len(result.to_input_list())
    assert guard.usage.seconds >= 1


@modes
async def test_a_store_gets_what_is_new(mode, tmp_path):
    given: list[int] = []

    class Counting(SqliteStore):
        def append(self, snapshot: Any, **facts: Any) -> Any:
            given.append(len(snapshot.messages))
            return super().append(snapshot, **facts)

    turns = 20
    agent = agent_of(*[calls("a")] * (turns - 1), says("Done."), tools=[tool("a", [])])
    hooks = BudgetHooks(Budget(max_iterations=99), store=Counting(tmp_path / "runs.db"))
    result = await go(mode, agent, hooks=hooks)
    whole = len(result.to_input_list())
    assert whole == 2 * turns
    # A call and its result after the answer, the result again before the next one, the end whole.
    assert sum(given[:-1]) <= 2 * whole
    assert given[-1] == whole


async def test_what_somebody_else_has_put_around_a_method_does_not_hide_the_budget():
    own = AgentBase.get_all_tools

    @wraps(own)
    async def traced(self: Any, context: Any) -> Any:
        return await own(self, context)

    AgentBase.get_all_tools = traced  # type: ignore[method-assign]
    try:
        bodies: list[str] = []
        agent = agent_of(calls("a", "a", "a"), says("Done."), tools=[tool("a", bodies)])
        result = await Runner.run(agent, "Go.", hooks=BudgetHooks(Budget(tool_quotas={"a": 2})))
        assert len(bodies) == 2
        assert result.final_output == "Done."
    finally:
        AgentBase.get_all_tools = own  # type: ignore[method-assign]
