"""What users put together: each way in, within the caps as without a guard, and exact at them."""

from __future__ import annotations

import asyncio
import operator
import threading
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import AgentState, create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import InjectedToolCallId, tool
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, ToolRuntime
from langgraph.store.memory import InMemoryStore
from langgraph.types import CachePolicy, Command, RetryPolicy, Send, interrupt
from pydantic import BaseModel

import langgraph_graphs as graphs
from budgetguard_core import Budget, Guard
from budgetguard_core.testing import Call, Reply, Script, calls, says
from budgetguard_langgraph import (
    BudgetCallback,
    BudgetMiddleware,
    aresume,
    bounded,
    resume,
)
from conformance.budgetguard_langgraph_driver import ScriptedChat
from langgraph_graphs import StrictChat, check_request, search, thread, user

WAYS = ["bounded", "callback", "middleware"]
MODES = ["sync", "async"]


@pytest.fixture(autouse=True)
def bodies():
    graphs.BODIES.clear()


class Way:
    """One way to bound a graph; what it makes is made anew for each attempt."""

    def __init__(self, way, guard, mode="sync"):
        self.way, self.guard, self.mode = way, guard, mode

    @property
    def middleware(self):
        return [BudgetMiddleware(self.guard)] if self.way == "middleware" else []

    async def run(self, graph, given, config, **options):
        config = dict(config)
        if self.way == "callback":
            config["callbacks"] = [BudgetCallback(self.guard)]
        made = bounded(graph, self.guard) if self.way == "bounded" else graph
        if self.mode == "sync":
            return made.invoke(given, config, **options)
        return await made.ainvoke(given, config, **options)


def told(messages):
    """What a conversation says, without ids."""
    return [(one.type, one.content, getattr(one, "name", None)) for one in messages]


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["plain", *WAYS])
async def test_a_command_a_person_and_a_subgraph(way, mode):
    """An agent as a subgraph; a tool that a person approves writes to the state by a command."""

    class State(MessagesState):
        notes: Annotated[list[str], operator.add]

    @tool
    def note(value: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Command:
        """Note."""
        graphs.BODIES.append(value)
        update = {"messages": [ToolMessage("noted", tool_call_id=tool_call_id)], "notes": [value]}
        return Command(update=update)

    script = Script(
        [calls(Call("note", "a"), Call("search", "b")), calls(Call("note", "c")), says("Done.")]
    )
    guard = Guard(Budget(max_iterations=3, max_tool_calls=3, max_seconds=60))
    bound = Way(way, guard, mode)

    class Noting(AgentState):
        notes: Annotated[list[str], operator.add]

    child = create_agent(
        StrictChat(script=script),
        [note, search],
        middleware=[*bound.middleware, HumanInTheLoopMiddleware({"note": True})],
        state_schema=Noting,
    )
    parent = StateGraph(State)
    parent.add_node("child", child)
    parent.add_edge(START, "child")
    graph = parent.compile(checkpointer=InMemorySaver())
    config = thread()
    result = await bound.run(graph, user(), config)
    for _ in range(2):
        assert result["__interrupt__"]
        result = await bound.run(
            graph, Command(resume={"decisions": [{"type": "approve"}]}), config
        )
    assert "__interrupt__" not in result
    assert result["notes"] == ["a", "c"]
    assert script.calls == 3
    assert sorted(graphs.BODIES) == ["a", "b", "c"]
    check_request(result["messages"])
    if way != "plain":
        assert (guard.usage.iterations, guard.usage.tool_calls) == (3, 3)
        assert guard.trip is None


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["plain", "bounded", "callback"])
@pytest.mark.parametrize("cap", [20, 5])
async def test_tasks_of_a_send_ask_persons_and_go_on_on_new_objects(way, mode, cap):
    class State(TypedDict):
        messages: Annotated[list[Any], operator.add]
        done: Annotated[list[str], operator.add]

    script = Script([says("x")])
    saver = InMemorySaver()

    def made():
        model = StrictChat(script=script)

        def worker(state):
            answer = interrupt({"item": state["item"]}) if state["item"] in "13" else "none"
            model.invoke([HumanMessage(state["item"])])
            return {"done": [f"{state['item']} {answer}"]}

        def last(state):
            model.invoke([HumanMessage("sum up")])
            return {"done": ["sum"]}

        graph = StateGraph(State)
        graph.add_node("worker", worker)
        graph.add_node("last", last)
        graph.add_edge("worker", "last")
        graph.add_conditional_edges(
            START, lambda _: [Send("worker", {"item": str(n)}) for n in range(5)], ["worker"]
        )
        return graph.compile(checkpointer=saver)

    config = thread()
    budget = Budget(max_model_calls=cap)
    bound = Way(way, budget, mode)
    result = await bound.run(made(), {"messages": [HumanMessage("Go.")]}, config)
    assert len(result["__interrupt__"]) == 2
    assert script.calls == 3
    answers = {one.id: f"yes {one.value['item']}" for one in result["__interrupt__"]}
    result = await bound.run(made(), Command(resume=answers), config)
    everything = cap == 20 or way == "plain"
    assert script.calls == (6 if everything else 5)
    assert sorted(one for one in result["done"] if one != "sum") == sorted(
        ["0 none", "1 yes 1", "2 none", "3 yes 3", "4 none"]
    )
    if way == "bounded":
        assert result.get("stop_reason") == (None if everything else "max_model_calls")
        if not everything:
            result = await (aresume if mode == "async" else _sync(resume))(made(), config, Budget())
            assert result["done"].count("sum") == 1
            assert script.calls == 6


