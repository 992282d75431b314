"""Edges of a process: lost replies, closed ledgers, retries."""

from __future__ import annotations

from decimal import Decimal

import pytest

from budgetguard_core import Guard
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.kit import ModelCall
from budgetguard_core.ledger import (
    LedgerRefused,
    LedgerUnreachable,
    as_ledger,
)
from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.testing import ManualClock

CENT = 10**7


@pytest.fixture
def clock(monkeypatch):
    made = ManualClock()
    made.advance(3600)
    return made


@pytest.fixture
def join(sqlite, opened, clock):
    """A run in a ledger of its own connection: a process, as far as the store can tell."""

    def attach(tenant="acme", **options):
        ledger = opened(sqlite, clock=clock, **options)
        ledger.connection._pause_ns = 0
        return ledger, ledger.attach("run", tenant, on_kill=id, on_warning=id)

    return attach


def spend(run, usd=CENT):
    part = run.obtain(Amount(usd, 1))
    if isinstance(part, LedgerRefused):
        return part
    run.settle(part, Amount(usd, 1))
    return None


def charged(ledger):
    day = ledger.usage("acme").daily
    return day.spent_usd, day.reserved_usd


def silent(*_):
    raise LedgerUnreachable("nothing")


def test_what_a_run_that_looks_on_takes_back_is_charged_to_nobody(sqlite, opened):
    ledger = opened(sqlite, daily_usd=Decimal("0.01"))
    ledger.reserve("acme", usd=Decimal("0.01"))
    guard = Guard(mode="observe", ledger=ledger, tenant="acme")
    ticket = guard.admit_model_call(ModelCall(cost_usd=Decimal(1)))
    assert guard.observed_trip.reason == "tenant_daily"
    assert guard.withdraw(ticket)
    ledger.send_heartbeat()
    assert charged(ledger) == (0, Decimal("0.01"))


@pytest.mark.parametrize("on_ledger_error", ["refuse", "allow"])
def test_a_reply_that_is_lost_at_midnight_leaves_nothing_behind(join, clock, on_ledger_error):
    ledger, run = join(daily_usd=1, on_ledger_error=on_ledger_error)
    store = ledger.connection.store()
    real = store.step

    def lost(step):
        real(step)
        clock.advance(2)
        raise LedgerUnreachable("the reply was lost")

    clock.advance(82_799)  # a second before
    store.step = lost
    asked = run.obtain(Amount(CENT, 1))
    store.step = real
    if not isinstance(asked, LedgerRefused):
        run.settle(asked, Amount(CENT, 1))
    assert spend(run) is None
    ledger.close()
    assert {row.reserved_usd for row in ledger.windows()} == {Decimal(0)}
    assert all(hold.closed for hold in ledger.holds())
    spent = sum(row.spent_usd for row in ledger.windows() if row.window[0] == "d")
    assert spent == Decimal("0.01") * (1 + (on_ledger_error == "allow"))


def test_many_tenants_are_not_all_kept_at_hand(sqlite, opened, monkeypatch):
    monkeypatch.setattr("budgetguard_core.ledger.ledger._TENANTS_AT_HAND", 3)
    ledger = opened(sqlite, daily_usd=1)
    for number in range(10):
        ledger.reserve(f"tenant-{number}", usd=0.5).settle(0.25)
        assert ledger._known_account.cache_info().currsize <= 3
    assert {row.spent_usd for row in ledger.windows()} == {Decimal("0.25")}


def test_a_connection_that_was_never_opened_crosses_a_fork():
    connection = Connection(silent, ManualClock())
    connection.forked()
    connection.close()


def roll_back(store):
    """Fail as where the disk is full: SQLite has rolled back by itself."""

    def work(db):
        db.execute("DELETE FROM bg_windows")
        db.execute("ROLLBACK")
        raise RuntimeError("rolled back")

    store._write(work)


def test_a_step_that_fails_half_way_leaves_the_file_as_it_was(sqlite, opened, monkeypatch):
    ledger = opened(sqlite, daily_usd=1)
    reservation = ledger.reserve("acme", usd=0.5)

    def fail(*_):
        raise RuntimeError("half way")

    with monkeypatch.context() as patch:
        patch.setattr("budgetguard_core.ledger.sqlite.decide", fail)
        with pytest.raises(RuntimeError, match="half way"):
            reservation.settle(0.25)
    with pytest.raises(RuntimeError, match="rolled back"):
        roll_back(ledger.connection.store())
    assert charged(ledger) == (0, Decimal("0.5"))
    assert ledger.check() == []


