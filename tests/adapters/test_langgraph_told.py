"""How a caller of a LangGraph run learns how it ended, whatever it asked for."""

from __future__ import annotations

import gc
import uuid

import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from budgetguard_core import AdapterError, Budget, ConfigurationError, MemoryStore
from budgetguard_core.kit import Envelope
from budgetguard_core.testing import Script, calls, says
from budgetguard_langgraph import (
    BudgetMiddleware,
    aresume,
    aresume_stream,
    bounded,
    outcome,
    resume,
    resume_stream,
)
from conformance.budgetguard_langgraph_driver import ScriptedChat, user
from langgraph_graphs import plan_and_execute

MODES = ["values", "updates", "messages", "custom", "debug", "tasks", "checkpoints"]
ENDINGS = [(Script([says("Done.")]), "completed"), (Script([calls("search")]), "max_iterations")]


@tool
def search(value: str = "") -> str:
    """Search."""
    return "a result"


@tool
def ask_person(value: str = "") -> str:
    """Ask a person."""
    return str(interrupt(value))


def agent(script, *tools, **options):
    return create_agent(ScriptedChat(script=script), [search, *tools], **options)


def thread():
    return {"configurable": {"thread_id": uuid.uuid4().hex}}


# The key `stop_reason`


@pytest.mark.anyio
@pytest.mark.parametrize(("script", "reason"), ENDINGS)
async def test_the_result_of_a_stopped_run_has_a_stop_reason(script, reason):
    graph = bounded(agent(script), Budget(max_iterations=2))
    reason = None if reason == "completed" else reason
    results = [graph.invoke(user("Go.")), await graph.ainvoke(user("Go."))]
    results += graph.batch([user("Go."), user("Go.")])
    results.append(graph.invoke(user("Go."), version="v2").value)
    assert [one.get("stop_reason") for one in results] == [reason] * 5


def test_with_the_middleware_below_it_is_the_same():
    graph = agent(ENDINGS[0][0], middleware=[BudgetMiddleware(Budget(max_iterations=2))])
    result = bounded(graph, Budget(max_iterations=2)).invoke(user("Go."))
    assert result.get("stop_reason") is None


def test_a_run_that_waits_has_none_and_has_one_after_the_answer():
    script = Script([calls("ask_person"), says("Done.")])
    graph = bounded(agent(script, ask_person, checkpointer=InMemorySaver()), Budget())
    config = thread()
    assert "stop_reason" not in graph.invoke(user("Go."), config)
    assert "stop_reason" not in graph.invoke(Command(resume="yes"), config)


def test_a_caller_gets_no_key_where_it_would_be_part_of_something_else():
    graph = bounded(agent(ENDINGS[0][0]), Budget())
    assert set(graph.invoke(user("Go."), output_keys=["messages"])) == {"messages"}
    assert isinstance(graph.invoke(user("Go."), stream_mode="updates"), list)

    @entrypoint()
    def flow(given):
        return {"value": given}

    assert bounded(flow, Budget()).invoke(1) == {"value": 1}

    class State(MessagesState):
        stop_reason: str

    builder = StateGraph(State)
    builder.add_node("inner", graph)
    builder.add_edge(START, "inner")
    builder.add_edge("inner", END)
    inside = builder.compile().invoke({**user("Go."), "stop_reason": "mine"})
    assert inside["stop_reason"] == "mine"


# Streams


@pytest.mark.parametrize("mode", [*MODES, MODES])
@pytest.mark.parametrize(("script", "reason"), ENDINGS)
def test_a_stream_of_any_mode_leads_to_its_outcome(mode, script, reason):
    graph = bounded(agent(script, checkpointer=InMemorySaver()), Budget(max_iterations=2))
    stream = graph.stream(user("Go."), thread(), stream_mode=mode)
    for _ in stream:
        pass
    ended = outcome(stream)
    assert ended.stop_reason == reason
    assert ended.usage.cost_usd is not None
    assert ended.usage.model_calls == (1 if reason == "completed" else 2)


@pytest.mark.anyio
@pytest.mark.parametrize(("script", "reason"), ENDINGS)
async def test_so_does_an_asynchronous_stream(script, reason):
    stream = bounded(agent(script), Budget(max_iterations=2)).astream(
        user("Go."), stream_mode="messages"
    )
    async for _ in stream:
        pass
    assert outcome(stream).stop_reason == reason


def test_the_outermost_budget_is_told_and_nothing_is_kept():
    from budgetguard_core.kit.outcomes import _KNOWN

    graph = bounded(agent(ENDINGS[1][0]), Budget(max_iterations=2))
    stream = bounded(graph, Budget(max_iterations=9)).stream(user("Go."), stream_mode="custom")
    list(stream)
    assert outcome(stream).usage.model_calls == 2
    del stream
    gc.collect()
    before = len(_KNOWN)
    for _ in range(20):
        list(graph.stream(user("Go."), stream_mode="custom"))
    gc.collect()
    assert len(_KNOWN) <= before


