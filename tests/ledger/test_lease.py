"""Leases: how much is taken ahead, when it is given back, and what becomes of it at the edges."""

from __future__ import annotations

import asyncio
import os
import threading
from decimal import Decimal
from types import SimpleNamespace

import pytest

from budgetguard_core.ledger import Key, LeaseOptions, Refusal
from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.errors import LedgerUnreachable
from budgetguard_core.ledger.step import Answer
from budgetguard_core.ledger.windows import as_keys
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

    def attach(tenant="acme", told=None, **options):
        options.setdefault("options", LeaseOptions(recall=0.0))
        ledger = opened(sqlite, clock=clock, **options)
        told = [] if told is None else told
        run = ledger.attach("run", tenant, on_kill=told.append, on_warning=told.append)
        return ledger, run

    return attach


def spend(run, usd=CENT, real=None, tokens=1):
    part = run.take(usd, tokens) or run.obtain(usd, tokens)
    if isinstance(part, Refusal):
        return part
    run.settle(part, Amount(usd, tokens), Amount(usd if real is None else real, tokens))
    return None


def charged(ledger, key="acme"):
    day = ledger.usage(key).daily
    return day.spent_usd, day.reserved_usd


def test_a_lease_is_a_few_calls_ahead_and_most_calls_make_no_trip(join):
    ledger, run = join(daily_usd=100)
    assert spend(run) is None
    assert charged(ledger) == (0, Decimal("0.04"))  # four calls like the first
    trips = ledger.trips
    for _ in range(3):
        spend(run)
    assert ledger.trips == trips
    for _ in range(200):
        spend(run)
        ledger.beat()
    assert ledger.trips - trips < 200
    ledger.close()
    assert charged(ledger) == (Decimal("2.04"), 0)


def test_it_grows_with_recent_spend_up_to_sixteen_calls(join, clock):
    ledger, run = join(daily_usd=100)
    for _ in range(50):
        clock.advance(0.1)
        spend(run)
        ledger.beat()
    _spent, reserved = charged(ledger)
    assert Decimal("0.04") <= reserved <= Decimal("0.17")
    assert reserved > Decimal("0.08")


def test_a_holder_gets_at_most_half_its_share_of_what_is_left(join):
    first, run = join(daily_usd=0.5)
    _other, neighbour = join(daily_usd=0.5)
    spend(run, usd=5 * CENT)
    assert sum(charged(first)) == Decimal("0.2")
    spend(neighbour, usd=5 * CENT)  # two holders: a quarter of the 0.30 that are left
    assert sum(charged(first)) == Decimal("0.275")


def test_what_is_idle_is_given_back_to_who_is_refused(join, clock):
    first, run = join(daily_usd=0.1)
    other, neighbour = join(daily_usd=0.1)
    spend(run)
    refusal = None
    while refusal is None:
        refusal = spend(neighbour)
    assert refusal.reason == "tenant_daily"
    first.beat()  # sees the recall
    while (refusal := spend(neighbour)) is None:
        pass
    assert sum(charged(first)) == Decimal("0.1")
    first.close()
    other.close()
    assert charged(first) == (Decimal("0.1"), 0)


def test_a_refused_call_waits_for_it_and_asks_once_more(join, monkeypatch):
    first, run = join(daily_usd=0.1)
    _other, neighbour = join(daily_usd=0.1, options=LeaseOptions(recall=0.75))
    spend(run)
    while sum(charged(first)) < Decimal("0.1"):
        spend(neighbour)
    waited = []

    class Event:
        def wait(self, seconds):
            waited.append(seconds)
            first.beat()  # while it waits, the other process sees the recall

    monkeypatch.setattr(
        "budgetguard_core.ledger.lease.threading", SimpleNamespace(Event=Event, Lock=threading.Lock)
    )
    while not waited:
        obtained = spend(neighbour)
    assert (obtained, waited) == (None, [0.75])


def test_not_inside_an_event_loop(join):
    _first, run = join(daily_usd=0.1)
    _, neighbour = join(daily_usd=0.1, options=LeaseOptions(recall=3600.0))
    spend(run)

    async def main():
        while (refusal := spend(neighbour)) is None:
            pass
        return refusal

    assert asyncio.run(main()).reason == "tenant_daily"


