"""Time, figures, names, logs and connections that are out to get more than the ceiling gives."""

from __future__ import annotations

import datetime as dt
import os
from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest

from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger import Key, Ledger, LedgerRefused
from budgetguard_core.ledger.amounts import Amount, to_amount, to_nano
from budgetguard_core.ledger.runs import Reservation
from budgetguard_core.testing import ManualClock
from ledger_servers import PATIENT, ZONE, Place, RedisServer, need, wait_until

CENT = 10**7


def clock_at(*when, zone="UTC"):
    clock = ManualClock()
    clock.advance(dt.datetime(*when, tzinfo=ZoneInfo(zone)).timestamp())
    return clock


def days(ledger, kind="d"):
    return {row.window: row.spent_usd for row in ledger.windows() if row.window[0] == kind}


# Time


def test_keys_of_different_zones_are_reserved_together(sqlite, opened):
    clock = clock_at(2026, 12, 31, 12)
    keys = (Key("acme"), Key("kiribati", "Pacific/Kiritimati"), Key("samoa", "Pacific/Pago_Pago"))
    ledger = opened(sqlite, daily_usd=1, clock=clock)
    for hours in (0, 12, 12, 12):
        clock.advance(hours * 3600)
        ledger.reserve(keys, usd=0.2).settle(0.2)
    spent = {(row.key, row.window): row.spent_usd for row in ledger.windows()}
    assert spent == {
        ("acme", "d:2026-12-31"): Decimal("0.2"),
        ("acme", "d:2027-01-01"): Decimal("0.4"),
        ("acme", "d:2027-01-02"): Decimal("0.2"),
        ("acme", "m:2026-12"): Decimal("0.2"),
        ("acme", "m:2027-01"): Decimal("0.6"),
        ("kiribati", "d:2027-01-01"): Decimal("0.4"),
        ("kiribati", "d:2027-01-02"): Decimal("0.4"),
        ("kiribati", "m:2027-01"): Decimal("0.8"),
        ("samoa", "d:2026-12-31"): Decimal("0.4"),
        ("samoa", "d:2027-01-01"): Decimal("0.4"),
        ("samoa", "m:2026-12"): Decimal("0.4"),
        ("samoa", "m:2027-01"): Decimal("0.4"),
    }


def test_a_zone_that_is_changed_in_the_middle_of_a_day_frees_nothing(sqlite, opened):
    clock = clock_at(2026, 11, 22, 12)
    ledger = opened(sqlite, daily_usd=1, clock=clock)
    reservation = ledger.reserve(Key("acme"), usd=0.6)
    with pytest.raises(LedgerRefused):
        ledger.reserve(Key("acme", "Europe/Berlin"), usd=0.6)
    tomorrow = ledger.reserve(Key("acme", "Pacific/Kiritimati"), usd=1)  # it is there already
    tomorrow.settle(1)
    reservation.settle(0.5)  # where it was made
    assert days(ledger) == {"d:2026-11-22": Decimal("0.5"), "d:2026-11-23": 1}
    clock.advance(12 * 3600)
    with pytest.raises(LedgerRefused):  # and the same money when it comes for all
        ledger.reserve(Key("acme"), usd=0.01)


def test_midnight_between_reserving_and_settling_more_than_was_reserved(sqlite, opened):
    clock = clock_at(2026, 11, 30, 23, 59, 59)
    ledger = opened(sqlite, daily_usd=1, monthly_usd=5, clock=clock)
    reservation = ledger.reserve("acme", usd=0.5)
    clock.advance(2)
    ledger.reserve("acme", usd=1).settle(1)
    reservation.settle(3)
    assert days(ledger) == {"d:2026-11-30": 3, "d:2026-12-01": 1}
    assert days(ledger, "m") == {"m:2026-11": 3, "m:2026-12": 1}


# Ceilings that change under way


