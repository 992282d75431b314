"""Agents that nobody gave a budget: they spend that of the run around them, and nothing else."""

from __future__ import annotations

import asyncio
import threading

import pytest
from strands import Agent, tool
from strands.hooks import BeforeModelCallEvent
from strands.multiagent import GraphBuilder
from strands.multiagent.graph import Graph

from budgetguard_core import AdapterError, Budget, Guard, StopReason
from budgetguard_core.testing import Call, Script, calls, says
from budgetguard_strands import BudgetHookProvider
from conformance.budgetguard_strands_driver import ScriptedModel
from strands_agents import Counter, made, run, sticky

WAYS = ("sync", "async", "stream")


@pytest.fixture
def counter():
    return Counter()


# Made or called by others


def delegating(worker):
    @tool
    async def delegate() -> str:
        """Delegates."""
        return str(await worker().invoke_async("Work."))

    return delegate


@pytest.mark.parametrize("way", WAYS)
def test_an_agent_without_a_provider_spends_the_budget_around_it(way, counter):
    below = sticky()
    delegate = delegating(lambda: made(below, counter.tool))
    provider = BudgetHookProvider(Budget(max_model_calls=5))
    agent = made(Script([calls("delegate")]), delegate, hooks=[provider])
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "max_model_calls"
    assert agent.model.script.calls + below.calls == 5


def test_on_its_own_it_has_no_budget(counter):
    worker = made(Script([calls("search")] * 8 + [says("Done.")]), counter.tool)
    provider = BudgetHookProvider(Budget(max_iterations=1))
    agent = made(Script([calls("delegate")]), delegating(lambda: worker), hooks=[provider])
    agent("Go.")
    worker.model.script.replies = iter(())
    fresh = Script([calls("search")] * 8 + [says("Done.")])
    worker.model = ScriptedModel(fresh)
    assert worker("On your own.").stop_reason == "end_turn"
    assert fresh.calls == 9


def test_a_provider_that_comes_later_takes_its_place(counter):
    script = sticky()
    worker = made(script, counter.tool)
    agent = made(
        Script([calls("delegate"), says("Done.")]),
        delegating(lambda: worker),
        hooks=[BudgetHookProvider(Budget(max_model_calls=20))],
    )
    provider = BudgetHookProvider(Budget(max_iterations=2))
    worker.model = ScriptedModel(Script([says("Here.")]))
    agent("Go.")
    provider.attach(worker)
    worker.model = ScriptedModel(script)
    assert worker("Go.").stop_reason == "max_iterations"
    assert script.calls == 2
    assert provider.outcome(worker).usage.model_calls == 2


# Agents that are at work elsewhere


