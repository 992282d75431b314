"""The servers that the ledger's tests need: this machine's, and instances of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from urllib.parse import quote

import pytest

from budgetguard_core.clock import SystemClock
from budgetguard_core.ledger.postgres import PostgresLedgerStore
from budgetguard_core.ledger.redis import RedisLedgerStore
from budgetguard_core.ledger.runs import Heartbeat
from budgetguard_core.ledger.sqlite import SqliteLedgerStore
from budgetguard_core.ledger.step import WindowRecord, ceiling_name

REDIS = os.environ.get("BUDGETGUARD_TEST_REDIS", "redis://127.0.0.1:6379/0")
POSTGRES = os.environ.get(
    "BUDGETGUARD_TEST_POSTGRES", "postgresql://postgres@127.0.0.1:5432/postgres"
)
HOW = {
    "redis": f"no Redis at {REDIS}; start one with `redis-server --port 6379`, "
    "or name another in BUDGETGUARD_TEST_REDIS",
    "postgres": f"no PostgreSQL at {POSTGRES}; start one with `pg_ctlcluster 15 main start`, "
    "or name another in BUDGETGUARD_TEST_POSTGRES",
}
STORES = ("sqlite", "redis", "postgres")
PATIENT = 60.0
"""The time-out of a ledger in tests that are not about it: a loaded machine may take long."""


def far_from_midnight():
    """A time zone in which it is about noon, or no test could be sure of its day."""
    ahead = 12 - int(SystemClock.wall_ns() / 1e9 // 3600 % 24)
    return f"Etc/GMT{-ahead:+d}"


ZONE = os.environ.setdefault("BUDGETGUARD_TEST_ZONE", far_from_midnight())
"""The same in the processes that a test starts."""
_found: dict[str, bool] = {}


def is_reachable(kind):
    """Whether the server of this machine answers; asked once."""
    if kind == "sqlite":
        return True
    if kind not in _found:
        try:
            if kind == "redis":
                import redis

                redis.Redis.from_url(REDIS, socket_timeout=2).ping()
            else:
                import psycopg

                psycopg.connect(POSTGRES, connect_timeout=2).close()
            _found[kind] = True
        except Exception:
            _found[kind] = False
    return _found[kind]


def leave_out(reason):
    """Skip a test, or fail where nothing may be skipped."""
    if os.environ.get("BUDGETGUARD_TEST_SERVERS") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


def need(kind):
    """Leave the test out, and say how to start the server, where it is absent."""
    if not is_reachable(kind):
        leave_out(HOW[kind])


class Quiet(Heartbeat):
    """Has no thread: it beats when it is told."""

    def wake(self):
        pass


class Place:
    """An empty ledger in one of the stores, that any process can open by its URL."""

    def __init__(self, kind, folder, redis_url=REDIS, postgres_url=POSTGRES):
        self.kind = kind
        self._redis, self._postgres = redis_url, postgres_url
        self.name = f"bg_{uuid.uuid4().hex[:12]}"
        if kind == "sqlite":
            self.path = Path(folder) / f"{self.name}.sqlite3"
            self.url = f"sqlite:///{self.path}?synchronous=normal"
        elif kind == "redis":
            mark = "&" if "?" in redis_url else "?"
            self.url = f"{redis_url}{mark}name={self.name}"
        else:
            import psycopg

            with psycopg.connect(postgres_url, autocommit=True) as db:
                db.execute(f"CREATE SCHEMA {self.name}")
            mark = "&" if "?" in postgres_url else "?"
            self.url = f"{postgres_url}{mark}options={quote(f'-csearch_path={self.name}')}"

    def store(self, **options):
        options.setdefault("timeout", PATIENT)
        if self.kind == "sqlite":
            return SqliteLedgerStore(self.path, synchronous="NORMAL", **options)
        if self.kind == "redis":
            return RedisLedgerStore(self._redis, name=self.name, **options)
        return PostgresLedgerStore(self.url, **options)

    @contextlib.contextmanager
    def held(self):
        """Hold the write lock of a SQLite file, as a process that stands still in a step."""
        self.store().close()
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            yield

    def wipe(self):
        """Empty the store, as a server does that keeps nothing over a restart."""
        if self.kind == "sqlite":
            for name in (self.path, *(Path(f"{self.path}{end}") for end in ("-wal", "-shm"))):
                name.unlink(missing_ok=True)
        elif self.kind == "redis":
            self.remove()
        else:
            import psycopg

            with psycopg.connect(self._postgres, autocommit=True) as db:
                for table in ("notes", "windows", "holds"):
                    extra = " WHERE name <> 'format'" if table == "notes" else ""
                    db.execute(f"DELETE FROM {self.name}.bg_{table}{extra}")

    def remove(self):
        if self.kind == "redis":
            import redis

            with redis.Redis.from_url(self._redis) as client:
                for name in client.scan_iter(f"{{{self.name}}}:*", count=1000):
                    client.delete(name)
        elif self.kind == "postgres":
            import psycopg

            with psycopg.connect(self._postgres, autocommit=True) as db:
                db.execute(f"DROP SCHEMA {self.name} CASCADE")


def window_of(store, key, label):
    """A store's record of a window, also of one that was never used."""
    found = [one for one in store.windows(key) if one.label == label]
    return found[0] if found else WindowRecord(key, label)


