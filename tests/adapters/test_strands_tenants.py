"""A tenant named in the invocation's state pays for the run, in agents, swarms and graphs."""

from __future__ import annotations

import threading

import pytest
from strands import tool
from strands.multiagent import GraphBuilder

from budgetguard_core import Budget, ConfigurationError, Guard
from budgetguard_core.ledger import Ledger
from budgetguard_core.plugs import Plug
from budgetguard_core.testing import Call, Script, calls, says
from budgetguard_strands import BudgetHookProvider
from ledger_servers import PATIENT, ZONE, Quiet
from strands_agents import Counter, made, run

WAYS = ("sync", "async", "stream")


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    monkeypatch.setattr("budgetguard_core.ledger.ledger.Heartbeat", Quiet)
    options = {"timeout": PATIENT, "time_zone": ZONE}
    made = Ledger(f"sqlite:///{tmp_path}/ledger.sqlite3", daily_tokens=100_000, **options)
    yield made
    made.close()


def provider_of(ledger):
    return BudgetHookProvider(
        Budget(max_iterations=9, loop_detection=None),
        ledger=ledger,
        tenant=lambda state: state["tenant"],
    )


def spent(ledger, tenant):
    ledger.send_heartbeat()
    return ledger.usage(tenant).daily.spent_tokens


@pytest.mark.parametrize("way", WAYS)
def test_each_invocation_is_charged_to_its_own_tenant(way, ledger):
    agent = made(Script([says("Done.")]), hooks=[provider_of(ledger)])
    for tenant in ("acme", "acme", "other"):
        run(agent, "Go.", way, invocation_state={"tenant": tenant})
    assert (spent(ledger, "acme"), spent(ledger, "other")) == (240, 120)


def test_a_tenants_ceiling_ends_the_run(ledger):
    ledger.set_ceilings("acme", daily_tokens=300)
    script = Script([calls("search")])
    agent = made(script, Counter().tool, hooks=[provider_of(ledger)])
    result = agent("Go.", invocation_state={"tenant": "acme"})
    assert result.stop_reason == "tenant_daily"
    assert script.calls <= 3


def test_the_nodes_of_a_graph_are_charged_to_the_graphs_tenant(ledger):
    builder = GraphBuilder().set_max_node_executions(9)
    builder.add_node(made(Script([says("A")]), name="a"), "a")
    builder.add_node(made(Script([says("B")]), name="b"), "b")
    builder.add_edge("a", "b")
    graph = provider_of(ledger).attach(builder.build())
    graph("Go.", invocation_state={"tenant": "acme"})
    assert spent(ledger, "acme") == 240


def test_a_run_without_a_tenant_does_not_begin(ledger):
    script = Script([says("Done.")])
    agent = made(script, hooks=[provider_of(ledger)])
    with pytest.raises(ConfigurationError, match="tenant"):
        agent("Go.")
    assert script.calls == 0


class SlowStore(Plug):
    """Notes the threads that wait for it."""

    waits = True

    def __init__(self):
        self.threads = []

    def reserve(self, owner, ask):
        self.threads.append(threading.get_ident())
        return True


@pytest.mark.parametrize("of", ["agent", "graph"])
def test_the_event_loop_does_not_wait_for_a_ledger(of, monkeypatch):
    store, started, loops = SlowStore(), [], []
    monkeypatch.setattr("budgetguard_core.guard.plugs_of", lambda guard, **_: (store,))
    provider = BudgetHookProvider(Guard(Budget(max_tool_calls=2)))

    @tool
    async def search(value: str) -> str:
        """Searches."""
        started.append(value)
        loops.append(threading.get_ident())
        return value

    script = Script([calls(*(Call("search", one) for one in "abc")), says("Done.")])
    agent = made(script, search)
    if of == "graph":
        builder = GraphBuilder().set_max_node_executions(9)
        builder.add_node(agent, "only")
        run(provider.attach(builder.build()), "Go.", "async")
    else:
        run(provider.attach(agent), "Go.", "async")
    assert started == ["a", "b"]
    assert store.threads
    assert not set(store.threads) & set(loops)
