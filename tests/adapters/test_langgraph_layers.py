"""Budgets in budgets, graphs in graphs, LangGraph's own limits, loops, streams, endings below."""

from __future__ import annotations

import itertools
import json
import operator
import warnings
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import InjectedToolCallId, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt
from pydantic import BaseModel

import langgraph_graphs as graphs
from budgetguard_core import AdapterError, Budget, BudgetExceeded, Guard
from budgetguard_core.frame import FRAME
from budgetguard_core.kit import current
from budgetguard_core.testing import Call, Reply, Script, calls, says
from budgetguard_langgraph import (
    BudgetCallback,
    BudgetMiddleware,
    aresume,
    bounded,
    outcome,
    resume,
)
from conformance.budgetguard_langgraph_driver import ScriptedChat
from langgraph_graphs import (
    StrictChat,
    asks,
    bounded_agent,
    check_request,
    search,
    sticky,
    thread,
    user,
)


@pytest.fixture(autouse=True)
def bodies():
    graphs.BODIES.clear()
    yield
    assert (f := current()) is None, (
        f.run_id,
        f.closed,
        f.call,
        f.graph_run.opener,
        f.run.ended,
        f.graph_run.root,
        FRAME.set(None),
    )


def agent(script, tools=(search,), **options):
    return create_agent(StrictChat(script=script), list(tools), **options)


# Two budgets on one graph


@pytest.mark.parametrize("tenant", ["budget", "guard"])
@pytest.mark.parametrize(("own", "theirs"), [(2, 5), (5, 2)])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_tenant_s_callback_on_a_bounded_graph(checkpointed, own, theirs, tenant):
    script = sticky()
    graph = agent(script, checkpointer=InMemorySaver() if checkpointed else None)
    guard = Guard(Budget(max_iterations=theirs))
    callback = BudgetCallback(guard if tenant == "guard" else guard.budget)
    outcomes = []
    made = bounded(graph, Budget(max_iterations=own), on_outcome=outcomes.append)
    config = thread()
    result = made.invoke(user(), {**config, "callbacks": [callback]})
    assert script.calls == 2
    assert result["stop_reason"] == "max_iterations"
    check_request(result["messages"])
    assert [one.status for one in outcomes] == ["terminated"]
    assert outcomes[0].violations[0].limit == 2
    assert outcome(result).status == "terminated"
    assert callback.outcome.status == "terminated"
    assert callback.guard.usage.model_calls == 2
    if checkpointed:
        check_request(graph.get_state(config).values["messages"])
        ended = resume(made, config, Budget(max_iterations=1))
        assert ended["stop_reason"] == "max_iterations"
        assert script.calls == 3


@pytest.mark.anyio
@pytest.mark.parametrize(("inner", "outer"), [(2, 5), (5, 2)])
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_bounded_graph_is_bounded_again(mode, inner, outer):
    script = sticky()
    graph = agent(script, checkpointer=InMemorySaver())
    seen = {"inner": [], "outer": []}
    once = bounded(graph, Budget(max_iterations=inner), on_outcome=seen["inner"].append)
    twice = bounded(once, Budget(max_iterations=outer), on_outcome=seen["outer"].append)
    config = thread()
    call = twice.invoke(user(), config) if mode == "sync" else await twice.ainvoke(user(), config)
    assert script.calls == 2
    assert call["stop_reason"] == "max_iterations"
    check_request(call["messages"])
    check_request(graph.get_state(config).values["messages"])
    assert sum(bool(m.response_metadata.get("synthetic")) for m in call["messages"]) == 1
    for one in (*seen["inner"], *seen["outer"]):
        assert one.status == "terminated"
        assert one.violations[0].limit == 2
    assert len(seen["outer"]) == len(seen["inner"]) == 1
    # Each call has fresh budgets of both.
    twice.invoke(user("And now?"), config)
    assert script.calls == 4


def test_two_callbacks_on_one_graph_both_apply():
    for caps in ((2, 5), (5, 2)):
        script = sticky()
        callbacks = [BudgetCallback(Budget(max_iterations=n)) for n in caps]
        agent(script).invoke(user(), {"callbacks": callbacks})
        assert script.calls == 2
        assert [one.outcome.status for one in callbacks] == ["terminated"] * 2
        assert [one.guard.usage.model_calls for one in callbacks] == [2, 2]


