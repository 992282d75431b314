"""Faults that were found by attack: each in `run`, `run_sync` and streamed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from decimal import Decimal
from typing import Any

import pytest
from agents import (
    Agent,
    ApplyPatchTool,
    ComputerProvider,
    ComputerTool,
    GuardrailFunctionOutput,
    InputGuardrail,
    InputGuardrailTripwireTriggered,
    ModelBehaviorError,
    ModelSettings,
    OpenAIProvider,
    OutputGuardrail,
    RunConfig,
    RunHooks,
    Runner,
    StopAtTools,
    ToolGuardrailFunctionOutput,
    ToolInputGuardrail,
    UserError,
    tool_namespace,
)
from agents.editor import ApplyPatchResult
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel, ValidationError

from budgetguard_core import Budget, FinalizeReserve, Guard, StopReason
from budgetguard_core.plugs import Plug
from budgetguard_core.testing import Call, ManualClock, Reply
from budgetguard_openai_agents import BudgetHooks, bounded_run, outcome
from conformance.budgetguard_openai_agents_driver import MemorySession, ScriptedModel, own_loop
from openai_agents_raw import RawModel, Screen, call_of, text_item
from openai_agents_runs import agent_of, calls, go, says, script_of, tool

WAYS = ("run", "run_sync", "run_streamed")
ways = pytest.mark.parametrize("way", WAYS)
# In real time: a stream that hangs never ends, a slow machine is no failure.
PATIENCE = 20


def ended(way: str, agent: Agent[Any], given: Any = "Go.", **options: Any) -> Any:
    """Run an agent to its end, where no event loop runs."""
    if way == "run_sync":
        with own_loop():
            return Runner.run_sync(agent, given, **options)
    return asyncio.run(asyncio.wait_for(go(way, agent, given, **options), PATIENCE))


class Answer(BaseModel):
    value: int


# 1. A stream always ends


class Stuck:
    """Stops its run, and then needs longer to unwind than anybody waits."""

    def __init__(self, why: str) -> None:
        self.clock = ManualClock()
        self.guard = Guard(Budget(max_seconds=1), clock=self.clock)
        self.released = asyncio.Event()
        self._why = why

    async def wait(self) -> None:
        if self._why == "abort":
            self.guard.abort("enough")
        else:
            self.clock.advance(2)
        await self.unwind()

    async def unwind(self) -> None:
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            await self.released.wait()
            raise


async def _nothing() -> None: ...


class StuckModel(ScriptedModel):
    def __init__(self, stuck: Stuck, *replies: Reply) -> None:
        super().__init__(script_of(agent_of(*replies or (says("Hi."),))))
        self.stuck = stuck

    async def _next(self, *given: Any) -> Any:
        await self.stuck.wait()
        return await super()._next(*given)


class StuckSession(MemorySession):
    def __init__(self, stuck: Stuck, name: str) -> None:
        super().__init__("s")
        self.stuck, self.name = stuck, name

    async def get_items(self, limit: int | None = None) -> Any:
        if self.name == "get":
            await self.stuck.wait()
        return await super().get_items(limit)

    async def add_items(self, items: Any) -> None:
        if self.name == "add":
            await self.stuck.wait()
        await super().add_items(items)


class StuckHooks(RunHooks[Any]):
    def __init__(self, stuck: Stuck) -> None:
        self.stuck = stuck

    async def on_llm_start(self, *args: Any) -> None:
        await self.stuck.wait()


@pytest.fixture
def short_patience(monkeypatch):
    monkeypatch.setattr("budgetguard_core.kit.cancel.UNCANCELLABLE", 0.05)
    monkeypatch.setattr("budgetguard_openai_agents._sessions._PATIENCE", 0.05)


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("place", ["model", "get", "add", "hook", "guardrail", "dispose"])
@pytest.mark.parametrize("why", ["abort", "deadline"])
@ways
def test_1_a_run_ends_within_the_grace_whatever_is_slow_to_unwind(way, place, why):
    stuck = Stuck(why)
    agent = agent_of(says("Hi."))
    inner, session = None, None
    if place == "model":
        agent.model = StuckModel(stuck)
    elif place in ("get", "add"):
        session = StuckSession(stuck, place)
    elif place == "hook":
        inner = StuckHooks(stuck)
    elif place == "guardrail":

        async def judge(*args: Any) -> GuardrailFunctionOutput:
            await stuck.wait()
            return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

        agent.input_guardrails = [InputGuardrail(judge)]
        agent.model = ScriptedModel(script_of(agent_of(Reply(hang=True))))
    else:

        async def dispose(**facts: Any) -> None:
            await stuck.unwind()

        provider = ComputerProvider(create=lambda **_: Screen([]), dispose=dispose)
        agent.tools = [ComputerTool(computer=provider)]
        agent.model = StuckModel(stuck)
    hooks = BudgetHooks(stuck.guard, inner)

    async def main() -> Any:
        result = await asyncio.wait_for(go(way, agent, session=session, hooks=hooks), PATIENCE)
        stuck.released.set()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(others, timeout=PATIENCE) if others else None
        return result

    if way == "run_sync":
        with own_loop():
            result = Runner.run_sync(agent, "Go.", session=session, hooks=hooks)
            loop = asyncio.get_event_loop_policy().get_event_loop()
            stuck.released.set()
            loop.run_until_complete(
                asyncio.wait(asyncio.all_tasks(loop) or {loop.create_task(_nothing())})
            )
    else:
        result = asyncio.run(main())
    assert outcome(result).status == "terminated"
    assert stuck.guard.open_calls() == ()


# 2. Runs on one agent do not mix


@pytest.mark.parametrize("way", ["run", "run_streamed"])
def test_2_two_runs_on_one_agent_have_a_computer_each(way):
    """`run_sync` has an event loop to itself, and so no other run beside it."""
    made: list[Any] = []

    def create(**facts: Any) -> Screen:
        made.append(Screen([]))
        return made[-1]

    turns = asyncio.Event()

    class Turns(RawModel):
        async def _wait(self) -> None:
            # The second click of the first run comes after the first one of the second run.
            if self.calls == 1 and not turns.is_set():
                turns.set()
                for _ in range(20):
                    await asyncio.sleep(0)

        async def get_response(self, *args: Any, **facts: Any) -> Any:
            await self._wait()
            return await super().get_response(*args, **facts)

        async def stream_response(self, *args: Any, **facts: Any) -> Any:
            await self._wait()
            async for event in super().stream_response(*args, **facts):
                yield event

    agent = Agent(
        name="main", tools=[ComputerTool(computer=ComputerProvider(create=create))], model="x"
    )

    async def one(number: int) -> Any:
        model = Turns(
            [call_of("computer", f"{number}-1")],
            [call_of("computer", f"{number}-2")],
            [text_item("Done.")],
        )
        config = RunConfig(model=model)
        return await go(way, agent, run_config=config, hooks=BudgetHooks(Budget(max_iterations=5)))

    async def both() -> None:
        await asyncio.gather(one(1), one(2))

    asyncio.run(both())
    assert sorted(one.bodies for one in made) == [["1-1", "1-2"], ["2-1", "2-2"]]


# 3. What nobody judged is no answer


class Ended(RunHooks[Any]):
    """Says when the agent has given its answer."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    async def on_agent_end(self, *args: Any) -> None:
        self.event.set()