def set_ceiling(store, key, kind, ceiling):
    """Store a ceiling, or take it away."""
    text = None if ceiling is None else ceiling.to_text()
    store.write(ceiling_name(key, kind), text)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def seconds():
    return SystemClock.monotonic_ns() / 1e9


def wait_until(done, timeout=120.0):
    """Ask again and again; for what another process does."""
    import threading

    pause, deadline = threading.Event(), seconds() + timeout
    while not done():
        assert seconds() < deadline, "it did not happen in time"
        pause.wait(0.01)


class RedisServer:
    """A Redis of the test's own, on a free port, in a temporary folder."""

    def __init__(self, *options):
        self.folder = tempfile.mkdtemp(prefix="bg-redis")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._options = options
        self.process = None

    def start(self):
        import redis

        self.process = subprocess.Popen(
            [
                *("redis-server", "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--dir", self.folder, "--save", "", *self._options),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        def answers():
            assert self.process.poll() is None, "redis-server ended as it started"
            with contextlib.suppress(redis.RedisError, OSError):
                return redis.Redis(port=self.port, socket_timeout=1).ping()

        wait_until(answers)
        return self

    def kill(self):
        self.process.kill()
        self.process.wait()

    def send(self, number):
        os.kill(self.process.pid, number)

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def postgres_binaries():
    """The folder of `initdb`, or None."""
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return folders[-1].parent if folders else None


class PostgresServer:
    """A PostgreSQL of the test's own; as the user `postgres` where the tests run as root."""

    def __init__(self, *settings):
        self.bin = postgres_binaries()
        self.folder = tempfile.mkdtemp(prefix="bg-postgres")
        self.port = free_port()
        self.url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"
        self._settings = settings
        self.process = None
        self._as = {}
        if sys.platform != "win32" and os.getuid() == 0:
            shutil.chown(self.folder, "postgres", "postgres")
            self._as = {"user": "postgres", "group": "postgres", "extra_groups": []}
        done = subprocess.run(
            [
                *(self.bin / "initdb", "-D", self.folder, "-U", "postgres", "-A", "trust"),
                *("-E", "UTF8", "--no-sync"),
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            **self._as,
        )
        assert done.returncode == 0, done.stderr

    def start(self):
        import psycopg

        settings = ["listen_addresses=127.0.0.1", "unix_socket_directories=", *self._settings]
        self.process = subprocess.Popen(
            [
                *(self.bin / "postgres", "-D", self.folder, "-p", str(self.port)),
                *(part for setting in settings for part in ("-c", setting)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            start_new_session=True,
            **self._as,
        )

        def answers():
            with contextlib.suppress(psycopg.Error):
                psycopg.connect(self.url, connect_timeout=2).close()
                return True

        wait_until(answers)
        return self

    def processes(self):
        """The postmaster and its children, by id: each child has a process group of its own."""
        found = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        return [self.process.pid, *map(int, found.stdout.split())]

    def send(self, number):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self):
        """Kill all of its processes, and wait until they are gone: a restart needs that."""
        pids = self.processes()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        wait_until(lambda: not any(_is_running(pid) for pid in pids))

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
