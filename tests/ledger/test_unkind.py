"""What an unkind world does to a ledger: torn files, silent processes, calls nobody can tell."""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path

import pytest

from budgetguard_core import Budget, Guard
from budgetguard_core.kit import ModelCall, TokenUsage
from budgetguard_core.ledger import LedgerRefused, LedgerUnreachable
from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.outbox import Outbox
from budgetguard_core.ledger.step import Step
from budgetguard_core.ledger.windows import Window
from budgetguard_core.testing import ManualClock
from ledger_servers import Place, need

WINDOWS = (Window("acme", "d:2026-11-22", 0.0, 0.0), Window("acme", "m:2026-11", 0.0, 0.0))


def silent(*_):
    raise LedgerUnreachable("nothing")


def test_a_report_that_a_full_disk_does_not_take_leaves_the_last_one(tmp_path, monkeypatch):
    outbox, sent = Outbox(tmp_path / "queue"), []
    outbox.record(Step("settle", "one", WINDOWS, Amount(5, 5)))

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(LedgerUnreachable, match="must be writable, got No space left"):
            outbox.record(Step("settle", "one", WINDOWS, Amount(9, 9)))
    Outbox(tmp_path / "queue").deliver_orphans(sent.append)
    assert [step.amount for step in sent] == [Amount(5, 5)]


@pytest.mark.parametrize("text", ["", "[1]", "7", "null", '{"done": true}', '{"id": [', "\udcff"])
def test_a_file_that_is_no_report_is_set_aside(tmp_path, text):
    (tmp_path / "x.json").write_text(text, errors="surrogateescape")
    Outbox(tmp_path).deliver_orphans(print)
    assert [path.name for path in tmp_path.iterdir()] == ["x.rejected"]


def test_a_call_without_figures_is_refused_all_the_same(place, opened):
    ledger = opened(place, daily_usd=1)
    ledger.reserve("acme", usd=1)
    with pytest.raises(LedgerRefused) as refused:
        ledger.reserve("acme")
    assert refused.value.reason == "tenant_daily"
    ledger.kill(tenant="beta", who="ann")
    with pytest.raises(LedgerRefused, match="killed by ann"):
        ledger.reserve("beta")


def test_a_ledger_that_is_used_again_charges_nothing_twice(sqlite, opened, monkeypatch):
    ledger = opened(sqlite, on_ledger_error="allow")
    with monkeypatch.context() as patch:
        for name in ("send", "ask"):
            patch.setattr(ledger.connection, name, silent)
        reservation = ledger.reserve("acme", usd=1)
        reservation.settle(0.25)
        ledger.close()
    ledger.send_heartbeat()
    opened(sqlite).send_heartbeat()
    day = ledger.usage("acme").daily
    assert (day.spent_usd, day.reserved_usd) == (Decimal("0.25"), 0)


def test_a_call_that_a_new_process_sent_while_it_was_under_way_is_charged_as_reserved(
    sqlite, opened, monkeypatch
):
    ledger = opened(sqlite, on_ledger_error="allow")
    with monkeypatch.context() as patch:
        patch.setattr(ledger.connection, "send", silent)
        reservation = ledger.reserve("acme", usd=1)
    opened(sqlite).send_heartbeat()
    reservation.settle(0.25)
    ledger.send_heartbeat()
    day = ledger.usage("acme").daily
    assert (day.spent_usd, day.reserved_usd) == (1, 0)
    opened(sqlite).send_heartbeat()
    assert ledger.usage("acme").daily.spent_usd == 1


def test_who_is_refused_at_once_is_told_why_too(sqlite, opened):
    ledger = opened(sqlite)

    def denied(_):
        raise LedgerUnreachable("the ledger's Redis must answer in time, got AuthenticationError.")

    for _ in range(2):
        with pytest.raises(LedgerUnreachable, match="got AuthenticationError"):
            ledger.connection.ask(denied)
    with pytest.raises(LedgerRefused, match="got AuthenticationError"):
        ledger.reserve("acme", usd=1)


def test_calls_that_never_left_need_no_taking_back(opened):
    ledger = opened("redis://127.0.0.1:1/0", timeout=0.2)
    for _ in range(50):
        with pytest.raises(LedgerRefused):
            ledger.reserve("acme", usd=1)
    assert len(ledger._outbox) == 0


FREE = ModelCall()
UNKNOWN = ModelCall(model="nobody-knows-it", input_tokens=10, max_output_tokens=10)


def made(guard, call, usage, **facts):
    """One model call; None, or why it was stopped."""
    ticket = guard.admit_model_call(call)
    if not hasattr(ticket, "call_id"):
        return ticket.trip.reason
    guard.settle_model_call(ticket, usage, **facts)
    return None


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["tokens", "dollars"])
def test_usage_that_nobody_reports_holds_a_run_under_a_tenants_ceiling(place, opened, kind):
    options = {"daily_tokens": 1000} if kind == "tokens" else {"monthly_usd": 5}
    ledger = opened(place, **options)
    guard = Guard(ledger=ledger, tenant="acme")
    call = FREE if kind == "tokens" else ModelCall(model="gpt-4o")
    assert made(guard, call, None) is None
    assert made(guard, call, None) == "unmetered_usage"
    assert guard.usage.model_calls == 1


