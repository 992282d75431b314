"""Graphs and swarms that were stopped: what has finished stays so, the rest is done on resuming."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from strands import Agent
from strands.multiagent import GraphBuilder, Swarm
from strands.multiagent.base import MultiAgentBase, MultiAgentResult, NodeResult, Status
from strands.session import FileSessionManager

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.testing import ManualClock, Reply, Script, calls, says
from budgetguard_strands import BudgetHookProvider
from strands_agents import Counter, check_request, in_new_process, made, run, sticky, strict

WAYS = ("sync", "async", "stream")


@pytest.fixture
def counter():
    return Counter()


def graph_builder() -> GraphBuilder:
    """Bounded by Strands as well, which warns of a graph that is not."""
    return GraphBuilder().set_max_node_executions(20)


# Nodes that are no agents


class Custom(MultiAgentBase):
    """A node of the user's own; `nodes` of theirs is not what a graph's is."""

    nodes = ("mine",)

    def __init__(self) -> None:
        self.ran = 0

    async def invoke_async(self, task, invocation_state=None, **kwargs):
        self.ran += 1
        return MultiAgentResult(
            status=Status.COMPLETED,
            results={"inner": NodeResult(result=RuntimeError("no text"), status=Status.COMPLETED)},
        )

    def serialize_state(self):
        return {}

    def deserialize_state(self, payload):
        del payload


class WithoutNodes(Custom):
    nodes = None  # type: ignore[assignment]


@dataclass
class DataNode(Custom):
    """A dataclass: equal to others of its kind, and without a hash."""

    ran: int = 0
    tags: list[str] = field(default_factory=list)


class Slotted(Custom):
    __slots__ = ("tags",)

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Custom, WithoutNodes, DataNode, Slotted])
@pytest.mark.parametrize("way", WAYS)
def test_custom_nodes_run_as_without_a_guard(kind, way):
    bodies = []
    for with_bound in (False, True):
        nodes = [kind(), kind()]
        builder = graph_builder()
        builder.add_node(nodes[0], "a")
        builder.add_node(nodes[1], "b")
        builder.add_edge("a", "b")
        graph = builder.build()
        if with_bound:
            provider = BudgetHookProvider(Budget(max_iterations=3))
            provider.attach(graph)
        result, _ = run(graph, "Go.", way)
        assert result.status == Status.COMPLETED
        bodies.append([node.ran for node in nodes])
    assert bodies == [[1, 1]] * 2
    assert provider.outcome(graph).status == "completed"


class EqualAgent(Agent):
    """An agent of the user's that says what it is equal to."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Agent)

    def __hash__(self) -> int:
        return 1


def test_agents_are_told_apart_by_identity(counter):
    agents = [
        EqualAgent(model=made(sticky()).model, tools=[counter.tool], callback_handler=None)
        for _ in range(2)
    ]
    provider = BudgetHookProvider(Budget(max_iterations=2))
    for agent in agents:
        provider.attach(agent)
        assert agent("Go.").stop_reason == "max_iterations"
    assert provider.outcome(agents[0]) is not provider.outcome(agents[1])


# What a stop leaves, and how it is resumed


def chain(
    scripts: dict[str, Script], tool: Any, folder: Path | None, provider: Any, **options: Any
):
    """A graph: its nodes one after the other."""
    builder = graph_builder()
    names = list(scripts)
    for name in names:
        builder.add_node(strict(scripts[name], tool, name=name), name)
    for one, other in pairwise(names):
        builder.add_edge(one, other)
    builder.set_entry_point(names[0])
    if folder is not None:
        builder.set_session_manager(FileSessionManager("s", storage_dir=str(folder)))
    graph = builder.build()
    if provider is not None:
        provider.attach(graph)
    return graph


def stored_status(folder: Path) -> list[str]:
    import json

    return [json.loads(path.read_text())["status"] for path in folder.rglob("multi_agent.json")]


def scripts_of_three() -> dict[str, Script]:
    return {
        "a": Script([says("A is done.")]),
        "b": Script([calls("search"), calls("search"), says("B is done.")]),
        "c": Script([says("C is done.")]),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["same object", "new object"])
def test_a_stopped_graph_goes_on_where_it_was(way, place, counter, tmp_path):
    scripts = scripts_of_three()
    provider = BudgetHookProvider(Budget(max_iterations=2))
    graph = chain(scripts, counter.tool, tmp_path, provider)
    result, _ = run(graph, "Go.", way)
    assert result.status == Status.FAILED
    assert stored_status(tmp_path) == [result.status.value]
    assert graph.max_node_executions == 20
    assert "should_continue" not in vars(graph.state)
    assert [scripts[name].calls for name in "abc"] == [1, 1, 0]
    assert provider.outcome(graph).stop_reason == StopReason.MAX_ITERATIONS

    provider = BudgetHookProvider(Budget(max_iterations=9))
    if place == "new object":
        graph = chain(scripts, counter.tool, tmp_path, provider)
        options = {}
    else:
        options = {"invocation_state": {"budgetguard": Budget(max_iterations=9)}}
    result, _ = run(graph, "Go.", way, **options)
    assert result.status == Status.COMPLETED
    assert [scripts[name].calls for name in "abc"] == [1, 3, 1]
    assert {node.node_id for node in result.execution_order} == set("abc")
    assert stored_status(tmp_path) == ["completed"]


