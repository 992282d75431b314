"""Tenants and kill switches through every way in of every adapter, on a real store."""

from __future__ import annotations

import contextvars
import threading
from decimal import Decimal

import pytest

import layout
from budgetguard_core import Budget, Guard
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.kit.envelope import Envelope
from budgetguard_core.ledger import Ledger
from budgetguard_core.pricing import Price, PriceBook
from budgetguard_core.stop import StopReason
from budgetguard_core.testing import Reply, Script, Tool, calls, says
from budgetguard_core.testing.script import MODEL
from budgetguard_core.testing.trial import Trial, sticky
from conformance.drivers import drivers_of, has_drivers, is_installed
from ledger_servers import ZONE, Quiet, wait_until

# openai-agents 0.24: a run that is cancelled as its turn begins leaves the turn's coroutine behind,
# because the task that would have awaited it never starts.
pytestmark = pytest.mark.filterwarnings(
    "ignore:coroutine 'run_single_turn' was never awaited:RuntimeWarning"
)
PRICES = PriceBook({MODEL: Price(input=1, output=2)})
"""A call of 100 and 20 tokens costs 0.00014 dollars."""
PATIENCE = 60.0
"""Seconds that a slow machine may take for what is seen within one."""


def ways(*modes, clause=0):
    for adapter in layout.adapters():
        if is_installed(adapter) and has_drivers(adapter):
            for driver in drivers_of(adapter):
                for mode in driver.modes:
                    if mode in modes and not driver.deviation(clause, mode):
                        name = f"{adapter.removeprefix('budgetguard_')}-{driver.name}-{mode}"
                        yield pytest.param(driver, mode, id=name)


every_way = pytest.mark.parametrize(("driver", "mode"), list(ways("sync", "async", "streamed")))
every_async_way = pytest.mark.parametrize(
    ("driver", "mode"), list(ways("async", "streamed", clause=7))
)


@pytest.fixture
def heartbeat():
    """Has the ledger's own thread beat; without it only the test does, with `Ledger.beat`."""


@pytest.fixture(autouse=True)
def _quiet(request, monkeypatch):
    if "heartbeat" not in request.fixturenames:
        monkeypatch.setattr("budgetguard_core.ledger.ledger.Heartbeat", Quiet)


@pytest.fixture
def opened(tmp_path):
    """Open the test's ledger once more, as another process would."""
    made = []

    def open_ledger(**options):
        options.setdefault("timeout", PATIENCE)  # what is tested here is not the time-out
        options.setdefault("time_zone", ZONE)
        if not any(name.startswith(("daily_", "monthly_")) for name in options):
            options["daily_usd"] = 1_000
        url = f"sqlite:///{tmp_path}/ledger.sqlite3?synchronous=normal"
        made.append(Ledger(url, queue=tmp_path / "queue", **options))
        return made[-1]

    yield open_ledger
    for ledger in made:
        ledger.close()


def paid(ledger, tenant="acme", **options):
    budget = Budget(max_iterations=50)
    return Envelope(budget=budget, ledger=ledger, tenant=tenant, price_book=PRICES, **options)


@pytest.mark.sample(11)
@every_way
def test_a_tenants_ceiling_ends_the_run_as_any_limit_does(driver, mode, opened):
    ledger = opened(daily_usd=Decimal("0.002"))
    script = sticky("search")
    ran = Trial(driver, mode).run(script, paid(ledger))
    outcome = ran.stopped(StopReason.TENANT_DAILY)
    assert outcome.violations[0].limit == Decimal("0.002")
    assert 0 < script.calls == outcome.usage.model_calls
    assert len(ran.started) == script.calls  # what was paid for was done
    before = script.calls
    again = Trial(driver, mode).run(script, paid(ledger))
    again.stopped(StopReason.TENANT_DAILY)  # the tenant's next run is refused at once
    other = Trial(driver, mode).run([says("Done.")], paid(ledger, tenant="beta"))
    other.completed()
    ledger.close()
    day = ledger.usage("acme").daily
    assert script.calls - before <= 1
    assert (day.spent_usd, day.reserved_usd) == (Decimal("0.00014") * script.calls, 0)
    assert day.spent_tokens == 120 * script.calls
    assert ledger.usage("beta").daily.spent_tokens == 120


@pytest.mark.sample(11)
@every_way
def test_a_kill_ends_the_run_before_its_next_call(driver, mode, opened):
    ledger, operator = opened(), opened()

    def reply(number):
        if number == 1:
            operator.kill(tenant="acme", who="ann", why="loops")
            ledger.send_heartbeat()
        return calls("search")

    script = Script(reply)
    ran = Trial(driver, mode).run(script, paid(ledger))
    outcome = ran.stopped(StopReason.ABORTED)
    assert "tenant 'acme' was killed by ann" in outcome.detail
    assert outcome.detail.endswith(": loops")
    # What is seen at the HTTP seam is asked by nobody: the next model call is refused.
    assert (script.calls, len(ran.started)) == (2, 2 if driver.deviation(3, mode) else 1)
    ran = Trial(driver, mode).run(script, paid(ledger))
    ran.stopped(StopReason.ABORTED)  # it survives the run
    assert script.calls == 2
    operator.revive(tenant="acme")
    ledger.send_heartbeat()
    ran = Trial(driver, mode).run([says("Done.")], paid(ledger))
    ran.completed()