@ways
@pytest.mark.parametrize("why", ["abort", "deadline"])
@pytest.mark.parametrize("with_session", [False, True])
def test_3_an_answer_that_a_guardrail_still_judges_is_none(way, why, with_session):
    clock = ManualClock()
    guard = Guard(Budget(max_seconds=1), clock=clock)
    ends = Ended()

    async def judge(*args: Any) -> GuardrailFunctionOutput:
        await ends.event.wait()
        for _ in range(9):
            await asyncio.sleep(0)
        if why == "abort":
            guard.abort("enough")
        else:
            clock.advance(2)
        await asyncio.Event().wait()
        raise AssertionError

    agent = agent_of(says("The secret is 42."), input_guardrails=[InputGuardrail(judge)])
    session = MemorySession("s") if with_session else None
    result = ended(way, agent, session=session, hooks=BudgetHooks(guard, ends))
    assert outcome(result).status == "terminated"
    assert "secret" not in str(result.final_output)
    assert "secret" not in str(result.to_input_list())
    if session is not None:
        assert "secret" not in str(asyncio.run(session.get_items()))


@ways
def test_3_a_tripwire_after_the_answer_is_a_failure_for_the_outcome_too(way):
    ends = Ended()
    found: list[Any] = []

    async def judge(*args: Any) -> GuardrailFunctionOutput:
        await ends.event.wait()
        for _ in range(9):
            await asyncio.sleep(0)
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=True)

    agent = agent_of(says("The secret is 42."), input_guardrails=[InputGuardrail(judge)])
    hooks = BudgetHooks(Budget(max_iterations=5), ends, on_outcome=found.append)
    with pytest.raises(InputGuardrailTripwireTriggered) as raised:
        ended(way, agent, hooks=hooks)
    assert outcome(raised.value).status == "failed"
    assert [one.status for one in found] == ["failed"]


