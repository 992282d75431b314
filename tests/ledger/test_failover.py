"""Servers that change under a process: read-only, rolled back, cut off in silence, slow."""

from __future__ import annotations

import contextlib
import gc
import shutil
import signal
import socket
import subprocess
import threading
from decimal import Decimal
from pathlib import Path

import pytest

from budgetguard_core import Guard
from budgetguard_core.decision import Admit
from budgetguard_core.kit import ModelCall
from budgetguard_core.ledger import (
    Ledger,
    LedgerError,
    LedgerRefused,
    LedgerUnreachable,
)
from budgetguard_core.ledger.amounts import Amount
from ledger_servers import (
    PATIENT,
    ZONE,
    Place,
    PostgresServer,
    RedisServer,
    free_port,
    need,
    seconds,
    wait_until,
)


class Proxy:
    """A door to a server on loopback, that can go quiet on the connections it has, or be slow."""

    def __init__(self, port, delay=0.0):
        self._to, self._delay = port, delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._quiet: set[int] = set()
        self._open: list[socket.socket] = []
        self.to = port
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(("127.0.0.1", self.to))
                self._open += [here, there]
                for one, other in ((here, there), (there, here)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if self._delay:
                    threading.Event().wait(self._delay)
                if id(one) not in self._quiet:
                    other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def drop_in_silence(self):
        """Pass on nothing more on what is open; nobody is told."""
        self._quiet |= {id(one) for one in self._open}

    def lead_to(self, port):
        """Have new connections end elsewhere, as a name that moves; cut the old ones."""
        self.to = port
        self.cut()

    def cut(self):
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._open = []

    def close(self):
        self._listener.close()
        for one in self._open:
            one.close()


@pytest.fixture
def proxied(tmp_path):
    made = []

    def make(kind, port, delay=0.0, name="redis"):
        proxy = Proxy(port, delay)
        made.append(proxy)
        if kind == "redis":
            return proxy, f"redis://127.0.0.1:{proxy.port}/0?name={name}"
        return proxy, f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres"

    yield make
    for proxy in made:
        proxy.close()


def server_of(kind):
    need(kind)
    return RedisServer("--appendonly", "yes") if kind == "redis" else PostgresServer()


def options(tmp_path, **more):
    return {"timeout": PATIENT, "time_zone": ZONE, "queue": tmp_path / "queue"} | more


def make_read_only(kind, server, elsewhere=None):
    if kind == "redis":
        import redis

        with redis.Redis(port=server.port) as client:
            if elsewhere is None:
                client.replicaof("127.0.0.1", free_port())
            else:
                client.replicaof("NO", "ONE")
        return
    import psycopg

    with psycopg.connect(server.url, autocommit=True) as db:
        value = "off" if elsewhere else "on"
        db.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
        db.execute("SELECT pg_reload_conf()")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis", "postgres"])
@pytest.mark.parametrize("on_ledger_error", ["refuse", "allow"])
def test_nothing_passes_because_a_server_only_reads(kind, on_ledger_error, tmp_path):
    with server_of(kind) as server:
        given = options(tmp_path, on_ledger_error=on_ledger_error, allow_usd=1000)
        with Ledger(server.url, daily_usd=5, **given) as ledger:
            ledger.connection._pause_ns = 0
            ledger.reserve("acme", usd=4).settle(4)
            make_read_only(kind, server)
            wait_until(lambda: is_refused(ledger))
            for _ in range(5):
                assert is_refused(ledger)
            make_read_only(kind, server, elsewhere=True)
            wait_until(lambda: not is_refused(ledger))
            assert ledger.usage("acme").daily.spent_usd == 4


def is_refused(ledger):
    try:
        ledger.reserve("acme", usd=0.5).release()
    except LedgerRefused as refused:
        return "must answer in time, got Read" in refused.detail
    return False


@pytest.mark.slow
def test_a_name_that_moves_to_the_new_leader_costs_no_run(tmp_path, proxied):
    """Redis: the old leader is a replica; the second try, on a new connection, meets the new."""
    need("redis")
    import redis

    with server_of("redis") as first, server_of("redis") as second:
        proxy, url = proxied("redis", first.port)
        with (
            redis.Redis(port=second.port) as client,
            Ledger(url, daily_usd=5, **options(tmp_path)) as ledger,
        ):
            client.replicaof("127.0.0.1", first.port)
            ledger.reserve("acme", usd=1).settle(1)
            wait_until(lambda: client.get("{redis}:h:none") or client.keys("*:w:*"))
            wait_until(lambda: client.hget("{redis}:conf", "sequence") == b"2")
            client.replicaof("NO", "ONE")
            make_read_only("redis", first)
            proxy.to = second.port  # the connection that is open leads to the replica
            ledger.reserve("acme", usd=1).settle(1)
            assert ledger.usage("acme").daily.spent_usd == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_an_idle_connection_that_was_dropped_in_silence_costs_no_run(kind, tmp_path, proxied):
    with server_of(kind) as server:
        proxy, url = proxied(kind, server.port)
        with Ledger(url, daily_usd=5, **options(tmp_path, timeout=4.0)) as ledger:
            kept = ledger.reserve("acme", usd=1)
            proxy.drop_in_silence()
            ledger.reserve("acme", usd=1).settle(1)
            proxy.drop_in_silence()
            kept.settle(1)
            assert ledger.usage("acme").daily.spent_usd == 2


class Copied:
    """A store that can be brought back to what it was at some time."""

    def __init__(self, kind, tmp_path, stack):
        self._copy = tmp_path / "copy"
        if kind == "sqlite":
            self._file = tmp_path / "ledger.sqlite3"
            self.url = f"sqlite:///{self._file}"
        else:
            need(kind)
            self._server = stack.enter_context(
                RedisServer() if kind == "redis" else PostgresServer()
            )
            self.url = self._server.url
        self._kind = kind

    def keep(self, ledger):
        if self._kind == "redis":  # with its default configuration
            ledger.connection.store()._client.save()
        elif self._kind == "sqlite":
            ledger.connection.store().close()
            shutil.copy(self._file, self._copy)
        else:
            self._server.kill()
            subprocess.run(["cp", "-a", self._server.folder, self._copy], check=True)
            self._server.start()

    def bring_back(self, ledger):
        if self._kind == "sqlite":
            ledger.connection.store().close()
            for end in ("-wal", "-shm"):
                Path(f"{self._file}{end}").unlink(missing_ok=True)
            self._copy.replace(self._file)
            return
        self._server.kill()
        if self._kind == "postgres":
            shutil.rmtree(self._server.folder)
            subprocess.run(["cp", "-a", self._copy, self._server.folder], check=True)
        self._server.start()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "redis", "postgres"])