@pytest.mark.sample(11)
@pytest.mark.parametrize("what", ["model", "tool"])
@every_async_way
def test_a_kill_reaches_a_call_that_hangs(driver, mode, what, opened, heartbeat):
    ledger, operator = opened(), opened()
    if what == "model":
        script, tools = Script([Reply(hang=True)]), []
    else:
        script, tools = sticky("search"), [Tool("search", hang=True)]

    def kill():
        wait_until(lambda: script.calls)
        operator.kill(everything=True, who="ann")

    person = threading.Thread(target=kill)
    person.start()
    ran = Trial(driver, mode).run(script, paid(ledger), tools=tools)
    person.join()
    assert "everything was killed by ann" in ran.stopped(StopReason.ABORTED).detail
    assert script.calls == 1
    assert ran.seconds < PATIENCE


@pytest.mark.sample(11)
@every_way
def test_80_percent_are_told_once_per_window(driver, mode, opened):
    ledger, told = opened(daily_tokens=1600), []
    envelope = paid(ledger, on_warning=lambda guard, event: told.append(event.dimension))

    def settled(number, value):
        ledger.send_heartbeat()
        return f"{number} {value}"

    for _ in range(3):
        script = Script([calls("search")] * 3 + [says("Done.")])
        ran = Trial(driver, mode).run(script, envelope, Tool("search", settled))
        ran.completed()
    assert told == ["tenant_daily"]


@pytest.mark.sample(7)
@every_way
def test_a_guard_of_the_users_own_pays_through_every_way_in(driver, mode, opened):
    ledger = opened()
    guard = Guard(Budget(max_iterations=3), price_book=PRICES, ledger=ledger, tenant=("acme", "u"))
    ran = Trial(driver, mode).run(sticky("search"), guard)
    ran.stopped(StopReason.MAX_ITERATIONS)
    ledger.close()
    for key in ("acme", "u"):
        assert ledger.usage(key).daily.spent_tokens == 360


@pytest.mark.sample(7)
@every_way
def test_a_store_that_is_gone_ends_the_run_as_any_limit_does(driver, mode, tmp_path):
    with Ledger("redis://127.0.0.1:1/0", timeout=0.2, queue=tmp_path / "queue") as ledger:
        script = sticky("search")
        ran = Trial(driver, mode).run(script, paid(ledger))
        assert "must answer in time" in ran.stopped(StopReason.ABORTED).detail
        assert script.calls == 0


TENANT = contextvars.ContextVar("TENANT")


def test_a_loop_has_no_configuration_and_may_ask_the_context(opened):
    from budgetguard_loop import run_bounded

    ledger = opened()
    envelope = paid(ledger, tenant=lambda config: TENANT.get())
    with pytest.raises(ConfigurationError, match="tenant must find a name"):
        run_bounded(lambda messages: "Done.", envelope, messages="Go.")

    def run():
        TENANT.set("acme")
        return run_bounded(lambda messages: "Done.", envelope, messages="Go.", model=MODEL)

    assert contextvars.copy_context().run(run).status == "completed"
    ledger.send_heartbeat()
    assert {row.key for row in ledger.windows()} == {"acme"}


def stopped_graph(bound):
    """A graph of a runaway on a thread that its bound has stopped; the thread."""
    from langchain.agents import create_agent
    from langgraph.checkpoint.memory import InMemorySaver

    from langgraph_graphs import StrictChat, search, thread, user
    from langgraph_graphs import sticky as runaway

    model = StrictChat(script=runaway(), model_name=MODEL)
    graph = bound(create_agent(model, [search], checkpointer=InMemorySaver()))
    config = thread()
    graph.invoke(user(), config)
    return graph, config


def test_a_graph_that_is_resumed_under_a_fresh_budget_is_paid_by_the_same_tenant(opened):
    pytest.importorskip("langgraph")
    from budgetguard_langgraph import bounded, outcome, resume

    events, ledger = [], opened(daily_tokens=500)
    terms = paid(ledger, sinks=[events.append])
    graph, config = stopped_graph(lambda made: bounded(made, terms))
    ledger.send_heartbeat()
    spent, told = ledger.usage("acme").daily.spent_tokens, len(events)
    result = resume(graph, config, Budget(max_iterations=25))
    assert outcome(result).stop_reason == "tenant_daily"
    ledger.send_heartbeat()
    assert ledger.usage("acme").daily.spent_tokens == spent > 0
    assert len(events) > told


def test_a_graph_whose_guard_a_tenant_paid_for_is_not_resumed_by_a_budget_alone(opened):
    pytest.importorskip("langgraph")
    from budgetguard_core import AdapterError
    from budgetguard_langgraph import bounded, outcome, resume

    ledger = opened(daily_tokens=500)
    guard = Guard(ledger=ledger, tenant="acme", price_book=PRICES)
    graph, config = stopped_graph(lambda made: bounded(made, guard))
    with pytest.raises(AdapterError, match="'acme' paid for the stopped run"):
        resume(graph, config, Budget(max_iterations=25))
    assert outcome(resume(graph, config, paid(ledger))).stop_reason == "tenant_daily"
