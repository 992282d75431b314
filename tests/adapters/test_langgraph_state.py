"""State of any shape: result, thread and next turn agree, and nothing appears, goes or doubles."""

from __future__ import annotations

import operator
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

import langgraph_graphs as graphs
from budgetguard_core import AdapterError, Budget, Guard
from budgetguard_core.testing import Script, calls, says
from budgetguard_langgraph import BudgetCallback, bounded, outcome, resume
from langgraph_graphs import (
    MODES,
    SHAPES,
    StrictChat,
    asks,
    check_request,
    functional,
    loop,
    plan_and_execute,
    run,
    sticky,
    thread,
)


@pytest.fixture(autouse=True)
def bodies():
    graphs.BODIES.clear()


def options(shape):
    return {"messages_key": "history"} if shape == "elsewhere" else {}


def messages_in(values):
    """The conversation in any result; None where the result has none."""
    if isinstance(values, list):
        return values
    for key in ("messages", "history"):
        if key in values:
            return values[key]
    return None


def in_thread(graph, config):
    """The conversation on the thread, also where the result does not show it."""
    values = graph.get_state(config).values
    return messages_in(values)


def contents(messages):
    return [(m.type, m.content) for m in messages]


def keys(result):
    return set(result) if isinstance(result, dict) else None


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_stop_after_an_answer_is_a_part_of_it(shape, mode):
    """A final answer that is paid for stays, and no two answers stand in a row."""
    saver = InMemorySaver()
    graph, given = loop(shape, Script([says("The answer.")]), checkpointer=saver)
    guard = Guard(Budget(max_total_tokens=10**6))
    config = thread()
    again = Script([says("again")])
    twice = again_and_again(shape, graph, again, saver)
    guarded = bounded(twice, Budget(max_iterations=2), **options(shape))
    result = await run(guarded, given("Go."), config, mode)
    shown = messages_in(result)
    kept = in_thread(twice, config)
    assert again.calls == 2
    if shown is not None:
        assert contents(shown) == contents(kept)
    assert kept[-1].response_metadata.get("synthetic") is True
    assert kept[-1].content.startswith("again")
    assert not isinstance(kept[-2], AIMessage)
    del guard


def again_and_again(shape, _, script, saver):
    """A graph that talks to itself: the user's part is made up after each answer."""
    model = StrictChat(script=script)
    key = "history" if shape == "elsewhere" else "messages"

    def messages(state):
        return state if shape == "root" else graphs.read(state, key)

    def update(state, new):
        if shape == "root":
            return new
        return {key: [*messages(state), *new] if shape == "last_value" else new}

    def agent(state):
        return update(state, [model.invoke(messages(state))])

    def critic(state):
        return update(state, [HumanMessage(f"Not yet {len(messages(state))}.")])

    def begin(state):
        return {key: [HumanMessage(state["question"])]}

    if shape == "hidden":
        graph = StateGraph(graphs.Hidden, input_schema=graphs.Question, output_schema=graphs.Answer)
        graph.add_node("begin", begin)
        graph.add_edge(START, "begin")
        graph.add_edge("begin", "agent")
    else:
        kinds = {**graphs.PREDEFINED, "elsewhere": graphs.Elsewhere, "root": graphs.ROOT}
        graph = StateGraph(kinds[shape])
        graph.add_edge(START, "agent")

    def route(state):
        return END if len(messages(state)) > 20 else "more"

    # The stop falls right behind the answer: nobody speaks in between.
    def more(state):
        if script.calls >= 2:
            model.invoke([HumanMessage("Was it good?")])
        return critic(state)

    graph.add_node("agent", agent)
    graph.add_node("more", more)
    graph.add_conditional_edges("agent", route, ["more", END])
    graph.add_edge("more", "agent")
    return graph.compile(checkpointer=saver)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_completed_run_is_what_it_is_without_a_guard(shape):
    saver = InMemorySaver()
    results, kept = [], []
    for wrap in (lambda g: g, lambda g: bounded(g, Budget(max_iterations=9), **options(shape))):
        graph, given = loop(shape, asks(2), checkpointer=saver)
        config = thread()
        graphs.BODIES.clear()
        results.append(wrap(graph).invoke(given("Go."), config))
        kept.append(in_thread(graph, config))
    assert keys(results[1]) == keys(results[0])
    assert type(results[0]) is type(results[1])
    assert contents(kept[0]) == contents(kept[1])


