"""What a turn costs does not grow with the conversation: each message is looked at once."""

from __future__ import annotations

import sys
import threading

import pytest
from langchain.agents import create_agent
from langchain_core.messages import BaseMessage

from budgetguard_core import Budget
from budgetguard_core.events import ModelCallAdmitted
from budgetguard_core.kit import TokenUsage, projection
from budgetguard_core.testing import Call, Reply, Script, says
from budgetguard_langgraph import bounded
from conformance.budgetguard_langgraph_driver import ScriptedChat
from langgraph_graphs import StrictChat, bounded_agent, search, user

TURNS = 40
BUDGETS = {
    "capped": Budget(max_total_tokens=10**9, max_iterations=10**6),
    "uncapped": Budget(max_iterations=10**6),
}


@pytest.mark.sample(7)
@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "streamed"])
@pytest.mark.parametrize("usage", ["reported", "missing"])
@pytest.mark.parametrize("caps", BUDGETS)
@pytest.mark.parametrize("way", ["bounded", "callback", "middleware"])
async def test_each_message_is_estimated_once(monkeypatch, way, caps, usage, mode):
    looked = []
    estimate = projection.estimate

    def counted(content):
        if isinstance(content, BaseMessage):
            looked.append(content)
        return estimate(content)

    monkeypatch.setattr(projection, "estimate", counted)
    given = {} if usage == "reported" else {"usage": None}

    def reply(n):
        if n == TURNS - 1:
            return says("Done.")
        return Reply(tool_calls=(Call("search", str(n)),), **given)

    script, budget = Script(reply), BUDGETS[caps]
    graph, config = bounded_agent(way, budget, StrictChat(script=script))
    if mode == "sync":
        graph.invoke(user(), config)
    else:
        async for _ in graph.astream(user(), config, stream_mode="messages"):
            pass
    assert script.calls == TURNS
    # A reply whose provider tells its size is not looked at.
    sent = 1 + 2 * (TURNS - 1) if usage == "missing" else TURNS
    assert len(looked) == sent


class Candidates(StrictChat):
    """A model that is asked for three candidates, whose usage is that of all of them."""

    def _generate(self, *args, **options):
        result = super()._generate(*args, **options)
        result.generations *= 3
        return result


def test_the_usage_of_several_candidates_is_not_the_size_of_the_one_that_is_kept():
    projected = []
    budget = Budget(max_total_tokens=10**6)

    def reply(n):
        asks = () if n else (Call("search", "a"),)
        return Reply(tool_calls=asks, text="Done.", usage=TokenUsage(10, 3000))

    class Sink:
        def emit(self, event):
            if isinstance(event, ModelCallAdmitted):
                projected.append(event.call.input_tokens)

        def flush(self):
            pass

    graph = create_agent(Candidates(script=Script(reply)), [search])
    bounded(graph, budget, sinks=[Sink()]).invoke(user())
    first, second = projected
    assert second < first + 100


def calls_until(turns, way=None):
    """Count the function calls of one run until each turn asks the model."""
    counted, until = 0, []

    def count(_, event, __):
        nonlocal counted
        counted += event in ("call", "c_call")

    def reply(n):
        until.append(counted)
        return says("Done.") if n == turns else Reply(tool_calls=(Call("search", str(n)),))

    graph, config = bounded_agent(way, BUDGETS["capped"], ScriptedChat(script=Script(reply)))
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        graph.invoke(user(), {"recursion_limit": 10**6, **config})
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return until


@pytest.fixture(scope="module")
def bare():
    return calls_until(305)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["bounded", "callback", "middleware"])
def test_turn_300_costs_what_turn_10_does(bare, way):
    guarded = calls_until(305, way)
    beyond = [one - other for one, other in zip(guarded, bare, strict=True)]
    # One look at each message of the history would be 600 calls more in each turn.
    assert beyond[305] - beyond[295] <= 1.1 * (beyond[15] - beyond[5])