# 4. Importing the adapter is enough

_ACTIVATE = """
import asyncio
import budgetguard_openai_agents
from agents import Runner, set_tracing_disabled
from budgetguard_core import Budget, Guard
from openai_agents_runs import agent_of, calls, script_of, tool, go
set_tracing_disabled(True)
for way in ("run_sync", "run", "run_streamed"):
    agent = agent_of(calls("search"), tools=[tool("search", [])])
    guard = Guard(Budget(max_model_calls=3))
    with guard.activate():
        if way == "run_sync":
            Runner.run_sync(agent, "Go.", max_turns=9)
        else:
            asyncio.run(go(way, agent, max_turns=9))
    print(script_of(agent).calls, guard.usage.model_calls)
"""


@pytest.mark.slow
def test_4_a_block_bounds_every_way_where_the_adapter_was_only_imported():
    command = [sys.executable, "-W", "ignore", "-c", _ACTIVATE]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd="tests")
    assert ran.stdout.split() == ["3"] * 6, ran.stderr


# 5. A model that is not known has no price


@ways
def test_5_a_prompt_without_a_model_is_unpriced(way):
    agent: Agent[Any] = Agent(name="main", prompt={"id": "pmpt_1"})
    budget = Budget(max_cost_usd=Decimal("5"))
    config = RunConfig(model_provider=OpenAIProvider(api_key="none"))
    result = ended(way, agent, hooks=BudgetHooks(budget), run_config=config)
    assert outcome(result).stop_reason is StopReason.UNPRICED_MODEL
    assert outcome(result).usage.model_calls == 0


# 6. Nothing of ours is among the user's guardrail results


def _allow(_: Any) -> ToolGuardrailFunctionOutput:
    return ToolGuardrailFunctionOutput.allow()


@ways
def test_6_a_paused_result_and_its_state_show_the_users_guardrails_only(way):
    guardrail = ToolInputGuardrail[Any](guardrail_function=_allow, name="mine")
    agent = agent_of(
        calls("search"),
        calls("send"),
        says("Done."),
        tools=[
            tool("search", [], tool_input_guardrails=[guardrail]),
            tool("send", [], needs_approval=True),
        ],
    )
    result = ended(way, agent, hooks=BudgetHooks(Budget(max_tool_calls=5)))
    assert result.interruptions
    names = [one.guardrail.get_name() for one in result.tool_input_guardrail_results]
    assert names == ["mine"]
    state = result.to_state().to_json()
    assert [one["guardrail"]["name"] for one in state["tool_input_guardrail_results"]] == ["mine"]
    # The counters are kept all the same.
    go_on = result.to_state()
    go_on.approve(result.interruptions[0])
    again = ended(way, agent, go_on, hooks=BudgetHooks(Budget(max_tool_calls=5)))
    assert outcome(again).usage.tool_calls == 2
    assert outcome(again).usage.model_calls == 3


@ways
def test_6_an_exception_shows_the_users_guardrails_only(way):
    agent = agent_of(calls("search"), calls("unknown"), tools=[tool("search", [])])
    with pytest.raises(ModelBehaviorError) as raised:
        ended(way, agent, hooks=BudgetHooks(Budget(max_iterations=5)))
    assert raised.value.run_data.tool_input_guardrail_results == []


# 7. The end has the form that the program asked for


@ways
def test_7_a_typed_last_answer_is_asked_with_its_schema(way):
    agent = agent_of(
        calls("search"), says('{"value": 42}'), tools=[tool("search", [])], output_type=Answer
    )
    reserve = FinalizeReserve(tokens=9000)
    budget = Budget(max_iterations=1, finalize_reserve=reserve)
    result = ended(way, agent, hooks=BudgetHooks(budget))
    assert result.final_output == Answer(value=42)
    assert outcome(result).final == Answer(value=42)
    assert outcome(result).finalized
    assert outcome(result).status == "terminated"