@pytest.mark.parametrize("config", [None, {"tags": ["night"]}])
def test_a_thread_that_the_graph_itself_names_is_resumed(config):
    graph, given = loop("reduced", asks(3), checkpointer=InMemorySaver())
    place = thread()
    guarded = bounded(graph.with_config(place), Budget(max_iterations=2))
    guarded.invoke(given("Go."))
    result = resume(guarded, config, Budget(max_iterations=9))
    assert graphs.BODIES == ["0", "1", "2"]
    assert result["messages"][-1].content == "Done."
    assert result["messages"] == guarded.get_state(place).values["messages"]


@pytest.mark.parametrize("output_keys", ["messages", ["turns"], ["messages", "turns"]])
def test_output_keys_hide_what_they_hid_before(output_keys):
    graph, given = loop("pydantic", sticky())
    result = bounded(graph, Budget(max_iterations=2)).invoke(
        given("Go."), thread(), output_keys=output_keys
    )
    if isinstance(output_keys, str):
        assert isinstance(result, list)
        check_request(result)
        assert result[-1].response_metadata["stop_reason"] == "max_iterations"
    else:
        assert set(result) <= {*output_keys, "stop_reason"}
        assert ("messages" in result) is ("messages" in output_keys)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_state_without_messages_gets_none(checkpointed):
    script = Script(lambda n: says(f"step {n}"))
    saver = InMemorySaver() if checkpointed else None
    graph = plan_and_execute(script, checkpointer=saver)
    config = thread()
    outcomes = []
    guarded = bounded(graph, Budget(max_iterations=4), on_outcome=outcomes.append)
    result = guarded.invoke({"goal": "g"}, config)
    assert script.calls == 4
    assert result == {
        "goal": "g",
        "plan": [f"g {n}" for n in range(6)],
        "done": [f"step {n}" for n in range(4)],
        "stop_reason": "max_iterations",
    }
    assert [one.status for one in outcomes] == ["terminated"]
    if checkpointed:
        assert outcome(guarded.get_state(config)).stop_reason == "max_iterations"
        assert not graph.get_state(config).next
        ended = resume(guarded, config, Budget(max_iterations=4))
        assert ended["done"] == [f"step {n}" for n in range(6)]
        with pytest.raises(AdapterError, match="ended by itself"):
            resume(guarded, config, Budget(max_iterations=4))


class Sorted(graphs.TypedDict):
    items: list[str]
    done: Annotated[list[str], operator.add]


def mapped(script, saver):
    """A map of a model over items; its state holds no messages."""
    model = StrictChat(script=script)
    graph = StateGraph(Sorted)
    graph.add_node("one", lambda item: {"done": [f"{item} {model.invoke('Go.').content}"]})
    graph.add_conditional_edges(START, lambda s: [Send("one", item) for item in s["items"]])
    return graph.compile(checkpointer=saver)


@pytest.mark.parametrize("then", ["resume", "resume twice", "new turn", "change"])
@pytest.mark.parametrize("guarded", [True, False])
def test_what_was_paid_stays_in_a_state_without_messages(then, guarded):
    script = Script(lambda n: says(str(n)))
    plain = mapped(script, InMemorySaver())
    graph, config = bounded(plain, Budget(max_model_calls=3)), thread()
    stopped = graph.invoke({"items": ["a", "b", "c", "d"], "done": []}, config)
    paid = stopped["done"]
    assert len(paid) == 3
    assert plain.get_state(config).values["done"] == paid
    after = graph if guarded else plain
    if then == "new turn":
        result = after.invoke({"items": ["e"], "done": []}, config)
        assert result["done"] == [*paid, "e 3"]
        return
    if then == "change":
        plain.update_state(config, {"done": ["note"]}, as_node="one")
        assert plain.get_state(config).values["done"] == [*paid, "note"]
        with pytest.raises(AdapterError, match="was changed since"):
            resume(after, config, Budget(max_model_calls=3))
        return
    if then == "resume twice":
        extra = bounded(plain, Budget(max_model_calls=3))
        stopped = resume(extra, config, Budget(max_tool_calls=1, max_total_tokens=1))
        assert stopped["stop_reason"] == "max_total_tokens"
        assert sorted(stopped["done"]) == sorted(paid)
    ended = resume(after, config, Budget(max_model_calls=3))
    assert script.calls == 4
    # Tasks of one step ask in any order.
    assert set(paid) < set(ended["done"])
    items, replies = zip(*(one.split() for one in ended["done"]), strict=True)
    assert (sorted(items), sorted(replies)) == (list("abcd"), list("0123"))