def _sync(call):
    async def run(*arguments):
        return call(*arguments)

    return run


@pytest.mark.parametrize("way", WAYS)
def test_an_abort_ends_a_batch_on_a_shared_guard(way):
    guard = Guard(Budget(max_model_calls=1_000))
    begun = threading.Barrier(4)
    lock = threading.Lock()
    count = 0

    def reply(n):
        nonlocal count
        with lock:
            count += 1
            mine = count
        if mine <= 4:
            begun.wait(30)
        if mine == 12:
            guard.abort("enough")
        return calls(Call("search", str(n)))

    bound = Way(way, guard)
    graph = create_agent(StrictChat(script=Script(reply)), [search], middleware=bound.middleware)
    config: Any = {"max_concurrency": 4, "recursion_limit": 1_000}
    if way == "callback":
        config["callbacks"] = [BudgetCallback(guard)]
    graph = bounded(graph, guard) if way == "bounded" else graph
    results = graph.batch([user() for _ in range(8)], config)
    assert len(results) == 8
    assert guard.trip is not None
    assert guard.trip.reason == "aborted"
    assert count <= 12 + 3
    assert not guard.open_tool_calls()
    assert guard.usage.reserved_tokens == 0
    if way != "callback":
        for result in results:
            check_request(result["messages"])
            assert result["stop_reason"] == "aborted"


class Report(BaseModel):
    """A report."""

    text: str


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["plain", *WAYS])
@pytest.mark.parametrize("strategy", ["tool", "provider", "tool that has to try again"])
async def test_structured_output(way, mode, strategy):
    first = calls(Call("search", "a"))
    good = calls(Call("Report", fields={"text": "found"}))
    bad = calls(Call("Report", fields={"wrong": 1}))
    replies, form = [first, bad, good], ToolStrategy(Report)
    if strategy == "tool":
        replies = [first, good]
    if strategy == "provider":
        replies, form = [first, says('{"text": "found"}')], ProviderStrategy(Report)
    script = Script(replies)
    guard = Guard(Budget(max_iterations=len(replies), max_tool_calls=1))
    bound = Way(way, guard, mode)
    graph = create_agent(
        ScriptedChat(script=script), [search], response_format=form, middleware=bound.middleware
    )
    result = await bound.run(graph, user(), {})
    assert result["structured_response"] == Report(text="found")
    assert script.calls == len(replies)
    if way != "plain":
        assert (guard.usage.iterations, guard.usage.tool_calls) == (len(replies), 1)
        assert guard.trip is None


