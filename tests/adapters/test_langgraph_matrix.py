"""Trip place x graph kind x checkpointer x entry point: the cap holds, and nothing dangles."""

from __future__ import annotations

import uuid
from inspect import signature

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.pregel import Pregel

from budgetguard_core import Budget, Guard
from budgetguard_core.testing import Scenario, Script, Tool, calls, check_history, says
from budgetguard_langgraph import BudgetCallback, bounded
from conformance.budgetguard_langgraph_driver import (
    BoundedDriver,
    BoundedReactDriver,
    CallbackDriver,
    message,
    user,
)

KINDS = {
    "state_graph": CallbackDriver(),
    "create_react_agent": BoundedReactDriver(),
    "create_agent": BoundedDriver(),
}
TRIPS = {"model": Budget(max_iterations=2), "tool": Budget(max_tool_calls=3)}
BODIES = {"model": 4, "tool": 3}


async def collected(stream):
    return [part async for part in stream]


async def astream_events(graph, given, config):
    events = graph.astream_events(given, config, version="v2", stream_mode="values")
    root = [event["data"] async for event in events if not event["parent_ids"]]
    return [data["chunk"] for data in root if "chunk" in data][-1]


ENTRIES = {
    "invoke": lambda g, i, c: g.invoke(i, c),
    "stream": lambda g, i, c: list(g.stream(i, c, stream_mode="values"))[-1],
    "stream_modes": lambda g, i, c: [
        part
        for mode, part in g.stream(i, c, stream_mode=["updates", "messages", "values"])
        if mode == "values"
    ][-1],
    "stream_subgraphs": lambda g, i, c: list(g.stream(i, c, stream_mode="values", subgraphs=True))[
        -1
    ][1],
    "batch": lambda g, i, c: g.batch([i], c)[0],
    "with_config": lambda g, i, c: g.with_config(tags=["again"]).invoke(i, c),
    "piped": lambda g, i, c: (g | RunnableLambda(lambda result: result)).invoke(i, c),
    "typed": lambda g, i, c: g.invoke(i, c, version="v2").value,
}
ASYNC_ENTRIES = {
    "ainvoke": lambda g, i, c: g.ainvoke(i, c),
    "abatch": lambda g, i, c: g.abatch([i], c),
    "astream": lambda g, i, c: collected(g.astream(i, c, stream_mode="values")),
    "astream_events": astream_events,
}
NAMES = [*ENTRIES, *ASYNC_ENTRIES]


def made(kind, trip, checkpointed):
    script = Script(lambda n: calls("a", "b") if n < 2 or trip == "model" else says("Done."))
    scenario = Scenario(
        script=script, mode="sync", guard=None, tools=[Tool("a", "is a"), Tool("b", "is b")]
    )
    saver = InMemorySaver() if checkpointed else None
    driver = KINDS[kind]
    tools = driver.tools(scenario, scenario.tools)
    return driver.agent(scenario, script, tools, checkpointer=saver), script, scenario


async def called(name, graph, given, config):
    if name == "typed" and "version" not in signature(Pregel.invoke).parameters:
        pytest.skip("this LangGraph has no typed output")
    if name in ENTRIES:
        return ENTRIES[name](graph, given, config)
    result = await ASYNC_ENTRIES[name](graph, given, config)
    return result[-1] if isinstance(result, list) else result


@pytest.mark.sample(13)
@pytest.mark.anyio
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["bare", "checkpointed"])
@pytest.mark.parametrize("trip", TRIPS)
@pytest.mark.parametrize("kind", KINDS)
async def test_bounded_ends_closed(kind, trip, checkpointed, name):
    plain, script, scenario = made(kind, trip, checkpointed)
    graph = bounded(plain, TRIPS[trip])
    assert isinstance(graph, type(plain))
    config = {"configurable": {"thread_id": uuid.uuid4().hex}}
    result = await called(name, graph, user("Go."), config)
    assert script.calls == 2
    assert len(scenario.started) == BODIES[trip]
    history = [message(one) for one in result["messages"]]
    check_history(history)
    reason = "max_iterations" if trip == "model" else "max_tool_calls"
    assert result["stop_reason"] == reason
    assert result["messages"][-1].response_metadata["stop_reason"] == reason
    assert "__interrupt__" not in result
    # The next turn, on the thread or with the messages that came back.
    turn = [HumanMessage("And now?")]
    if checkpointed:
        assert plain.get_state(config).next == ()
    else:
        turn = [*result["messages"], *turn]
    again = await called(name, bounded(plain, Budget(max_iterations=1)), {"messages": turn}, config)
    assert script.calls == 3
    check_history([message(one) for one in again["messages"]])


@pytest.mark.sample(13)
@pytest.mark.anyio
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["bare", "checkpointed"])
@pytest.mark.parametrize("trip", TRIPS)
@pytest.mark.parametrize("kind", KINDS)
async def test_the_callback_stops_before_the_call(kind, trip, checkpointed, name):
    graph, script, scenario = made(kind, trip, checkpointed)
    guard = Guard(TRIPS[trip])
    config = {
        "configurable": {"thread_id": uuid.uuid4().hex},
        "callbacks": [BudgetCallback(guard)],
    }
    await called(name, graph, user("Go."), config)
    assert script.calls == 2
    assert len(scenario.started) == BODIES[trip]
    assert guard.outcome is not None
    assert guard.outcome.status == "terminated"
    check_history([message(one) for one in guard.outcome.messages])
    if not checkpointed:
        return
    # The state itself has no open call either, so that a new input on the thread works.
    plain = {"configurable": config["configurable"]}
    check_history([message(one) for one in graph.get_state(plain).values["messages"]])
    await called(
        name,
        graph,
        {"messages": [HumanMessage("And now?")]},
        {**plain, "callbacks": [BudgetCallback(Budget(max_iterations=1))]},
    )
    assert script.calls == 3