@pytest.mark.parametrize("output_keys", ["done", "plan", ["done"]])
def test_a_result_of_one_channel_stays_one(output_keys):
    graph = plan_and_execute(Script(lambda n: says(f"step {n}")))
    guarded = bounded(graph, Budget(max_iterations=2))
    result = guarded.invoke({"goal": "g"}, output_keys=output_keys)
    values = {"done": ["step 0", "step 1"], "plan": [f"g {n}" for n in range(6)]}
    if isinstance(output_keys, str):
        assert result == values[output_keys]
    else:
        assert result == {"done": values["done"], "stop_reason": "max_iterations"}


class Listed(graphs.TypedDict):
    messages: Annotated[list[Any], operator.add]


class Written(graphs.TypedDict):
    messages: str


# Channels that are called `messages`, or are the whole state, and hold none of LangChain's.
OWN = {
    "tables": (
        Listed,
        lambda state, text: {"messages": [{"role": "assistant", "content": text}]},
        {"messages": [{"role": "user", "content": "Go."}]},
    ),
    "texts": (Listed, lambda state, text: {"messages": [text]}, {"messages": ["Go."]}),
    "text": (Written, lambda state, text: {"messages": state["messages"] + text}, {"messages": ""}),
    "whole text": (str, lambda state, text: state + text, "Go."),
    "whole list": (Annotated[list[str], operator.add], lambda state, text: [text], ["Go."]),
    "whole table": (dict, lambda state, text: {**state, text: len(state)}, {"Go.": 0}),
}


def steps(kind, times, saver):
    """Build a graph that asks a model so many times, and give it with the model's script."""
    schema, writes, _ = OWN[kind]
    script = Script(lambda n: says(f"step {n}"))
    model = StrictChat(script=script)
    graph = StateGraph(schema)
    graph.add_node("work", lambda state: writes(state, model.invoke("Go.").content))
    graph.add_edge(START, "work")
    graph.add_conditional_edges("work", lambda state: "work" if script.calls < times else END)
    return graph.compile(checkpointer=saver), script


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", OWN)
async def test_a_channel_of_the_user_s_own_is_left_as_it_is(kind, checkpointed, mode):
    given = OWN[kind][-1]

    async def called(graph, config):
        if mode == "async":
            return await graph.ainvoke(given, config)
        return graph.invoke(given, config)

    expected = {times: steps(kind, times, None)[0].invoke(given) for times in (2, 3)}
    graph, script = steps(kind, 3, InMemorySaver() if checkpointed else None)
    config = thread()
    guarded = bounded(graph, Budget(max_model_calls=2))
    result = await called(guarded, config)
    assert script.calls == 2
    plain = kind.startswith("whole")
    assert result == (expected[2] if plain else {**expected[2], "stop_reason": "max_model_calls"})
    if checkpointed:
        assert graph.get_state(config).values == expected[2]
        ended = resume(guarded, config, Budget(max_model_calls=2))
        assert ended == expected[3]


def test_messages_in_other_forms_stay_in_the_conversation():
    """Of a list that is only added to, some are pairs and some are messages."""
    model = StrictChat(script=sticky())
    graph = StateGraph(Listed)
    graph.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", graphs.ToolNode([graphs.search]))
    graph.add_edge(START, "agent")
    graph.add_edge("agent", "tools")
    graph.add_edge("tools", "agent")
    built = graph.compile(checkpointer=InMemorySaver())
    config = thread()
    guarded = bounded(built, Budget(max_iterations=2))
    for turn in (1, 2):
        result = guarded.invoke({"messages": [("user", "Go.")]}, config)
        check_request(result["messages"])
        asked = [one for one in result["messages"] if isinstance(one, HumanMessage)]
        assert [one.content for one in asked] == ["Go."] * turn
        assert built.get_state(config).values["messages"] == result["messages"]