@pytest.mark.anyio
@pytest.mark.parametrize("way", ["plain", *WAYS])
@pytest.mark.parametrize("stopped", [False, True])
async def test_events(way, stopped):
    script = Script(lambda n: calls(Call("search", str(n))) if n < 3 else says("Done."))
    guard = Guard(Budget(max_iterations=2 if stopped else 9))
    bound = Way(way, guard)
    graph = create_agent(StrictChat(script=script), [search], middleware=bound.middleware)
    config: Any = {"callbacks": [BudgetCallback(guard)]} if way == "callback" else {}
    made = bounded(graph, guard) if way == "bounded" else graph
    kinds: dict[str, int] = {}
    async for event in made.astream_events(user(), config, version="v2"):
        kinds[event["event"]] = kinds.get(event["event"], 0) + 1
    stopped = stopped and way != "plain"
    assert kinds["on_chat_model_end"] == (2 if stopped else 4)
    assert kinds["on_tool_end"] == (2 if stopped else 3)


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("subgraphs", [False, True])
@pytest.mark.parametrize("way", WAYS)
async def test_streams_within_the_caps_are_as_without_a_guard(way, subgraphs, mode):
    modes = ["values", "updates", "custom", "tasks", "checkpoints"]

    def shape(part):
        *space, kind, payload = part
        spaces = [one.partition(":")[0] for one in space[0]] if space else []
        keys = sorted(payload) if isinstance(payload, dict) else type(payload).__name__
        return spaces, kind, keys

    async def parts(bound):
        script = Script(lambda n: calls(Call("search", str(n))) if n < 3 else says("Done."))
        child = create_agent(
            StrictChat(script=script), [search], middleware=bound.middleware if bound else []
        )
        parent = StateGraph(MessagesState)
        parent.add_node("child", child)
        parent.add_edge(START, "child")
        graph = parent.compile(checkpointer=InMemorySaver())
        config = thread()
        if bound and bound.way == "callback":
            config["callbacks"] = [BudgetCallback(bound.guard)]
        if bound and bound.way == "bounded":
            graph = bounded(graph, bound.guard)
        options: Any = {"stream_mode": modes, "subgraphs": subgraphs}
        if mode == "sync":
            return [shape(part) for part in graph.stream(user(), config, **options)]
        return [shape(part) async for part in graph.astream(user(), config, **options)]

    plain = await parts(None)
    found = await parts(Way(way, Guard(Budget(max_iterations=9)), mode))
    if way == "middleware":
        # Its nodes and its key of the state are in the agent.
        assert {one[1] for one in found} == {one[1] for one in plain}
    else:
        assert found == plain


@pytest.mark.anyio
@pytest.mark.parametrize("way", ["bounded", "callback"])
async def test_a_workflow_keeps_what_it_had_before_a_stop(way):
    script = Script([says("x")])
    model = ScriptedChat(script=script)
    before: list[list[str]] = []

    @task
    def think(value):
        return model.invoke([HumanMessage(value)]).content

    @entrypoint(checkpointer=InMemorySaver())
    def flow(given, *, previous=None):
        before.append(list(previous or []))
        said = [think(f"{given} {n}").result() for n in range(3)]
        return entrypoint.final(value=len(said), save=[*(previous or []), *said])

    config = thread()

    async def turn(cap, given):
        return await Way(way, Budget(max_model_calls=cap)).run(flow, given, config)

    assert await turn(9, "a") == 3
    stopped = await turn(2, "b")
    assert script.calls == 5
    if way == "bounded":
        assert stopped == {"stop_reason": "max_model_calls"}
    # What the stopped turn has paid for is not asked again.
    assert resume(flow, config, Budget(max_model_calls=9)) == 3
    assert script.calls == 6
    assert await turn(9, "c") == 3
    assert [len(one) for one in before] == [0, 3, 3, 6]