def test_a_ceiling_below_what_is_spent_refuses_and_takes_nothing_back(place, opened):
    ledger = opened(place, daily_usd=10)
    run = ledger.attach("run", "acme", on_kill=id, on_warning=id)
    part = run.obtain(Amount(5 * 10**9, 1))
    ledger.set_ceilings("acme", daily_usd=1)
    run.settle(part, Amount(4 * 10**9, 1))
    ledger.send_heartbeat()
    refused = run.obtain(Amount(1, 1))
    assert isinstance(refused, LedgerRefused)
    assert (refused.reason, refused.limit, refused.used) == ("tenant_daily", 1, 4)
    day = ledger.usage("acme").daily
    assert (day.spent_usd, day.remaining_usd) == (4, 0)
    ledger.set_ceilings("acme", daily_usd=5)
    assert not isinstance(run.obtain(Amount(10**9, 1)), LedgerRefused)


def test_ceilings_that_come_while_calls_are_under_way_hold_for_what_is_asked_next(place, opened):
    ledger, other = opened(place), opened(place)
    run = ledger.attach("run", "acme", on_kill=id, on_warning=id)
    part = run.obtain(Amount(10**9, 1))  # no ceiling yet
    other.set_ceilings("acme", daily_usd=1)
    neighbour = other.attach("run-2", "acme", on_kill=id, on_warning=id)
    assert neighbour.obtain(Amount(10**9, 1)).reason == "tenant_daily"
    run.settle(part, Amount(10**9, 1))
    ledger.close()
    assert neighbour.obtain(Amount(1, 1)).reason == "tenant_daily"
    assert other.usage("acme").daily.remaining_usd >= 0


@pytest.mark.parametrize(
    ("url", "ceilings"),
    [
        ("sqlite:///l.sqlite3", {"daily_usd": 10**12}),
        ("sqlite:///l.sqlite3", {"monthly_tokens": 2**62}),
        ("postgresql://127.0.0.1:1/x", {"monthly_usd": 5e9}),
        ("redis://127.0.0.1:1", {"daily_usd": 4_503_600}),
        ("redis://127.0.0.1:1", {"daily_tokens": 2**52}),
    ],
)
def test_a_default_that_the_store_cannot_count_is_refused_at_once(url, ceilings):
    with pytest.raises(ConfigurationError, match="a ceiling in this store must be below"):
        Ledger(url, **ceilings)


# Kill and revive


def test_a_tenant_that_was_revived_pays_before_the_next_beat(place, opened):
    ledger, operator = opened(place, daily_usd=10), opened(place)
    run = ledger.attach("run", "acme", on_kill=id, on_warning=id)
    first = run.obtain(Amount(CENT, 1))
    operator.kill(tenant="acme")
    ledger.send_heartbeat()
    assert run.obtain(Amount(CENT, 1)).reason == "aborted"
    operator.revive(tenant="acme")
    part = run.obtain(Amount(CENT, 1))
    assert not isinstance(part, LedgerRefused), part
    run.settle(first, Amount(CENT, 1))


# Figures


@pytest.mark.parametrize(
    ("usd", "nano"),
    [
        (Decimal("1E-1000000"), 1),
        (5e-324, 1),
        (Decimal("-0"), 0),
        (-0.0, 0),
        (Decimal("0.0000000010000000000000000000000000000000000000000000000000000001"), 2),
        (Decimal("0." + "9" * 80), 10**9),
        (0.1 + 0.2, 300_000_001),  # not three tenths: rounded up
    ],
)
def test_tiny_amounts_are_rounded_up_and_never_free(usd, nano):
    assert to_nano(usd) == nano


def test_numbers_too_long_to_be_written_are_refused_in_a_sentence(sqlite, opened):
    for wrong in (lambda: to_amount(0, 10**5000), lambda: to_amount(0, -(10**5000))):
        with pytest.raises(ConfigurationError, match="got int that cannot be written"):
            wrong()
    with pytest.raises(ConfigurationError, match="must be below"):
        opened(sqlite).set_ceilings("acme", daily_tokens=10**5000)
    with pytest.raises(ConfigurationError):
        opened(sqlite).set_ceilings("acme", daily_usd=10**5000)