def test_after_a_recall_only_what_is_needed_is_asked_for(join, clock, store_note):
    ledger, run = join(daily_usd=100)
    spend(run)
    ledger.beat()
    store_note("w:acme", "1 an old one")
    ledger.beat()
    assert sum(charged(ledger)) == Decimal("0.01")
    spend(run)
    assert sum(charged(ledger)) == Decimal("0.02")
    clock.advance(6)
    spend(run)
    assert sum(charged(ledger)) > Decimal("0.03")


@pytest.fixture
def store_note(sqlite):
    def put(name, text):
        store = sqlite.store()
        store.write(name, text)
        store.close()

    return put


def test_a_lease_ends_with_its_day_and_calls_settle_where_they_were_admitted(join, clock):
    ledger, run = join(tenant=Key("acme"), daily_usd=1)
    clock.advance(86400 - 3600 - 10)
    part = run.obtain(5 * CENT, 1)
    clock.advance(15)
    assert run.take(1, 1) is None  # not with yesterday's money
    late = run.obtain(3 * CENT, 1)
    run.settle(part, Amount(5 * CENT, 1), Amount(4 * CENT, 1))
    run.settle(late, Amount(3 * CENT, 1), Amount(2 * CENT, 1))
    ledger.beat()
    ledger.close()
    days = {row.window: (row.spent_usd, row.reserved_usd) for row in ledger.windows()}
    assert days == {
        "d:1970-01-01": (Decimal("0.04"), 0),
        "d:1970-01-02": (Decimal("0.02"), 0),
        "m:1970-01": (Decimal("0.06"), 0),
    }


def test_a_silent_holder_stops_admitting_before_the_store_lists_it(join, clock):
    ledger, run = join(daily_usd=1)
    spend(run)
    clock.advance(47)
    assert run.take(CENT, 1) is not None
    clock.advance(2)  # 0.8 of the time to live has passed
    assert run.take(CENT, 1) is None
    (hold,) = ledger.holds()
    assert hold.expires - ledger.now() == pytest.approx(60 - 49)


def test_the_heartbeat_renews_it(join, clock):
    ledger, run = join(daily_usd=1)
    part = run.obtain(CENT, 1)
    for _ in range(10):
        clock.advance(21)
        ledger.beat()
        assert run.take(0, 0) is not None
    run.settle(part, Amount(CENT, 1), Amount(CENT, 1))
    assert len(ledger.holds()) == 1


def test_a_long_call_is_renewed_in_the_part_that_has_ended(join, clock):
    ledger, run = join(daily_usd=1)
    part = run.obtain(5 * CENT, 1)
    clock.advance(50)
    spend(run)
    for _ in range(5):
        clock.advance(21)
        ledger.beat()
    assert all(hold.expires > ledger.now() for hold in ledger.holds() if not hold.closed)
    run.settle(part, Amount(5 * CENT, 1), Amount(5 * CENT, 1))
    ledger.beat()
    assert sum(not hold.closed for hold in ledger.holds()) == 1


def test_a_lease_is_not_idle_while_a_call_is_under_way_in_any_of_its_parts(join, clock):
    ledger, run = join(daily_usd=1)
    late = run.obtain(5 * CENT, 1)
    clock.advance(50)  # the part has ended
    spend(run)
    ledger.beat()
    lease = run.meter
    assert (lease.idle_seconds(), lease.is_idle) == (0, False)
    run.settle(late, Amount(5 * CENT, 1), Amount(CENT, 1))
    assert not lease.is_idle  # not reported
    clock.advance(7)
    assert lease.idle_seconds() == 7
    lease.close()
    assert lease.is_idle


def test_more_than_was_reserved_is_made_good_by_the_next_lease(join):
    ledger, run = join(daily_usd=0.5)
    spend(run, real=30 * CENT)
    assert spend(run, usd=20 * CENT) is None
    assert spend(run).reason == "tenant_daily"
    ledger.close()
    assert charged(ledger) == (Decimal("0.5"), 0)


def test_what_no_run_uses_is_given_back_and_forgotten(join, clock):
    ledger, run = join(daily_usd=1)
    spend(run)
    run.close()
    ledger.beat()
    assert sum(charged(ledger)) == Decimal("0.04")
    clock.advance(6)
    ledger.beat()
    assert charged(ledger) == (Decimal("0.01"), 0)
    assert not ledger._attached.meters()
    run.open()
    run.open()
    assert spend(run) is None