class Gate:
    """A tool that holds its agent at work until it is let go."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.tool = tool(name="wait", description="Waits.")(self.run)

    def run(self) -> str:
        self.entered.set()
        assert self.open.wait(600)
        return "let go"


def at_work(agent, gate):
    results: list = []
    thread = threading.Thread(target=lambda: results.append(agent("Go.")))
    thread.start()
    assert gate.entered.wait(600)
    return thread, results


def test_attaching_an_agent_at_work_changes_nothing_of_its_run():
    gate = Gate()
    agent = made(Script([calls("wait"), calls("wait"), says("Done.")]), gate.tool)
    thread, results = at_work(agent, gate)
    provider = BudgetHookProvider(Budget(max_iterations=1))
    provider.attach(agent)
    gate.open.set()
    thread.join(600)
    assert results[0].stop_reason == "end_turn"
    assert provider.outcome(agent) is None


def test_a_sub_agent_at_work_elsewhere_stays_as_it_is(counter):
    gate = Gate()
    worker = made(Script([calls("wait"), says("Done.")]), gate.tool, name="worker")
    thread, results = at_work(worker, gate)
    provider = BudgetHookProvider(Budget(max_iterations=2))
    agent = made(
        Script([calls("delegate")]), delegating(lambda: worker), counter.tool, hooks=[provider]
    )
    assert agent("Go.").stop_reason == "max_iterations"  # the worker refuses a second run
    gate.open.set()
    thread.join(600)
    assert results[0].stop_reason == "end_turn"


def test_one_worker_of_many_runs_at_once(counter):
    provider = BudgetHookProvider(Budget(max_model_calls=4))
    workers = [made(sticky(), counter.tool) for _ in range(4)]

    async def go():
        agents = [
            made(Script([calls("delegate")]), delegating(lambda w=w: w), hooks=[provider])
            for w in workers
        ]
        return agents, await asyncio.gather(*(agent.invoke_async("Go.") for agent in agents))

    agents, results = asyncio.run(go())
    assert {result.stop_reason for result in results} == {"max_model_calls"}
    for agent, worker in zip(agents, workers, strict=True):
        assert agent.model.script.calls + worker.model.script.calls == 4


# The tools of strands-agents-tools


@pytest.fixture
def strands_tools():
    return pytest.importorskip("strands_tools", reason="comes with the dependency group `sdks`")


PROMPTS = {"prompt": "Work.", "system_prompt": "You work."}


def asking(name, **arguments):
    """A script that calls one tool with these arguments again and again."""
    return Script([calls(Call(name, "x"))]), arguments


class Asking(ScriptedModel):
    """Calls a tool with arguments of its own; the agents below share this model."""

    def __init__(self, name, arguments):
        super().__init__(Script([says("never")]))
        self.name, self.arguments, self.asked = name, arguments, 0

    async def stream(self, messages, *args, **kwargs):
        import json

        self.asked += 1
        yield {"messageStart": {"role": "assistant"}}
        use = {"name": self.name, "toolUseId": f"t{self.asked}"}
        yield {"contentBlockStart": {"start": {"toolUse": use}}}
        text = json.dumps({**self.arguments, "n": self.asked})
        yield {"contentBlockDelta": {"delta": {"toolUse": {"input": text}}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use"}}
        usage = {"inputTokens": 10, "outputTokens": 1, "totalTokens": 11}
        yield {"metadata": {"usage": usage, "metrics": {"latencyMs": 1}}}


THIRD_PARTY = {
    "think": {"thought": "Why?", "cycle_count": 3, "system_prompt": "You think."},
    "use_agent": PROMPTS,
    "swarm": {
        "task": "Work.",
        "agents": [
            {"name": "one", "system_prompt": "You."},
            {"name": "two", "system_prompt": "You."},
        ],
    },
    "graph": {
        "action": "execute",
        "graph_id": "g",
        "task": "Work.",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["think", "use_agent", "swarm", "graph"])
def test_agents_of_third_party_tools_spend_the_budget(name, strands_tools, counter, monkeypatch):
    from importlib import import_module

    module = import_module(f"strands_tools.{name}")
    model = Asking(name, THIRD_PARTY[name])
    # The agents of its swarm tool always have Strands' default model, which would go to AWS.
    monkeypatch.setattr("strands.agent.agent.BedrockModel", lambda *args, **kwargs: model)
    provider = BudgetHookProvider(Budget(max_model_calls=6, loop_detection=None))
    agent = Agent(
        model=model, tools=[module, counter.tool], hooks=[provider], callback_handler=None
    )
    if name == "graph":
        topology = {
            "nodes": [{"id": "a", "role": "r", "system_prompt": "You."}],
            "edges": [],
            "entry_points": ["a"],
        }
        agent.tool.graph(
            action="create", graph_id="g", topology=topology, record_direct_tool_call=False
        )
    assert agent("Go.").stop_reason == "max_model_calls"
    assert model.asked == 6
    assert provider.outcome(agent).stop_reason == StopReason.MAX_MODEL_CALLS


# Which releases are supported


def test_the_class_is_wrapped_once():
    before = Agent.stream_async
    for _ in range(3):
        BudgetHookProvider().attach(made(sticky()))
    assert Agent.stream_async is before or Agent.stream_async.__wrapped__ is before


def test_a_private_name_that_is_missing_is_told_by_name():
    agent = made(sticky())
    del agent._interrupt_state
    with pytest.raises(AdapterError, match=r"Agent\._interrupt_state"):
        BudgetHookProvider().attach(agent)


def one_node(**names) -> Graph:
    builder = GraphBuilder().set_max_node_executions(9)
    builder.add_node(made(sticky()), "a")
    graph = builder.build()
    graph.__class__ = type("Graph", (Graph,), names)
    return graph


@pytest.mark.parametrize("name", ["_interrupt_state"])
def test_a_private_name_that_a_graph_lacks_is_told_by_name(name):
    class Missing:
        def __get__(self, graph, owner):
            raise AttributeError(name)

        def __set__(self, graph, value):
            pass

    with pytest.raises(AdapterError, match=f"Graph.{name}"):
        BudgetHookProvider().attach(one_node(**{name: Missing()}))


def test_an_admission_that_never_became_a_call_is_withdrawn(counter):
    class Refusing:
        def register_hooks(self, registry, **kwargs):
            registry.add_callback(BeforeModelCallEvent, self.before)

        def before(self, event):
            raise RuntimeError("not today")

    guard = Guard(Budget(max_model_calls=3))
    agent = made(sticky(), counter.tool, hooks=[BudgetHookProvider(guard), Refusing()])
    with pytest.raises(RuntimeError, match="not today"):
        agent("Go.")
    assert guard.usage.model_calls == 0
    assert guard.usage.reserved_tokens == 0


def test_what_has_no_agents_cannot_be_attached():
    with pytest.raises(AdapterError, match="Attach the agents"):
        BudgetHookProvider().attach(object())  # type: ignore[type-var]
