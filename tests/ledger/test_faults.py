"""What breaks: killed workers, killed and stopped servers, a full disk, no reply at all."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
from decimal import Decimal
from pathlib import Path

import pytest

import ledger_workers as workers
from budgetguard_core.ledger import Ledger, LedgerError, LedgerRefused, LedgerUnreachable
from ledger_servers import (
    HOW,
    PATIENT,
    ZONE,
    Place,
    PostgresServer,
    RedisServer,
    leave_out,
    postgres_binaries,
    seconds,
    wait_until,
    window_of,
)

OPTIONS = {"timeout": PATIENT, "time_zone": ZONE}
# 1,000 over the manual runs: BUDGETGUARD_TEST_KILLS=1000.
KILLS = int(os.environ.get("BUDGETGUARD_TEST_KILLS", "200"))


def billed(folder):
    """What the workers were billed, by their own record; a line may be cut off by the kill."""
    texts = [path.read_text() for path in Path(folder).iterdir()]
    return sum(int(line) for text in texts for line in text.rpartition("\n")[0].splitlines())


@pytest.mark.slow
def test_a_worker_that_is_killed_never_under_counts(place, tmp_path):
    folder = tmp_path / "billed"
    folder.mkdir()
    arguments = (place.url, ("acme", "u"), KILLS, folder, tmp_path / "queue")
    killer = workers.start(workers.kill_many, *arguments)
    killer.join(600)
    assert killer.exitcode == 0
    store = place.store()
    with Ledger(place.url, **OPTIONS, queue=tmp_path / "queue") as ledger:
        label = ledger.usage("acme").daily.window
        ledger.send_heartbeat()  # sends what the dead left on the disk
        assert place.kind != "sqlite" or ledger.check() == []
    real = billed(folder)
    assert real > 0
    for key in ("acme", "u"):
        row = window_of(store, key, label)
        assert row.charged.usd >= real
        assert row.spent.usd <= real + 10**7 * KILLS
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", ["FULL", "NORMAL"])
def test_a_file_that_lost_its_power_is_an_earlier_ledger_and_a_sound_one(
    synchronous, tmp_path, opened
):
    """In place of a loss of power: the log of SQLite, cut off at any byte.

    With FULL each commit is on the disk before it is acknowledged, so nothing that was is cut off;
    NORMAL waits for the next checkpoint, so what came after the last one may be.
    """
    import sqlite3

    url = f"sqlite:///{tmp_path}/ledger.sqlite3?synchronous={synchronous.lower()}"
    ledger = opened(url, daily_usd=10**6)
    for _ in range(12):
        ledger.reserve(("acme", "u"), usd=0.5).settle(0.25)
    ledger.reserve("acme", usd=1)
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite3")) as db:
        (mode,) = db.execute("PRAGMA journal_mode").fetchone()
    asked = ledger.connection.store()._db.execute("PRAGMA synchronous").fetchone()
    assert (mode, asked) == ("wal", (2,) if synchronous == "FULL" else (1,))
    log = (tmp_path / "ledger.sqlite3-wal").read_bytes()
    rnd, seen = random.Random(7), set()
    for size in (0, len(log), *(rnd.randrange(len(log)) for _ in range(40))):
        folder = tmp_path / str(size)
        folder.mkdir()
        shutil.copy(tmp_path / "ledger.sqlite3", folder)
        (folder / "ledger.sqlite3-wal").write_bytes(log[:size])
        try:
            file = f"sqlite:///{folder}/ledger.sqlite3"
            with Ledger(file, **OPTIONS, queue=tmp_path / "q") as cut:
                assert cut.check() == []
                day = cut.usage("acme").daily
        finally:
            shutil.rmtree(folder)
        assert 0 <= day.spent_usd <= 3
        seen.add((day.spent_usd, day.reserved_usd))
    assert (Decimal(3), Decimal(1)) in seen  # the whole log
    assert len(seen) > 5


def need_server(kind):
    found = shutil.which("redis-server") if kind == "redis" else postgres_binaries()
    if not found:
        leave_out(HOW[kind])


class Load:
    """Threads that reserve and settle while the server comes and goes."""

    def __init__(self, url, queue, threads=4):
        self.ledgers = [
            Ledger(url, timeout=1.0, time_zone=ZONE, queue=queue, daily_usd=10**6)
            for _ in range(threads)
        ]
        self.acknowledged, self.refused, self.longest = [0] * threads, 0, 0.0
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(place,)) for place in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, place):
        rnd = random.Random(place)
        while not self._stop.is_set():
            started = seconds()
            try:
                reservation = self.ledgers[place].reserve("acme", usd=0.001)
            except LedgerRefused:
                self.refused += 1
                self._stop.wait(0.02)
                continue
            finally:
                self.longest = max(self.longest, seconds() - started)
            spent = rnd.randrange(1, 10**6)
            reservation.settle(Decimal(spent) / 10**9)
            self.acknowledged[place] += spent

    def stop(self):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def settle_all(self):
        for ledger in self.ledgers:
            wait_until(
                lambda ledger=ledger: not _fails(ledger.send_heartbeat) and not len(ledger._outbox)
            )
            ledger.close()


def _fails(call):
    try:
        call()
    except LedgerUnreachable:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("redis", ("--appendonly", "yes", "--appendfsync", "everysec")),
        ("redis", ("--appendonly", "yes", "--appendfsync", "always")),
        ("postgres", ()),
        # Set for each connection of the ledger's, whatever the server's default.
        ("postgres", ("synchronous_commit=off",)),
    ],
    ids=["redis everysec", "redis always", "postgres", "postgres that commits later"],
)
def test_a_server_that_is_killed_under_load_loses_no_settlement(kind, options, tmp_path):
    need_server(kind)
    with (RedisServer if kind == "redis" else PostgresServer)(*options) as server:
        place = Place(kind, tmp_path, server.url, server.url)
        load = Load(place.url, tmp_path / "queue")
        at_risk = 0
        try:
            for _ in range(2):
                before = sum(load.acknowledged)
                wait_until(lambda before=before: sum(load.acknowledged) > before + 10**6)
                known = sum(load.acknowledged)
                if "everysec" in options:
                    # While an fsync takes long, Redis answers before it has written its file.
                    wait_until(lambda: has_written(server))
                server.kill()
                refused = load.refused
                wait_until(lambda refused=refused: load.refused > refused)
                if "everysec" in options:
                    at_risk += sum(load.acknowledged) - known
                server.start()
            before = sum(load.acknowledged)
            wait_until(lambda: sum(load.acknowledged) > before)
        finally:
            load.stop()
        load.settle_all()
        assert load.longest < 30
        with Ledger(place.url, **OPTIONS) as ledger:
            day = ledger.usage("acme").daily
        spent, reserved = day.spent_usd * 10**9, day.reserved_usd * 10**9
        # A settlement that is lost leaves its reservation charged, unless that is lost as well.
        assert sum(load.acknowledged) - at_risk <= spent + reserved
        assert spent <= sum(load.acknowledged)
        if "everysec" not in options:
            assert (spent, reserved) == (sum(load.acknowledged), 0)


def has_written(server):
    import redis

    with redis.Redis(port=server.port) as client:
        return client.info("persistence")["aof_buffer_length"] == 0


def test_redis_without_a_file_loses_all_and_is_refused(tmp_path, caplog):
    need_server("redis")
    with RedisServer() as server:
        place = Place("redis", tmp_path, server.url)
        with Ledger(place.url, **OPTIONS, daily_usd=1, queue=tmp_path / "queue") as ledger:
            ledger.reserve("acme", usd=1).settle(1)
            assert "keeps no append-only file" in caplog.text
            server.kill()
            with pytest.raises(LedgerRefused):
                ledger.reserve("acme", usd=1)
            server.start()
            ledger.connection._pause_ns = 0
            with pytest.raises(LedgerRefused, match="got an empty store"):
                ledger.reserve("acme", usd=1)


def fill(ledger):
    for number in range(20_000):
        ledger.reserve("acme", usd=0.01, reservation_id=f"{number:0100d}")


@pytest.mark.slow
def test_redis_that_evicts_is_refused(tmp_path):
    need_server("redis")
    with (
        RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as server,
        pytest.raises(LedgerError, match="maxmemory-policy must be noeviction, got allkeys"),
    ):
        Place("redis", tmp_path, server.url).store()
    with RedisServer("--maxmemory", "2mb", "--maxmemory-policy", "noeviction") as server:
        place = Place("redis", tmp_path, server.url)
        with Ledger(place.url, **OPTIONS, daily_usd=10**6, queue=tmp_path / "q") as ledger:
            ledger.connection._pause_ns = 0
            with pytest.raises(LedgerRefused, match="OutOfMemory"):
                fill(ledger)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_a_server_that_stands_still_holds_nobody_beyond_the_time_out(kind, tmp_path):
    need_server(kind)
    with (RedisServer if kind == "redis" else PostgresServer)() as server:
        place = Place(kind, tmp_path, server.url, server.url)
        options = {"timeout": 0.3, "time_zone": ZONE, "queue": tmp_path / "queue"}
        with Ledger(place.url, daily_usd=5, **options) as ledger:
            wait_until(lambda: not _fails(ledger.send_heartbeat))  # its time-out is short
            server.send(signal.SIGSTOP)
            try:
                started = seconds()
                with pytest.raises(LedgerRefused, match="must answer in time"):
                    ledger.reserve("acme", usd=1)
                assert seconds() - started < 30
                trips, ledger.connection._pause_ns = ledger.connection.trips, 10**12
                with pytest.raises(LedgerRefused):  # at once: it did not answer a moment ago
                    ledger.reserve("acme", usd=1)
                assert ledger.connection.trips == trips
            finally:
                server.send(signal.SIGCONT)
            ledger.connection._pause_ns = 0
            wait_until(lambda: not _fails(lambda: ledger.usage("acme")))
            wait_until(lambda: not _fails(ledger.send_heartbeat) and not len(ledger._outbox))
            with Ledger(place.url, **OPTIONS) as patient:
                # What was refused while it stood still was taken back.
                assert patient.usage("acme").daily.reserved_usd == 0


def test_a_process_that_stands_still_in_the_file_holds_nobody(sqlite, opened):
    ledger = opened(sqlite, timeout=0.2)
    ledger.reserve("acme", usd=1)
    with sqlite.held():
        started = seconds()
        with pytest.raises(LedgerRefused, match="process that held it"):
            ledger.reserve("acme", usd=1)
        assert seconds() - started < 30


@pytest.mark.slow
def test_a_full_disk_is_refused_and_the_file_stays_sound(sqlite, tmp_path):
    out = workers.CONTEXT.Queue()
    process = workers.start(workers.fill, sqlite.url, tmp_path / "queue", out)
    spent, refused = out.get(timeout=300)
    process.join()
    assert spent > 10
    assert "SQLITE_" in refused
    with Ledger(sqlite.url, **OPTIONS, queue=tmp_path / "queue") as ledger:
        ledger.send_heartbeat()  # what could not be written waits in the queue
        assert ledger.check() == []
        day = ledger.usage("acme").daily
    assert day.spent_usd * 1000 == spent
    assert day.reserved_usd == 0


@pytest.mark.slow
def test_ten_processes_open_an_empty_ledger_at_once(place):
    barrier, out = workers.CONTEXT.Barrier(10), workers.CONTEXT.Queue()
    processes = [workers.start(workers.first_use, place.url, barrier, out) for _ in range(10)]
    found = {out.get(timeout=300) for _ in processes}
    for process in processes:
        process.join()
    assert len(found) == 1
    with Ledger(place.url, **OPTIONS) as ledger:
        assert ledger.usage("acme").daily.reserved_usd == 10


def test_what_a_dead_process_left_on_the_disk_is_sent_by_the_next(sqlite, opened, tmp_path):
    queue = tmp_path / "queue"
    sqlite.path.mkdir()
    process = workers.start(workers.allowed_and_killed, sqlite.url, queue)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (left,) = queue.rglob("*.json")
    sqlite.path.rmdir()
    ledger = opened(sqlite)
    ledger.send_heartbeat()
    day = ledger.usage("acme").daily
    assert (day.spent_usd, day.reserved_usd) == (Decimal("0.2"), 0)  # in full
    assert not left.exists()


def test_a_file_of_a_newer_format_is_left_alone(sqlite, opened):
    import sqlite3

    store = sqlite.store()
    store.close()
    with contextlib.closing(sqlite3.connect(sqlite.path)) as db:
        db.execute("PRAGMA user_version = 9")
    with pytest.raises(LedgerUnreachable, match="format must be 1, got 9"):
        sqlite.store()
    sqlite.path.write_bytes(b"no data base" * 100)
    with pytest.raises(LedgerUnreachable, match="SQLITE_NOTADB"):
        sqlite.store()


def test_a_damaged_file_shows(sqlite, opened):
    import sqlite3

    ledger = opened(sqlite)
    ledger.reserve("acme", usd=1).settle(1)
    assert ledger.check() == []
    with contextlib.closing(sqlite3.connect(sqlite.path)) as db:
        db.execute("UPDATE bg_windows SET charged1 = 0 WHERE label LIKE 'd%'")
        db.execute("DELETE FROM bg_windows WHERE label LIKE 'm%'")
        db.commit()
    wrong = ledger.check()
    assert len(wrong) == 2
    assert "the window is missing" in wrong[1]


@pytest.mark.slow
def test_ceilings_hold_where_the_data_base_defaults_to_repeatable_read(tmp_path):
    need_server("postgres")
    with PostgresServer("default_transaction_isolation=repeatable read") as server:
        place = Place("postgres", tmp_path, "", server.url)
        out = workers.CONTEXT.Queue()
        arguments = (place.url, ("acme",), 5 * 10**9, 100, "exact")
        for seed in range(4):
            workers.start(workers.pairs, *arguments, seed, tmp_path / "q", out)
        results = [out.get(timeout=300) for _ in range(4)]
        with Ledger(place.url, **OPTIONS) as ledger:
            day = ledger.usage("acme").daily
        assert day.spent_usd * 10**9 == sum(result[0] for result in results)
        assert day.spent_usd <= 5