@ways
def test_7_a_last_answer_that_does_not_fit_its_schema_is_none(way):
    agent = agent_of(calls("search"), says("Er."), tools=[tool("search", [])], output_type=Answer)
    budget = Budget(max_iterations=1, finalize_reserve=FinalizeReserve(tokens=9000))
    result = ended(way, agent, hooks=BudgetHooks(budget))
    assert result.final_output is None
    assert outcome(result).status == "terminated"


@pytest.mark.parametrize("form", ["value", "dict", "async"])
@ways
def test_7_without_a_reserve_the_users_own_handler_gives_the_typed_end(way, form):
    asked: list[Any] = []

    def handler(about: Any) -> Any:
        asked.append(about)
        return {"final_output": Answer(value=7)} if form == "dict" else Answer(value=7)

    async def later(about: Any) -> Any:
        return handler(about)

    agent = agent_of(calls("search"), tools=[tool("search", [])], output_type=Answer)
    handlers: Any = {"max_turns": later if form == "async" else handler}
    result = ended(way, agent, hooks=BudgetHooks(Budget(max_iterations=1)), error_handlers=handlers)
    assert result.final_output == Answer(value=7)
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS
    assert len(asked) == 1
    assert len(asked[0].run_data.new_items) == 2
    kinds = [one.get("type") for one in result.to_input_list()]
    assert kinds.count("function_call") == kinds.count("function_call_output") == 1


@pytest.mark.parametrize(
    "handler",
    [None, lambda _: None, lambda _: "no Answer", lambda _: 1 / 0],
    ids=["none", "no answer", "no value of the type", "fails"],
)
@ways
def test_7_else_a_typed_end_is_none(way, handler):
    agent = agent_of(calls("search"), tools=[tool("search", [])], output_type=Answer)
    handlers: Any = None if handler is None else {"max_turns": handler}
    hooks = BudgetHooks(Budget(max_iterations=1))
    result = ended(way, agent, hooks=hooks, error_handlers=handlers)
    assert result.final_output is None
    assert outcome(result).final is None
    assert outcome(result).status == "terminated"
    assert result.new_items[-1].metadata["synthetic"]


# 8. The framework's own limit is one, however its handler ends the run


@ways
def test_8_a_handler_without_an_answer_is_the_frameworks_limit(way):
    agent = agent_of(calls("search"), tools=[tool("search", [])])
    hooks = BudgetHooks(Budget(max_iterations=15))
    handlers: Any = {"max_turns": lambda _: None}
    result = ended(way, agent, hooks=hooks, max_turns=2, error_handlers=handlers)
    assert outcome(result).stop_reason is StopReason.FRAMEWORK_LIMIT
    assert outcome(result).status == "terminated"
    assert script_of(agent).calls == 2


@ways
def test_8_a_handler_that_ends_the_run_is_the_frameworks_limit(way):
    agent = agent_of(calls("search"), tools=[tool("search", [])])
    handlers: Any = {"max_turns": lambda _: "Mine."}
    session = MemorySession("s")
    result = ended(
        way,
        agent,
        hooks=BudgetHooks(Budget(max_iterations=15)),
        max_turns=2,
        error_handlers=handlers,
        session=session,
    )
    assert result.final_output == "Mine."
    assert outcome(result).stop_reason is StopReason.FRAMEWORK_LIMIT
    stored = asyncio.run(session.get_items())
    assert str(stored).count("Mine.") == 1
    assert len(stored) == len(result.to_input_list())


# 9. Arguments that were refused, or let through


@ways
def test_9_an_outcome_can_be_resumed_from(way):
    agent = agent_of(calls("search"), tools=[tool("search", [])])
    first = ended(way, agent, hooks=BudgetHooks(Budget(max_iterations=2)))
    agent.model = agent_of(says("Done.")).model
    hooks = BudgetHooks(Budget(max_iterations=1), resume=outcome(first))
    again = ended(way, agent, first.to_input_list(), hooks=hooks)
    assert again.final_output == "Done."
    assert outcome(again).earlier_usage.iterations == 2


