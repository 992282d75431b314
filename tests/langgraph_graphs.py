"""Graphs of every kind and state shape, and a model that refuses what strict providers do."""

from __future__ import annotations

import operator
import uuid
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel
from langgraph.types import Send
from pydantic import BaseModel

from budgetguard_core.testing import Script, calls, says
from budgetguard_langgraph import BudgetCallback, BudgetMiddleware, bounded
from conformance.budgetguard_langgraph_driver import ScriptedChat


class InvalidRequest(Exception):
    """What a strict provider answers with status 400."""


def check_request(messages):
    """Refuse unpaired tool calls, results without a call, and two answers in a row."""
    open_calls: list[str] = []
    before = None
    for message in messages:
        if isinstance(message, ToolMessage):
            if message.tool_call_id not in open_calls:
                raise InvalidRequest(f"result without a call: {message.tool_call_id}")
            open_calls.remove(message.tool_call_id)
        elif open_calls:
            raise InvalidRequest(f"calls without a result: {open_calls}")
        if isinstance(message, AIMessage):
            if isinstance(before, AIMessage):
                raise InvalidRequest("two answers in a row")
            asked = (*message.tool_calls, *message.invalid_tool_calls)
            open_calls = [call["id"] for call in asked]
        before = message
    if open_calls:
        raise InvalidRequest(f"calls without a result: {open_calls}")


class StrictChat(ScriptedChat):
    """A scripted model behind a provider that checks what it is sent."""

    def _next(self, messages, *sent):
        check_request(messages)
        return super()._next(messages, *sent)


BODIES: list[str] = []


@tool
def search(value: str = "") -> str:
    """Search."""
    BODIES.append(value)
    return f"result {len(BODIES)}"


def thread(**more):
    return {"configurable": {"thread_id": uuid.uuid4().hex, **more}}


def user(text="Go."):
    return {"messages": [HumanMessage(text)]}


def sticky(*names):
    """A model that asks for tools for ever, with new arguments each time."""
    from budgetguard_core.testing import Call

    wanted = names or ("search",)
    return Script(lambda n: calls(*[Call(name, f"{n}.{i}") for i, name in enumerate(wanted)]))


def asks(times, last="Done."):
    """A model that asks for a tool so many times, then answers."""
    from budgetguard_core.testing import Call

    return Script(lambda n: calls(Call("search", str(n))) if n < times else says(last))


# State shapes. Each is a loop of a model and its tools, over another kind of state.


class LastValue(TypedDict):
    messages: list[AnyMessage]


class Added(TypedDict):
    messages: Annotated[list[AnyMessage], operator.add]


class Reduced(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


class Elsewhere(TypedDict):
    history: Annotated[list[AnyMessage], add_messages]
    turns: Annotated[int, operator.add]


class Model(BaseModel):
    messages: Annotated[list[AnyMessage], add_messages] = []
    turns: int = 0


@dataclass
class Data:
    messages: Annotated[list[AnyMessage], add_messages] = field(default_factory=list)
    turns: int = 0


class Question(TypedDict):
    question: str


class Answer(TypedDict):
    answer: str


class Hidden(TypedDict):
    question: str
    answer: str
    messages: Annotated[list[AnyMessage], add_messages]


def last_sixty(left, right):
    """A reducer of a user's own: a window, that also takes one message."""
    return [*left, *(right if isinstance(right, list) else [right])][-60:]


class Windowed(TypedDict):
    messages: Annotated[list[AnyMessage], last_sixty]


ROOT = Annotated[list[AnyMessage], add_messages]

PREDEFINED = {
    "reduced": Reduced,
    "added": Added,
    "last_value": LastValue,
    "windowed": Windowed,
    "pydantic": Model,
    "dataclass": Data,
}


def read(state, key):
    return state[key] if isinstance(state, dict) else getattr(state, key)


def loop(shape, script, *, checkpointer=None, **options):
    """Build a model and its tools over a state of this shape; give graph and input."""
    model = StrictChat(script=script)
    run_tools = ToolNode([search])

    if shape == "hidden":

        def begin(state):
            return {"messages": [HumanMessage(state["question"])]}

        def end(state):
            return {"answer": state["messages"][-1].content}

        graph = StateGraph(Hidden, input_schema=Question, output_schema=Answer)
        graph.add_node("begin", begin)
        graph.add_node("end", end)
        graph.add_node("agent", lambda s: {"messages": [model.invoke(s["messages"])]})
        graph.add_node("tools", run_tools)
        graph.add_edge(START, "begin")
        graph.add_edge("begin", "agent")
        graph.add_conditional_edges(
            "agent", lambda s: "tools" if s["messages"][-1].tool_calls else "end"
        )
        graph.add_edge("tools", "agent")
        graph.add_edge("end", END)
        return graph.compile(checkpointer=checkpointer, **options), lambda t: {"question": t}

    if shape == "root":
        graph = StateGraph(ROOT)
        graph.add_node("agent", lambda s: [model.invoke(s)])
        graph.add_node("tools", run_tools)
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", lambda s: "tools" if s[-1].tool_calls else END)
        graph.add_edge("tools", "agent")
        return graph.compile(checkpointer=checkpointer, **options), lambda t: [HumanMessage(t)]

    key = "history" if shape == "elsewhere" else "messages"
    whole = shape == "last_value"

    def agent(state):
        before = read(state, key)
        answer = model.invoke(before)
        return {key: [*before, answer] if whole else [answer]}

    def tools(state):
        before = read(state, key)
        results = run_tools.invoke(before)
        return {key: [*before, *results] if whole else results}

    graph = StateGraph(Elsewhere if shape == "elsewhere" else PREDEFINED[shape])
    graph.add_node("agent", agent)
    graph.add_node("tools", tools)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges(
        "agent", lambda s: "tools" if read(s, key)[-1].tool_calls else END, ["tools", END]
    )
    graph.add_edge("tools", "agent")
    given = (lambda t: {key: [HumanMessage(t)], "turns": 1}) if shape == "elsewhere" else user
    return graph.compile(checkpointer=checkpointer, **options), given


SHAPES = (*PREDEFINED, "elsewhere", "hidden", "root")


class Plan(TypedDict, total=False):
    goal: str
    plan: list[str]
    done: Annotated[list[str], operator.add]


def plan_and_execute(script, *, checkpointer=None):
    """A planner and a worker whose state holds no messages at all."""
    model = StrictChat(script=script)

    def planner(state):
        return {"plan": [f"{state['goal']} {n}" for n in range(6)]}

    def worker(state):
        at = len(state.get("done", ()))
        return {"done": [model.invoke([HumanMessage(state["plan"][at])]).content]}

    graph = StateGraph(Plan)
    graph.add_node("planner", planner)
    graph.add_node("worker", worker)
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "worker")
    graph.add_conditional_edges(
        "worker", lambda s: END if len(s["done"]) == len(s["plan"]) else "worker", ["worker", END]
    )
    return graph.compile(checkpointer=checkpointer)


