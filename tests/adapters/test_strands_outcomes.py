"""What a run came to that its own limits did not end: failed, or ended by a limit of Strands'."""

from __future__ import annotations

import asyncio

import pytest
from strands.hooks import BeforeNodeCallEvent, MessageAddedEvent
from strands.multiagent import GraphBuilder, Swarm
from strands.multiagent.base import Status

from budgetguard_core import Budget, StopReason
from budgetguard_core.testing import Reply, Script, says
from budgetguard_strands import BudgetHookProvider
from strands_agents import Counter, made, run, sticky

WAYS = ("sync", "async", "stream")
BUDGET = Budget(max_iterations=50)


def handing_over(name: str, to: str):
    script = Script(lambda number: says("Over.") if number % 2 else Reply(handoff=to))
    return made(script, name=name)


def swarm_of(provider, **options):
    agents = [handing_over("first", "second"), handing_over("second", "first")]
    return Swarm(agents, hooks=[provider], **options)


def graph_of(provider, **options):
    del options
    builder = GraphBuilder().set_max_node_executions(3).reset_on_revisit()
    for name in ("first", "second"):
        builder.add_node(made(Script(lambda number: says(f"{number}")), name=name), name)
    builder.add_edge("first", "second")
    builder.add_edge("second", "first")
    builder.set_entry_point("first")
    return provider.attach(builder.build())


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize(
    ("of", "options"),
    [(swarm_of, {"max_handoffs": 3}), (swarm_of, {"max_iterations": 3}), (graph_of, {})],
)
def test_a_limit_of_strands_is_no_completion(of, options, way):
    provider = BudgetHookProvider(BUDGET)
    target = of(provider, **options)
    for _ in range(2):
        result, _ = run(target, "Go.", way)
        assert result.status == Status.FAILED
        outcome = provider.outcome(target)
        assert (outcome.status, outcome.stop_reason) == ("terminated", StopReason.FRAMEWORK_LIMIT)
        assert outcome.usage.iterations in (3, 6)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_swarm_whose_node_failed_has_failed(way):
    provider = BudgetHookProvider(BUDGET)
    agent = made(Script([Reply(error=ValueError("no such model"))]), name="only")
    swarm = Swarm([agent], hooks=[provider])
    result, _ = run(swarm, "Go.", way)
    assert result.status == Status.FAILED
    assert provider.outcome(swarm).status == "failed"


class Cancelling:
    """The user's hook that lets no node start."""

    def register_hooks(self, registry, **kwargs):
        registry.add_callback(BeforeNodeCallEvent, self.before)

    def before(self, event):
        event.cancel_node = "not today"


def test_a_swarm_whose_node_was_cancelled_has_failed():
    provider = BudgetHookProvider(BUDGET)
    swarm = Swarm([made(sticky(), name="only")], hooks=[Cancelling(), provider])
    assert swarm("Go.").status == Status.FAILED
    outcome = provider.outcome(swarm)
    assert (outcome.status, outcome.usage.model_calls) == ("failed", 0)


class Raising:
    """The user's hook that takes no message."""

    def register_hooks(self, registry, **kwargs):
        registry.add_callback(MessageAddedEvent, self.added)

    def added(self, event):
        raise ValueError("no place for it")


@pytest.mark.parametrize("way", WAYS)
def test_an_agent_that_a_hook_of_its_first_message_leaves_has_failed(way):
    provider = BudgetHookProvider(BUDGET)
    agent = made(sticky(), hooks=[Raising(), provider])
    with pytest.raises(ValueError, match="no place"):
        run(agent, "Go.", way)
    assert provider.outcome(agent).status == "failed"


@pytest.mark.parametrize("place", ["data", "message", "event"])
async def test_a_stream_that_is_closed_early_has_not_completed(place):
    counter = Counter()
    provider = BudgetHookProvider(BUDGET)
    agent = made(Script([says("It is 42.")]), counter.tool, hooks=[provider])
    stream = agent.stream_async("Go.")
    async for chunk in stream:
        if place in chunk:
            break
    await stream.aclose()
    for _ in range(20):
        # Strands of older releases leaves it to the loop to close what is inside of the stream.
        await asyncio.sleep(0)
    outcome = provider.outcome(agent)
    assert (outcome.status, outcome.usage.model_calls) == ("failed", 1)