def test_a_lease_that_somebody_reconciled_is_begun_anew(join, sqlite):
    ledger, run = join(daily_usd=1)
    spend(run)
    (hold,) = ledger.holds()
    from budgetguard_core.ledger.reconcile import settle_hold

    settle_hold(ledger, hold, Amount(0, 0))
    for _ in range(6):
        assert spend(run) is None
    ledger.close()
    assert charged(ledger) == (Decimal("0.07"), 0)


def test_a_killed_tenant_gets_nothing_from_memory(join):
    ledger, run = join(told=(told := []), daily_usd=1)
    spend(run)
    ledger.kill(tenant="acme", who="ann")
    ledger.beat()
    assert len(told) == 1
    assert run.take(CENT, 1) is None
    assert run.obtain(CENT, 1).reason == "aborted"
    ledger.revive(tenant="acme")
    ledger.beat()
    assert spend(run) is None


def test_a_listener_that_throws_changes_nothing(sqlite, opened, clock, caplog):
    ledger = opened(sqlite, clock=clock, daily_usd=0.1)

    def throw(_):
        raise RuntimeError("x")

    run = ledger.attach("run", "acme", on_kill=throw, on_warning=throw)
    for _ in range(9):
        assert spend(run) is None
    ledger.kill(run="run")
    ledger.beat()
    assert "a listener failed: RuntimeError" in caplog.text


def test_a_warning_comes_with_the_figures(join):
    told = []
    _ledger, run = join(told=told, daily_tokens=10)
    for _ in range(9):
        spend(run)
    (warned,) = told
    assert (warned.reason, warned.limit) == ("tenant_daily", 10)
    assert warned.used >= 8


class Lossy:
    """Loses requests and replies, in turns."""

    def __init__(self, store, every=5):
        self._store, self._every, self.count = store, every, 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def step(self, step):
        self.count += 1
        if self.count % self._every == 0:
            raise LedgerUnreachable("the request was lost")
        answer = self._store.step(step)
        if self.count % self._every == 2:
            raise LedgerUnreachable("the reply was lost")
        return answer


@pytest.mark.sample(4)
@pytest.mark.parametrize("lease", ["auto", "exact"])
def test_lost_messages_are_charged_to_the_unit(place, opened, lease):
    ledger = opened(place, daily_usd=10**5, lease=lease)
    store = Lossy(ledger.connection.store())
    ledger.connection._store = store
    ledger.connection._pause_ns = 0
    run = ledger.attach("run", "acme", on_kill=print, on_warning=print)
    spent = refused = 0
    for number in range(200):
        if spend(run, usd=1000, real=600 + number) is None:
            spent += 600 + number
        else:
            refused += 1
    assert refused
    assert store.count > 50 or lease == "auto"
    store._every = 10**9
    run.close()
    ledger.close()
    day = ledger.usage("acme").daily
    assert (day.spent_usd * 10**9, day.reserved_usd) == (spent, 0)


def test_a_forked_child_finds_its_parents_lease_dry(place, opened):
    ledger = opened(place, daily_usd=1)
    ledger.close()  # no thread may run while a process forks, or Python warns
    lease = ledger._attached.meter_of(as_keys("acme"), ledger._new_lease)
    part = lease.obtain(CENT, 1)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            dry = lease.take(CENT, 1) is None
            mine = lease.obtain(CENT, 1)
            lease.settle(mine, Amount(CENT, 1), Amount(CENT, 1))
            lease.settle(part, Amount(CENT, 1), Amount(CENT, 1))  # the parent's: no report of ours
            lease.close()
            code = 0 if dry and mine.id != part.id else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    lease.settle(part, Amount(CENT, 1), Amount(CENT, 1))
    lease.close()
    assert charged(ledger) == (Decimal("0.02"), 0)


def test_answers_that_never_end_end_the_call(join):
    ledger, run = join()
    ledger.connection.store().step = lambda step: Answer("closed", now=ledger.now())
    assert run.obtain(1, 1).detail.startswith("the lease was settled by somebody else")