def test_a_callback_and_a_middleware_with_budgets_of_their_own_both_apply():
    for first, second in ((2, 5), (5, 2)):
        script = sticky()
        graph = agent(script, middleware=[BudgetMiddleware(Budget(max_iterations=first))])
        callback = BudgetCallback(Budget(max_iterations=second))
        graph.invoke(user(), {"callbacks": [callback]})
        assert script.calls == 2
        assert callback.guard.usage.model_calls == 2


def test_pauses_of_two_budgets_keep_apart():
    @tool
    def ask(value: str = "") -> str:
        """Ask."""
        return str(interrupt("?"))

    script = Script(lambda n: calls(Call("ask", str(n))))
    graph = agent(script, [ask], checkpointer=InMemorySaver())
    config, given = thread(), user()
    for _ in range(8):
        callback = BudgetCallback(Budget(max_iterations=5))
        made = bounded(graph, Budget(max_iterations=3))
        result = made.invoke(given, {**config, "callbacks": [callback]})
        if "stop_reason" in result:
            break
        given = Command(resume="yes")
    assert script.calls == 3
    assert callback.guard.usage.model_calls == 3


# LangGraph's own limits


def polling(steps):
    """A graph that polls for so many steps before its one model call."""
    model = StrictChat(script=Script([says("Ready.")]))

    class State(MessagesState):
        polls: Annotated[int, operator.add]

    graph = StateGraph(State)
    graph.add_node("poll", lambda s: {"polls": 1})
    graph.add_node("agent", lambda s: {"messages": [model.invoke(s["messages"])]})
    graph.add_edge(START, "poll")
    graph.add_conditional_edges("poll", lambda s: "agent" if s["polls"] >= steps else "poll")
    graph.add_edge("agent", END)
    return graph.compile()


def test_a_loop_without_models_completes_as_it_does_without_a_guard():
    given = {**user(), "polls": 0}
    free, failed = None, None
    try:
        free = polling(60).invoke(given)
    except GraphRecursionError as error:  # 25 steps in old releases
        failed = error
    if failed is not None:
        with pytest.raises(BudgetExceeded, match="framework_limit"):
            bounded(polling(60), Budget(max_iterations=2), on_trip="raise").invoke(given)
        return
    result = bounded(polling(60), Budget(max_iterations=2)).invoke(given)
    assert result["polls"] == free["polls"] == 60
    assert result["messages"][-1].content == "Ready."


@pytest.mark.parametrize("where", ["config", "with_config", "with_config inside"])
def test_the_user_s_own_limit_holds(where):
    script = sticky()
    graph = graphs.loop("reduced", script)[0]
    if where == "with_config inside":
        graph = graph.with_config({"recursion_limit": 6})
    made = bounded(graph, Budget(max_iterations=400))
    if where == "with_config":
        made = made.with_config({"recursion_limit": 6})
    config = {"recursion_limit": 6} if where == "config" else {}
    result = made.invoke(user(), config)
    assert result["stop_reason"] == "framework_limit"
    assert script.calls <= 4


# Loops


class Count(BaseModel):
    """How many there are."""

    number: int


def answered_by_a_node(script):
    """A graph whose own node answers the calls: no tool of LangChain's is called."""
    model = StrictChat(script=script)
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda s: {"messages": [model.invoke(s["messages"])]})

    def answers(state):
        asked = state["messages"][-1].tool_calls
        return {"messages": [ToolMessage("nothing", tool_call_id=one["id"]) for one in asked]}

    graph.add_node("answers", answers)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges(
        "agent", lambda s: "answers" if s["messages"][-1].tool_calls else END, ["answers", END]
    )
    graph.add_edge("answers", "agent")
    return graph.compile()