def test_a_price_that_is_needed_only_at_the_settlement_holds_the_run(sqlite, opened):
    clock = ManualClock()
    ledger, operator = opened(sqlite, clock=clock), opened(sqlite)
    guard = Guard(ledger=ledger, tenant="acme")
    ticket = guard.admit_model_call(UNKNOWN)  # no ceiling in dollars yet
    operator.set_ceilings("acme", daily_usd=1)
    clock.advance(2)
    guard.settle_model_call(ticket, TokenUsage(10, 10))
    priced = ModelCall(cost_usd=Decimal("0.01"), input_tokens=1, max_output_tokens=1)
    assert made(guard, priced, TokenUsage(1, 1)) == "unpriced_model"
    assert "a tenant's ceiling in dollars" in guard.trip.detail


def test_a_failed_or_free_call_or_one_that_only_looks_on_holds_nothing(sqlite, opened):
    ledger = opened(sqlite, daily_usd=5, daily_tokens=1000)
    guard = Guard(ledger=ledger, tenant="acme")
    priced = ModelCall(model="gpt-4o")
    assert made(guard, priced, None, error="turned away") is None
    assert made(guard, priced, None, error="turned away") is None
    zero = Guard(Budget(on_unpriced="count_zero"), ledger=ledger, tenant="acme")
    for _ in range(2):
        assert made(zero, UNKNOWN, TokenUsage(5, 5)) is None
    dollars = Guard(ledger=opened(sqlite, daily_usd=5), tenant="delta")
    for _ in range(2):
        assert made(dollars, priced, None, cost_usd=Decimal("0.01")) is None
    unlimited = Guard(ledger=opened(sqlite), tenant="gamma")
    for _ in range(2):
        assert made(unlimited, FREE, None) is None


def test_observe_records_what_nobody_reported_and_goes_on(sqlite, opened):
    ledger = opened(sqlite, daily_tokens=1000)
    guard = Guard(mode="observe", ledger=ledger, tenant="acme")
    for _ in range(3):
        assert made(guard, FREE, None) is None
    assert guard.observed_trip.reason == "unmetered_usage"


def test_a_child_is_held_by_the_tenant_of_the_run_around(sqlite, opened):
    ledger = opened(sqlite, daily_tokens=1000)
    guard = Guard(ledger=ledger, tenant="acme")
    child = guard.child()
    assert made(child, FREE, None) is None
    assert made(child, FREE, None) == "unmetered_usage"
    assert guard.trip is not None


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files in /proc")
def test_attempts_that_fail_leave_no_file_open(sqlite, opened):
    ledger = opened(sqlite, timeout=0.01)
    ledger.connection._pause_ns = 0
    with sqlite.held():
        before = open_files()
        for _ in range(20):
            with pytest.raises(LedgerUnreachable):
                ledger.usage("acme")
        assert open_files() <= before + 3  # the file, its log and its index
    sqlite.path.write_bytes(b"no data base" * 100)
    before = open_files()
    for _ in range(20):
        with pytest.raises(LedgerUnreachable):
            ledger.usage("acme")
    assert open_files() <= before + 2


def test_a_store_that_is_closed_may_be_closed_again(place):
    store = place.store()
    store.close()
    store.close()


@pytest.mark.slow
def test_long_lists_in_redis_come_in_whole(tmp_path, monkeypatch):
    need("redis")
    monkeypatch.setattr("budgetguard_core.ledger.redis._AT_ONCE", 50)
    place = Place("redis", tmp_path)
    store = place.store()
    try:
        for number in range(600):
            one = Step("settle", f"h{number}", WINDOWS, Amount(1, 1))
            store.step(one)
        assert len(store.holds()) == 600
        (name, *_), rest = store._names("h")[:1], store._names("h")
        store._client.delete(f"{store._prefix}:h:{name}")
        store._names = lambda what: rest  # a tombstone that expires in between
        assert len(store.holds()) == 599
    finally:
        store.close()
        place.remove()


def test_postgres_forgets_what_was_settled_long_ago_and_waits_for_no_lock(
    tmp_path, opened, monkeypatch
):
    need("postgres")
    import psycopg

    monkeypatch.setattr("budgetguard_core.ledger.postgres._STEPS_BETWEEN_CLEANINGS", 2)
    place = Place("postgres", tmp_path)
    try:
        ledger = opened(place, daily_usd=100)
        ledger.connection._pause_ns = 0
        ledger.reserve("acme", usd=1).settle(1)
        with psycopg.connect(place.url) as other:
            other.execute("UPDATE bg_holds SET expires = 0")
            other.commit()
            ledger.reserve("acme", usd=2).settle(1)
            ((count, spent),) = other.execute(
                "SELECT count(*), sum(amount[1]) FROM bg_holds"
            ).fetchall()
            assert (count, spent) == (1, 10**9)
            other.execute("SELECT * FROM bg_windows FOR UPDATE")
            ledger.connection.store()._timeout = 0.6
            ledger.connection.store()._pool.drain()
            with pytest.raises(LedgerRefused, match=r"must answer in time, got \w+ 5"):
                ledger.reserve("acme", usd=1)
        assert ledger.usage("acme").daily.spent_usd == 2
        ledger.close()
    finally:
        place.remove()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_processes_of_a_few_steps_forget_what_was_settled_long_ago(tmp_path, opened, kind):
    need(kind)
    place, clock = Place(kind, tmp_path), ManualClock()
    for _ in range(3):
        ledger = opened(place, clock=clock)
        ledger.reserve("acme", usd=1).settle(1)
        assert len(ledger.holds()) == 1
        ledger.close()
        clock.advance(90_000)
        if kind == "postgres":
            import psycopg

            with psycopg.connect(place.url) as other:
                other.execute("UPDATE bg_holds SET expires = 0")
    place.remove()