def test_a_store_that_was_rolled_back_is_noticed(kind, tmp_path):
    """An older copy of a file or a data base, and a Redis that kept what it had saved."""
    with contextlib.ExitStack() as stack:
        copied = Copied(kind, tmp_path, stack)
        given = options(tmp_path, on_ledger_error="allow", allow_usd=1000)
        ledger = stack.enter_context(Ledger(copied.url, daily_usd=10, **given))
        ledger.connection._pause_ns = 0
        ledger.reserve("acme", usd=1).settle(1)
        copied.keep(ledger)
        # PostgreSQL's number may be 32 ahead after a crash: its sequences are logged ahead of use.
        for _ in range(20):
            ledger.reserve("acme", usd=0.4).settle(0.4)
        copied.bring_back(ledger)
        for _ in range(2):
            with pytest.raises(LedgerRefused, match="it was rolled back"):
                ledger.reserve("acme", usd=8)
        run = ledger.attach("run", "acme", on_kill=id, on_warning=id)
        assert isinstance(run.obtain(Amount(1)), LedgerRefused)
        ledger.adopt()
        ledger.reserve("acme", usd=8).settle(8)


def test_what_is_allowed_while_the_store_is_absent_has_a_cap_of_its_own(tmp_path, sqlite, opened):
    ledger = opened(sqlite, daily_usd=100, on_ledger_error="allow", allow_usd=2, timeout=0.1)
    sqlite.path.mkdir()  # a folder where the file should be
    ledger.reserve("acme", usd=1.5).settle(1.75)
    with pytest.raises(LedgerRefused, match=r"is used up \(allow_usd\)"):
        ledger.reserve("acme", usd=0.5)
    sqlite.path.rmdir()
    ledger.connection._pause_ns = 0
    ledger.send_heartbeat()
    ledger.reserve("acme", usd=50).settle(50)
    assert ledger.usage("acme").daily.spent_usd == Decimal("51.75")