def functional(script, answer, *, checkpointer=None):
    """A workflow of the functional API; `answer` makes its result of the texts."""
    model = StrictChat(script=script)

    @task
    def work(item):
        return model.invoke([HumanMessage(item)]).content

    @entrypoint(checkpointer=checkpointer)
    def flow(items: list[str]) -> Any:
        return answer([work(item).result() for item in items])

    return flow


def map_reduce(script, count, **options):
    """A fan-out: one model call for each of so many items, all at the same time."""
    model = StrictChat(script=script)

    class State(TypedDict):
        messages: Annotated[list[Any], operator.add]
        done: Annotated[list[str], operator.add]

    def worker(state):
        model.invoke([HumanMessage(state["item"])])
        return {"done": [state["item"]]}

    graph = StateGraph(State)
    graph.add_node("worker", worker)
    graph.add_conditional_edges(
        START,
        lambda _: [Send("worker", {"item": str(n)}) for n in range(count)],
        ["worker"],
    )
    return graph.compile(**options)


WAYS = ("bounded", "callback", "middleware")


def bounded_agent(way, budget, model, tools=(search,), *, options=None, **made):
    """Make an agent with a budget of one way in; return it, and its configuration."""
    options = options or {}
    middleware = [BudgetMiddleware(budget, **options)] if way == "middleware" else []
    graph = create_agent(model, list(tools), middleware=middleware, **made)
    if way == "bounded":
        return bounded(graph, budget, **options), {}
    return graph, {"callbacks": [BudgetCallback(budget, **options)]} if way == "callback" else {}


MODES = ("sync", "async", "streamed")
AWAITED = ("async", "abatch", "streamed", "events")
ENTRIES = (*MODES, "stream", "batch", "abatch", "events", "piped", "typed", "with_config")


async def run(graph, given, config, entry="sync"):
    """Run a graph by one of its entry points, and return its last values."""
    if entry == "sync":
        return graph.invoke(given, config)
    if entry == "async":
        return await graph.ainvoke(given, config)
    if entry == "batch":
        return graph.batch([given], config)[0]
    if entry == "abatch":
        return (await graph.abatch([given], config))[0]
    if entry == "piped":
        return (graph | (lambda result: result)).invoke(given, config)
    if entry == "with_config":
        return graph.with_config(tags=["again"]).invoke(given, config)
    if entry == "typed":
        return graph.invoke(given, config, version="v2").value
    if not isinstance(graph, Pregel):  # a chain has no modes
        if entry == "stream":
            return list(graph.stream(given, config))
        return [part async for part in graph.astream(given, config)]
    modes = ["updates", "messages", "values"]
    if entry == "stream":
        stream = graph.stream(given, config, stream_mode=modes, subgraphs=True)
        parts = [part for space, mode, part in stream if mode == "values" and not space]
        return parts[-1] if parts else None
    if entry == "streamed":
        stream = graph.astream(given, config, stream_mode=modes)
        parts = [part async for mode, part in stream if mode == "values"]
        return parts[-1] if parts else None
    events = graph.astream_events(given, config, version="v2", stream_mode="values")
    root = [event["data"] async for event in events if not event["parent_ids"]]
    return [data["chunk"] for data in root if "chunk" in data][-1]
