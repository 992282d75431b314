"""Nothing of a run that is over is kept: no conversation, no entry, no task, no thread."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from budgetguard_core import Budget, Guard
from budgetguard_core.kit import Run
from budgetguard_core.testing import Reply, Script, calls, hang, says
from budgetguard_langgraph import BudgetCallback, BudgetMiddleware, bounded
from budgetguard_langgraph._run import OWNERS, GraphRun
from langgraph_graphs import StrictChat, search, thread, user

WAYS = ["bounded", "callback", "middleware", "active"]
# What the object that bounds, its guard and the caller's own context know of the last run.
LAST = 3
# By hand, any number: a leak of one object for each run shows in a few hundred.
RUNS = int(os.environ.get("BUDGETGUARD_RUNS", "300"))


def alive(kind):
    gc.collect()
    return sum(type(one) is kind for one in gc.get_objects())


def tiny(script):
    """A graph whose every run is one call of a model."""
    model = StrictChat(script=script)
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda s: {"messages": [model.invoke(s["messages"])]})
    graph.add_edge(START, "agent")
    return graph.compile()


def asking(saver):
    """A graph whose every run asks a person."""
    graph = StateGraph(MessagesState)
    graph.add_node("ask", lambda s: {"messages": [HumanMessage(interrupt("?"))]})
    graph.add_edge(START, "ask")
    return graph.compile(checkpointer=saver)


def runner(way, given, script):
    middleware = [BudgetMiddleware(given)] if way == "middleware" else []
    graph = tiny(script)
    if way == "middleware":
        graph = create_agent(StrictChat(script=script), middleware=middleware)
    if way == "bounded":
        graph = bounded(graph, given)
    callback = BudgetCallback(given) if way == "callback" else None
    config = {"callbacks": [callback]} if callback else {}

    def run(text):
        if way != "active":
            return graph.invoke(user(text), config)
        with (given if isinstance(given, Guard) else Guard(given)).activate():
            return graph.invoke(user(text), config)

    return run


@pytest.mark.sample(11)
@pytest.mark.parametrize("form", ["budget", "guard"])
@pytest.mark.parametrize("way", WAYS)
def test_runs_on_one_object_leave_nothing_behind(way, form):
    given = Budget(max_iterations=1) if form == "budget" else Guard(Budget(max_iterations=10**6))
    script = Script([says("Done.")])
    run = runner(way, given, script)
    before, entries = alive(Run), len(OWNERS)
    kept = []
    for n in range(RUNS):
        result = run(f"Go {n}.")
        kept.append(weakref.ref(result["messages"][-1]))
    del result
    gc.collect()
    assert script.calls == RUNS
    assert sum(one() is not None for one in kept) <= LAST
    assert alive(Run) - before <= LAST
    assert alive(GraphRun) <= LAST
    assert len(OWNERS) == entries


@pytest.mark.sample(4)
@pytest.mark.parametrize("way", WAYS)
def test_stopped_runs_leave_nothing_behind_either(way):
    script = Script([says("Done.")])
    run = runner(way, Budget(max_total_tokens=1), script)
    before, entries = alive(GraphRun), len(OWNERS)
    kept = []
    for n in range(100):
        result = run(f"Go {n}.")
        kept.append(weakref.ref(result["messages"][-1]))
    del result
    gc.collect()
    assert script.calls == 0
    assert sum(one() is not None for one in kept) <= LAST
    assert alive(GraphRun) - before <= LAST
    assert len(OWNERS) == entries


@pytest.mark.anyio
@pytest.mark.parametrize("way", ["bounded", "middleware"])
async def test_calls_that_an_abort_cuts_leave_no_entry(way):
    entries = len(OWNERS)
    for _ in range(3):
        guard = Guard(Budget(max_model_calls=10**6))
        model = StrictChat(script=Script([Reply(hang=True)]))
        agent = create_agent(
            model, [search], middleware=[BudgetMiddleware(guard)] if way == "middleware" else []
        )
        graph = bounded(agent, guard) if way == "bounded" else agent
        task = asyncio.create_task(graph.ainvoke(user("Go.")))
        while not model.script.calls:  # noqa: ASYNC110 - the model sets no event
            await asyncio.sleep(0)
        guard.abort("stop")
        result = await task
        assert result["messages"][-1].response_metadata["stop_reason"] == "aborted"
    assert len(OWNERS) == entries


@pytest.mark.anyio
@pytest.mark.parametrize("form", ["budget", "guard"])
@pytest.mark.parametrize("way", ["bounded", "callback", "middleware", "bare"])
async def test_cancelled_calls_leave_no_entry(way, form):
    budget = Budget(max_model_calls=10**6)
    given = budget if form == "budget" else Guard(budget)
    model = StrictChat(script=Script([Reply(hang=True)]))
    middleware = [BudgetMiddleware(given)] if way == "middleware" else []
    callback = BudgetCallback(given)
    config = {} if way in ("bounded", "middleware") else {"callbacks": [callback]}
    agent = create_agent(model, [search], middleware=middleware)
    graph = bounded(agent, given) if way == "bounded" else agent
    entries, before = len(OWNERS), alive(GraphRun)
    prompts = []
    for _ in range(20):
        message = HumanMessage("Go.")
        prompts.append(weakref.ref(message))
        called = model if way == "bare" else graph
        given_ = [message] if way == "bare" else {"messages": [message]}
        task = asyncio.create_task(called.ainvoke(given_, config))
        while model.script.calls < len(prompts):  # noqa: ASYNC110 - the model sets no event
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task, message, given_
    for _ in range(5):
        await asyncio.sleep(0)
    gc.collect()
    assert len(OWNERS) == entries
    assert alive(GraphRun) - before <= LAST
    assert sum(one() is not None for one in prompts) <= LAST
    guard = given if form == "guard" else callback.guard
    if form == "guard" or way in ("callback", "bare"):
        assert guard.open_calls() == ()
        assert guard.usage.reserved_tokens == 0


@pytest.mark.anyio
async def test_cancelled_tools_leave_no_open_call_on_a_shared_guard():
    started = asyncio.Event()

    @tool
    async def slow(value: str = "") -> str:
        """Hang."""
        started.set()
        await hang()
        return ""

    guard = Guard(Budget(max_tool_calls=10**6))
    agent = create_agent(StrictChat(script=Script([calls("slow", "slow")])), [slow])
    for graph, config in (
        (bounded(agent, guard), {}),
        (agent, {"callbacks": [BudgetCallback(guard)]}),
    ):
        for _ in range(10):
            started.clear()
            task = asyncio.create_task(graph.ainvoke(user(), config))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        for _ in range(5):
            await asyncio.sleep(0)
        assert guard.open_calls() == ()


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", ["bounded", "callback"])
def test_threads_beside_paused_runs_do_not_disturb_each_other(way):
    """24 threads beside many runs that wait: none of them looks through the others."""
    guard = Guard(Budget(max_model_calls=10**6))
    waiting = asking(InMemorySaver())
    before = alive(GraphRun), alive(Run), len(OWNERS)
    questions = []
    for n in range(RUNS):
        given = guard if n % 2 else Budget(max_iterations=5)
        config = thread()
        if way == "bounded":
            result = bounded(waiting, given).invoke(user(), config)
        else:
            result = waiting.invoke(user(), {**config, "callbacks": [BudgetCallback(given)]})
        assert result["__interrupt__"]
        questions.append(config)
    script = Script([says("x")])
    agent = tiny(script)
    barrier = threading.Barrier(24)

    def work(n):
        barrier.wait()
        given = guard if n % 2 else Budget(max_model_calls=3)
        made = bounded(waiting, given)
        for _ in range(5):
            bounded(agent, given).invoke(user())
        return made.invoke(Command(resume="yes"), questions[n])

    with ThreadPoolExecutor(24) as pool:
        results = list(pool.map(work, range(24)))
    assert [one["messages"][-1].content for one in results] == ["yes"] * 24
    assert script.calls == 120
    assert guard.usage.model_calls == 60
    del results, result
    # Those that wait are on their threads, and nowhere else.
    assert alive(GraphRun) - before[0] <= LAST
    assert alive(Run) - before[1] <= LAST
    assert len(OWNERS) == before[2]
