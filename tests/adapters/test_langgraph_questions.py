"""A cap that asks a person by an interrupt of the graph: `on_trip="ask"`."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from budgetguard_core import Budget, ConfigurationError, StopReason
from budgetguard_core.testing import ManualClock
from budgetguard_core.testing.scripted import Answers
from budgetguard_langgraph import BudgetCallback, BudgetMiddleware, bounded, outcome
from budgetguard_langgraph.scripted import scripted_model

NUMBERS = itertools.count()
QUESTION = {"messages": [("user", "Go.")]}
SEARCH = {"search": {"query": "a"}}


def search(query: str = "") -> str:
    """Search."""
    return f"{query} {next(NUMBERS)}"


class Chat:
    """A thread of an agent that is made anew for each call, as in a process of its own."""

    def __init__(self, answers, budget, *, way="bounded", mode="sync", layers=(), on_trip="ask"):
        self.model = scripted_model(Answers(answers))
        self.budget, self.way, self.mode, self.layers = budget, way, mode, layers
        self.on_trip = on_trip
        self.saver = InMemorySaver()
        self.config = {"configurable": {"thread_id": "thread"}}

    def call(self, given):
        layers, config = list(self.layers), dict(self.config)
        if self.way == "middleware":
            layers.append(BudgetMiddleware(self.budget, on_trip=self.on_trip))
        agent = create_agent(self.model, [search], checkpointer=self.saver, middleware=layers)
        if self.way == "bounded":
            agent = bounded(agent, self.budget, on_trip=self.on_trip)
        if self.way == "callback":
            config["callbacks"] = [BudgetCallback(self.budget, on_trip=self.on_trip)]
        if self.mode == "sync":
            return agent.invoke(given, config)
        if self.mode == "async":
            return asyncio.run(agent.ainvoke(given, config))
        return list(agent.stream(given, config, stream_mode="values"))[-1]


def asked(result):
    return [(one.value["reason"], one.value["limit"], one.value["used"]) for one in of(result)]


def of(result):
    return result.get("__interrupt__", ())


@pytest.mark.parametrize("mode", ["sync", "async", "streamed"])
@pytest.mark.parametrize("way", ["bounded", "callback", "middleware"])
def test_the_graph_waits_for_more_budget_and_goes_on(way, mode):
    chat = Chat([SEARCH] * 5 + ["Done."], Budget(max_iterations=2), way=way, mode=mode)
    result = chat.call(QUESTION)
    assert asked(result) == [("max_iterations", 2, 2)]
    assert of(result)[0].value["next_step"] == "call the model gpt-4o"
    assert result["messages"][-1].type == "tool"
    result = chat.call(Command(resume={"max_iterations": 4}))
    assert asked(result) == [("max_iterations", 4, 4)]
    result = chat.call(Command(resume={"max_iterations": 40}))
    assert not of(result)
    assert result["messages"][-1].content == "Done."
    assert (outcome(result).status, outcome(result).usage.iterations) == ("completed", 6)


@pytest.mark.parametrize("no", [False, "no", {"max_iterations": 1}])
@pytest.mark.parametrize("way", ["bounded", "middleware"])
def test_any_other_answer_is_the_end(way, no):
    chat = Chat([SEARCH], Budget(max_iterations=2), way=way)
    chat.call(QUESTION)
    ended = outcome(chat.call(Command(resume=no)))
    assert (ended.status, ended.stop_reason) == ("terminated", StopReason.MAX_ITERATIONS)
    assert ended.usage.iterations == 2
    assert bool(ended.errors) is bool(no)


def test_while_nobody_answers_no_time_is_charged():
    clock, model = ManualClock(), scripted_model(Answers([SEARCH, "Done."]))
    agent = create_agent(model, [search], checkpointer=InMemorySaver())
    budget = Budget(max_iterations=1, max_seconds=60)
    agent = bounded(agent, budget, on_trip="ask", clock=clock)
    config = {"configurable": {"thread_id": "thread"}}
    agent.invoke(QUESTION, config)
    clock.advance(10_000)
    result = agent.invoke(Command(resume={"max_iterations": 2}), config)
    assert outcome(result).status == "completed"
    assert outcome(result).usage.seconds < 1


@pytest.mark.parametrize("way", ["bounded", "middleware"])
def test_a_batch_of_tools_over_its_cap_asks_and_runs(way):
    both = {"search": {"query": "a"}}
    chat = Chat([both, both, "Done."], Budget(max_tool_calls=1), way=way)
    result = chat.call(QUESTION)
    assert asked(result) == [("max_tool_calls", 1, 1)]
    result = chat.call(Command(resume={"max_tool_calls": 9}))
    assert result["messages"][-1].content == "Done."
    assert outcome(result).usage.tool_calls == 2


def test_it_waits_beside_questions_of_the_users_own():
    layers = [HumanInTheLoopMiddleware(interrupt_on={"search": True})]
    chat = Chat([SEARCH, SEARCH, "Done."], Budget(max_iterations=1), layers=layers)
    result = chat.call(QUESTION)
    assert "action_requests" in of(result)[0].value
    approve = Command(resume={"decisions": [{"type": "approve"}]})
    result = chat.call(approve)
    assert asked(result) == [("max_iterations", 1, 1)]
    result = chat.call(Command(resume={"max_iterations": 9}))
    assert "action_requests" in of(result)[0].value
    # Caps are never read from a thread: those of the envelope hold after another pause.
    result = chat.call(approve)
    assert asked(result) == [("max_iterations", 1, 2)]
    result = chat.call(Command(resume={"max_iterations": 9}))
    assert outcome(result).usage.iterations == 3


def test_a_node_that_asks_by_itself_gets_its_own_answer():
    model = scripted_model(Answers(["One.", "Two."]))
    answers = []

    def first(state):
        return {"messages": [model.invoke(state["messages"])]}

    def second(state):
        reply = model.invoke(state["messages"])
        answers.append(interrupt("Really?"))
        return {"messages": [reply]}

    graph = StateGraph(MessagesState)
    graph.add_node(first)
    graph.add_node(second)
    graph.add_edge(START, "first")
    graph.add_edge("first", "second")
    graph.add_edge("second", END)
    compiled = graph.compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "thread"}}

    def call(given):
        return bounded(compiled, Budget(max_model_calls=1), on_trip="ask").invoke(given, config)

    assert asked(call(QUESTION)) == [("max_model_calls", 1, 1)]
    result = call(Command(resume={"max_model_calls": 9}))
    assert [one.value for one in of(result)] == ["Really?"]
    result = call(Command(resume="Yes."))
    while of(result):  # asked for more calls once again, after the pause
        result = call(Command(resume={of(result)[0].id: {"max_model_calls": 9}}))
        if [one.value for one in of(result)] == ["Really?"]:
            result = call(Command(resume="Yes."))
            break
    assert set(answers) == {"Yes."}


def test_a_function_may_ask_by_an_interrupt_of_its_own():
    def person(question):
        return interrupt(f"{question.reason}: more?")

    chat = Chat([SEARCH] * 2 + ["Done."], Budget(max_iterations=2), on_trip=person)
    result = chat.call(QUESTION)
    assert [one.value for one in of(result)] == ["max_iterations: more?"]
    result = chat.call(Command(resume={"max_iterations": 9}))
    assert outcome(result).status == "completed"


def test_nothing_of_it_is_in_langchains_log(caplog):
    chat = Chat([SEARCH], Budget(max_iterations=1))
    chat.call(QUESTION)
    assert [one for one in caplog.records if one.name.startswith("langchain")] == []


@pytest.mark.parametrize("mode", ["sync", "async", "streamed"])
@pytest.mark.parametrize("way", ["bounded", "callback", "middleware"])
def test_a_graph_without_a_checkpointer_asks_nobody(way, mode):
    chat = Chat([SEARCH], Budget(max_iterations=1), way=way, mode=mode)
    chat.saver = None
    with pytest.raises(ConfigurationError, match="needs a graph with a checkpointer"):
        chat.call(QUESTION)
    assert chat.model.answers.calls == 0


def test_a_model_in_a_chain_asks_nobody():
    model = scripted_model(Answers(["One."]))
    chain = model | (lambda reply: reply.content)
    callback = BudgetCallback(Budget(max_model_calls=1), on_trip="ask")
    with pytest.raises(ConfigurationError, match="a framework that asks by itself"):
        chain.invoke("Go.", {"callbacks": [callback]})


def test_a_subgraph_asks_by_the_checkpointer_of_its_graph():
    model = scripted_model(Answers([SEARCH, "Done."]))
    inner = bounded(create_agent(model, [search]), Budget(max_iterations=1), on_trip="ask")
    graph = StateGraph(MessagesState)
    graph.add_node("agent", inner)
    graph.add_edge(START, "agent")
    compiled = graph.compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "thread"}}
    assert asked(compiled.invoke(QUESTION, config)) == [("max_iterations", 1, 1)]
    result = compiled.invoke(Command(resume={"max_iterations": 9}), config)
    assert result["messages"][-1].content == "Done."


def branches(model, count):
    """A graph with nodes that ask a model beside each other."""

    def first(state):
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("first", first)
    graph.add_edge(START, "first")
    for number in range(count):
        graph.add_node(f"branch {number}", first)
        graph.add_edge("first", f"branch {number}")
    return graph.compile(checkpointer=InMemorySaver())


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("way", ["bounded", "callback"])
def test_one_answer_serves_all_branches_that_ask_about_a_cap(way, mode):
    graph = branches(scripted_model(Answers(["Said."])), 3)

    def call(given, caps=1):
        config, guarded = {"configurable": {"thread_id": "thread"}}, graph
        budget = Budget(max_model_calls=caps)
        if way == "bounded":
            guarded = bounded(graph, budget, on_trip="ask")
        else:
            config["callbacks"] = [BudgetCallback(budget, on_trip="ask")]
        if mode == "sync":
            return guarded.invoke(given, config)
        return asyncio.run(guarded.ainvoke(given, config))

    result = call(QUESTION)
    assert set(asked(result)) == {("max_model_calls", 1, 1)}
    assert len({one.id for one in of(result)}) == 1
    result = call(Command(resume={"max_model_calls": 9}))
    assert not of(result)
    assert [one.content for one in result["messages"][1:]] == ["Said."] * 4
    assert outcome(result).usage.model_calls == 4


def test_one_answer_has_all_caps_that_branches_ask_about():
    model = scripted_model(Answers(["Said.", "Said.", SEARCH]))
    graph = StateGraph(MessagesState)

    def talks(state):
        return {"messages": [model.invoke(state["messages"])]}

    def searches(state):
        return {"messages": [("user", StructuredTool.from_function(search).invoke({}))]}

    for name, node in (("before", talks), ("searched", searches)):
        graph.add_node(name, node)
        graph.add_edge(START, name)
    for name, node in (("talks", talks), ("searches", searches)):
        graph.add_node(name, node)
        graph.add_edge(["before", "searched"], name)
    budget = Budget(max_model_calls=1, max_tool_calls=1)
    agent = bounded(graph.compile(checkpointer=InMemorySaver()), budget, on_trip="ask")
    config = {"configurable": {"thread_id": "thread"}}
    result = agent.invoke(QUESTION, config)
    assert {one[0] for one in asked(result)} == {"max_model_calls", "max_tool_calls"}
    result = agent.invoke(Command(resume={"max_model_calls": 9, "max_tool_calls": 9}), config)
    assert not of(result)
    assert len(result["messages"]) == 5


@pytest.mark.parametrize("no", [False, True])
def test_a_cap_asks_after_the_person_who_approves_the_calls_of_its_batch(no):
    both = [("search", {"query": "a"}), ("search", {"query": "b"})]
    layers = [HumanInTheLoopMiddleware(interrupt_on={"search": True})]
    chat = Chat([both, "Done."], Budget(max_tool_calls=1), layers=layers)
    assert "action_requests" in of(chat.call(QUESTION))[0].value
    result = chat.call(Command(resume={"decisions": [{"type": "approve"}] * 2}))
    assert asked(result) == [("max_tool_calls", 1, 1)]
    result = chat.call(Command(resume=False if no else {"max_tool_calls": 9}))
    assert outcome(result).status == ("terminated" if no else "completed")
    assert outcome(result).usage.tool_calls == (1 if no else 2)
