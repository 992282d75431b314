"""Random runs: what users combine. The referees count apart from the guard.

`BUDGETGUARD_SEEDS=5000` runs as many seeds by hand.
"""

from __future__ import annotations

import asyncio
import os
import random

import langchain.agents.middleware as built_in
import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph

import langgraph_graphs as graphs
from budgetguard_core import Budget, BudgetExceeded, Guard
from budgetguard_core.testing import Call, ProviderError, Reply, Script, calls, says
from budgetguard_langgraph import BudgetCallback, BudgetMiddleware, bounded
from conformance.budgetguard_langgraph_driver import ScriptedChat
from langgraph_graphs import SHAPES, check_request, functional, loop, plan_and_execute, thread

SEEDS = int(os.environ.get("BUDGETGUARD_SEEDS", "240"))
ENTRIES = ["invoke", "stream", "batch", "ainvoke", "astream", "abatch"]
KINDS = [
    *(f"loop {shape}" for shape in SHAPES),
    "agent",
    "agent with summaries",
    "agent with fallbacks",
    "agent in a graph",
    "agent in a tool",
    "plan",
    "workflow",
    "reflection",
    "chain",
]


class Referee:
    """Counts what really happens."""

    def __init__(self, rng):
        self.rng = rng
        self.models = 0

    def script(self, tools=("search",), fail=0.0, last=12):
        rng, names = random.Random(self.rng.random()), list(tools)

        def reply(n):
            self.models += 1
            if rng.random() < fail:
                return Reply(error=ProviderError("500"))
            if n >= last or rng.random() < 0.15 or not names:
                return says(f"text {n}")
            wanted = [rng.choice(names) for _ in range(rng.randint(1, 3))]
            same = rng.random() < 0.2
            return calls(
                *[Call(one, f"{n}.{i}", f"id{n}" if same else None) for i, one in enumerate(wanted)]
            )

        return Script(reply)


def made(kind, referee, saver, middleware):
    """Build a graph and its input."""
    rng = referee.rng
    user = graphs.user
    if kind.startswith("loop "):
        return loop(kind.removeprefix("loop "), referee.script(), checkpointer=saver)
    if kind == "plan":
        return plan_and_execute(referee.script(()), checkpointer=saver), lambda t: {"goal": t}
    if kind == "workflow":
        flow = functional(referee.script(()), list, checkpointer=saver)
        return flow, lambda t: [t] * rng.randint(1, 6)
    model = ScriptedChat(script=referee.script())
    if kind == "chain":
        twice = RunnableLambda(
            lambda text: [
                (model | StrOutputParser()).invoke(text) for _ in range(rng.randint(1, 6))
            ]
        )
        return twice, lambda t: t
    if kind == "reflection":
        talker = ScriptedChat(script=referee.script(()))
        graph = StateGraph(MessagesState)
        graph.add_node("draft", lambda s: {"messages": [talker.invoke(s["messages"])]})
        graph.add_node(
            "critic", lambda s: {"messages": [HumanMessage(f"Again {len(s['messages'])}.")]}
        )
        graph.add_edge(START, "draft")
        graph.add_conditional_edges(
            "draft", lambda s: END if len(s["messages"]) > 12 else "critic", ["critic", END]
        )
        graph.add_edge("critic", "draft")
        return graph.compile(checkpointer=saver), user
    others = []
    if kind == "agent with summaries":
        others = [
            built_in.SummarizationMiddleware(
                model=ScriptedChat(script=referee.script(())),
                trigger=("messages", 4),
                keep=("messages", 2),
            )
        ]
    if kind == "agent with fallbacks":
        model = ScriptedChat(script=referee.script(fail=0.3))
        others = [built_in.ModelFallbackMiddleware(ScriptedChat(script=referee.script()))]
    tools = [graphs.search]
    if kind == "agent in a tool":
        child = create_agent(ScriptedChat(script=referee.script(last=3)), [graphs.search])

        @graphs.tool
        def search(value: str = "") -> str:
            """Search, by an agent."""
            graphs.BODIES.append(value)
            return child.invoke(user(value))["messages"][-1].content

        tools = [search]
    agent = create_agent(
        model,
        tools,
        middleware=[*middleware, *others],
        checkpointer=None if kind == "agent in a graph" else saver,
    )
    if kind != "agent in a graph":
        return agent, user
    graph = StateGraph(MessagesState)
    graph.add_node("one", agent)
    graph.add_edge(START, "one")
    graph.add_edge("one", END)
    return graph.compile(checkpointer=saver), user


