"""Calls without a graph around them: batches, maps, parallel branches, retries, fallbacks."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph

from budgetguard_core import Budget, BudgetExceeded, Guard
from budgetguard_core.kit import current_guard
from budgetguard_core.testing import ProviderError, Reply, Script, says
from budgetguard_langgraph import BudgetCallback, BudgetInterrupt, bounded
from langgraph_graphs import StrictChat

GIVEN = [[HumanMessage(str(n))] for n in range(12)]


def model(replies=None):
    return StrictChat(script=Script(replies or [says("x")]))


def chain_of(chat):
    return ChatPromptTemplate.from_messages([("user", "{text}")]) | chat | StrOutputParser()


async def called(chain, given, config, mode):
    return chain.invoke(given, config) if mode == "sync" else await chain.ainvoke(given, config)


def attempt(call):
    try:
        return call()
    except BudgetExceeded as stop:
        return stop


@pytest.mark.parametrize("form", ["budget", "guard"])
@pytest.mark.parametrize("round_", range(5))
def test_a_batch_of_a_model_shares_the_budget_of_models_called_on_their_own(form, round_):
    chat = model()
    given = Budget(max_model_calls=3) if form == "budget" else Guard(Budget(max_model_calls=3))
    callback = BudgetCallback(given)
    results = chat.batch(
        GIVEN, {"callbacks": [callback], "max_concurrency": 6}, return_exceptions=True
    )
    assert chat.script.calls == 3
    assert sum(isinstance(one, BudgetInterrupt) for one in results) == 9
    assert callback.outcome.usage.model_calls == 3


@pytest.mark.anyio
@pytest.mark.parametrize("round_", range(5))
async def test_so_does_an_async_batch(round_):
    chat = model()
    callback = BudgetCallback(Budget(max_model_calls=3))
    await chat.abatch(GIVEN, {"callbacks": [callback]}, return_exceptions=True)
    assert chat.script.calls == 3


@pytest.mark.parametrize("round_", range(5))
def test_each_item_of_a_batch_of_chains_has_a_budget_of_its_own(round_):
    chat = model()
    twice = RunnableLambda(
        lambda text: [chain_of(chat).invoke({"text": f"{text} {n}"}) for n in range(9)]
    )
    outcomes = []
    callback = BudgetCallback(Budget(max_model_calls=3), on_outcome=outcomes.append)
    results = twice.batch(
        ["a", "b", "c", "d"],
        {"callbacks": [callback], "max_concurrency": 4},
        return_exceptions=True,
    )
    assert chat.script.calls == 12
    assert all(isinstance(one, BudgetExceeded) for one in results)
    assert sorted(one.usage.model_calls for one in outcomes) == [3, 3, 3, 3]


@pytest.mark.parametrize("round_", range(5))
def test_a_batch_of_chains_on_one_guard_is_exact_together(round_):
    chat = model()
    guard = Guard(Budget(max_model_calls=3))
    chain_of(chat).batch(
        [{"text": str(n)} for n in range(12)],
        {"callbacks": [BudgetCallback(guard)], "max_concurrency": 6},
        return_exceptions=True,
    )
    assert chat.script.calls == guard.usage.model_calls == 3


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("round_", range(3))
async def test_parallel_branches_are_one_run(mode, round_):
    chat = model()
    branches = RunnableParallel({f"b{n}": chain_of(chat) for n in range(9)})
    callback = BudgetCallback(Budget(max_model_calls=3))
    config = {"callbacks": [callback]}
    with pytest.raises(BudgetExceeded) as stopped:
        await called(branches, {"text": "a"}, config, mode)
    assert chat.script.calls == 3
    assert stopped.value.trip.reason == "max_model_calls"
    assert callback.outcome.status == "terminated"


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_map_is_exact(mode):
    chat = model()
    mapped = RunnablePassthrough() | chain_of(chat).map()
    given = [{"text": str(n)} for n in range(9)]
    config = {"callbacks": [BudgetCallback(Budget(max_model_calls=3))]}
    with pytest.raises(BudgetExceeded):
        await called(mapped, given, config, mode)
    assert chat.script.calls == 3


@pytest.mark.parametrize("alone", [True, False], ids=["model", "chain"])
def test_retries_are_calls_and_no_iterations(alone):
    failing = Script(lambda n: Reply(error=ProviderError("500")) if n < 2 else says("x"))
    chat = StrictChat(script=failing)
    again = chat.with_retry(
        retry_if_exception_type=(ProviderError,),
        wait_exponential_jitter=False,
        stop_after_attempt=5,
    )
    chain = again if alone else again | StrOutputParser()
    callback = BudgetCallback(Budget(max_iterations=1, max_model_calls=3))
    chain.invoke("a", {"callbacks": [callback]})
    assert failing.calls == 3
    usage = callback.guard.usage
    assert (usage.model_calls, usage.iterations, usage.failed_calls) == (3, 1, 2)


@pytest.mark.parametrize("alone", [True, False], ids=["model", "chain"])
def test_a_retry_over_the_cap_is_not_made(alone):
    chat = model([Reply(error=ProviderError("500"))])
    again = chat.with_retry(wait_exponential_jitter=False, stop_after_attempt=2)
    chain = again if alone else again | StrOutputParser()
    callback = BudgetCallback(Budget(max_model_calls=1))
    with pytest.raises(BudgetExceeded):
        chain.invoke("a", {"callbacks": [callback]})
    assert chat.script.calls == 1


def test_fallbacks_are_calls_of_the_same_budget():
    first = model([Reply(error=ProviderError("500"))])
    second = model([Reply(error=ProviderError("500"))])
    third = model()
    chain = first.with_fallbacks([second, third]) | StrOutputParser()
    callback = BudgetCallback(Budget(max_model_calls=2))
    # LangChain raises the first error when every fallback fails, and a refused one has failed.
    with pytest.raises(ProviderError):
        chain.invoke("a", {"callbacks": [callback]})
    assert (first.script.calls, second.script.calls, third.script.calls) == (1, 1, 0)
    assert callback.outcome.stop_reason == "max_model_calls"


def test_many_threads_with_one_callback_are_exact():
    chat = model()
    callback = BudgetCallback(Budget(max_model_calls=5))
    barrier = threading.Barrier(24)

    def work(_):
        barrier.wait()
        return attempt(lambda: chat.invoke("a", {"callbacks": [callback]}))

    with ThreadPoolExecutor(24) as pool:
        results = list(pool.map(work, range(24)))
    assert chat.script.calls == 5
    assert sum(isinstance(one, BudgetExceeded) for one in results) == 19


def test_a_refused_generate_of_many_prompts_leaves_no_reservation():
    chat = model()
    guard = Guard(Budget(max_model_calls=1))
    with pytest.raises(BudgetExceeded):
        chat.generate(GIVEN[:3], callbacks=[BudgetCallback(guard)])
    assert chat.script.calls == 0
    assert guard.open_calls() == ()
    assert guard.usage.reserved_tokens == 0
    chat.invoke(
        "a", {"callbacks": [BudgetCallback(guard.child(Budget()))]}
    ) if not guard.trip else 0


@pytest.mark.anyio
async def test_tasks_and_threads_that_copy_the_context_are_bounded_by_an_active_guard():
    chat = model()
    guard = Guard(Budget(max_model_calls=4))
    with guard.activate():
        await asyncio.gather(*(chat.ainvoke("a") for _ in range(2)))
        context = copy_context()
        await asyncio.to_thread(chat.invoke, "b")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(context.run, chat.invoke, "c").result()
        with pytest.raises(BudgetExceeded):
            await chat.ainvoke("d")
    assert chat.script.calls == guard.usage.model_calls == 4


@pytest.mark.anyio
async def test_a_chain_in_a_tool_that_outlives_its_run_is_a_part_of_it():
    started, released, guards, tasks = asyncio.Event(), asyncio.Event(), [], []

    @tool
    async def late() -> str:
        """Goes on when its run has ended."""
        started.set()
        await released.wait()
        return await RunnableLambda(lambda _: guards.append(current_guard()) or "x").ainvoke("a")

    async def node(_):
        tasks.append(asyncio.create_task(late.ainvoke({})))
        await started.wait()
        return await late.ainvoke({})

    callback = BudgetCallback(Budget(max_tool_calls=1))
    with pytest.raises(BudgetExceeded):
        await RunnableLambda(node).ainvoke("a", {"callbacks": [callback]})
    assert callback.outcome.stop_reason == "max_tool_calls"
    released.set()
    assert await tasks[0] == "x"
    assert guards == [callback.guard]


class Table:
    """What compares element by element, as the tables of pandas do."""

    def __eq__(self, other):
        return self

    __ne__ = __eq__
    __hash__ = None

    def __bool__(self):
        raise ValueError("The truth value of a table is ambiguous.")


def test_an_argument_that_compares_to_no_truth_value_reaches_its_tool():
    @tool
    def rows(table: Any) -> str:
        """Tell what it is."""
        return type(table).__name__

    guard = Guard(Budget(max_tool_calls=2))
    call = {"type": "tool_call", "id": "1", "name": "rows", "args": {"table": Table()}}
    result = rows.invoke(call, {"callbacks": [BudgetCallback(guard)]})
    assert result.content == "Table"
    assert guard.usage.tool_calls == 1


@pytest.mark.parametrize("mode", ["updates", "values", ["updates", "debug"]])
def test_the_chunk_of_a_breakpoint_is_the_unguarded_one(mode):
    def steps(bound):
        builder = StateGraph(dict)
        builder.add_node("one", lambda state: {"x": 1})
        builder.add_node("two", lambda state: {"x": 2})
        builder.set_entry_point("one")
        builder.add_edge("one", "two")
        graph = builder.compile(checkpointer=InMemorySaver(), interrupt_before=["two"])
        graph = bounded(graph, Budget(max_iterations=9)) if bound else graph
        config = {"configurable": {"thread_id": "1"}}
        chunks = list(graph.stream({"x": 0}, config, stream_mode=mode))
        return [one for one in chunks if "'timestamp'" not in repr(one)]

    assert steps(bound=True) == steps(bound=False)