def test_calls_that_cost_more_than_they_reserved_are_known_before_the_next(place, opened):
    # Nobody beats here: what was settled behind a call has not been sent when the next one asks.
    ledger = opened(place, daily_usd=1)
    run = ledger.attach("run", "acme", on_kill=id, on_warning=id)
    parts = 0
    while isinstance(part := run.obtain(Amount(CENT)), Reservation):
        run.settle(part, Amount(40 * CENT))
        parts += 1
        assert parts < 100, "the ceiling is not seen"
    assert (parts, part.reason) == (3, "tenant_daily")
    day = ledger.usage("acme").daily
    assert (day.spent_usd, day.reserved_usd) == (Decimal("1.2"), 0)
    run.close()


# Connections


def test_a_process_that_forks_after_use_shares_nothing_but_the_ceiling(place, opened):
    ledger = opened(place, daily_usd=1)
    open_, kept = ledger.reserve("acme", usd=0.25), ledger.reserve("acme", usd=0.25)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ledger.reserve("acme", usd=0.25).settle(0.125)
            open_.settle(0.125)  # its parent's, and its parent settles it again
            ledger.close()
            code = 0
        finally:
            os._exit(code)
    kept.settle(0.125)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    open_.settle(0.125)
    day = ledger.usage("acme").daily
    assert (day.spent_usd, day.reserved_usd) == (Decimal("0.375"), 0)


def test_a_connection_to_postgres_that_is_cut_costs_nothing(tmp_path, opened):
    need("postgres")
    import psycopg

    place = Place("postgres", tmp_path)
    ledger = opened(place, daily_usd=1)
    reservation = ledger.reserve("acme", usd=0.5)

    def cut():
        pool = ledger.connection.store()._pool
        with psycopg.connect(place.url, autocommit=True) as db:
            for one in list(pool._pool):  # its workers go on
                db.execute("SELECT pg_terminate_backend(%s, 60000)", (one.info.backend_pid,))

    cut()
    ledger.reserve("acme", usd=0.25).settle(0.125)
    cut()
    reservation.settle(0.5)
    cut()
    with pytest.raises(LedgerRefused, match="of the day"):
        ledger.reserve("acme", usd=0.5)
    cut()
    day = ledger.usage("acme").daily
    assert (day.spent_usd, day.reserved_usd) == (Decimal("0.625"), 0)
    ledger.close()
    place.remove()


def test_a_step_whose_reply_was_lost_with_the_connection_counts_once(tmp_path, opened, monkeypatch):
    need("postgres")
    from psycopg import OperationalError

    place = Place("postgres", tmp_path)
    ledger = opened(place, daily_usd=1)
    store = ledger.connection.store()
    real, lost = store._step, []

    def step(db, *arguments):
        """Take the statement; the connection goes before the reply comes."""
        answer = real(db, *arguments)
        if lost:
            lost.pop()
            db.close()
            raise OperationalError("terminating connection")
        return answer

    monkeypatch.setattr(store, "_step", step)
    ledger.reserve("acme", usd=0.125).release()
    lost.append(1)
    kept = ledger.reserve("acme", usd=0.75)
    lost.append(1)
    kept.settle(0.5)
    assert lost == []
    day = ledger.usage("acme").daily
    assert (day.spent_usd, day.reserved_usd) == (Decimal("0.5"), 0)
    ledger.close()
    place.remove()