class Noting(ScriptedModel):
    """Writes down the settings that its calls are made with."""

    def __init__(self) -> None:
        super().__init__(script_of(agent_of(says("Hi."))))
        self.settings: list[ModelSettings] = []

    async def _next(self, instructions, given, settings, tools, handoffs):
        self.settings.append(settings)
        return await super()._next(instructions, given, settings, tools, handoffs)


@pytest.mark.parametrize("place", ["extra_args", "extra_body"])
@pytest.mark.parametrize("name", ["max_output_tokens", "max_completion_tokens", "max_tokens"])
@pytest.mark.parametrize("own", [40, 900])
@ways
def test_9_a_bound_beside_the_settings_is_one(way, place, name, own):
    model = Noting()
    given: Any = {place: {name: own, "user": "u"}}
    agent = Agent(name="main", model=model, model_settings=ModelSettings(**given))
    result = ended(way, agent, hooks=BudgetHooks(Budget(max_output_tokens_per_call=100)))
    assert result.final_output == "Hi."
    assert model.settings[0].max_tokens is None
    # Where the user has put it: some models take no other name.
    sent = dict(getattr(model.settings[0], place))
    sent.pop("prompt_cache_key", None)  # the SDK's own
    assert sent == {"user": "u", name: min(own, 100)}
    assert getattr(agent.model_settings, place) == {name: own, "user": "u"}


class OnlyCreates:
    def __init__(self) -> None:
        self.made: list[str] = []

    def create_file(self, operation: Any) -> ApplyPatchResult:
        self.made.append(operation.path)
        return ApplyPatchResult(status="completed", output="made")


@ways
def test_9_an_editor_may_lack_methods(way):
    editor: Any = OnlyCreates()
    model = RawModel([call_of("apply_patch", "a.txt")], [text_item("Done.")])
    agent = Agent(name="main", model=model, tools=[ApplyPatchTool(editor=editor)])
    result = ended(way, agent, hooks=BudgetHooks(Budget(max_tool_calls=3)))
    assert result.final_output == "Done."
    assert editor.made == ["a.txt"]


def test_9_a_computer_is_disposed_of_when_the_run_is_cancelled(monkeypatch):
    """As without a guard. A consumer who is cancelled waits for no stream of the SDK's."""
    monkeypatch.setattr("budgetguard_core.kit.cancel.UNCANCELLABLE", 0.01)
    done: list[str] = []

    async def main() -> None:
        called, released = asyncio.Event(), asyncio.Event()

        async def dispose(**facts: Any) -> None:
            asyncio.get_running_loop().call_later(0.1, released.set)
            await released.wait()
            done.append("disposed")

        class Hanging(ScriptedModel):
            async def _next(self, *given: Any) -> Any:
                called.set()
                await asyncio.Event().wait()

        provider = ComputerProvider(create=lambda **_: Screen([]), dispose=dispose)
        model = Hanging(script_of(agent_of(says("Hi."))))
        agent = Agent(name="main", model=model, tools=[ComputerTool(computer=provider)])
        work = asyncio.create_task(bounded_run(agent, "Go.", budget=Budget(max_iterations=3)))
        await called.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(main())
    assert done == ["disposed"]


# 10. Answers without a body, and turns of a sub-agent


@ways
def test_10_a_sub_agent_keeps_the_sdks_ten_turns_where_no_cap_is_on_turns(way):
    below = agent_of(
        lambda number: calls(Call("search", str(number))), tools=[tool("search", [])], name="below"
    )
    ask = below.as_tool("ask", "Ask the one below.")
    agent = agent_of(calls("ask"), says("Done."), tools=[ask])
    result = ended(way, agent, hooks=BudgetHooks(Budget(max_total_tokens=20_000)))
    assert script_of(below).calls == 10
    assert result.final_output == "Done."


# 11. Answers that fitted, answers that nobody judged, figures that are none, names


@pytest.mark.parametrize("behavior", ["stop_on_first_tool", StopAtTools(stop_at_tool_names=["a"])])
@ways
def test_11_the_result_of_the_call_that_fitted_completes_the_run(way, behavior):
    bodies: list[str] = []
    agent = agent_of(
        calls("a", "b"),
        tools=[tool("a", bodies), tool("b", bodies)],
        tool_use_behavior=behavior,
    )
    result = ended(way, agent, hooks=BudgetHooks(Budget(max_tool_calls=1)))
    assert bodies == ["a"]
    assert result.final_output == "a 1"
    assert outcome(result).status == "completed"
    assert outcome(result).stop_reason is StopReason.COMPLETED