@pytest.mark.parametrize(
    ("asks_for", "way"),
    [
        *itertools.product(
            ["an answer that never fits", "no known tool"], ["bounded", "callback", "middleware"]
        ),
        ("a node", "bounded"),
        ("a node", "callback"),
    ],
)
def test_calls_that_are_answered_without_a_tool_are_seen_by_loop_detection(asks_for, way):
    """The framework's structured output, a name that it does not know, a node that answers."""
    name = {"an answer that never fits": "Count"}.get(asks_for, "nobody")
    script, told = Script(lambda n: calls(Call(name, "x"))), []
    budget = Budget(max_iterations=30)
    middleware = []
    if way == "middleware":
        middleware = [BudgetMiddleware(budget, on_outcome=told.append)]
    if asks_for == "a node":
        graph = answered_by_a_node(script)
    else:
        structured = {"response_format": ToolStrategy(Count)} if name == "Count" else {}
        graph = agent(script, middleware=middleware, **structured)
    config = {}
    if way == "bounded":
        graph = bounded(graph, budget, on_outcome=told.append)
    if way == "callback":
        config = {"callbacks": [BudgetCallback(budget, on_outcome=told.append)]}
    graph.invoke(user(), config)
    assert str(told[-1].stop_reason) == "no_progress"
    assert script.calls < 6
    assert told[-1].usage.tool_calls == 0
    check_request(told[-1].messages)


def test_a_few_invalid_structured_answers_are_no_loop():
    script = Script(lambda n: calls(Call("Count", f"not {n}")) if n < 3 else says("Done."))
    graph = bounded(agent(script, response_format=ToolStrategy(Count)), Budget(max_iterations=30))
    graph.invoke(user())
    assert script.calls == 4