async def run(graph, given, config, entry):
    if entry == "invoke":
        return graph.invoke(given, config)
    if entry == "batch":
        return graph.batch([given], config)[0]
    if entry == "ainvoke":
        return await graph.ainvoke(given, config)
    if entry == "abatch":
        return (await graph.abatch([given], config))[0]
    last = None
    if entry == "stream":
        for chunk in graph.stream(given, config):
            last = chunk
    else:
        async for chunk in graph.astream(given, config):
            last = chunk
    return last


@pytest.mark.parametrize("block", range(8))
def test_whatever_is_combined_the_caps_hold_and_nothing_is_lost(block):
    for seed in range(block, SEEDS, 8):
        try:
            asyncio.run(one_run(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


async def one_run(seed):
    rng = random.Random(seed)
    referee = Referee(rng)
    graphs.BODIES.clear()
    kind, entry = rng.choice(KINDS), rng.choice(ENTRIES)
    ways = ["callback"]
    if kind != "chain":
        ways.append("bounded")
    if kind in ("agent", "agent with summaries", "agent with fallbacks", "agent in a tool"):
        ways.append("middleware")
    way = rng.choice(ways)
    calls_cap = rng.choice([None, 1, 2, 3, 5])
    tools_cap = rng.choice([None, 1, 2, 4])
    tokens_cap = rng.choice([None, None, 400, 1000])
    budget = Budget(
        max_model_calls=calls_cap,
        max_tool_calls=tools_cap,
        max_total_tokens=tokens_cap,
        loop_detection=None,
    )
    outcomes = []
    guard = Guard(budget)
    given_budget = rng.choice([budget, guard])
    option = {"on_outcome": outcomes.append}
    saver = InMemorySaver() if rng.random() < 0.5 and kind != "chain" else None
    middleware = [BudgetMiddleware(given_budget, **option)] if way == "middleware" else []
    graph, given = made(kind, referee, saver, middleware)
    config = {**thread(), "recursion_limit": 300}
    key = {"messages_key": "history"} if kind == "loop elsewhere" else {}
    if way == "callback":
        callback = BudgetCallback(given_budget, **option, **key)
        config["callbacks"] = [callback]
    if way == "bounded":
        graph = bounded(graph, given_budget, **option, **key)
    result, failed = None, None
    try:
        result = await run(graph, given("Go."), config, entry)
    except BudgetExceeded:
        assert kind == "chain"
    except ProviderError as error:
        failed = error
    # Each run has exactly one outcome, and its figures are the referees'.
    assert len(outcomes) == 1, outcomes
    (ended,) = outcomes
    assert ended.usage.model_calls == referee.models
    assert ended.usage.tool_calls == len(graphs.BODIES)
    assert calls_cap is None or referee.models <= calls_cap
    assert tools_cap is None or len(graphs.BODIES) <= tools_cap
    assert ended.status == ("failed" if failed else ended.status)
    assert not guard.open_calls()
    assert guard.usage.reserved_tokens == 0
    # A chain may end with an answer that asks for tools: nobody was to run them.
    if ended.messages and (kind != "chain" or ended.status == "terminated"):
        check_request(ended.messages)
    if saver is None or failed or way == "callback" or result is None:
        return
    # What the thread holds is what was returned, and another turn is valid.
    kept = graph.get_state(config).values
    if not isinstance(kept, list):
        kept = (kept or {}).get("messages", (kept or {}).get("history", []))
    if kept and isinstance(kept[0], (HumanMessage, AIMessage)):
        check_request(kept)
        if way == "middleware":
            # A stop outside of what it wraps ends the graph as the callback's does.
            return
        assert (ended.status == "terminated") is bool(
            kept[-1].response_metadata.get("synthetic", False)
        )
