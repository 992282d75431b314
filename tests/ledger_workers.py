"""What the processes of the ledger's tests do. Imported by the fork server, so without a test."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import random
import resource
import signal
import sqlite3
import threading
from decimal import Decimal

from budgetguard_core import Guard
from budgetguard_core.kit import ModelCall
from budgetguard_core.ledger import Ledger, LedgerRefused
from budgetguard_core.ledger.amounts import Amount, to_dollars
from ledger_servers import ZONE

CONTEXT = multiprocessing.get_context("forkserver")
# What this module imports, and the drivers: importing them takes each process longer than what it
# is started for. Not the module itself: before Python 3.13 the server does not know the path.
CONTEXT.set_forkserver_preload(["pytest", "budgetguard_core.ledger", "redis", "psycopg"])


def start(target, *arguments):
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


def one(url, queue):
    """Spend a dollar, whose settlement its worker's end has to send."""
    ledger = Ledger(url, daily_usd=10, timeout=60.0, time_zone=ZONE, queue=queue)
    guard = Guard(ledger=ledger, tenant="acme")
    ticket = guard.admit_model_call(ModelCall(cost_usd=Decimal(1)))
    guard.settle_model_call(ticket, cost_usd=Decimal(1))


def pairs(url, keys, ceiling, count, by_run, seed, queue, out):
    """Reserve and settle at random; says what was billed and refused."""
    rnd = random.Random(seed)
    ledger = Ledger(
        url,
        daily_usd=to_dollars(ceiling),
        monthly_usd=to_dollars(ceiling * 2),
        timeout=60.0,
        time_zone=ZONE,
        queue=queue,
    )
    spent = refused = 0
    run = ledger.attach(f"run-{seed}", keys, on_kill=print, on_warning=lambda warned: None)
    for _ in range(count):
        usd = rnd.randrange(10**6, 10**8)
        real = int(usd * rnd.uniform(0.1, 1.0))
        if not by_run:
            try:
                reservation = ledger.reserve(keys, f"run-{seed}", usd=to_dollars(usd))
            except LedgerRefused:
                refused += 1
                continue
            reservation.settle(to_dollars(real))
        else:
            part = run.obtain(Amount(usd))
            if isinstance(part, LedgerRefused):
                assert part.reason.startswith("tenant"), part
                refused += 1
                continue
            run.settle(part, Amount(real))
        spent += real
    run.close()
    ledger.close()
    out.put((spent, refused))


def kill_many(url, keys, kills, folder, queue):
    """Start workers, two at a time, and kill each at a moment of its own."""
    rnd = random.Random(5)
    pause = threading.Event()
    for number in range(0, kills, 2):
        children = []
        for one in (number, number + 1):
            path = folder / str(one)
            pid = os.fork()
            if pid == 0:
                try:
                    bill_for_ever(url, keys, one % 2, path, one, queue)
                finally:
                    os._exit(1)
            children.append((pid, path))
        for pid, path in children:
            while not (path.exists() and path.stat().st_size):
                assert os.waitpid(pid, os.WNOHANG) == (0, 0), "a worker ended by itself"
                pause.wait(0.001)
            pause.wait(rnd.uniform(0.0, 0.03))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def bill_for_ever(url, keys, by_run, path, seed, queue):
    """Spend until killed; each bill is one write before its settlement."""
    rnd = random.Random(seed)
    options = {"timeout": 1.0, "time_zone": ZONE, "queue": queue}
    ledger = Ledger(url, daily_usd=10**6, **options)
    run = ledger.attach(f"run-{seed}", keys, on_kill=print, on_warning=lambda warned: None)
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    while True:
        usd = rnd.randrange(10**5, 10**7)
        if not by_run:
            try:
                reservation = ledger.reserve(keys, usd=to_dollars(usd))
            except LedgerRefused:
                continue
            os.write(fd, b"%d\n" % (usd // 2))
            reservation.settle(to_dollars(usd // 2))
        else:
            part = run.obtain(Amount(usd))
            if isinstance(part, LedgerRefused):
                continue
            os.write(fd, b"%d\n" % (usd // 2))
            run.settle(part, Amount(usd // 2))


def first_use(url, barrier, out):
    """Open an empty ledger at the same moment as others."""
    barrier.wait()
    try:
        ledger = Ledger(url, timeout=60.0, time_zone=ZONE)
        ledger.reserve("acme", usd=1)
        out.put(ledger.id)
    except LedgerRefused as error:
        out.put(str(error))


def fill(url, queue, out):
    """Fill the ledger's file up to a limit of its size."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
    spent, refused = 0, None
    options = {"time_zone": ZONE, "queue": queue}
    with Ledger(url, daily_usd=10**6, **options) as ledger:
        ledger.connection._pause_ns = 0
        for number in range(5000):
            try:
                ledger.reserve("acme", usd=0.001, reservation_id=f"{number:0150d}").settle(0.001)
            except LedgerRefused as full:
                refused = str(full)
                break
            spent += 1
    out.put((spent, refused))


def allowed_and_killed(url, queue):
    """Be allowed to spend while the store cannot be reached, and die before it can."""
    options = {"on_ledger_error": "allow", "timeout": 0.1, "time_zone": ZONE, "queue": queue}
    ledger = Ledger(url, **options)
    run = ledger.attach("run", "acme", on_kill=print, on_warning=print)
    run.settle(run.obtain(Amount(2 * 10**8, 5)), Amount(10**8, 5))
    os.kill(os.getpid(), signal.SIGKILL)


def processor_seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed_pairs(url, count, seed, barrier, out):
    """Exact pairs as fast as they go, once all are ready; tells the seconds of processor time."""
    rnd = random.Random(seed)
    with Ledger(url, timeout=30.0, daily_usd=10**6) as ledger:
        ledger.reserve("acme", usd=0)
        barrier.wait()
        started = processor_seconds()
        for _ in range(count):
            usd = to_dollars(rnd.randrange(10**6, 10**8))
            ledger.reserve("acme", usd=usd).settle(usd)
        used = processor_seconds() - started
    out.put(used)


def timed_bare_pairs(path, count, seed, barrier, out):
    """Two transactions of one row each."""
    with contextlib.closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("CREATE TABLE IF NOT EXISTS bare(id INTEGER PRIMARY KEY, n INT)")
        db.execute("INSERT OR IGNORE INTO bare VALUES(1, 0)")
        barrier.wait()
        started = processor_seconds()
        for _ in range(2 * count):
            db.execute("BEGIN IMMEDIATE")
            db.execute("UPDATE bare SET n = n + 5 WHERE id = 1")
            db.execute("COMMIT")
    out.put(processor_seconds() - started)


def timed_bare_postgres(url, count, seed, barrier, out):
    """Two transactions of one row, which all processes share."""
    psycopg = importlib.import_module("psycopg")
    with psycopg.connect(url, autocommit=True) as db:
        barrier.wait()
        started = processor_seconds()
        for _ in range(2 * count):
            db.execute("UPDATE bare SET n = n + %s WHERE id = 1", ("5",))
        out.put(processor_seconds() - started)