def test_a_retry_of_a_named_reservation_never_finds_it_closed_at_nothing(place, opened):
    """Its first reply is lost; whoever is refused takes back nothing that a retry has got."""
    ledger, other = opened(place, daily_usd=10), opened(place, daily_usd=10)
    ledger.connection._pause_ns = 0
    store = ledger.connection.store()
    real = store.step

    def lost(step):
        real(step)
        raise LedgerUnreachable("the reply was lost")

    store.step = lost
    with pytest.raises(LedgerRefused):
        ledger.reserve("acme", usd=8, reservation_id="call-1")
    store.step = real
    retried = other.reserve("acme", usd=8, reservation_id="call-1")  # a call is under way
    ledger.send_heartbeat()
    assert other.usage("acme").daily.reserved_usd == 8
    with pytest.raises(LedgerRefused, match="of the day"):
        ledger.reserve("acme", usd=8)
    retried.settle(8)
    assert other.usage("acme").daily.spent_usd == 8


@pytest.mark.slow
@pytest.mark.parametrize("tenants", [1, 200])
def test_many_threads_on_a_slow_postgres_are_stopped_by_no_queue_of_ours(
    tenants, tmp_path, proxied
):
    """64 threads at 20 ms a trip, or 200 tenants at 5 ms."""
    delay, threads = (0.01, 64) if tenants == 1 else (0.0025, 64)
    with server_of("postgres") as server:
        _, url = proxied("postgres", server.port, delay)
        refused = []
        with Ledger(url, daily_usd=10**6, **options(tmp_path, timeout=5.0)) as ledger:
            guards = [
                Guard(ledger=ledger, tenant=f"t{n % tenants}") for n in range(max(64, tenants))
            ]
            waiting = iter(guards)
            lock = threading.Lock()

            def work():
                while True:
                    with lock:
                        guard = next(waiting, None)
                    if guard is None:
                        return
                    ticket = guard.admit_model_call(ModelCall(cost_usd=Decimal("0.01")))
                    if isinstance(ticket, Admit):
                        guard.settle_model_call(ticket, cost_usd=Decimal("0.01"))
                    else:
                        refused.append(ticket.trip)

            workers = [threading.Thread(target=work) for _ in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        assert refused == []


class Interrupted(Exception):
    pass


def test_a_signals_handler_that_raises_leaves_no_lock_held(place, opened):
    gc.collect()  # or a handler raises where Python ignores it, in what an earlier test left
    ledger = opened(place, daily_usd=10**6)
    ledger.reserve("acme", usd=1).settle(1)

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for number in range(150):
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0001 + number * 0.00002)
                    ledger.reserve("acme", usd=0.001).settle(0.001)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                interrupted += 1
            except LedgerRefused:
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted
    done = []
    other = threading.Thread(target=lambda: done.append(ledger.reserve("acme", usd=1)))
    other.start()
    other.join(60)
    assert done
    ledger.send_heartbeat()
    ledger.close()
    with Ledger(place.url, timeout=PATIENT, time_zone=ZONE) as fresh:
        used = fresh.usage("acme").daily
        assert used.spent_usd >= 1
        if place.kind == "sqlite":
            assert fresh.check() == []


