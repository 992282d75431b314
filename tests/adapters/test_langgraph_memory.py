"""Nothing of a run that is over is kept: no conversation, no entry, no task, no thread."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

import langgraph_graphs as graphs
from budgetguard_core import Budget, Guard
from budgetguard_core.kit import Run
from budgetguard_core.testing import Call, Reply, Script, calls, hang, says
from budgetguard_langgraph import BudgetCallback, BudgetMiddleware, bounded
from budgetguard_langgraph._run import OWNERS, GraphRun
from langgraph_graphs import StrictChat, search, thread, user

WAYS = ["bounded", "callback", "middleware", "active"]
# What the object that bounds, its guard and the caller's own context know of the last run.
LAST = 3


def alive(kind):
    gc.collect()
    return sum(type(one) is kind for one in gc.get_objects())


def runner(way, given, script):
    model = StrictChat(script=script)
    middleware = [BudgetMiddleware(given)] if way == "middleware" else []
    graph = create_agent(model, [search], middleware=middleware)
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


@pytest.mark.parametrize("form", ["budget", "guard"])
@pytest.mark.parametrize("way", WAYS)
def test_runs_on_one_object_leave_nothing_behind(way, form):
    budget = Budget(max_iterations=2 if form == "budget" else 10**6)
    given = budget if form == "budget" else Guard(budget)
    script = Script(lambda n: calls(Call("search", str(n))) if n % 3 else says("Done."))
    run = runner(way, given, script)
    before, entries = alive(Run), len(OWNERS)
    kept = []
    for n in range(25):
        result = run(f"Go {n}.")
        kept.append(weakref.ref(result["messages"][-1]))
    del result
    gc.collect()
    assert sum(one() is not None for one in kept) <= LAST
    assert alive(Run) - before <= LAST
    assert len(OWNERS) == entries


def test_paused_runs_leave_nothing_but_what_is_on_their_threads():
    @tool
    def ask(value: str = "") -> str:
        """Ask."""
        from langgraph.types import interrupt

        return str(interrupt("?"))

    saver = InMemorySaver()
    graph = create_agent(StrictChat(script=Script([calls("ask")])), [ask], checkpointer=saver)
    made = bounded(graph, Budget(max_iterations=5))
    before = alive(GraphRun), len(OWNERS)
    for _ in range(50):
        made.invoke(user(), thread())
    assert alive(GraphRun) - before[0] <= LAST
    assert len(OWNERS) == before[1]


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


def test_threads_beside_paused_runs_do_not_disturb_each_other():
    """24 threads beside many runs that wait: none of them looks through the others."""

    @tool
    def ask(value: str = "") -> str:
        """Ask."""
        from langgraph.types import interrupt

        return str(interrupt("?"))

    waiting = create_agent(
        StrictChat(script=Script([calls("ask")])), [ask], checkpointer=InMemorySaver()
    )
    guard = Guard(Budget(max_model_calls=10**6))
    bounded_waiting = bounded(waiting, guard)
    for _ in range(60):
        bounded_waiting.invoke(user(), thread())
    script = Script([says("x")])
    agent = create_agent(StrictChat(script=script), [search])
    barrier = threading.Barrier(24)

    def work(n):
        barrier.wait()
        given = guard if n % 2 else Budget(max_model_calls=3)
        return [bounded(agent, given).invoke(user()) for _ in range(5)]

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(work, range(24)))
    assert script.calls == 120
    assert guard.usage.model_calls == 60 + 60
    assert graphs.BODIES is not None