def test_redis_that_forgets_its_scripts_or_cuts_the_connection(tmp_path, opened, monkeypatch):
    need("redis")
    from redis import ConnectionError as Cut

    place = Place("redis", tmp_path)
    ledger = opened(place, daily_usd=1)
    client = ledger.connection.store()._client
    reservation = ledger.reserve("acme", usd=0.5)
    client.script_flush()
    reservation.settle(0.25)
    client.script_flush()
    with pytest.raises(LedgerRefused, match="of the day"):
        ledger.reserve("acme", usd=1)
    with client.client() as one, Place("redis", tmp_path).store()._client as other:
        assert other.client_kill_filter(_id=one.client_id()) == 1
    ledger.reserve("acme", usd=0.5).release()
    # Cut after the step, before its reply: it is sent again, and counts once.
    parse, cuts = client.parse_response, [1]

    def loses_replies(connection, command, **options):
        got = parse(connection, command, **options)
        if cuts and command == "EVALSHA":
            cuts.pop()
            raise Cut("Connection closed by server.")
        return got

    monkeypatch.setattr(client, "parse_response", loses_replies)
    kept = ledger.reserve("acme", usd=0.5)
    cuts.append(1)
    kept.settle(0.25)
    day = ledger.usage("acme").daily
    assert (day.spent_usd, day.reserved_usd) == (Decimal("0.5"), 0)
    place.remove()


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("redis", "&decode_responses=True"),
        ("postgres", "&client_encoding=latin1"),
        ("postgres", "%20-cextra_float_digits%3D-15"),
    ],
)
def test_no_option_of_a_url_changes_what_is_said(tmp_path, opened, kind, option):
    need(kind)
    place = Place(kind, tmp_path)
    ledger = opened(place.url + option, daily_usd=1)
    ledger.reserve("Zoë 😀", usd=0.5).settle(0.25)
    run = ledger.attach("run", "Zoë 😀", on_kill=id, on_warning=id)
    run.settle(run.obtain(Amount(CENT, 1)), Amount(CENT, 1))
    ledger.close()
    day = ledger.usage("Zoë 😀").daily
    assert (day.spent_usd, day.reserved_usd) == (Decimal("0.26"), 0)
    ledger.close()
    place.remove()


# Since Redis 6.0 or earlier, as the manual of each says.
OF_REDIS_6 = {
    *("evalsha", "eval", "hget", "hset", "hsetnx", "hmget", "hdel", "hscan", "hgetall"),
    *("get", "set", "del", "scan", "time", "info", "zadd", "zrem", "zcount", "zcard"),
    *("hkeys", "hincrby"),
    *("zremrangebyscore", "hello", "client", "select", "ping", "script", "config", "expire"),
}


def test_redis_is_asked_only_what_version_6_knows(tmp_path):
    need("redis")
    with RedisServer("--appendonly", "yes") as server:
        place = Place("redis", tmp_path, server.url)
        options = {"timeout": PATIENT, "queue": tmp_path / "q"}
        with Ledger(place.url, daily_usd=5, **options) as ledger:
            run = ledger.attach("run", ("acme", "u"), on_kill=id, on_warning=id)
            part = run.obtain(Amount(10**9, 5))
            ledger.send_heartbeat()
            run.settle(part, Amount(10**9, 5))
            ledger.reserve("acme", usd=1).settle(0.5)
            ledger.set_ceilings("acme", daily_usd=4)
            ledger.kill(tenant="acme")
            ledger.revive(tenant="acme")
            found = (ledger.ceilings(), ledger.windows(), ledger.holds())
            assert all(found)
            assert ledger.kills() == []
            ledger.clear_ceilings("acme")
            ledger.adopt()
            stats = ledger.connection.store()._client.info("commandstats")
    asked = {name.removeprefix("cmdstat_").partition("|")[0] for name in stats}
    assert asked <= OF_REDIS_6


@pytest.mark.slow
def test_a_replica_of_redis_admits_nothing_until_it_leads(tmp_path):
    need("redis")
    with RedisServer("--appendonly", "yes") as first, RedisServer("--appendonly", "yes") as second:
        here, there = (Place("redis", tmp_path, one.url) for one in (first, second))
        there.url = there.url.replace(there.name, here.name)
        options = {"daily_usd": 1, "queue": tmp_path / "q"}
        options |= {"timeout": PATIENT, "time_zone": ZONE}
        with Ledger(here.url, **options) as ledger:
            known = ledger.id
            ledger.reserve("acme", usd=0.75).settle(0.75)
        import redis

        with redis.Redis(port=second.port) as client:
            client.replicaof("127.0.0.1", first.port)
            wait_until(lambda: client.keys("*:w:*") and client.info()["master_link_status"] == "up")
            with Ledger(there.url, ledger_id=known, **options) as ledger:
                ledger.connection._pause_ns = 0
                with pytest.raises(LedgerRefused, match="ReadOnlyError"):
                    ledger.reserve("acme", usd=0.125)
                first.kill()
                client.replicaof("NO", "ONE")
                ledger.reserve("acme", usd=0.125).settle(0.125)
                with pytest.raises(LedgerRefused, match="of the day"):
                    ledger.reserve("acme", usd=0.25)
                assert ledger.id == known
