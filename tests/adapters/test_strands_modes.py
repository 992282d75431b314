"""OBSERVE and OFF hold for whatever is a part of the run: nodes, agents in tools, joined agents."""

from __future__ import annotations

import pytest
from strands import tool
from strands.multiagent import GraphBuilder, Swarm

from budgetguard_core import Budget, Guard
from budgetguard_core.testing import Script, calls, says
from budgetguard_strands import BudgetHookProvider, install
from strands_agents import run, strict

WAYS = ("sync", "async", "stream")
REPEATED = 8


@tool(name="search")
def search(value: str = "") -> str:
    """Search, and find the same each time."""
    return "the same"


def repeating() -> Script:
    return Script([*[calls("search")] * REPEATED, says("Done.")])


def in_graph(script, provider):
    builder = GraphBuilder().set_max_node_executions(20)
    builder.add_node(strict(script, search, name="worker"), "worker")
    return provider.attach(builder.build())


def in_swarm(script, provider):
    return Swarm([strict(script, search, name="worker")], hooks=[provider])


def in_tool(script, provider):
    @tool(name="delegate")
    def delegate(value: str = "") -> str:
        """Have somebody else do it."""
        return str(strict(script, search)("Go."))

    return strict(Script([calls("delegate"), says("Done.")]), delegate, hooks=[provider])


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("made", [in_graph, in_swarm, in_tool])
@pytest.mark.parametrize("mode", ["observe", "off"])
@pytest.mark.parametrize("shared", [False, True])
def test_nothing_of_a_run_that_only_looks_on_is_stopped(shared, mode, made, way):
    budget, script = Budget(max_iterations=50), repeating()
    provider = BudgetHookProvider(Guard(budget, mode=mode)) if shared else None
    provider = provider or BudgetHookProvider(budget, mode=mode)
    target = made(script, provider)
    run(target, "Go.", way)
    assert script.calls == REPEATED + 1
    assert provider.outcome(target).status == "completed"


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_nothing_in_a_block_that_only_looks_on_is_stopped(mode):
    install()
    script = repeating()
    with Guard(Budget(max_iterations=50), mode=mode).activate():
        result = strict(script, search)("Go.")
    assert (result.stop_reason, script.calls) == ("end_turn", REPEATED + 1)
