"""A process forks while its ledger is open, as servers do that fork their workers."""

from __future__ import annotations

import multiprocessing
import os
import threading
from decimal import Decimal
from functools import partial

import pytest

import ledger_workers
from budgetguard_core import Guard
from budgetguard_core.kit import ModelCall
from budgetguard_core.ledger import Ledger, LedgerRefused
from ledger_servers import PATIENT, ZONE

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def in_a_child(work):
    """Fork, and return what ends the child: 0 where the work did not fail."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_what_a_child_spends_after_its_parent_has_closed_is_not_lost(place, opened):
    ledger = opened(place, daily_usd=10)
    ledger.reserve("acme", usd=1).settle(1)
    child_has_opened, parent_has_closed = os.pipe(), os.pipe()

    def work():
        ledger.reserve("acme", usd=1).settle(1)
        os.write(child_has_opened[1], b".")
        os.read(parent_has_closed[0], 1)
        ledger.reserve("acme", usd=1).settle(1)
        ledger.close()

    ended = in_a_child(work)
    os.read(child_has_opened[0], 1)
    ledger.close()
    os.write(parent_has_closed[1], b".")
    assert ended() == 0
    with Ledger(place.url, timeout=PATIENT) as other:
        day = other.usage("acme").daily
    assert (day.spent_usd, day.reserved_usd) == (Decimal(3), 0)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("has_parents", [True, False])
def test_a_worker_of_multiprocessing_leaves_no_reservation(
    sqlite, opened, tmp_path, method, has_parents
):
    ledger = opened(sqlite, daily_usd=10)
    if has_parents:
        ledger.reserve("acme", usd=1).settle(1)
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context = ledger_workers.CONTEXT
    worker = context.Process(target=ledger_workers.one, args=(sqlite.url, tmp_path / "queue"))
    worker.start()
    worker.join()
    ledger.close()
    with Ledger(sqlite.url, timeout=PATIENT, time_zone=ZONE) as other:
        day = other.usage("acme").daily
    assert (day.spent_usd, day.reserved_usd) == (Decimal(1 + has_parents), 0)


def test_a_fork_waits_for_the_step_of_another_thread_and_holds_the_next(sqlite, opened):
    ledger = opened(sqlite, daily_usd=10)
    ledger.reserve("acme", usd=1).settle(1)
    store, connection = ledger.connection.store(), ledger.connection
    in_a_step, may_end, asked = threading.Event(), threading.Event(), threading.Event()
    said = []

    def step():
        def work(_):
            in_a_step.set()
            may_end.wait(PATIENT)
            said.append("step")

        connection.ask(lambda store: store._write(work))

    def next_step():
        asked.set()
        ledger.reserve("acme", usd=1).settle(1)
        said.append("next step")

    first, second = threading.Thread(target=step), threading.Thread(target=next_step)
    first.start()
    assert in_a_step.wait(PATIENT)
    threading.Timer(0.05, may_end.set).start()
    assert connection.before_fork()
    assert store._db is None
    second.start()
    assert asked.wait(PATIENT)
    said.append("fork")
    connection.after_fork()
    first.join(PATIENT)
    second.join(PATIENT)
    assert said == ["step", "fork", "next step"]


def test_a_child_of_a_fork_that_could_not_wait_is_refused(sqlite, opened):
    ledger = opened(sqlite, daily_usd=10, timeout=0.05)
    ledger.reserve("acme", usd=1).settle(1)

    def work():
        with pytest.raises(LedgerRefused, match="must not be in use while its process forks"):
            ledger.reserve("acme", usd=1)

    fork = partial(in_a_child, work)
    assert ledger.connection.ask(lambda store: store._write(lambda _: fork()))() == 0
    ledger.reserve("acme", usd=1).settle(1)
    ended = in_a_child(lambda: ledger.reserve("acme", usd=1).release())
    assert ended() == 0


def test_a_guard_that_crosses_a_fork_is_looked_after_in_the_child(place, opened):
    ledger = opened(place, daily_usd=10)
    guard = Guard(ledger=ledger, tenant="acme")

    def spend():
        ticket = guard.admit_model_call(ModelCall(cost_usd=Decimal("0.01")))
        guard.settle_model_call(ticket, cost_usd=Decimal("0.01"))

    def work():
        spend()
        ledger.send_heartbeat()
        assert [run.run for run in ledger._heartbeat.all()] == [guard.run_id]
        ledger.kill(run=guard.run_id, who="ops")
        ledger.send_heartbeat()
        assert guard.check().reason == "aborted"
        ledger.close()

    spend()
    assert in_a_child(work)() == 0
    ledger.close()
    day = ledger.usage("acme").daily
    assert (day.spent_usd, day.reserved_usd) == (Decimal("0.02"), 0)