def test_tools_that_return_commands_are_seen_by_loop_detection():
    @tool
    def note(value: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Command:
        """Note something."""
        return Command(update={"messages": [ToolMessage("noted", tool_call_id=tool_call_id)]})

    script = Script([calls(Call("note", "same"))])
    result = bounded(agent(script, [note]), Budget(max_iterations=30)).invoke(user())
    assert result["stop_reason"] == "no_progress"
    assert script.calls < 10


def talkers(first, second):
    """Two agents that talk to each other: one's answer is the other's input."""

    class State(TypedDict):
        said: Annotated[list[str], operator.add]

    def speak(script):
        model = StrictChat(script=script)
        return lambda s: {"said": [model.invoke([HumanMessage(s["said"][-1])]).content]}

    graph = StateGraph(State)
    graph.add_node("a", speak(first))
    graph.add_node("b", speak(second))
    graph.add_edge(START, "a")
    graph.add_edge("a", "b")
    graph.add_edge("b", "a")
    return graph.compile()


@pytest.mark.parametrize("way", ["bounded", "callback"])
def test_agents_that_only_repeat_themselves_are_stopped(way):
    first, second = Script([says("After you.")]), Script([says("No, after you.")])
    graph = talkers(first, second)
    budget = Budget(max_iterations=60)
    if way == "bounded":
        outcomes = []
        bounded(graph, budget, on_outcome=outcomes.append).invoke({"said": ["Go."]})
        ended = outcomes[-1]
    else:
        callback = BudgetCallback(budget)
        graph.invoke({"said": ["Go."]}, {"callbacks": [callback], "recursion_limit": 500})
        ended = callback.outcome
    assert ended.stop_reason in ("no_progress", "oscillation")
    assert first.calls + second.calls < 30
    sent = [len(json.loads(one)[0]) for one in (*first.sent, *second.sent)]
    # Told once to do something else, in the request alone.
    assert sent.count(2) == 1


def test_the_same_question_about_many_documents_is_no_loop():
    model = StrictChat(script=Script([says("yes")]))

    class State(TypedDict):
        grades: Annotated[list[str], operator.add]

    def grade(state):
        return {"grades": [model.invoke([HumanMessage(f"doc {n}")]).content for n in range(30)]}

    graph = StateGraph(State)
    graph.add_node("grade", grade)
    graph.add_edge(START, "grade")
    result = bounded(graph.compile(), Budget(max_iterations=60)).invoke({"grades": []})
    assert result["grades"] == ["yes"] * 30


# Counting


def team(inner_script, outer_script, **options):
    """A supervisor made by hand: a tool that leaves its graph for another node."""

    @tool
    def to_worker(tool_call_id: Annotated[str, InjectedToolCallId]) -> Command:
        """Hand over."""
        done = ToolMessage("handed over", tool_call_id=tool_call_id)
        return Command(goto="worker", graph=Command.PARENT, update={"messages": [done]})

    lead = create_agent(ScriptedChat(script=outer_script), [to_worker, search], name="lead")
    worker = create_agent(ScriptedChat(script=inner_script), [search], name="worker")
    graph = StateGraph(MessagesState)
    graph.add_node("lead", lead, destinations=("worker",))
    graph.add_node("worker", worker)
    graph.add_edge(START, "lead")
    graph.add_edge("worker", "lead")
    return graph.compile(**options)


def test_handoffs_are_no_tool_calls_and_loops_of_them_are_seen():
    guard = Guard(Budget(max_tool_calls=1, max_iterations=40))
    outer = Script(lambda n: calls("to_worker") if n == 0 else says("Done."))
    result = bounded(team(asks(1), outer), guard).invoke(user())
    assert result["messages"][-1].content == "Done."
    assert guard.usage.tool_calls == 1
    assert graphs.BODIES == ["0"]
    guard = Guard(Budget(max_iterations=40))
    stuck = bounded(team(Script([says("Back to you.")]), Script([calls("to_worker")])), guard)
    result = stuck.invoke(user(), {"recursion_limit": 500})
    assert result["stop_reason"] in ("no_progress", "oscillation")
    assert guard.usage.model_calls < 30
    assert guard.usage.tool_calls == 0


class Hosted(ScriptedChat):
    """A model that searches the web by itself before it asks for a tool."""

    blocks: Any = None

    def _generate(self, messages, stop=None, run_manager=None, **_):
        result = super()._generate(messages, stop, run_manager)
        message = result.generations[0].message
        message.content = [*self.blocks, {"type": "text", "text": "found"}]
        return result


BLOCKS = {
    "anthropic": [
        {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []},
    ],
    "openai": [{"type": "web_search_call", "id": "ws_1", "status": "completed"}],
    "langchain": [
        {"type": "server_tool_call", "id": "srv_1", "name": "web_search", "args": {"query": "q"}}
    ],
}


@pytest.mark.parametrize("provider", BLOCKS)
def test_hosted_tools_are_counted_when_they_are_reported(provider):
    script = Script(lambda n: calls(Call("search", str(n))))
    guard = Guard(Budget(max_tool_calls=4))
    graph = create_agent(Hosted(script=script, blocks=BLOCKS[provider]), [search])
    result = bounded(graph, guard).invoke(user())
    # A hosted call is run when it is reported: the fifth call of all, and then no other starts.
    assert guard.tool_counts["web_search"] == script.calls == 3
    assert len(graphs.BODIES) == 2
    assert result["stop_reason"] == "max_tool_calls"


@pytest.mark.sample(5)
@pytest.mark.parametrize("way", ["bounded", "callback", "middleware"])
@pytest.mark.parametrize("provider", BLOCKS)
@pytest.mark.parametrize(
    ("quotas", "models", "hosted", "own"),
    [
        ({"web_search": 1}, 2, 2, 1),
        ({"web_search": 2}, 3, 3, 2),
        # One quota for both: the fourth of all calls is a search of the provider's.
        ({"*": 3}, 3, 3, 1),
        ({"other": 1}, 6, 6, 5),
    ],
)
def test_a_quota_that_a_hosted_tool_has_passed_stops_the_next_model_call(
    way, provider, quotas, models, hosted, own
):
    """The call that passes a quota has run when it is reported: no model is called after it."""
    script = Script(lambda n: calls(Call("search", str(n))) if n < 5 else says("Done."))
    guard = Guard(Budget(tool_quotas=quotas))
    graph, config = bounded_agent(way, guard, Hosted(script=script, blocks=BLOCKS[provider]))
    graph.invoke(user(), config)
    assert script.calls == models
    assert guard.tool_counts["web_search"] == hosted
    assert guard.tool_counts["search"] == len(graphs.BODIES) == own
    if "other" in quotas:
        assert guard.outcome.status == "completed"
        return
    (violation,) = guard.outcome.violations
    ((name, limit),) = quotas.items()
    assert (violation.reason, violation.limit, violation.used) == ("tool_quota", limit, limit + 1)
    assert repr(name) in violation.detail


@pytest.mark.parametrize("way", ["bounded", "callback", "middleware"])
def test_equal_ids_in_a_batch_and_across_turns_are_calls_of_their_own(way):
    same = [Call("search", str(n), "same") for n in range(3)]
    script = Script(lambda n: calls(*same) if n < 2 else says("Done."))
    guard = Guard(Budget(max_tool_calls=5, loop_detection=None))
    graph, config = bounded_agent(way, guard, ScriptedChat(script=script))
    graph.invoke(user(), config)
    assert len(graphs.BODIES) == guard.usage.tool_calls == 5
    check_request(guard.outcome.messages)


# Endings below the top


def test_a_bounded_child_with_a_thread_of_its_own_in_a_tool():
    inner = sticky()
    child = agent(inner, checkpointer=InMemorySaver())
    own = thread()
    made = bounded(child, Budget(max_iterations=2))

    @tool
    def delegate(value: str = "") -> str:
        """Delegate."""
        return str(made.invoke(user(value), own)["messages"][-1].content)

    outer = Script(lambda n: calls(Call("delegate", str(n))) if n < 2 else says("Done."))
    guard = Guard(Budget(max_model_calls=20))
    result = bounded(agent(outer, [delegate]), guard).invoke(user())
    assert result["messages"][-1].content == "Done."
    state = child.get_state(own)
    assert state.next == ()
    check_request(state.values["messages"])
    assert inner.calls == 4
    assert guard.usage.model_calls == 7
    ended = resume(made, own, Budget(max_iterations=1))
    assert inner.calls == 5
    check_request(ended["messages"])


def test_a_fresh_budget_takes_the_place_of_the_outermost_alone():
    script = Script(lambda n: calls(Call("search", str(n))))
    tenant = Guard(Budget(max_model_calls=5))
    inner = bounded(agent(script, checkpointer=InMemorySaver()), tenant)
    made, config = bounded(inner, Budget(max_iterations=2)), thread()
    made.invoke(user(), config)
    ended = resume(made, config, Budget(max_iterations=20))
    assert (outcome(ended).stop_reason, script.calls) == ("max_model_calls", 5)


@pytest.mark.parametrize("below", ["plain", "bounded"])
def test_a_subgraph_with_a_history_of_its_own(below):
    inner = Script(lambda n: calls(Call("search", str(n))) if n < 9 else says("Done."))
    child = agent(inner, checkpointer=True)
    if below == "bounded":
        child = bounded(child, Budget(max_iterations=2))
    graph = StateGraph(MessagesState)
    graph.add_node("child", child)
    graph.add_edge(START, "child")
    parent = graph.compile(checkpointer=InMemorySaver())
    config = thread()
    made = bounded(parent, Budget(max_iterations=3))
    for turn in range(3):
        result = made.invoke(user(f"Turn {turn}."), config)
        check_request(result["messages"])
        check_request(parent.get_state(config).values["messages"])
    assert inner.calls == (6 if below == "bounded" else 9)


@pytest.mark.sample(4)
@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("trip", ["model", "tool"])
@pytest.mark.parametrize("owner", ["child", "parent"])
async def test_a_subgraph_with_a_history_of_its_own_is_closed_and_goes_on(mode, trip, owner):
    """Stopped inside, by its own budget or by that around it: closed, valid, resumable."""
    inner = sticky("search", "search")
    budget = Budget(max_iterations=2) if trip == "model" else Budget(max_tool_calls=3)
    child = agent(inner, checkpointer=True)
    if owner == "child":
        child = bounded(child, budget)
    graph = StateGraph(MessagesState)
    graph.add_node("child", child)
    graph.add_edge(START, "child")
    parent = graph.compile(checkpointer=InMemorySaver())
    config = thread()
    # The model of the child checks each request: what it kept from before is in it.
    for turn in range(3):
        graphs.BODIES.clear()
        made = bounded(parent, budget if owner == "parent" else Budget(max_iterations=9))
        given = user(f"Turn {turn}.")
        if mode == "sync":
            result = made.invoke(given, config)
        else:
            result = await made.ainvoke(given, config)
        check_request(result["messages"])
        check_request(parent.get_state(config).values["messages"])
        assert inner.calls == 2 * (turn + 1)
        assert len(graphs.BODIES) == (4 if trip == "model" else 3)
    if owner == "parent":
        ended = resume(parent, config, Budget(max_iterations=1))
        assert inner.calls == 7
        check_request(ended["messages"])


def test_a_new_turn_on_a_stopped_map_keeps_what_was_paid():
    script = Script([says("x")])
    graph = graphs.map_reduce(script, 20, checkpointer=InMemorySaver())
    config = thread()
    made = bounded(graph, Budget(max_iterations=5))
    first = made.invoke({"messages": [], "done": []}, config)
    assert script.calls == 5
    assert len(first["done"]) == 5
    second = made.invoke({"messages": [HumanMessage("Again.")], "done": []}, config)
    assert script.calls == 10
    assert len(second["done"]) == 10
    assert set(first["done"]) <= set(second["done"])


@pytest.mark.anyio
@pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])
async def test_a_stopped_map_is_closed_and_resumes_what_is_left(awaited):
    """Stopped twice: nothing is open on the thread, and each item is done and paid for once."""

    async def of(call, acall, *arguments):
        return await acall(*arguments) if awaited else call(*arguments)

    script = Script([says("x")])
    graph = graphs.map_reduce(script, 20, checkpointer=InMemorySaver())
    config = thread()
    made = bounded(graph, Budget(max_model_calls=5))
    result = await of(made.invoke, made.ainvoke, graphs.user(), config)
    for done in (5, 12):
        state = await of(graph.get_state, graph.aget_state, config)
        assert (state.next, state.tasks, script.calls) == ((), (), done)
        assert len(state.values["done"]) == len(result["done"]) == done
        assert state.values["messages"] == result["messages"]
        check_request(state.values["messages"])
        assert state.values["messages"][-1].response_metadata["stop_reason"] == "max_model_calls"
        budget = Budget(max_model_calls=7 if done == 5 else 8)
        result = await of(resume, aresume, made, config, budget)
    assert "stop_reason" not in result
    assert sorted(result["done"], key=int) == [str(n) for n in range(20)]
    assert [one.content for one in result["messages"]] == ["Go."]
    assert script.calls == 20


