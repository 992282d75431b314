"""A stored history and the returned one are the same after every ending, and can be sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrail,
    OpenAIResponsesModel,
    OutputGuardrail,
    RunConfig,
    RunHooks,
    handoff,
)
from agents.extensions import handoff_filters
from agents.extensions.memory import AdvancedSQLiteSession
from agents.memory import SessionSettings
from agents.run import ModelInputData
from openai import AsyncOpenAI
from openai.types.responses import ResponseReasoningItem
from openai.types.responses.response_reasoning_item import Summary

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.kit import entered, part
from budgetguard_core.testing import Reply
from budgetguard_openai_agents import BudgetHooks, _sessions, outcome
from conformance.budgetguard_openai_agents_driver import MemorySession
from openai_agents_raw import RawModel, call_of, toolbox
from openai_agents_runs import MODES, agent_of, calls, go, says, tool, unpaired
from strict_openai_server import NAME, StrictServer, check_responses_input

pytestmark = pytest.mark.anyio
modes = pytest.mark.parametrize("mode", MODES)
sessions = pytest.mark.parametrize("kind", ["sqlite", "advanced"])


@pytest.fixture
def server(httpserver):
    server = StrictServer(httpserver)
    yield server
    assert server.refusals == []


@pytest.fixture
async def client(httpserver):
    async with AsyncOpenAI(
        base_url=httpserver.url_for("/v1"), api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.fixture
def session_of():
    made: list[Any] = []

    def make(kind: str) -> Any:
        if kind == "sqlite":
            return MemorySession("s")
        made.append(AdvancedSQLiteSession(session_id="s", create_tables=True))
        return made[-1]

    yield make
    for one in made:
        one.close()


def plain(items: Any) -> list[Any]:
    """Write a history so that two forms of the same item are equal."""
    found = []
    for item in items:
        content = item.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text")) for part in content)
        role = item.get("role")
        found.append((item.get("type") if role is None else role, item.get("call_id"), content))
    return found


class Stage:
    """Stops a run at one moment of it."""

    def __init__(self, guard: Guard, moment: str) -> None:
        self.guard = guard
        self.moment = moment

    async def reached(self, moment: str) -> None:
        if moment == self.moment:
            self.guard.abort(f"at {moment}")
            await asyncio.get_running_loop().create_future()


MOMENTS = ("load", "input", "instructions", "tool", "output", "final")


@pytest.mark.sample(7)
@sessions
@pytest.mark.parametrize("moment", MOMENTS)
@modes
async def test_an_abort_at_any_moment(mode, moment, kind, server, client, session_of):
    """The second run of a conversation is stopped, and a third one goes on."""
    session = session_of(kind)
    guard = Guard(Budget(max_iterations=9))
    stage = Stage(guard, moment)
    began: list[bool] = []

    async def judge(*_: Any) -> GuardrailFunctionOutput:
        await stage.reached("output")
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

    async def before(*_: Any) -> GuardrailFunctionOutput:
        await stage.reached("input")
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

    async def instructions(context: Any, agent: Any) -> str:
        if began:
            await stage.reached("instructions")
        return "Be brief."

    async def search() -> str:
        if began:
            await stage.reached("tool")
        return f"found {len(server.requests)}"

    from agents import function_tool

    agent = Agent(
        name="main",
        model=OpenAIResponsesModel(NAME, client),
        instructions=instructions,
        tools=[function_tool(search)],
    )
    server.texts = {1: "First.", 3: "Second.", 4: "Third.", 5: "Fourth."}
    await go(mode, agent, "One.", session=session)
    began.append(True)
    agent.output_guardrails = [OutputGuardrail(judge)]
    agent.input_guardrails = [InputGuardrail(before, run_in_parallel=False)]
    load = session.get_items
    if moment == "load":

        async def slow(*args: Any, **facts: Any) -> Any:
            session.get_items = load
            await stage.reached("load")

        session.get_items = slow
    if moment == "final":
        # A budget that is used up when the answer comes changes nothing of it.
        guard = Guard(Budget(max_iterations=2))
    result = await go(mode, agent, "Two.", session=session, hooks=BudgetHooks(guard))
    if moment == "final":
        assert outcome(result).status == "completed"
        assert result.final_output == "Second."
    else:
        assert outcome(result).stop_reason is StopReason.ABORTED
    stored = await session.get_items()
    returned = result.to_input_list()
    if mode == "run" or moment != "final":
        assert plain(stored) == plain(returned)
    assert [item["content"] for item in stored if item.get("role") == "user"] == ["One.", "Two."]
    assert not unpaired(stored)
    check_responses_input(stored)
    check_responses_input(returned)
    agent.input_guardrails, agent.output_guardrails = [], []
    server.texts = dict.fromkeys(range(20), "Third.")
    began.clear()
    again = await go(mode, agent, "Three.", session=session)
    assert again.final_output == "Third."
    assert plain(await session.get_items())[: len(stored)] == plain(stored)


@pytest.mark.sample(5)
@sessions
@pytest.mark.parametrize("budget", [{"max_iterations": 2}, {"max_tool_calls": 3}], ids=str)
@modes
async def test_a_stop_in_the_middle(mode, budget, kind, server, client, session_of):
    session = session_of(kind)
    server.calls = [("search", "{}")] * 2
    agent = Agent(name="main", model=OpenAIResponsesModel(NAME, client), tools=[tool("search", [])])
    result = await go(mode, agent, "One.", session=session, hooks=BudgetHooks(Budget(**budget)))
    assert outcome(result).status == "terminated"
    stored = await session.get_items()
    assert plain(stored) == plain(result.to_input_list())
    check_responses_input(stored)
    server.texts = dict.fromkeys(range(2, 20), "Done.")
    again = await go(mode, agent, "Two.", session=session, hooks=BudgetHooks(Budget()))
    assert again.final_output == "Done."


@modes
async def test_an_input_filter_loses_no_message(mode, server, client):
    guard = Guard(Budget(max_iterations=9))
    entered_tool = asyncio.Event()

    async def hang() -> str:
        entered_tool.set()
        await asyncio.get_running_loop().create_future()
        return "never"

    from agents import function_tool

    agent = Agent(
        name="main",
        model=OpenAIResponsesModel(NAME, client),
        tools=[function_tool(hang, name_override="search")],
    )

    def last_only(data: Any) -> ModelInputData:
        return ModelInputData(input=data.model_data.input[-1:], instructions=None)

    given = [{"role": "user", "content": text} for text in ("One.", "Two.", "Three.")]
    config = RunConfig(call_model_input_filter=last_only)
    run = go(mode, agent, given, run_config=config, hooks=BudgetHooks(guard))
    task = asyncio.create_task(run)
    await entered_tool.wait()
    guard.abort()
    result = await task
    assert len(server.requests[0]["input"]) == 1
    users = [i["content"] for i in result.to_input_list() if i.get("role") == "user"]
    assert users == ["One.", "Two.", "Three."]


@pytest.mark.slow
@modes
async def test_a_session_that_hangs_does_not_hold_the_result(mode, server, client, monkeypatch):
    monkeypatch.setattr(_sessions, "_PATIENCE", 0.05)
    session = MemorySession("s")
    server.calls = [("search", "{}")]
    agent = Agent(name="main", model=OpenAIResponsesModel(NAME, client), tools=[tool("search", [])])
    read = session.get_items
    reads: list[int] = []

    async def once(*args: Any, **facts: Any) -> Any:
        reads.append(1)
        if len(reads) > 1:
            await asyncio.get_running_loop().create_future()
        return await read(*args, **facts)

    session.get_items = once  # type: ignore[method-assign]
    result = await go(mode, agent, session=session, hooks=BudgetHooks(Budget(max_iterations=1)))
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS
    assert any("session" in error for error in outcome(result).errors)


def said(role: str, text: str) -> Any:
    return {"role": role, "content": text}


def call(call_id: str, output: str | None = None) -> Any:
    if output is None:
        return {"type": "function_call", "call_id": call_id, "name": "a", "arguments": "{}"}
    return {"type": "function_call_output", "call_id": call_id, "output": output}


@pytest.mark.parametrize("limit", [1, 2, 3, 6])
@modes
async def test_a_session_that_shows_its_last_items_alone_is_read_to_its_beginning(mode, limit):
    session = MemorySession("s")
    session.session_settings = SessionSettings(limit=limit)
    for turn in range(2):
        agent = agent_of(calls("search", "search"), tools=[tool("search", [])])
        budget = Budget(max_iterations=3)
        result = await go(mode, agent, f"Turn {turn}.", session=session, hooks=BudgetHooks(budget))
        items = await session.get_items(limit=100)
        assert len(items) == 14 * (turn + 1)
        assert not unpaired(items)
        assert plain(items) == plain(result.to_input_list())


class RenamingSession(MemorySession):
    """Gives items ids of its own, as a conversation at OpenAI does."""

    async def get_items(self, limit: int | None = None) -> list[Any]:
        items: list[Any] = await super().get_items(limit)
        return [{**one, "id": f"own_{n}"} for n, one in enumerate(items)]


@pytest.mark.parametrize("cap", ["max_iterations", "max_tool_calls"])
@pytest.mark.parametrize("session_of", [MemorySession, RenamingSession])
@modes
async def test_a_session_with_ids_of_its_own_holds_the_same_items(mode, session_of, cap):
    session = session_of("s")
    for turn in range(2):
        thoughts = [
            ResponseReasoningItem(
                id=f"rs_{turn}_{n}",
                summary=[Summary(text="Well.", type="summary_text")],
                type="reasoning",
            )
            for n in range(3)
        ]
        asked = [[one, call_of("function", one.id)] for one in thoughts]
        agent = Agent(name="main", model=RawModel(*asked), tools=[toolbox([])["function"]])
        hooks = BudgetHooks(Budget(**{cap: 2}, loop_detection=None))
        result = await go(mode, agent, f"Turn {turn}.", session=session, hooks=hooks)
        assert outcome(result).stop_reason == cap
        items = await session.get_items()
        assert plain(items) == plain(result.to_input_list())
        assert not unpaired(items)


@modes
async def test_the_ids_of_reasoning_are_left_out_where_the_user_wants_it(mode):
    """A provider that stores nothing does not know them in the next request."""
    thought = ResponseReasoningItem(id="rs_1", summary=[], type="reasoning")
    model = RawModel([thought, call_of("function", 1)])
    agent = Agent(name="main", model=model, tools=[toolbox([])["function"]])
    config = RunConfig(reasoning_item_id_policy="omit")
    hooks = BudgetHooks(Budget(max_iterations=1))
    result = await go(mode, agent, run_config=config, hooks=hooks)
    assert "rs_1" not in str(result.to_input_list())
    assert result.to_state()._reasoning_item_id_policy == "omit"


@pytest.mark.parametrize("fresh", [True, False])
@modes
async def test_turns_that_end_with_the_same_words_are_all_kept(mode, fresh):
    """A stop says the same each time; a guard that is used up says it at once."""
    session, guard = MemorySession("s"), Guard(Budget(max_iterations=1))
    for turn in range(4):
        agent = agent_of(*[calls("search")] * 9, tools=[tool("search", [])])
        hooks = BudgetHooks(Budget(max_iterations=1) if fresh else guard)
        result = await go(mode, agent, f"Turn {turn}.", session=session, hooks=hooks)
        items = await session.get_items()
        assert plain(items) == plain(result.to_input_list())
        assert [one["content"] for one in items if part(one, "role") == "user"] == [
            f"Turn {number}." for number in range(turn + 1)
        ]
        assert sum(part(one, "role") == "assistant" for one in items) == turn + 1


def test_the_frame_of_an_ended_run_bounds_nothing():
    run = BudgetHooks(Budget(max_iterations=1)).envelope.open()
    run.end()
    with entered(run.frame()):
        from budgetguard_core.kit import current_guard

        assert current_guard() is None


@pytest.mark.parametrize("stop", ["cap", "abort"])
@modes
async def test_what_the_filter_of_a_handoff_took_away_does_not_come_back(mode, stop):
    """A stopped run has the history that the SDK gives to one that is not."""

    def team(last: Any) -> Any:
        other = agent_of(calls("look"), last, name="other", tools=[tool("look", [])])
        return agent_of(
            calls("search"),
            Reply(handoff="other"),
            tools=[tool("search", [])],
            handoffs=[handoff(other, input_filter=handoff_filters.remove_all_tools)],
        )

    def names(items: Any) -> list[Any]:
        return [item.get("name") or item.get("type") or item["role"] for item in items]

    before = await go(mode, team(says("Done.")), session=(bare := MemorySession("bare")))
    guard = Guard(Budget(max_iterations=3 if stop == "cap" else 9))

    class Aborting(RunHooks[Any]):
        async def on_llm_start(self, *args: Any) -> None:
            if stop == "abort" and guard.usage.iterations == 4:
                guard.abort("enough")

    session = MemorySession("bounded")
    agent = team(Reply(hang=True))
    result = await go(mode, agent, session=session, hooks=BudgetHooks(guard, Aborting()))
    assert outcome(result).status == "terminated"
    stored = await session.get_items()
    assert names(stored)[:-1] == names(await bare.get_items())[:-1]
    assert not unpaired(stored)
    returned = result.to_input_list()
    assert not unpaired(returned)
    held = {item["call_id"] for item in stored if "call_id" in item}
    assert {item["call_id"] for item in returned if "call_id" in item} <= held
    if stop == "cap":
        assert names(result.to_input_list())[:-1] == names(before.to_input_list())[:-1]