def test_a_stopped_graph_is_resumed_without_the_provider_as_well(counter, tmp_path):
    scripts = scripts_of_three()
    chain(scripts, counter.tool, tmp_path, BudgetHookProvider(Budget(max_iterations=2)))("Go.")
    result = chain(scripts, counter.tool, tmp_path, None)("Go.")
    assert result.status == Status.COMPLETED
    assert [scripts[name].calls for name in "abc"] == [1, 3, 1]


def test_without_a_session_the_same_graph_begins_anew(counter):
    scripts = scripts_of_three()
    graph = chain(scripts, counter.tool, None, BudgetHookProvider(Budget(max_iterations=2)))
    graph("Go.")
    graph("Go.")
    assert scripts["a"].calls == 2


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_whose_last_node_was_stopped_has_failed(way, counter, tmp_path):
    # Nothing follows it, so nobody asks whether the next nodes may start.
    provider = BudgetHookProvider(Budget(max_iterations=2))
    graph = chain({"a": sticky()}, counter.tool, tmp_path, provider)
    result, _ = run(graph, "Go.", way)
    assert result.status == Status.FAILED
    assert stored_status(tmp_path) == [result.status.value]
    assert provider.outcome(graph).stop_reason == StopReason.MAX_ITERATIONS


CHILD = """
import sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
from adapters.test_strands_graphs import chain, swarm_of, scripts_of_three, swarm_scripts
from budgetguard_core import Budget
from budgetguard_core.testing import Script, says
from budgetguard_strands import BudgetHookProvider
from strands_agents import Counter
folder, kind = Path(sys.argv[1]), sys.argv[2]
provider = BudgetHookProvider(Budget(max_iterations=9))
scripts = {{name: Script([says(name + " is done.")]) for name in "abc"}}
made = chain if kind == "graph" else swarm_of
result = made(scripts, Counter().tool, folder, provider)("Go.")
print(result.status.value, *(scripts[name].calls for name in "abc"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["graph", "swarm"])
def test_a_stopped_graph_or_swarm_goes_on_in_a_new_process(kind, counter, tmp_path):
    provider = BudgetHookProvider(Budget(max_iterations=2))
    if kind == "graph":
        chain(scripts_of_three(), counter.tool, tmp_path, provider)("Go.")
    else:
        swarm_of(swarm_scripts(), counter.tool, tmp_path, provider)("Go.")
    tests = str(Path(__file__).parent.parent)
    words = in_new_process(CHILD.format(tests=tests), str(tmp_path), kind)
    assert words == ["completed", "0", "1", "1" if kind == "graph" else "0"]


def test_a_join_waits_for_the_node_that_was_stopped(counter, tmp_path):
    scripts = {
        "a": Script([says("A is done.")]),
        "b": Script([calls("search")]),
        "join": Script([says("Joined.")]),
    }

    def built(provider):
        builder = graph_builder()
        for name in scripts:
            builder.add_node(strict(scripts[name], counter.tool, name=name), name)
        for name in ("a", "b"):
            builder.add_edge(name, "join")
            builder.set_entry_point(name)
            builder.set_session_manager(FileSessionManager("s", storage_dir=str(tmp_path)))
        return provider.attach(builder.build())

    provider = BudgetHookProvider(Budget(max_model_calls=3))
    assert built(provider)("Go.").status == Status.FAILED
    assert (scripts["a"].calls, scripts["join"].calls) == (1, 0)
    scripts["b"] = Script([says("B is done.")])
    assert built(BudgetHookProvider(Budget(max_model_calls=9)))("Go.").status == Status.COMPLETED
    assert [scripts[name].calls for name in scripts] == [1, 1, 1]


def test_no_custom_node_starts_after_a_stop(counter):
    last = Custom()
    builder = graph_builder()
    builder.add_node(made(sticky(), counter.tool, name="a"), "a")
    builder.add_node(last, "last")
    builder.add_edge("a", "last")
    provider = BudgetHookProvider(Budget(max_iterations=2))
    result = provider.attach(builder.build())("Go.")
    assert result.status == Status.FAILED
    assert last.ran == 0


def test_an_abort_ends_a_graph_between_two_nodes():
    guard = Guard(Budget(max_iterations=50))

    class Aborting(Custom):
        async def invoke_async(self, *args, **kwargs):
            guard.abort("enough")
            return await super().invoke_async(*args, **kwargs)

    nodes = [Aborting(), Custom()]
    builder = graph_builder()
    builder.add_node(nodes[0], "a")
    builder.add_node(nodes[1], "b")
    builder.add_edge("a", "b")
    provider = BudgetHookProvider(guard)
    graph = provider.attach(builder.build())
    assert graph("Go.").status == Status.FAILED
    assert [node.ran for node in nodes] == [1, 0]
    assert provider.outcome(graph).stop_reason == StopReason.ABORTED


def test_the_deadline_ends_a_graph_of_quiet_nodes():
    clock = ManualClock()

    class Slow(Custom):
        async def invoke_async(self, *args, **kwargs):
            clock.advance(6)
            return await super().invoke_async(*args, **kwargs)

    nodes = {name: Slow() for name in "abc"}
    builder = graph_builder()
    for name, node in nodes.items():
        builder.add_node(node, name)
    builder.add_edge("a", "b")
    builder.add_edge("b", "c")
    provider = BudgetHookProvider(Budget(max_seconds=10), clock=clock)
    graph = provider.attach(builder.build())
    graph("Go.")
    assert [node.ran for node in nodes.values()] == [1, 1, 0]
    assert provider.outcome(graph).stop_reason == StopReason.MAX_SECONDS


def test_a_node_with_a_smaller_budget_of_its_own_gives_its_partial_result(counter):
    small = made(sticky(), counter.tool, hooks=[BudgetHookProvider(Budget(max_iterations=1))])
    last = made(Script([says("Done.")]))
    builder = graph_builder()
    builder.add_node(small, "small")
    builder.add_node(last, "last")
    builder.add_edge("small", "last")
    provider = BudgetHookProvider(Budget(max_iterations=9))
    graph = provider.attach(builder.build())
    assert graph("Go.").status == Status.COMPLETED
    assert provider.outcome(graph).status == "completed"
    assert provider.outcome(graph).usage.model_calls == 2


def test_a_graph_in_a_graph_is_stopped_as_one(counter):
    inner = chain({"x": sticky(), "y": Script([says("Y")])}, counter.tool, None, None)
    last = Script([says("Done.")])
    builder = graph_builder()
    builder.add_node(inner, "inner")
    builder.add_node(made(last), "last")
    builder.add_edge("inner", "last")
    provider = BudgetHookProvider(Budget(max_model_calls=3))
    graph = provider.attach(builder.build())
    result = graph("Go.")
    assert result.status == Status.FAILED
    assert last.calls == 0
    assert inner.nodes["x"].executor.model.script.calls == 3


# Swarms


def swarm_scripts() -> dict[str, Script]:
    return {
        "a": Script([Reply(handoff="b"), says("Your turn.")]),
        "b": Script([calls("search"), says("B is done.")]),
        "c": Script([says("C is done.")]),
    }


def swarm_of(scripts: dict[str, Script], tool: Any, folder: Path | None, provider: Any):
    agents = [strict(script, tool, name=name) for name, script in scripts.items()]
    session = None if folder is None else FileSessionManager("s", storage_dir=str(folder))
    swarm = Swarm(agents, session_manager=session)
    return swarm if provider is None else provider.attach(swarm)


@pytest.mark.sample(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["same object", "new object"])
@pytest.mark.parametrize("cap", [2, 3])
def test_a_stopped_swarm_goes_on_where_it_was(way, place, cap, counter, tmp_path):
    scripts = swarm_scripts()
    provider = BudgetHookProvider(Budget(max_iterations=cap))
    swarm = swarm_of(scripts, counter.tool, tmp_path, provider)
    result, _ = run(swarm, "Go.", way)
    assert result.status == Status.FAILED
    assert stored_status(tmp_path) == [result.status.value]
    before = scripts["a"].calls
    assert sum(script.calls for script in scripts.values()) == cap
    scripts["b"] = Script([says("B is done.")])
    if place == "new object":
        swarm = swarm_of(scripts, counter.tool, tmp_path, BudgetHookProvider(Budget()))
        options = {}
    else:
        swarm.nodes["b"].executor.model = strict(scripts["b"]).model
        options = {"invocation_state": {"budgetguard": Budget(max_iterations=9)}}
    result, _ = run(swarm, "Go.", way, **options)
    assert result.status == Status.COMPLETED
    assert scripts["a"].calls == before
    assert scripts["b"].calls == 1
    assert [node.node_id for node in result.node_history] == ["a", "b"]
    assert stored_status(tmp_path) == ["completed"]


def test_every_history_of_a_stopped_graph_can_be_sent(counter):
    agents = [strict(sticky("search", "search"), counter.tool, name=name) for name in "abc"]
    builder = graph_builder()
    for agent in agents:
        builder.add_node(agent, agent.name)
        builder.set_entry_point(agent.name)
    BudgetHookProvider(Budget(max_tool_calls=5)).attach(builder.build())("Go.")
    for agent in agents:
        check_request([*agent.messages, {"role": "user", "content": [{"text": "Go on."}]}])


def test_nothing_is_kept_of_a_graph():
    import weakref

    provider = BudgetHookProvider(Budget(max_iterations=2))
    graph = chain({"a": Script([says("A")])}, Counter().tool, None, provider)
    graph("Go.")
    seen = weakref.ref(graph)
    del graph
    gc.collect()
    assert seen() is None