def test_a_turn_without_a_guard_on_a_stopped_map_keeps_what_was_paid():
    script = Script([says("x")])
    graph = graphs.map_reduce(script, 4, checkpointer=InMemorySaver())
    config = thread()
    first = bounded(graph, Budget(max_iterations=1)).invoke(graphs.user(), config)
    second = graph.invoke(graphs.user("Again."), config)
    assert script.calls == 5
    assert len(second["done"]) == 5
    assert second["done"][:1] == first["done"]
    check_request(second["messages"])


@pytest.mark.parametrize("own", [{"checkpointer": True}, {}], ids=["its own", "none"])
def test_a_stopped_subgraph_goes_on_with_what_it_had_done(own):
    script = asks(4)
    parent = StateGraph(MessagesState)
    parent.add_node("agent", agent(script, **own))
    parent.add_edge(START, "agent")
    graph = parent.compile(checkpointer=InMemorySaver())
    config = thread()
    bounded(graph, Budget(max_model_calls=2)).invoke(user(), config)
    assert graph.get_state(config).next == ()
    result = resume(graph, config, Budget(max_model_calls=20))
    assert sum(isinstance(one, AIMessage) for one in result["messages"]) == 5
    assert script.calls == 5
    check_request(result["messages"])


def test_nodes_side_by_side_that_are_stopped_twice_are_paid_for_once():
    script = Script([says("x")])
    model = StrictChat(script=script)

    class State(MessagesState):
        done: Annotated[list[str], operator.add]

    def node(name):
        def work(state):
            model.invoke([HumanMessage(name)])
            return {"done": [name]}

        return work

    graph = StateGraph(State)
    for name in "abcdef":
        graph.add_node(name, node(name))
        graph.add_edge(START, name)
    graph = graph.compile(checkpointer=InMemorySaver())
    config = thread()
    result = bounded(graph, Budget(max_model_calls=2)).invoke(user(), config)
    for done in (2, 4):
        assert (len(result["done"]), script.calls) == (done, done)
        result = resume(graph, config, Budget(max_model_calls=2))
    assert (sorted(result["done"]), script.calls) == (list("abcdef"), 6)


