"""Runs that begin at an older checkpoint of their thread: what they did is kept on their branch."""

from __future__ import annotations

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, interrupt

import langgraph_graphs as graphs
from budgetguard_core import Budget
from budgetguard_core.testing import Call, Script, calls
from budgetguard_langgraph import BudgetCallback, aresume, bounded, outcome
from langgraph_graphs import StrictChat, check_request, search, sticky, thread, user


@pytest.fixture(autouse=True)
def bodies():
    graphs.BODIES.clear()


def loop(script, tools=(search,)):
    model = StrictChat(script=script)
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(list(tools)))
    graph.add_edge(START, "agent")
    graph.add_edge("agent", "tools")
    graph.add_edge("tools", "agent")
    return graph.compile(checkpointer=InMemorySaver())


def past(graph, config, *next_nodes):
    """Return the checkpoints of a thread at which these were next, the newest first."""
    return [
        one.config
        for one in graph.get_state_history(config)
        if one.next == next_nodes and one.metadata["source"] != "update"
    ]


async def invoked(graph, mode, given, config):
    if mode == "sync":
        return graph.invoke(given, config)
    return await graph.ainvoke(given, config)


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("at", ["agent", "tools"])
async def test_a_branch_that_is_stopped_keeps_what_it_did(mode, at):
    plain = loop(sticky())
    graph = bounded(plain, Budget(max_iterations=2))
    config = thread()
    graph.invoke(user(), config)
    oldest = past(graph, config, at)[-1]
    result = await invoked(graph, mode, None, oldest)
    assert outcome(result).usage.iterations == 2
    begun = 1 if at == "tools" else 0
    assert sum(bool(getattr(m, "tool_calls", ())) for m in result["messages"]) == 2 + begun
    check_request(result["messages"])
    state = graph.get_state(config)
    assert state.values["messages"] == result["messages"]
    assert not state.next
    assert outcome(state).stop_reason == "max_iterations"
    again = await aresume(graph, config, Budget(max_iterations=2))
    assert len(again["messages"]) == len(result["messages"]) + 4
    check_request(again["messages"])


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("way", ["bounded", "callback"])
async def test_a_branch_that_waits_goes_on_with_its_counters(way, mode):
    """Those are its own, and not those of the branch that it leaves."""

    @graphs.tool
    def ask(value: str = "") -> str:
        """Ask a person."""
        return interrupt(value)

    outcomes = []
    plain = loop(Script(lambda n: calls(Call("ask", str(n)))), [ask])
    budget, listens = Budget(max_iterations=3), {"on_outcome": outcomes.append}
    graph = bounded(plain, budget, **listens) if way == "bounded" else plain

    async def call(given, config):
        if way == "callback":
            config = {**config, "callbacks": [BudgetCallback(budget, **listens)]}
        await invoked(graph, mode, given, config)

    config, answer = thread(), Command(resume="yes")
    await call(user(), config)
    await call(answer, config)
    await call(None, past(graph, config, "agent")[-1])
    for _ in range(3):
        await call(answer, config)
    told = [(one.status, one.usage.iterations) for one in outcomes]
    branch = [("paused", 1), ("paused", 2), ("paused", 3), ("terminated", 3)]
    assert told == [*branch[:2], *branch]


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_new_turn_at_a_stopped_checkpoint_is_sent_closed(mode):
    plain = loop(sticky())
    config = thread()
    callback = BudgetCallback(Budget(max_tool_calls=1))
    plain.invoke(user(), {**config, "callbacks": [callback]})
    stopped = past(plain, config, "tools")[0]
    graph = bounded(plain, Budget(max_iterations=1))
    graph.invoke(user("Now."), config)
    result = await invoked(graph, mode, user("Or so."), stopped)
    check_request(result["messages"])
    assert outcome(result).usage.iterations == 1
    assert "Now." not in [one.content for one in result["messages"]]
    assert graph.get_state(config).values["messages"] == result["messages"]
