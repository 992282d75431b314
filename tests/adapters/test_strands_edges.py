"""Strands beyond one quiet agent: people, limits of its own, odd results, agents within agents."""

from __future__ import annotations

import logging

import pytest
from strands import Agent, tool
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    MessageAddedEvent,
)
from strands.models.anthropic import AnthropicModel
from strands.multiagent import GraphBuilder

from budgetguard_core import AdapterError, Budget, Guard, StopReason
from budgetguard_core.testing import Script, calls, says
from budgetguard_strands import BudgetHookProvider
from budgetguard_strands._bounds import with_bound
from conformance.budgetguard_strands_driver import ScriptedModel
from strands_agents import Counter, made, sticky


@pytest.fixture
def counter():
    return Counter()


# Limits of Strands' own, and what a person or a hook does


def test_strands_own_limit_does_not_end_a_shared_guard(counter):
    guard = Guard(Budget(max_iterations=9))
    agent = made(sticky(), counter.tool, hooks=[BudgetHookProvider(guard)])
    agent("Go.", limits={"turns": 1})
    assert guard.trip is None


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_strands_own_limit_leaves_the_history_of_a_run_that_is_only_looked_on(counter, mode):
    provider = BudgetHookProvider(Budget(max_iterations=9), mode=mode, on_trip="raise")
    agent = made(sticky(), counter.tool, hooks=[provider])
    assert agent("Go.", limits={"turns": 2}).stop_reason == "limit_turns"
    assert agent.messages[-1]["role"] == "user"
    assert provider.outcome(agent).stop_reason is StopReason.FRAMEWORK_LIMIT


@pytest.mark.parametrize("mode", ["observe", "off", None])
def test_a_hook_goes_on_after_strands_own_limit_in_a_run_that_is_only_looked_on(counter, mode):
    provider = BudgetHookProvider(Budget(max_iterations=9), mode=mode or "off")
    script = sticky()
    agent = made(script, counter.tool, hooks=[provider] if mode else [])
    left = ["Go on.", "And on."]

    def resume(event):
        event.resume = left.pop() if left else None

    agent.hooks.add_callback(AfterInvocationEvent, resume)
    assert agent("Go.", limits={"turns": 1}).stop_reason == "limit_turns"
    # The limit is one of all attempts.
    assert (script.calls, left) == (1, [])


def test_what_a_person_cancelled_is_not_completed(counter):
    provider = BudgetHookProvider(Budget(max_iterations=9))
    script = sticky()
    agent = made(script, counter.tool, hooks=[provider])
    agent.hooks.add_callback(AfterModelCallEvent, lambda event: event.agent.cancel())
    assert agent("Go.").stop_reason == "cancelled"
    assert provider.outcome(agent).status == "failed"


def test_a_hook_that_fails_on_the_synthetic_message_is_reported(counter):
    def added(event):
        if (event.message.get("metadata") or {}).get("synthetic"):
            raise OSError("the disk is full")

    provider = BudgetHookProvider(Budget(max_iterations=2))
    agent = made(sticky(), counter.tool, hooks=[provider])
    agent.hooks.add_callback(MessageAddedEvent, added)
    assert agent("Go.").stop_reason == "max_iterations"
    assert any("the disk is full" in error for error in provider.outcome(agent).errors)


# Agents that are at work when the budget comes, and that outlive it


def test_attached_by_its_own_tool_it_begins_with_the_next_run(counter):
    provider = BudgetHookProvider(Budget(max_iterations=1))
    agents: list[Agent] = []

    @tool
    def attach() -> str:
        """Attaches."""
        provider.attach(agents[0])
        return "attached"

    script = Script([calls("attach"), calls("search"), says("Done."), calls("search")])
    agents.append(made(script, attach, counter.tool))
    assert agents[0]("Go.").stop_reason == "end_turn"
    assert agents[0]("Again.").stop_reason == "max_iterations"


def test_a_worker_made_in_a_tool_works_in_later_runs(counter):
    provider = BudgetHookProvider(Budget(max_iterations=3))
    workers: list[Agent] = []

    @tool
    async def delegate() -> str:
        """Delegates."""
        if not workers:
            workers.append(made(Script([says("Here.")]), hooks=[provider]))
        return str(await workers[0].invoke_async("Work."))

    agent = made(Script([calls("delegate")]), delegate, hooks=[provider])
    assert agent("Go.").stop_reason == "max_iterations"
    assert workers[0]("On your own.").stop_reason == "end_turn"
    assert provider.outcome(workers[0]).usage.model_calls == 1


def test_a_shared_guard_answers_the_same_question_again_and_again():
    agent = made(Script([says("Yes.")]), hooks=[BudgetHookProvider(Guard(Budget()))])
    assert {agent("Is it?").stop_reason for _ in range(12)} == {"end_turn"}


# Nodes that are no agents


def test_an_agent_in_a_custom_node_spends_the_graphs_budget(counter):
    from strands.multiagent.base import MultiAgentBase, MultiAgentResult, NodeResult, Status

    below = sticky()
    provider = BudgetHookProvider(Guard(Budget(max_model_calls=3)))

    class Custom(MultiAgentBase):
        async def invoke_async(self, task, invocation_state=None, **kwargs):
            child = made(below, counter.tool, hooks=[BudgetHookProvider(Budget(max_iterations=9))])
            result = await child.invoke_async("Work.")
            node = NodeResult(result=result, status=Status.COMPLETED)
            return MultiAgentResult(status=Status.COMPLETED, results={"inner": node})

        def serialize_state(self):
            return {}

        def deserialize_state(self, payload):
            del payload

    builder = GraphBuilder()
    builder.add_node(Custom(), "custom")
    builder.set_max_node_executions(5)
    graph = builder.build()
    provider.attach(graph)
    try:
        graph("Go.")
    except Exception:
        logging.getLogger(__name__).debug("a graph raises what its nodes raise")
    assert below.calls == 3
    assert provider.outcome(graph).stop_reason == "max_model_calls"


# The completion bound in a model's settings


def test_the_bound_is_never_below_what_a_provider_takes():
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    model = AnthropicModel(
        client_args={"api_key": "x"}, model_id="m", max_tokens=4000, params=thinking
    )
    assert with_bound(model, 100).config["max_tokens"] == 1025
    assert with_bound(model, 3000).config["max_tokens"] == 3000
    assert model.config["max_tokens"] == 4000


def test_what_a_model_of_the_users_remembers_stays_with_it(counter):
    class Counting(ScriptedModel):
        seen = 0

        async def stream(self, *args, **kwargs):
            self.seen += 1
            async for chunk in super().stream(*args, **kwargs):
                yield chunk

    agent = made(sticky(), counter.tool)
    agent.model = Counting(agent.model.script)
    provider = BudgetHookProvider(Budget(max_iterations=3, max_output_tokens_per_call=50))
    provider.attach(agent)
    agent("Go.")
    assert agent.model.seen == 3


def test_an_agent_that_speaks_is_refused():
    bidi = pytest.importorskip("strands.bidi", reason="younger releases only")
    models = pytest.importorskip("strands.bidi.models.model")

    class Model(models.BidiModel):
        def __init__(self):
            self.config = {}

        async def start(self, *args, **kwargs):
            raise NotImplementedError

        stop = send = receive = update_config = get_config = start

    with pytest.raises(AdapterError, match="BidiAgent"):
        bidi.BidiAgent(model=Model(), hooks=[BudgetHookProvider(Budget(max_iterations=3))])