@pytest.mark.parametrize("edit", [{"done": ["mine"]}, {"messages": [AIMessage("mine")]}])
def test_a_stopped_thread_that_was_changed_is_not_resumed(edit):
    script = Script([says("x")])
    graph = graphs.map_reduce(script, 4, checkpointer=InMemorySaver())
    config = thread()
    bounded(graph, Budget(max_iterations=1)).invoke(graphs.user(), config)
    graph.update_state(config, edit, as_node="worker")
    with pytest.raises(AdapterError, match="changed since"):
        resume(graph, config, Budget(max_iterations=9))
    assert script.calls == 1


@pytest.mark.parametrize("stops", [2, 3])
def test_a_stopped_map_of_agents_goes_on_inside_of_them(stops):
    """Where it would be closed, what the agents have done until then would be lost."""
    script = graphs.asks(3)
    inner, _ = graphs.loop("reduced", script)
    parent = StateGraph(MessagesState)
    parent.add_node("agent", inner)
    sends = [Send("agent", graphs.user(str(n))) for n in range(2)]
    parent.add_conditional_edges(START, lambda _: sends, ["agent"])
    graph = parent.compile(checkpointer=InMemorySaver())
    config = thread()
    bounded(graph, Budget(max_model_calls=stops)).invoke(graphs.user(), config)
    assert script.calls == stops
    result = resume(graph, config, Budget(max_model_calls=20))
    # Three that ask and two that answer, and none of them twice.
    assert script.calls == 5
    assert sum(isinstance(one, AIMessage) for one in result["messages"]) == 5
    check_request(result["messages"])