def test_a_guard_that_goes_on_after_its_ledger_was_closed_is_looked_after(sqlite, opened):
    ledger = opened(sqlite, daily_usd=1)
    guard = Guard(ledger=ledger, tenant="acme")
    ask = ModelCall(input_tokens=1, cost_usd=Decimal("0.01"))
    guard.settle_model_call(guard.admit_model_call(ask), cost_usd=Decimal("0.01"))
    ledger.close()
    guard.settle_model_call(guard.admit_model_call(ask), cost_usd=Decimal("0.01"))
    ledger.send_heartbeat()
    assert [run.run for run in ledger._heartbeat.all()] == [guard.run_id]
    ledger.close()
    assert charged(ledger) == (Decimal("0.02"), 0)


@pytest.mark.parametrize("another", [False, True])
def test_a_call_under_way_when_its_ledger_is_closed_is_settled(sqlite, opened, another):
    ledger = opened(sqlite, daily_usd=1)
    guard = Guard(ledger=ledger, tenant="acme")
    ask = ModelCall(input_tokens=1, cost_usd=Decimal("0.01"))
    call = guard.admit_model_call(ask)
    ledger.close()
    others = [Guard(ledger=ledger, tenant="acme")] if another else []
    for other in others:
        other.settle_model_call(other.admit_model_call(ask), cost_usd=Decimal("0.01"))
    guard.settle_model_call(call, cost_usd=Decimal("0.01"))
    ledger.send_heartbeat()
    ledger.close()
    assert charged(ledger) == (Decimal("0.01") * (1 + another), 0)


@pytest.mark.parametrize("when", ["1e300", "NaN", "-1e300", "true"])
def test_a_kill_switch_with_a_time_that_is_none_is_set_all_the_same(place, opened, store, when):
    store.write("f:t:acme", f'{{"who": "ops", "when": {when}, "why": "test"}}')
    ledger, told = opened(place), []
    with pytest.raises(LedgerRefused, match="tenant 'acme' was killed"):
        ledger.reserve("acme", usd=0.1)
    run = ledger.attach("run", "acme", on_kill=told.append, on_warning=id)
    ledger.send_heartbeat()
    run.close()
    assert "tenant 'acme' was killed" in told[0]
    assert "tenant 'acme' was killed" in ledger.kills()[0].detail


@pytest.mark.parametrize("given", [7, ["sqlite:///l"], {}])
def test_what_is_no_ledger_is_said_so(given):
    with pytest.raises(ConfigurationError):
        as_ledger(given)


def test_a_retry_that_asks_for_more_is_not_the_same_reservation(place, opened):
    ledger = opened(place, daily_usd=1, daily_tokens=100)
    first = ledger.reserve("acme", usd=0.1, tokens=10, reservation_id="call-1")
    for more in ({"usd": 100, "tokens": 10}, {"usd": 0.1, "tokens": 11}):
        with pytest.raises(ConfigurationError, match="must name one reservation"):
            ledger.reserve("acme", reservation_id="call-1", **more)
    ledger.reserve("acme", usd=0.05, reservation_id="call-1").settle(0.07, 3)
    first.settle(0.07, 3)
    day = ledger.usage("acme").daily
    assert (day.spent_usd, day.spent_tokens, day.reserved_usd) == (Decimal("0.07"), 3, 0)


def test_a_retry_after_midnight_is_refused_and_its_reservation_stays(sqlite, opened, clock):
    ledger = opened(sqlite, daily_usd=1, monthly_usd=2, clock=clock)
    clock.advance(82_799)
    kept = ledger.reserve("acme", usd=0.5, reservation_id="call-1")
    clock.advance(2)
    with pytest.raises(ConfigurationError, match="must name one reservation, got one of another"):
        ledger.reserve("acme", usd=0.5, reservation_id="call-1")
    kept.settle(0.25)
    assert {row.spent_usd for row in ledger.windows()} == {Decimal("0.25")}
    assert {row.reserved_usd for row in ledger.windows()} == {Decimal(0)}


def test_a_reservation_of_another_tenant_is_not_the_same(place, opened):
    ledger = opened(place, daily_usd=1)
    ledger.reserve("acme", usd=0.5, reservation_id="call-1")
    with pytest.raises(
        ConfigurationError, match="must name one reservation, got one of another tenant"
    ):
        ledger.reserve("beta", usd=0.5, reservation_id="call-1")
    with pytest.raises(ConfigurationError, match="reservation_id must have 1 to 200"):
        ledger.reserve("acme", usd=0.5, reservation_id="")
