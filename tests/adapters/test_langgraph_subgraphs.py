"""Subgraphs in which a run was stopped: what they had done is there when the thread is resumed."""

from __future__ import annotations

import operator
from importlib.util import find_spec
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt

import langgraph_graphs as graphs
from budgetguard_core import Budget
from budgetguard_core.testing import Call, Script, calls, says
from budgetguard_langgraph import aresume, bounded, resume
from langgraph_graphs import StrictChat, check_request, search, thread, user

ANSWERS = 4


@pytest.fixture(autouse=True)
def bodies():
    graphs.BODIES.clear()


def asks(times=ANSWERS):
    return Script(lambda n: calls(Call("search", str(n))) if n < times else says("Done."))


def agent(script):
    return create_agent(StrictChat(script=script), [search])


def inside(graph, levels, saver=None):
    """Put a graph into so many others, each its only node."""
    for level in reversed(range(levels)):
        outer = StateGraph(MessagesState)
        outer.add_node("inner", graph)
        outer.add_edge(START, "inner")
        graph = outer.compile(checkpointer=saver if level == 0 else None)
    return graph


async def of(awaited, call, acall, *arguments):
    return await acall(*arguments) if awaited else call(*arguments)


@pytest.mark.anyio
@pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("levels", [1, 2, 3])
async def test_a_subgraph_goes_on_where_it_was_stopped(levels, awaited):
    script = asks()
    graph = inside(agent(script), levels, InMemorySaver())
    config = thread()
    made = bounded(graph, Budget(max_model_calls=2))
    await of(awaited, made.invoke, made.ainvoke, user(), config)
    assert graph.get_state(config).next == ()
    for stop in (3, 20):
        result = await of(awaited, resume, aresume, made, config, Budget(max_model_calls=stop - 2))
    assert "stop_reason" not in result
    assert script.calls == ANSWERS + 1
    assert [str(n) for n in range(ANSWERS)] == graphs.BODIES
    assert sum(isinstance(one, AIMessage) for one in result["messages"]) == ANSWERS + 1
    assert not any(one.response_metadata.get("synthetic") for one in result["messages"])
    check_request(result["messages"])


@pytest.mark.anyio
@pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])
async def test_tasks_of_a_send_that_are_graphs_are_closed_and_go_on_where_they_were(awaited):
    answered: dict[str, int] = {}

    class State(TypedDict):
        messages: Annotated[list[Any], operator.add]
        done: Annotated[list[str], operator.add]
        item: str

    class Done(TypedDict):
        done: Annotated[list[str], operator.add]

    script = Script([says("x")])
    model = StrictChat(script=script)

    def step(name):
        def work(state):
            key = f"{state['item']}{name}"
            answered[key] = answered.get(key, 0)
            model.invoke([HumanMessage(key)])
            answered[key] += 1
            return {"done": [key]} if name == "b" else {}

        return work

    child = StateGraph(State, output_schema=Done)
    child.add_node("a", step("a"))
    child.add_node("b", step("b"))
    child.add_edge(START, "a")
    child.add_edge("a", "b")
    parent = StateGraph(State)
    parent.add_node("child", child.compile())
    parent.add_conditional_edges(
        START, lambda _: [Send("child", {"item": str(n)}) for n in range(4)], ["child"]
    )
    graph = parent.compile(checkpointer=InMemorySaver())
    config = thread()
    made = bounded(graph, Budget(max_model_calls=5))
    given = {"messages": [HumanMessage("Go.")]}
    await of(awaited, made.invoke, made.ainvoke, given, config)
    assert graph.get_state(config).next == ()
    result = await of(awaited, resume, aresume, made, config, Budget(max_model_calls=20))
    assert sorted(result["done"]) == ["0b", "1b", "2b", "3b"]
    assert script.calls == 8
    assert set(answered.values()) == {1}
    assert [one.content for one in result["messages"]] == ["Go."]