def test_calls_that_are_no_calls_are_closed_too():
    """An answer with arguments that are no JSON: `invalid_tool_calls`, and nothing to run."""

    class Broken(ScriptedChat):
        def _generate(self, messages, stop=None, run_manager=None, **_):
            result = super()._generate(messages, stop, run_manager)
            message = result.generations[0].message
            message.invalid_tool_calls = [
                {
                    "name": "search",
                    "args": "{",
                    "id": "bad",
                    "error": None,
                    "type": "invalid_tool_call",
                }
            ]
            return result

    script = Script([says("x")])
    graph = StateGraph(MessagesState)
    model = Broken(script=script)
    graph.add_node("agent", lambda s: {"messages": [model.invoke(s["messages"])]})
    graph.add_node("again", lambda s: {"messages": [HumanMessage(f"again {len(s['messages'])}")]})
    graph.add_edge(START, "agent")
    graph.add_edge("agent", "again")
    graph.add_edge("again", "agent")
    plain = graph.compile(checkpointer=InMemorySaver())
    config = thread()
    result = bounded(plain, Budget(max_iterations=2)).invoke(user(), config)
    assert script.calls == 2
    check_request(result["messages"])
    resume(plain, config, Budget(max_iterations=1))
    assert script.calls == 3


# Streams


@pytest.mark.sample(4)
@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["debug", "tasks", "checkpoints", "updates", "values"])
async def test_no_mode_of_a_stream_shows_a_budget_interrupt(mode):
    for graph in (
        bounded(agent(sticky(), checkpointer=InMemorySaver()), Budget(max_iterations=2)),
        bounded(graphs.loop("reduced", sticky())[0], Budget(max_tool_calls=2)),
    ):
        parts = list(graph.stream(user(), thread(), stream_mode=mode))
        parts += [p async for p in graph.astream(user(), thread(), stream_mode=mode)]
        assert parts or mode == "checkpoints"
        assert "budget_exceeded" not in str(parts)


def test_resume_after_the_thread_was_changed_answers_truthfully():
    graph = agent(sticky(), checkpointer=InMemorySaver())
    config = thread()
    made = bounded(graph, Budget(max_iterations=2))
    made.invoke(user(), config)
    graph.update_state(config, {"messages": [HumanMessage("One more thing.")]})
    with pytest.raises(AdapterError, match="was changed since it was stopped"):
        resume(made, config, Budget(max_iterations=2))
    result = made.invoke(user("Go on."), config)
    assert result["stop_reason"] == "max_iterations"


@pytest.mark.anyio
async def test_a_stream_that_is_left_early_is_a_failed_run_and_leaves_nothing():
    outcomes = []
    guard = Guard(Budget(max_iterations=9))
    made = bounded(agent(sticky()), guard, on_outcome=outcomes.append)
    stream = made.stream(user(), stream_mode="updates")
    next(stream)
    stream.close()
    parts = made.astream(user(), stream_mode="updates")
    await anext(parts)
    await parts.aclose()
    assert [one.status for one in outcomes] == ["failed", "failed"]
    assert guard.open_calls() == ()


def test_what_reads_a_stream_is_no_part_of_its_run():
    script, other = sticky(), Script([says("x")])
    guard = Guard(Budget(max_model_calls=2))
    for _ in bounded(agent(script), guard).stream(user(), stream_mode="updates"):
        StrictChat(script=other).invoke("Not its business.")
    assert guard.usage.model_calls == script.calls == 2
    assert other.calls > 2