def test_close_ends_in_bounded_time(tmp_path):
    need("redis")
    with RedisServer("--appendonly", "yes") as server:
        ledger = Ledger(server.url, daily_usd=10**6, **options(tmp_path, timeout=0.3))
        run = ledger.attach("run", "acme", on_kill=id, on_warning=id)
        wait_until(lambda: not isinstance(run.obtain(Amount(1)), LedgerRefused))
        server.send(signal.SIGSTOP)
        try:
            for _ in range(200):
                run.report(Amount(1))
            started = seconds()
            ledger.close()
            assert seconds() - started < 15
        finally:
            server.send(signal.SIGCONT)
        assert list((tmp_path / "queue").rglob("*.json"))  # for the next process


def test_a_kill_is_seen_by_thousands_of_tenants_with_one_small_question(place, opened):
    ledger, operator = opened(place), opened(place)
    told = []
    runs = [
        ledger.attach(f"r{number}", f"t{number}", on_kill=told.append, on_warning=id)
        for number in range(4000)
    ]
    ledger.send_heartbeat()
    asked = []
    store = ledger.connection.store()
    real = store.notes
    store.notes = lambda prefix: asked.append(real(prefix)) or asked[-1]
    ledger.send_heartbeat()
    assert asked == [{}]  # what is set, however many live
    operator.kill(tenant="t3999", who="ann")
    started = seconds()
    ledger.send_heartbeat()
    assert (len(told), len(runs)) == (1, 4000)
    assert seconds() - started < 30  # a few milliseconds; the machine may be loaded


def test_a_redis_of_a_cluster_is_refused_when_it_is_opened(tmp_path):
    need("redis")
    # By default the bus is 10,000 above the port, which of a high port is none.
    bus = ("--cluster-port", str(free_port()))
    with (
        RedisServer("--cluster-enabled", "yes", *bus) as server,
        pytest.raises(LedgerError, match="must be one server, got a part of a cluster"),
    ):
        Place("redis", tmp_path, server.url).store()


def test_check_is_quiet_about_a_hold_whose_window_was_pruned(sqlite, opened):
    from budgetguard_core.testing import ManualClock

    clock = ManualClock()
    clock.advance(400 * 86400)
    ledger = opened(sqlite, daily_usd=1, clock=clock)
    kept = ledger.reserve("acme", usd=0.5)
    clock.advance(63 * 86400)
    ledger.reserve("acme", usd=0.5).settle(0.5)
    assert ledger.check() == []
    kept.settle(0.25)  # late, and in the window that it was made in
    assert ledger.check() == []
    assert sum(row.spent_usd for row in ledger.windows() if row.window[0] == "d") == Decimal("0.75")


KILLED = """
import os, signal, sys
from decimal import Decimal
from budgetguard_core import Guard
from budgetguard_core.kit import ModelCall
from budgetguard_core.ledger import Ledger
ledger = Ledger(sys.argv[1], daily_usd=100, queue=sys.argv[2], time_zone=sys.argv[3], timeout=60)
ledger._heartbeat.wake = lambda: None  # it is killed before its thread comes to it
guard = Guard(ledger=ledger, tenant="acme")
ticket = guard.admit_model_call(ModelCall(cost_usd=Decimal(1)))
guard.settle_model_call(ticket, cost_usd=Decimal(3))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_call_that_was_settled_just_before_its_process_was_killed_is_not_forgotten(
    place, opened, tmp_path
):
    import sys

    queue = tmp_path / "queue"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, place.url, str(queue), ZONE], check=False, timeout=300
    )
    assert done.returncode == -signal.SIGKILL
    ledger = opened(place, daily_usd=100)
    ledger.send_heartbeat()
    day = ledger.usage("acme").daily
    assert (day.spent_usd, day.reserved_usd) == (3, 0)