# Threads


@pytest.mark.anyio
@pytest.mark.parametrize(("script", "reason"), ENDINGS[1:])
async def test_the_state_of_a_thread_leads_to_the_outcome_of_its_last_run(script, reason):
    plain, config = agent(script, checkpointer=InMemorySaver()), thread()
    graph = bounded(plain, Budget(max_iterations=2), on_outcome=(seen := []).append)
    graph.invoke(user("Go."), config)
    other = bounded(plain, Budget())  # another object, as in another process
    for state in (other.get_state(config), await other.aget_state(config)):
        ended = outcome(state)
        assert (ended.stop_reason, ended.usage) == (reason, seen[0].usage)
        assert ended.run_id == seen[0].run_id
        assert ended.final == seen[0].final
        assert len(ended.messages) == len(seen[0].messages)
        assert state == plain.get_state(config)
    await graph.ainvoke(user("Go."), config)
    assert outcome(graph.get_state(config)).run_id == seen[1].run_id
    graph.update_state(config, {"messages": [("user", "Something else.")]})
    with pytest.raises(AdapterError, match="without one"):
        outcome(graph.get_state(config))


def test_so_does_the_state_of_a_run_that_waits():
    script = Script([calls("ask_person"), says("Done.")])
    graph = bounded(agent(script, ask_person, checkpointer=InMemorySaver()), Budget())
    config = thread()
    graph.invoke(user("Go."), config)
    assert outcome(graph.get_state(config)).status == "paused"
    graph.invoke(Command(resume="yes"), config)
    with pytest.raises(AdapterError, match="without one"):
        outcome(graph.get_state(config))


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_thread_with_nothing_left_to_run_keeps_how_it_ended(mode):
    saver, config = InMemorySaver(), thread()
    plain = plan_and_execute(Script(lambda n: says(f"text {n}")), checkpointer=saver)
    graph = bounded(plain, Budget(max_model_calls=2))
    graph.invoke({"goal": "Go."}, config)
    before = saver.get_tuple(config)
    again = graph.invoke(None, config) if mode == "sync" else await graph.ainvoke(None, config)
    assert again["done"] == ["text 0", "text 1"]
    assert saver.get_tuple(config).pending_writes == before.pending_writes
    assert outcome(graph.get_state(config)).stop_reason == "max_model_calls"
    ended = await aresume(graph, config, Budget())
    assert ended["done"] == [f"text {n}" for n in range(6)]


# Going on


@pytest.mark.anyio
@pytest.mark.parametrize("store", [None, MemoryStore])
async def test_a_resumed_run_knows_what_it_used_before(store):
    graph, config = agent(Script([calls("search")]), checkpointer=InMemorySaver()), thread()
    options = {"loop_detection": None}
    given = Envelope(budget=Budget(max_iterations=2, **options), store=store and store())
    graph = bounded(graph, given)
    first = outcome(graph.invoke(user("Go."), config))
    second = outcome(resume(graph, config, Budget(max_iterations=1, **options)))
    third = outcome(await aresume(graph, config, Budget(max_iterations=3, **options)))
    earlier = [one.earlier_usage.iterations for one in (first, second, third)]
    assert [one.usage.iterations for one in (first, second, third)] == [2, 1, 3]
    assert earlier == [0, 2, 3]
    assert {one.run_id for one in (first, second, third)} == {first.run_id}


@pytest.mark.anyio
async def test_resume_streams():
    script = Script([calls("search"), calls("search"), calls("search"), says("Done.")])
    graph = agent(script, checkpointer=InMemorySaver())
    config = thread()
    bounded(graph, Budget(max_iterations=1)).invoke(user("Go."), config)
    stream = resume_stream(graph, config, Budget(max_iterations=1), stream_mode="updates")
    parts = list(stream)
    assert parts[-1]["budgetguard"]["stop_reason"] == "max_iterations"
    assert outcome(stream).stop_reason == "max_iterations"
    again = await aresume_stream(graph, config, Budget(), stream_mode="values")
    values = [part async for part in again]
    assert values[-1]["messages"][-1].content == "Done."
    assert outcome(again).status == "completed"
    assert len([one for one in values[-1]["messages"] if one.type == "tool"]) == 3


def test_a_resume_that_is_refused_changes_nothing():
    graph, config = (
        bounded(agent(ENDINGS[1][0], checkpointer=InMemorySaver()), Budget(max_iterations=1)),
        thread(),
    )
    graph.invoke(user("Go."), config)
    before = [one.config for one in graph.get_state_history(config)]
    with pytest.raises(ConfigurationError, match="budget must be"):
        resume(graph, config, "10 dollars")
    assert [one.config for one in graph.get_state_history(config)] == before