# Outcomes


def test_a_run_that_fails_has_an_outcome():
    from budgetguard_core.testing import ProviderError

    outcomes = []
    script = Script(lambda n: Reply(error=ProviderError("500")) if n else calls("search"))
    for way in ("bounded", "callback", "middleware"):
        script.calls = 0
        budget, option = Budget(max_iterations=9), {"on_outcome": outcomes.append}
        graph, config = bounded_agent(way, budget, StrictChat(script=script), options=option)
        with pytest.raises(ProviderError) as raised:
            graph.invoke(user(), config)
        assert outcomes[-1].status == "failed"
        assert outcomes[-1].usage.model_calls == 2
        assert outcome(raised.value).status == "failed"
    assert len(outcomes) == 3


def test_an_incident_says_the_next_step():
    outcomes = []
    made = bounded(agent(sticky()), Budget(max_iterations=1), on_outcome=outcomes.append)
    made.invoke(user())
    assert "model" in outcomes[0].next_step


def test_outcome_says_when_there_is_none():
    with pytest.raises(AdapterError, match="takes the result of a run with a budget"):
        outcome(agent(Script([says("x")])).invoke(user()))
    with pytest.raises(AdapterError, match="on_outcome"):
        outcome("a text")


# Teams as packages build them


@pytest.mark.slow
def test_deep_agents_end_within_a_budget():
    deepagents = pytest.importorskip("deepagents")
    inner, outer = sticky(), Script([])
    outer._replies = [calls("task")]
    brief = {"description": "search", "subagent_type": "finder"}

    class Asking(ScriptedChat):
        def _generate(self, messages, stop=None, run_manager=None, **_):
            result = super()._generate(messages)
            message = result.generations[0].message
            message.tool_calls = [{**call, "args": brief} for call in message.tool_calls]
            return result

    finder = {
        "name": "finder",
        "description": "finds",
        "system_prompt": "find",
        "tools": [search],
        "model": ScriptedChat(script=inner),
    }
    graph = deepagents.create_deep_agent(
        model=Asking(script=outer), subagents=[finder], checkpointer=InMemorySaver()
    )
    guard = Guard(Budget(max_model_calls=6))
    config = thread()
    result = bounded(graph, guard).invoke(user(), config)
    assert outer.calls + inner.calls == guard.usage.model_calls == 6
    assert result["stop_reason"] == "max_model_calls"
    check_request(result["messages"])
    check_request(graph.get_state(config).values["messages"])


@pytest.mark.anyio
@pytest.mark.parametrize("package", ["langgraph_supervisor", "langgraph_swarm"])
@pytest.mark.slow
async def test_teams_of_packages_end_within_a_budget(package):
    module = pytest.importorskip(package)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alice, bob = Script([]), Script([])
        if package == "langgraph_supervisor":
            alice._replies = [calls("transfer_to_bob")]
            bob._replies = lambda n: calls(Call("search", str(n))) if n % 2 == 0 else says("ok")
            worker = create_agent(ScriptedChat(script=bob), [search], name="bob")
            graph = module.create_supervisor([worker], model=ScriptedChat(script=alice)).compile(
                checkpointer=InMemorySaver()
            )
        else:
            alice._replies = lambda n: calls("transfer_to_bob")
            bob._replies = lambda n: calls("transfer_to_alice")
            made = [
                create_agent(
                    ScriptedChat(script=script),
                    [search, module.create_handoff_tool(agent_name=to)],
                    name=name,
                )
                for name, to, script in (("alice", "bob", alice), ("bob", "alice", bob))
            ]
            graph = module.create_swarm(made, default_active_agent="alice").compile(
                checkpointer=InMemorySaver()
            )
        guard = Guard(Budget(max_iterations=7, loop_detection=None))
        config = thread()
        result = await bounded(graph, guard).ainvoke(user(), config)
    assert alice.calls + bob.calls == 7
    assert result["stop_reason"] == "max_iterations"
    assert guard.usage.tool_calls == len(graphs.BODIES)
    history = graph.get_state(config).values["messages"]
    assert history[-1].response_metadata["synthetic"] is True
    again = await aresume(graph, config, Budget(max_iterations=2, loop_detection=None))
    assert alice.calls + bob.calls == 9
    assert isinstance(again["messages"][-1], AIMessage)