class Report(graphs.BaseModel):
    lines: list[str]


ANSWERS = {
    "text": "".join,
    "list": list,
    "number": len,
    "dict": lambda lines: {"lines": lines},
    "model": lambda lines: Report(lines=lines),
    "nothing": lambda lines: None,
    "messages": lambda lines: [AIMessage(line) for line in lines],
}


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("way", ["bounded", "callback"])
def test_a_workflow_of_any_type(kind, way):
    saver = InMemorySaver()
    script = Script([says("x")])
    flow = functional(script, ANSWERS[kind], checkpointer=saver)
    free = flow.invoke(["a"], thread())
    outcomes = []
    config = thread()

    def call(items, cap):
        budget = Budget(max_model_calls=cap)
        if way == "bounded":
            return bounded(flow, budget, on_outcome=outcomes.append).invoke(items, config)
        callback = BudgetCallback(budget, on_outcome=outcomes.append)
        return flow.invoke(items, {**config, "callbacks": [callback]})

    done = call(["a"], 2)
    assert isinstance(done, type(free))
    assert done == free
    assert outcomes[-1].status == "completed"
    stopped = call(["a"] * 4, 2)
    assert outcomes[-1].status == "terminated"
    if way == "callback":
        # What the graph returns is LangGraph's own; it says that it is no answer.
        assert "__interrupt__" in stopped
    else:
        # Never the answer of the turn before.
        assert stopped == {"stop_reason": "max_model_calls"}
    assert script.calls == 4


def test_private_channels_stay_private():
    class Private(graphs.TypedDict):
        secret: str

    model = StrictChat(script=sticky())

    def first(state) -> Private:
        return {"secret": "s"}

    def second(state: Private):
        return {}

    graph = StateGraph(graphs.Reduced)
    graph.add_node("first", first)
    graph.add_node("second", second, input_schema=Private)
    graph.add_node("agent", lambda s: {"messages": [model.invoke(s["messages"])]})
    graph.add_node("tools", graphs.ToolNode([graphs.search]))
    graph.add_edge(START, "first")
    graph.add_edge("first", "second")
    graph.add_edge("second", "agent")
    graph.add_edge("agent", "tools")
    graph.add_edge("tools", "agent")
    plain = graph.compile(checkpointer=InMemorySaver())
    config = thread()
    result = bounded(plain, Budget(max_iterations=2)).invoke(graphs.user(), config)
    assert set(result) == {"messages", "stop_reason"}


def test_a_conditional_entry_is_not_asked_when_a_run_is_closed():
    """Closing writes to the thread, and no router of the user's may run for it."""
    routed = []

    def route(state):
        routed.append(len(state["messages"]))
        return "agent"

    model = StrictChat(script=sticky())
    graph = StateGraph(graphs.Reduced)
    graph.add_node("agent", lambda s: {"messages": [model.invoke(s["messages"])]})
    graph.add_node("tools", graphs.ToolNode([graphs.search]))
    graph.add_conditional_edges(START, route, ["agent"])
    graph.add_edge("agent", "tools")
    graph.add_edge("tools", "agent")
    plain = graph.compile(checkpointer=InMemorySaver())
    bounded(plain, Budget(max_iterations=2)).invoke(graphs.user(), thread())
    assert routed == [1]


def test_messages_without_ids_are_neither_doubled_nor_lost():
    """`operator.add` gives no ids: a message of the same text twice is two messages."""
    script = Script([calls("search"), calls("search"), says("Done.")])
    graph, given = loop("added", script, checkpointer=InMemorySaver())
    config = thread()
    for n in range(3):
        bounded(graph, Budget(max_iterations=1)).invoke(given("Go."), config)
        kept = in_thread(graph, config)
        check_request(kept)
        assert [m.content for m in kept if isinstance(m, HumanMessage)] == ["Go."] * (n + 1)
    assert all(isinstance(m, BaseMessage) for m in kept)