@dataclass
class Context:
    who: str


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["plain", *WAYS])
async def test_store_and_context(way, mode):
    @tool
    def recall(value: str, runtime: ToolRuntime[Context]) -> str:
        """Recall."""
        runtime.store.put(("notes", runtime.context.who), value, {"text": value})
        return f"{runtime.context.who}: {value}"

    script = Script([calls(Call("recall", "a")), calls(Call("recall", "b")), says("Done.")])
    guard = Guard(Budget(max_iterations=3, max_tool_calls=2))
    bound = Way(way, guard, mode)
    store = InMemoryStore()
    graph = create_agent(
        StrictChat(script=script),
        [recall],
        middleware=bound.middleware,
        context_schema=Context,
        store=store,
    )
    result = await bound.run(graph, user(), {}, context=Context("me"))
    assert told(result["messages"])[2][1] == "me: a"
    assert len(store.search(("notes", "me"))) == 2
    assert guard.trip is None
    if way != "plain":
        assert guard.usage.tool_calls == 2


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["bounded", "callback"])
async def test_node_retries_and_node_caches(way, mode):
    script = Script(lambda n: Reply(error=ConnectionError("down")) if n == 0 else says("x"))
    model = ScriptedChat(script=script)

    def ask(state):
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node(
        "ask",
        ask,
        retry_policy=RetryPolicy(initial_interval=0.0, jitter=False, max_attempts=3),
        cache_policy=CachePolicy(key_func=lambda state: state["messages"][-1].content),
    )
    graph.add_edge(START, "ask")
    graph = graph.compile(cache=InMemoryCache())
    guard = Guard(Budget(max_iterations=2))
    bound = Way(way, guard, mode)
    for _ in range(3):
        result = await bound.run(graph, user(), {})
        assert result["messages"][-1].content == "x"
    assert script.calls == 2
    assert (guard.usage.iterations, guard.usage.model_calls) == (1, 2)
    assert guard.trip is None


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["bounded", "callback"])
@pytest.mark.parametrize("handles", [True, False, "It failed."])
async def test_tools_that_fail(way, mode, handles):
    @tool
    def fails(value: str = "") -> str:
        """Fail."""
        graphs.BODIES.append(value)
        raise ValueError(value)

    script = Script(
        lambda n: calls(Call("fails", str(n)), Call("search", f"s{n}")) if n < 3 else says("Done.")
    )
    guard = Guard(Budget(max_tool_calls=3))
    model = StrictChat(script=script)
    graph = StateGraph(MessagesState)
    graph.add_node("ask", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([fails, search], handle_tool_errors=handles))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges(
        "ask", lambda state: "tools" if state["messages"][-1].tool_calls else "__end__"
    )
    graph.add_edge("tools", "ask")
    graph = graph.compile()
    bound = Way(way, guard, mode)
    if handles is False:
        with pytest.raises(ValueError, match="0"):
            await bound.run(graph, user(), {})
        assert guard.usage.tool_calls in (1, 2)
        return
    result = await bound.run(graph, user(), {})
    assert guard.usage.tool_calls == 3
    assert len(graphs.BODIES) == 3
    assert script.calls == 2
    check_request(result["messages"])


@pytest.mark.anyio
@pytest.mark.parametrize("way", WAYS)
async def test_a_cancelled_call_leaves_nothing_open(way):
    guard = Guard(Budget(max_model_calls=9, max_total_tokens=10**6))
    bound = Way(way, guard)
    begun = asyncio.Event()

    @tool
    async def hangs(value: str = "") -> str:
        """Hang."""
        begun.set()
        await asyncio.Event().wait()
        return value

    graph = create_agent(
        StrictChat(script=Script([calls(Call("hangs", "a"), Call("hangs", "b"))])),
        [hangs],
        middleware=bound.middleware,
    )
    config: Any = {"callbacks": [BudgetCallback(guard)]} if way == "callback" else {}
    made = bounded(graph, guard) if way == "bounded" else graph
    made = made.with_config({"tags": ["x"], "run_name": "mine"})
    running = asyncio.create_task(made.ainvoke(user(), config))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert guard.usage.model_calls == 1
    assert guard.usage.reserved_tokens == 0
    assert not guard.open_tool_calls()
    assert guard.trip is None