@pytest.mark.parametrize("child", ["plain", "bounded"])
def test_new_objects_on_a_file_go_on_too(tmp_path, child):
    script = asks()

    def made(saver):
        inner = agent(script)
        if child == "bounded":
            inner = bounded(inner, Budget(max_model_calls=50))
        return inside(inner, 2, saver)

    config = thread()
    path = str(tmp_path / "threads.sqlite3")
    with SqliteSaver.from_conn_string(path) as saver:
        bounded(made(saver), Budget(max_model_calls=2)).invoke(user(), config)
    with SqliteSaver.from_conn_string(path) as saver:
        resume(made(saver), config, Budget(max_model_calls=1))
    with SqliteSaver.from_conn_string(path) as saver:
        result = resume(made(saver), config, Budget(max_model_calls=9))
    assert script.calls == ANSWERS + 1
    assert [str(n) for n in range(ANSWERS)] == graphs.BODIES
    check_request(result["messages"])
    assert result["messages"][-1].content == "Done."


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_a_question_inside_of_a_subgraph_is_asked_after_the_stop_and_answered(cap):
    @tool
    def ask(value: str = "") -> str:
        """Ask a person."""
        return f"the person said {interrupt(value)}"

    asked = [Call("search", "a"), Call("search", "b"), Call("ask", "?")]
    script = Script([*map(calls, asked), says("Done.")])
    child = create_agent(StrictChat(script=script), [search, ask])
    graph = inside(child, 2, InMemorySaver())
    config = thread()
    result = bounded(graph, Budget(max_model_calls=cap)).invoke(user(), config)
    if cap < 3:
        assert "__interrupt__" not in result
        result = resume(graph, config, Budget(max_model_calls=9))
    assert [one.value for one in result["__interrupt__"]] == ["?"]
    made = bounded(graph, Budget(max_model_calls=9))
    result = made.invoke(Command(resume="yes"), config)
    assert script.calls == 4
    assert graphs.BODIES == ["a", "b"]
    assert result["messages"][-2].content == "the person said yes"
    check_request(result["messages"])


def test_a_subgraph_that_is_stopped_in_a_later_turn_keeps_the_turns_before():
    script = asks(2)
    graph = inside(agent(script), 1, InMemorySaver())
    config = thread()
    made = bounded(graph, Budget(max_model_calls=9))
    first = made.invoke(user("One."), config)["messages"]
    script = asks(2)
    again = inside(agent(script), 1, graph.checkpointer)
    bounded(again, Budget(max_model_calls=1)).invoke(user("Two."), config)
    result = resume(again, config, Budget(max_model_calls=9))["messages"]
    assert script.calls == 3
    assert [one.content for one in result[: len(first)]] == [one.content for one in first]
    check_request(result)
    assert [one.content for one in result if one.type == "human"] == ["One.", "Two."]


if find_spec("langgraph.channels.delta") is not None:  # later than the oldest supported release
    from langgraph.channels.delta import DeltaChannel

    def added(before, writes):
        return [*(before or []), *(one for write in writes for one in write)]

    class Deltas(MessagesState):
        log: Annotated[list[str], DeltaChannel(added)]

    class Outer(MessagesState):
        log: list[str]

    def test_a_subgraph_whose_state_is_not_in_one_checkpoint_begins_anew():
        """Declared in the README."""
        script = Script([says("x")])
        model = StrictChat(script=script)

        def step(name):
            def work(state):
                model.invoke([HumanMessage(name)])
                return {"log": [name]}

            return work

        child = StateGraph(Deltas)
        for name, before in zip("abc", [START, "a", "b"], strict=True):
            child.add_node(name, step(name))
            child.add_edge(before, name)
        parent = StateGraph(Outer)
        parent.add_node("child", child.compile())
        parent.add_edge(START, "child")
        graph = parent.compile(checkpointer=InMemorySaver())
        config = thread()
        bounded(graph, Budget(max_model_calls=2)).invoke(user(), config)
        result = resume(graph, config, Budget(max_model_calls=9))
        assert (result["log"], script.calls) == (["a", "b", "c"], 5)


@pytest.mark.parametrize("levels", [0, 1])
def test_a_node_that_waits_for_the_others_is_not_left_out(levels):
    """LangGraph schedules a deferred node when nothing else is left, and by no command."""

    class State(MessagesState):
        notes: Annotated[list[str], operator.add]

    script = Script(lambda n: says(f"{n}"))
    model = StrictChat(script=script)

    def writes(name):
        return lambda state: {"notes": [f"{name} {model.invoke('Go.').content}"]}

    graph = StateGraph(State)
    for name in ("left", "right", "far"):
        graph.add_node(name, writes(name))
    graph.add_node(
        "last", lambda state: {"messages": [model.invoke(state["messages"])]}, defer=True
    )
    for before, after in (("left", "last"), ("right", "far"), ("far", "last")):
        graph.add_edge(before, after)
    graph.add_edge(START, "left")
    graph.add_edge(START, "right")
    built = graph.compile(checkpointer=None if levels else InMemorySaver())
    if levels:
        outer = StateGraph(State)
        outer.add_node("inner", built)
        outer.add_edge(START, "inner")
        built = outer.compile(checkpointer=InMemorySaver())
    config = thread()
    guarded = bounded(built, Budget(max_model_calls=3))
    stopped = guarded.invoke({**user(), "notes": []}, config)
    assert stopped["stop_reason"] == "max_model_calls"
    ended = resume(guarded, config, Budget(max_model_calls=1))
    assert script.calls == 4
    assert "stop_reason" not in ended
    assert [one.content for one in ended["messages"]] == ["Go.", "3"]
    assert len(ended["notes"]) == 3
