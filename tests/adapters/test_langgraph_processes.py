"""What processes share: whose money a run spends, and which of two goes on with a run."""

from __future__ import annotations

import threading
from contextvars import Context

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRetryMiddleware
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from budgetguard_core import Budget, ConfigurationError, MemoryStore, RunFencedError, SqliteStore
from budgetguard_core.kit import Envelope
from budgetguard_core.ledger import Ledger
from budgetguard_core.testing import Call, ProviderError, Reply, Script, calls, says
from budgetguard_langgraph import BudgetCallback, bounded, outcome, resume
from langgraph_graphs import StrictChat, bounded_agent, search, sticky, thread, user
from ledger_servers import PATIENT, ZONE

# Tenants


@pytest.fixture
def ledger(tmp_path):
    made = Ledger(
        f"sqlite:///{tmp_path / 'ledger.sqlite3'}",
        queue=tmp_path / "queue",
        time_zone=ZONE,
        timeout=PATIENT,
    )
    # A call of the scripted model uses 120 tokens, and is asked for with what its prompt may be.
    made.set_ceilings("acme", daily_tokens=440)
    made.set_ceilings("beta", daily_tokens=720)
    yield made
    made.close()


def tenants(ledger):
    return Envelope(
        budget=Budget(max_iterations=50, loop_detection=None),
        ledger=ledger,
        tenant=lambda config: config["configurable"]["tenant"],
    )


def attached(way, script, envelope):
    """A graph and the configuration that it is called with, for one way in."""
    return bounded_agent(way, envelope, StrictChat(script=script))


@pytest.mark.sample(5)
@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "async", "batch", "bound"])
@pytest.mark.parametrize("way", ["bounded", "callback", "middleware"])
async def test_each_tenant_of_one_graph_has_a_ceiling_of_its_own(ledger, way, mode):
    script = sticky()
    graph, config = attached(way, script, tenants(ledger))
    spent = {}
    for tenant in ("acme", "beta"):
        told = {**config, "configurable": {"tenant": tenant}}
        before = script.calls
        if mode == "sync":
            graph.invoke(user(), told)
        elif mode == "async":
            await graph.ainvoke(user(), told)
        elif mode == "batch":
            graph.batch([user()], [told])
        else:
            graph.with_config(told).invoke(user())
        spent[tenant] = script.calls - before
    assert spent == {"acme": 3, "beta": 5}
    ledger.close()
    assert ledger.usage("acme").daily.spent_tokens == 360
    assert ledger.usage("beta").daily.spent_tokens == 600


def test_a_run_without_a_tenant_is_refused_and_calls_nothing(ledger):
    for way in ("bounded", "callback", "middleware"):
        script = sticky()
        graph, config = attached(way, script, tenants(ledger))
        with pytest.raises(ConfigurationError, match="tenant must find a name"):
            graph.invoke(user(), config)
        assert script.calls == 0


def test_a_chain_has_its_tenant_in_the_metadata_and_a_bare_model_has_none(ledger):
    chat = StrictChat(script=Script([says("x")]))
    envelope = Envelope(
        budget=Budget(), ledger=ledger, tenant=lambda config: config["metadata"]["tenant"]
    )
    config = {"callbacks": [BudgetCallback(envelope)], "metadata": {"tenant": "acme"}}
    RunnableLambda(lambda text: chat.invoke(text)).invoke("a", config)
    assert chat.script.calls == 1
    # Calls on their own share one run, whosever they are: nobody would know whom to charge.
    with pytest.raises(ConfigurationError, match="tenant must find a name"):
        chat.invoke("a", config)
    assert chat.script.calls == 1
    ledger.close()
    assert ledger.usage("acme").daily.spent_tokens == 120


# Fences


def killed(script, saver, store):
    """A run that ended without a word, and the thread that it left."""
    agent = create_agent(StrictChat(script=script), [search], checkpointer=saver)
    config = thread()
    with pytest.raises(ProviderError):
        bounded(agent, Budget(max_iterations=9), store=store).invoke(user(), config)
    return agent, config


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_of_two_processes_that_resume_one_run_one_goes_on(tmp_path, kind):
    store = MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "runs.sqlite3")
    first, late = threading.Event(), threading.Event()

    def reply(n):
        if n == 1:
            return Reply(error=ProviderError("500"))
        if n == 2:  # the one that resumes first is overtaken during its first call
            first.set()
            assert late.wait(30)
        return calls(Call("search", str(n))) if n < 4 else says("Done.")

    script = Script(reply)
    agent, config = killed(script, InMemorySaver(), store)
    found = {}

    def go_on(name):
        outcomes = []
        made = bounded(agent, Budget(max_iterations=9), store=store, on_outcome=outcomes.append)
        try:
            found[name] = outcome(made.invoke(None, config))
        except RunFencedError as error:
            found[name] = error
        found[name, "outcome"] = outcomes

    one = threading.Thread(target=go_on, args=("first",))
    one.start()
    assert first.wait(30)
    two = threading.Thread(target=go_on, args=("second",))
    two.start()
    two.join(30)
    late.set()
    one.join(30)
    assert found["second"].status == "completed"
    # What the killed process used is in it, and what the fenced one used is not lost to its own.
    assert found["second"].usage.model_calls >= 3
    assert isinstance(found["first"], RunFencedError)
    assert "resumed elsewhere" in str(found["first"])
    assert [one.status for one in found["first", "outcome"]] == ["failed"]


@pytest.mark.parametrize("way", ["with_retry", "handled"])
def test_a_fenced_run_is_neither_retried_nor_taken_for_a_tool_s_error(tmp_path, way):
    """The process that was thought dead goes on, and its run was resumed meanwhile."""
    store = SqliteStore(tmp_path / "runs.sqlite3")
    saver, config = InMemorySaver(), thread()
    middleware = [ModelRetryMiddleware(max_retries=2, initial_delay=0)] if way != "handled" else []

    def elsewhere():
        again = create_agent(StrictChat(script=Script([says("x")])), [search], checkpointer=saver)
        resume(again, config, Envelope(budget=Budget(max_iterations=2), store=store))

    @tool
    def search_long(value: str = "") -> str:
        """Search, for so long that somebody else goes on with the run."""
        # Not in this run's context: what the run starts in a thread is a part of it.
        worker = threading.Thread(target=Context().run, args=(elsewhere,))
        worker.start()
        worker.join(30)
        return "found"

    script = Script(lambda n: calls(Call("search_long", str(n))))
    agent = create_agent(
        StrictChat(script=script), [search_long], checkpointer=saver, middleware=middleware
    )
    made = bounded(agent, Budget(max_iterations=9), store=store)
    with pytest.raises(RunFencedError):
        made.invoke(user(), config)
    assert script.calls == 1