@ways
def test_11_an_answer_behind_a_hung_output_guardrail_is_in_no_session(way):
    guard = Guard(Budget(max_iterations=5))

    async def judge(*args: Any) -> GuardrailFunctionOutput:
        guard.abort("enough")
        await asyncio.Event().wait()
        raise AssertionError

    agent = agent_of(
        calls("search"),
        says("The secret is 42."),
        tools=[tool("search", [])],
        output_guardrails=[OutputGuardrail(judge)],
    )
    session = MemorySession("s")
    result = ended(way, agent, session=session, hooks=BudgetHooks(guard))
    assert outcome(result).status == "terminated"
    stored = asyncio.run(session.get_items())
    assert "secret" not in str(stored)
    assert "secret" not in str(result.to_input_list())
    assert len(stored) == len(result.to_input_list())


@ways
def test_11_a_fraction_in_a_usage_record_fails_as_without_a_guard_and_is_charged(way):
    """The SDK's own record of usage takes no fractions, in a stream nobody comes before it."""
    agent = Agent(name="main", model=RawModel([text_item("Hi.")], usage=(10.5, 5)))
    guard = Guard(Budget(max_iterations=5))
    for options in ({}, {"hooks": BudgetHooks(guard)}):
        with pytest.raises(ValidationError, match="fractional part"):
            ended(way, agent, **options)
    assert guard.usage.model_calls == 1
    assert guard.usage.total_tokens > 0


@ways
def test_11_tools_of_one_name_in_two_namespaces_share_its_quota(way):
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

    model = RawModel([asked("web", 1), asked("mail", 2)], [text_item("Done.")])
    agent = Agent(name="main", model=model, tools=[*named("web"), *named("mail")])
    result = ended(way, agent, hooks=BudgetHooks(Budget(tool_quotas={"search": 1})))
    assert result.final_output == "Done."
    assert bodies == ["search"]


# What the SDK's own suite has shown


class LazySession(MemorySession):
    """Has no id before its first use, as a conversation at OpenAI."""

    is_there = False

    def __getattribute__(self, name: str) -> Any:
        if name == "session_id" and not self.is_there:
            raise ValueError("not yet available")
        return super().__getattribute__(name)

    async def get_items(self, limit: int | None = None) -> Any:
        self.is_there = True
        return await super().get_items(limit)


@ways
def test_a_session_may_have_no_id_before_its_first_use(way):
    result = ended(
        way,
        agent_of(says("Hi.")),
        session=LazySession("s"),
        hooks=BudgetHooks(Budget(max_iterations=3)),
    )
    assert result.final_output == "Hi."


@ways
def test_what_the_sdk_refuses_as_an_approval_it_refuses_within_a_budget(way):
    send = tool("send", [])
    send.needs_approval = "yes"  # type: ignore[assignment]
    for options in ({}, {"hooks": BudgetHooks(Budget(max_iterations=5))}):
        with pytest.raises(UserError, match="needs_approval"):
            ended(way, agent_of(calls("send"), tools=[send]), **options)


# A store that is asked does not hold up the event loop


class SlowStore(Plug):
    """Answers when the event loop has done something else meanwhile."""

    waits = True

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.loop: Any = None

    def reserve(self, owner: Any, ask: Any) -> bool:
        went_on = threading.Event()
        self.loop.call_soon_threadsafe(went_on.set)
        self.asked.append(went_on.wait(PATIENCE))
        return True


@pytest.mark.parametrize("way", ["run", "run_streamed"])
def test_the_event_loop_goes_on_while_a_store_is_asked(way, monkeypatch):
    store = SlowStore()
    monkeypatch.setattr("budgetguard_core.guard.plugs_of", lambda guard, **_: (store,))
    agent = agent_of(calls("search"), says("Done."), tools=[tool("search", [])])

    async def main() -> Any:
        store.loop = asyncio.get_running_loop()
        return await go(way, agent, hooks=BudgetHooks(Budget(max_iterations=5)))

    assert asyncio.run(main()).final_output == "Done."
    assert set(store.asked) == {True}
