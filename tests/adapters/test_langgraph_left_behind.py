"""What a stopped run leaves behind: the body of a node, in a thread that nobody can cancel."""

from __future__ import annotations

import asyncio
import threading

import pytest
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph

from budgetguard_core import Budget, Guard
from budgetguard_core.testing import Script, says
from budgetguard_langgraph import BudgetCallback, bounded
from conformance.budgetguard_langgraph_driver import ScriptedChat, user

pytestmark = pytest.mark.anyio


def graph_of(node):
    graph = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    return graph.compile()


def by_model(model):
    model.invoke("Go on.")


def by_chain(model):
    (model | (lambda reply: reply.content)).invoke("Go on.")


def by_graph(model):
    graph_of(lambda state: {"messages": [model.invoke(state["messages"])]}).invoke(user("Go on."))


def by_own_budget(model):
    bounded(graph_of(lambda state: {"messages": [model.invoke("x")]}), Budget()).invoke(user("x"))


def by_event_loop(model):
    asyncio.run(model.ainvoke("Go on."))


ASKS = [by_model, by_chain, by_graph, by_own_budget, by_event_loop]


class Body:
    """A node's body that goes on when its run has ended."""

    def __init__(self, ask):
        self.script = Script(lambda number: says(f"{number}."))
        self.model = ScriptedChat(script=self.script)
        self.ask = ask
        self.began, self.is_over, self.done = (threading.Event() for _ in range(3))
        self.left_by = []

    def __call__(self, state):
        self.ask(self.model)
        self.began.set()
        self.is_over.wait(30)
        for _ in range(3):
            try:
                self.ask(self.model)
            except BaseException as error:
                self.left_by.append(type(error))
        self.done.set()
        return {}

    async def has_begun(self):
        assert await asyncio.to_thread(self.began.wait, 30)

    async def go_on(self):
        self.is_over.set()
        assert await asyncio.to_thread(self.done.wait, 30)


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("shared", [False, True])
async def test_the_body_of_a_node_makes_no_call_when_its_run_was_stopped(shared, ask):
    body, budget = Body(ask), Budget(max_seconds=0.3, max_model_calls=50)
    graph = bounded(graph_of(body), Guard(budget) if shared else budget)
    result = await graph.ainvoke(user("Go."))
    assert result["stop_reason"] == "max_seconds"
    before = body.script.calls
    await body.go_on()
    assert body.script.calls == before <= 1


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("way", ["bounded", "callback"])
async def test_the_body_of_a_node_keeps_to_the_caps_when_its_run_was_cancelled(way, ask):
    body, budget = Body(ask), Budget(max_model_calls=3)
    graph, config = graph_of(body), {}
    if way == "bounded":
        graph = bounded(graph, budget)
    else:
        config = {"callbacks": [BudgetCallback(budget)]}
    task = asyncio.create_task(graph.ainvoke(user("Go."), config))
    await body.has_begun()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await body.go_on()
    assert body.script.calls == 3
    assert len(body.left_by) == 1


@pytest.mark.parametrize("way", ["bounded", "callback"])
async def test_what_comes_after_a_stopped_run_is_no_part_of_it(way):
    body, budget = Body(by_model), Budget(max_seconds=0.3, max_model_calls=1)
    callback = BudgetCallback(budget)
    if way == "bounded":
        await bounded(graph_of(body), budget).ainvoke(user("Go."))
    else:
        task = asyncio.create_task(graph_of(body).ainvoke(user("Go."), {"callbacks": [callback]}))
        await body.has_begun()
        task.cancel()
        await asyncio.wait({task})
    script = Script(lambda number: says(f"{number}."))
    model = ScriptedChat(script=script)
    await asyncio.to_thread(model.invoke, "Hello.", {"callbacks": [callback]})
    await model.ainvoke("Hello.")
    assert script.calls == 2
    await body.go_on()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("way", ["bounded", "callback"])
def test_tasks_that_begin_when_their_workflow_is_through_are_a_part_of_its_run(way, mode):
    """Nobody waits for them but LangGraph, and few run at the same time."""
    script, outcomes = Script(lambda number: says(f"{number}.")), []
    model = ScriptedChat(script=script)

    @task
    def ask(number):
        model.invoke(str(number))

    @task
    async def ask_awaited(number):
        await model.ainvoke(str(number))

    @entrypoint()
    def flow(count):
        for number in range(count):
            ask(number)

    @entrypoint()
    async def awaited_flow(count):
        for number in range(count):
            ask_awaited(number)

    graph, config = flow if mode == "sync" else awaited_flow, {"max_concurrency": 2}
    budget = Budget(max_model_calls=2)
    if way == "bounded":
        graph = bounded(graph, budget, on_outcome=outcomes.append)
    else:
        config["callbacks"] = [BudgetCallback(budget, on_outcome=outcomes.append)]
    if mode == "sync":
        graph.invoke(5, config)
    else:
        asyncio.run(graph.ainvoke(5, config))
    assert script.calls == 2
    assert [(one.status, one.usage.model_calls) for one in outcomes] == [("terminated", 2)]
