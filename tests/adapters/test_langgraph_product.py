"""State shape x graph kind x way in x checkpointer x trip place x entry point x what comes next.

A sample of the product by seeds. `BUDGETGUARD_SEEDS=5000` runs as many by hand, from
`BUDGETGUARD_FIRST_SEED` on; there are about 2,800 cases.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent

import langgraph_graphs as graphs
from budgetguard_core import Budget
from budgetguard_core.testing import Call, Script, calls, says
from budgetguard_langgraph import (
    BudgetCallback,
    BudgetMiddleware,
    aresume,
    bounded,
    outcome,
    resume,
)
from langgraph_graphs import AWAITED, ENTRIES, WAYS, StrictChat, check_request, run, search, thread

FIRST = int(os.environ.get("BUDGETGUARD_FIRST_SEED", "0"))
SEEDS = int(os.environ.get("BUDGETGUARD_SEEDS", "160"))
BLOCKS = 4

# A model that asks four times for two tools, then answers.
TURNS, WIDTH = 4, 2
KINDS = (
    *(f"loop {shape}" for shape in graphs.SHAPES),
    "agent",
    "react agent",
    "agent in a graph",
    "agent with its own history",
)
SAVERS = ("none", "memory", "sqlite")
TRIPS = {
    "model": (Budget(max_iterations=2), "max_iterations", 2, 4),
    "tool": (Budget(max_tool_calls=3), "max_tool_calls", 2, 3),
    "first": (Budget(max_total_tokens=1), "max_total_tokens", 0, 0),
    "never": (Budget(max_iterations=9), "completed", 5, 8),
}
NEXT = ("turn", "resume")


def possible(case):
    """Tell whether there is such a combination in the world."""
    kind, way, saver, trip, entry, after = case
    if way == "middleware" and kind != "agent":
        return False
    if saver == "sqlite" and entry in AWAITED:
        return False  # it cannot be awaited
    if kind == "agent with its own history" and saver == "none":
        return False
    return after == "turn" or (saver != "none" and trip != "never")


CASES = [
    case for case in itertools.product(KINDS, WAYS, SAVERS, TRIPS, ENTRIES, NEXT) if possible(case)
]

MIXED = random.Random(10).sample(CASES, len(CASES))


def script():
    def reply(n):
        if n >= TURNS:
            return says("Done.")
        return calls(*[Call("search", f"{n}.{i}") for i in range(WIDTH)])

    return Script(reply)


def built(kind, made, saver, middleware):
    if kind.startswith("loop "):
        return graphs.loop(kind.removeprefix("loop "), made, checkpointer=saver)
    if kind == "react agent":
        react = create_react_agent(StrictChat(script=made), [search], checkpointer=saver)
        return react, graphs.user
    if kind == "agent":
        agent = create_agent(
            StrictChat(script=made), [search], checkpointer=saver, middleware=middleware
        )
        return agent, graphs.user
    own = {"checkpointer": True} if kind == "agent with its own history" else {}
    inner = create_agent(StrictChat(script=made), [search], **own)
    graph = StateGraph(MessagesState)
    graph.add_node("one", inner)
    graph.add_edge(START, "one")
    return graph.compile(checkpointer=saver), graphs.user


def conversation(values):
    """Return the conversation in what a graph returned, None where it shows none."""
    if isinstance(values, list):
        return values
    for key in ("messages", "history"):
        found = values.get(key) if isinstance(values, dict) else getattr(values, key, None)
        if found:
            return found
    return None


def contents(messages):
    return [(type(one).__name__, one.content) for one in messages]


async def check(case, saver):
    kind, way, _, trip, entry, after = case
    budget, reason, models, bodies = TRIPS[trip]
    graphs.BODIES.clear()
    made, told, options = script(), [], {}
    if kind == "loop elsewhere":
        options["messages_key"] = "history"
    middleware = []
    if way == "middleware":
        middleware = [BudgetMiddleware(budget, on_outcome=told.append)]
    plain, given = built(kind, made, saver, middleware)
    config = thread()
    graph, there = plain, config
    if way == "bounded":
        graph = bounded(plain, budget, on_outcome=told.append, **options)
    if way == "callback":
        callback = BudgetCallback(budget, on_outcome=told.append, **options)
        there = {**config, "callbacks": [callback]}
    result = await run(graph, given("Go."), there, entry)

    # The caps hold exactly, and the run has ended once.
    assert (made.calls, len(graphs.BODIES)) == (models, bodies)
    assert [str(one.stop_reason) for one in told] == [reason]
    assert (told[0].usage.model_calls, told[0].usage.tool_calls) == (models, bodies)
    if told[0].messages:
        check_request(told[0].messages)
    shown = conversation(result)
    if way != "callback":
        if shown is not None:
            check_request(shown)
            ended = shown[-1].response_metadata.get("stop_reason")
            assert ended == (None if trip == "never" else reason)
        if isinstance(result, dict):
            assert "__interrupt__" not in result
    if saver is not None and way != "callback":
        state = plain.get_state(config)
        assert state.next == ()
        kept = conversation(state.values)
        if shown is not None:
            assert contents(kept) == contents(shown)
    if after == "resume":
        fresh = Budget(max_iterations=20)
        if way == "middleware":
            # The middleware is a part of the graph; its stop is a step of it like any other.
            return
        resumed = aresume if entry in AWAITED else resume
        again = resumed(graph, config, fresh)
        again = await again if entry in AWAITED else again
        # The answers of refused calls count as their results.
        assert made.calls == TURNS + 1
        last = conversation(again)
        if last is not None:
            check_request(last)
            assert last[-1].content == "Done."
            key = "history" if kind == "loop elsewhere" else "messages"
            if not isinstance(again, list):
                assert outcome(again, messages_key=key).status == "completed"
        return
    # The next turn: on the thread, or with what came back.
    if way == "callback" and (saver is not None or trip != "never"):
        return  # it cannot write, so its thread is gone on with by `resume`
    turn = given("And now?")
    if kind in ("loop last_value",) or saver is None:
        if shown is None or kind == "loop hidden":
            return  # its input is a question
        rest = turn if isinstance(turn, list) else turn[next(iter(turn))]
        whole = [*shown, *rest]
        turn = whole if isinstance(turn, list) else {**turn, next(iter(turn)): whole}
    if kind == "loop windowed":
        return  # its own window cuts calls from their results
    before = made.calls
    second = await run(plain, turn, config, entry)
    if way != "middleware" or trip == "never":
        assert made.calls == max(TURNS + 1, before + 1)
    found = conversation(second)
    if found is not None:
        check_request(found)
        assert contents(found)[: len(shown)] == contents(shown)


async def one(number):
    # As many seeds as there are cases take each of them once.
    case = MIXED[number % len(MIXED)]
    saver = InMemorySaver() if case[2] == "memory" else None
    try:
        if case[2] == "sqlite":
            with SqliteSaver.from_conn_string(":memory:") as saver:
                await check(case, saver)
        else:
            await check(case, saver)
    except BaseException as error:
        error.add_note(f"seed {number}: {case}")
        raise


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("block", range(BLOCKS))
def test_the_product(block):
    for number in range(FIRST + block, FIRST + SEEDS, BLOCKS):
        asyncio.run(one(number))
