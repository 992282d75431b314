"""The ledger in PostgreSQL: one function call for each step."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from importlib.resources import files
from typing import Any, TypeVar, cast

from budgetguard_core.clock import SystemClock
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.amounts import LARGEST_CEILING, ZERO, Amount
from budgetguard_core.ledger.errors import LedgerUnreachable
from budgetguard_core.ledger.step import (
    SEPARATOR,
    Answer,
    HoldRecord,
    Status,
    Step,
    WindowRecord,
)
from budgetguard_core.ledger.windows import Window

_R = TypeVar("_R")

_FORMAT = "1"
# Of the advisory lock under which the schema is made: IF NOT EXISTS alone races in the catalogues.
_MIGRATION = 7305803
_RECORD = "\x1e"
_RESERVE = (
    "SELECT * FROM bg_reserve_v1(%s, %s::bigint, %s::bigint, %s::float8, %s, %s, %s, %s::float8, "
    "%s::float8, %s::bigint[], %s::bigint[], %s, %s)"
)
_SETTLE = "SELECT * FROM bg_settle_v1(%s, %s::bigint, %s::bigint, %s, %s, %s)"
_STEP = (
    "SELECT * FROM bg_step_v1(%s, %s::int, %s::bool, %s::float8, %s::int, %s::bigint[], "
    "%s::bigint[], %s::bigint[], %s::bigint[], %s, %s, %s, %s::float8, %s::float8, "
    "%s::bigint[], %s::bigint[], %s, %s)"
)
_FORGET = (
    "DELETE FROM bg_holds WHERE id IN (SELECT id FROM bg_holds WHERE closed "
    "AND expires < clock_timestamp() LIMIT 2000 FOR UPDATE SKIP LOCKED)"
)
_REFUSALS: dict[str, Status] = {
    "BG001": "refused",
    "BG002": "clock",
    "BG003": "killed",
    "BG004": "foreign",
}
_STEPS_BETWEEN_CLEANINGS = 500
_SHUT_DOWN = "57P"  # the class of what a server says that goes, or was told to end a connection
_LEAST_CONNECT_SECONDS = 2  # libpq's own


class PostgresLedgerStore:
    """A `Store` in PostgreSQL 12 or later.

    Args:
        url: As libpq takes it.
        timeout: Seconds until a step gives up.

    Raises:
        ConfigurationError: psycopg is missing, or the data base is not UTF-8.
        LedgerUnreachable: The server does not answer.
    """

    largest_ceiling = LARGEST_CEILING

    def __init__(self, url: str, *, timeout: float = 1.0) -> None:
        try:
            import psycopg
        except ModuleNotFoundError as error:
            if error.name != "psycopg":
                raise
            raise ConfigurationError(
                "a ledger in PostgreSQL needs psycopg, which is not installed. "
                'Install the extra from the checkout: pip install ".[postgres]"'
            ) from None
        self._psycopg: Any = psycopg
        # A little more: the server's own time-outs come first.
        self._class = _bounded(psycopg.Connection, timeout + 0.2)
        self._url = url
        self._timeout = timeout
        self._mutex = threading.Lock()
        self._db: Any = None
        self._inherited: list[Any] = []
        self._steps = 0
        self._ask(id)

    # Connection

    def _connect(self) -> Any:
        db = self._class.connect(
            self._url,
            autocommit=True,
            connect_timeout=max(_LEAST_CONNECT_SECONDS, int(self._timeout)),
            application_name="budgetguard",
            client_encoding="utf8",  # whatever the URL or the environment says
        )
        try:
            self._set_up(db)
        except BaseException:
            db.close()
            raise
        return db

    def _set_up(self, db: Any) -> None:
        milliseconds = int(self._timeout * 1000)
        # A default of `repeatable read` would make most concurrent steps fail.
        db.execute(
            "SET default_transaction_isolation = 'read committed'; "
            f"SET statement_timeout = {milliseconds}; SET lock_timeout = {milliseconds}; "
            f"SET idle_in_transaction_session_timeout = {milliseconds * 5}; "
            "SET synchronous_commit = on; SET extra_float_digits = 1"
        )
        self._migrate(db)

    def _migrate(self, db: Any) -> None:
        encoding = db.info.parameter_status("server_encoding")
        if encoding != "UTF8":
            raise ConfigurationError(
                f"a ledger's data base must have the encoding UTF8, got {encoding}. "
                "Make one with ENCODING 'UTF8'."
            )
        if _format(db) is None:
            with db.transaction():
                db.execute("SELECT pg_advisory_xact_lock(%s)", (_MIGRATION,))
                if not _is_made(db):
                    schema = files("budgetguard_core.ledger").joinpath("schema_v1.sql")
                    db.execute(schema.read_text("utf-8"))
                    db.execute("INSERT INTO bg_notes VALUES('format', %s)", (_FORMAT,))
        found = _format(db)
        if found != _FORMAT:
            raise LedgerUnreachable(
                f"the ledger's format must be {_FORMAT}, got {str(found)[:20]}. "
                "Upgrade BudgetGuard."
            )

    def _ask(self, work: Callable[[Any], _R]) -> _R:
        """Do some work on the connection.

        That a server was restarted, or a proxy ended what was idle, only the next statement tells.
        So the work is done once more, on a new connection: all of it counts once, however often it
        is sent. A server that does not answer in time gets no second chance.
        """
        if not self._mutex.acquire(timeout=self._timeout):
            raise LedgerUnreachable(
                f"the ledger must be free within {self._timeout} s, got another thread's step that "
                "took longer. Raise timeout."
            )
        try:
            db = self._db
            if db is not None and not db.closed:
                try:
                    return work(db)
                except self._psycopg.OperationalError as error:
                    if not (db.closed or (error.sqlstate or "").startswith(_SHUT_DOWN)):
                        raise
                    db.close()
            self._db = self._connect()
            return work(self._db)
        except self._psycopg.Error as error:
            self._drop_if_broken()
            code = f" {error.sqlstate}" if error.sqlstate else ""
            # Never the text: it may hold the URL, and with it the password.
            raise LedgerUnreachable(
                f"the ledger's PostgreSQL must answer in time, got {type(error).__name__}{code}. "
                "Check that it runs and can be reached."
            ) from None
        except BaseException:
            self._drop_if_broken()
            raise
        finally:
            self._mutex.release()

    def _drop_if_broken(self) -> None:
        db = self._db
        if db is not None and (db.closed or db.info.transaction_status.name != "IDLE"):
            db.close()
            self._db = None

    # The step

    def step(self, step: Step) -> Answer:
        """Apply a step once, in one statement."""
        windows = step.windows
        keys = SEPARATOR.join([window.key for window in windows])
        labels = SEPARATOR.join([window.label for window in windows])
        return self._ask(lambda db: self._step(db, step, keys, labels))

    def _step(self, db: Any, step: Step, keys: str, labels: str) -> Answer:
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_CLEANINGS == 1:  # the first one, for processes of a few
            db.execute(_FORGET)
        if step.op == 1 and not step.close and step.spent == ZERO:
            if step.need == step.want != ZERO:
                return self._reserve(db, step, keys, labels)
        elif step.op == 2 and step.close and not step.takes:
            status, warn = db.execute(
                _SETTLE, (step.id, *map(str, step.spent), keys, labels, step.ledger)
            ).fetchone()
            if status == "ok":
                return Answer("ok", step.spent, warn=warn)
        row = db.execute(
            _STEP,
            (
                step.id,
                str(step.op),
                "t" if step.close else "f",
                repr(step.ttl),
                str(step.share),
                *map(_array, (step.spent, step.keep, step.need, step.want)),
                *_common(step, keys, labels),
            ),
        ).fetchone()
        return _answer(row)

    def _reserve(self, db: Any, step: Step, keys: str, labels: str) -> Answer:
        flags, *rest = _common(step, keys, labels)
        try:
            row = db.execute(
                _RESERVE, (step.id, *map(str, step.need), repr(step.ttl), flags, *rest)
            ).fetchone()
        except self._psycopg.Error as error:
            status = _REFUSALS.get(error.sqlstate or "")
            if status is None:
                raise
            text = error.diag.message_primary or ""
            if status == "clock":
                return Answer("clock", now=float(text))
            return Answer(status, detail=text)
        return _answer(row)

    # Notes, ceilings, reports

    def _all(self, statement: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        rows = self._ask(lambda db: db.execute(statement, arguments).fetchall())
        return cast("list[tuple[Any, ...]]", rows)

    def _do(self, statement: str, arguments: Sequence[Any] = ()) -> None:
        self._ask(lambda db: db.execute(statement, arguments))

    def now(self) -> float:
        """Return the server's clock."""
        return float(self._all("SELECT extract(epoch FROM clock_timestamp())")[0][0])

    def identity(self) -> str:
        """Return the id of the ledger, made at first use."""
        made = uuid.uuid4().hex
        self._do("INSERT INTO bg_notes VALUES('id', %s) ON CONFLICT DO NOTHING", (made,))
        return str(self.read(("id",))[0])

    def adopt(self) -> str:
        """Say that this ledger is meant; return its id."""
        found = self.identity()
        self.write("adopted", "1")
        return found

    def read(self, names: Sequence[str]) -> list[str | None]:
        """Return notes by name."""
        found = dict(
            self._all("SELECT name, text FROM bg_notes WHERE name = ANY(%s)", (list(names),))
        )
        return [found.get(name) for name in names]

    def scan(self, prefix: str) -> dict[str, str]:
        """Return the notes whose name begins so."""
        return dict(
            self._all("SELECT name, text FROM bg_notes WHERE starts_with(name, %s)", (prefix,))
        )

    def write(self, name: str, text: str | None) -> None:
        """Set a note, or take it away."""
        if text is None:
            self._do("DELETE FROM bg_notes WHERE name = %s", (name,))
        else:
            self._do(
                "INSERT INTO bg_notes VALUES(%s, %s) "
                "ON CONFLICT(name) DO UPDATE SET text = excluded.text",
                (name, text),
            )

    def ceilings(self) -> dict[tuple[str, str], Amount]:
        """Return the stored ceilings by key and kind; key "" is the default."""
        rows = self._all("SELECT key, kind, usd, tokens FROM bg_ceilings")
        return {(key, kind): Amount(usd, tokens) for key, kind, usd, tokens in rows}

    def set_ceiling(self, key: str, kind: str, ceiling: Amount | None) -> None:
        """Store a ceiling, or take it away."""
        if ceiling is None:
            self._do("DELETE FROM bg_ceilings WHERE key = %s AND kind = %s", (key, kind))
        else:
            self._do(
                "INSERT INTO bg_ceilings VALUES(%s, %s, %s, %s) ON CONFLICT(key, kind) "
                "DO UPDATE SET usd = excluded.usd, tokens = excluded.tokens",
                (key, kind, *ceiling),
            )

    def windows(self) -> list[WindowRecord]:
        """Return every window."""
        rows = self._all(
            "SELECT key, label, cu, ct, su, st, lu, lt FROM bg_windows ORDER BY key, label"
        )
        return [_window(row) for row in rows]

    def window(self, key: str, label: str) -> WindowRecord:
        """Return one window, also one that was never used."""
        rows = self._all(
            "SELECT key, label, cu, ct, su, st, lu, lt FROM bg_windows "
            "WHERE key = %s AND label = %s",
            (key, label),
        )
        return _window(rows[0] if rows else (key, label, 0, 0, 0, 0, 0, 0))

    def holds(self) -> list[HoldRecord]:
        """Return every hold of the last day, and all that are open."""
        rows = self._all(
            "SELECT id, owner, gu, gt, su, st, op, closed, lease, "
            "extract(epoch FROM made)::float8, extract(epoch FROM expires)::float8, windows "
            "FROM bg_holds ORDER BY made"
        )
        return [
            HoldRecord(
                id=row[0],
                owner=row[1],
                granted=Amount(row[2], row[3]),
                spent=Amount(row[4], row[5]),
                op=row[6],
                closed=row[7],
                lease=row[8],
                made=row[9],
                expires=row[10],
                windows=_pairs(row[11]),
            )
            for row in rows
        ]

    def before_fork(self) -> bool:
        """Do nothing: what a child takes along is closed for nobody."""
        return False

    def after_fork(self) -> None:
        """Do nothing."""

    def forked(self) -> None:
        """Leave the connection to the parent process; called in a forked child."""
        if self._db is not None:
            # Collected here, it would say good-bye to the server in the parent's name.
            self._inherited.append(self._db)
        self._db = None
        self._mutex = threading.Lock()

    def close(self) -> None:
        """Close the connection."""
        with self._mutex:
            if self._db is not None:
                self._db.close()
                self._db = None


def _bounded(connection: Any, seconds: float) -> Any:
    """Make a connection class whose reads end after so many seconds.

    No option of libpq ends a read from a server that stands still but whose kernel answers:
    `tcp_user_timeout`, keepalives and `statement_timeout` all wait for it.
    """

    def wait(self: Any, gen: Any, *args: Any, **options: Any) -> Any:
        deadline = SystemClock.monotonic_ns() + int(seconds * 1e9)
        return connection.wait(self, _until(gen, deadline, self.pgconn.finish), *args, **options)

    return type("Bounded", (connection,), {"wait": wait})


def _until(
    gen: Generator[Any, Any, _R], deadline: int, give_up: Callable[[], object]
) -> Generator[Any, Any, _R]:
    try:
        state = next(gen)
        while True:
            ready = yield state
            if not ready and SystemClock.monotonic_ns() > deadline:
                give_up()
                raise LedgerUnreachable(
                    "the ledger's PostgreSQL must answer in time, got nothing. "
                    "Check that it runs and can be reached."
                )
            state = gen.send(ready)
    except StopIteration as end:
        return cast("_R", end.value)


def _is_made(db: Any) -> bool:
    # The catalogue itself: what a name means is cached for the whole of a transaction, and this
    # one began before another process made the tables.
    (count,) = db.execute(
        "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE c.relname = 'bg_notes' AND n.nspname = ANY(current_schemas(false))"
    ).fetchone()
    return bool(count)


def _format(db: Any) -> str | None:
    (table,) = db.execute("SELECT to_regclass('bg_notes')").fetchone()
    if table is None:
        return None
    row = db.execute("SELECT text FROM bg_notes WHERE name = 'format'").fetchone()
    return None if row is None else str(row[0])


def _common(step: Step, keys: str, labels: str) -> tuple[str, ...]:
    windows: Sequence[Window] = step.windows
    return (
        SEPARATOR.join([f"f:{flag}" for flag in step.flags]),
        keys,
        labels,
        repr(max([window.start for window in windows])),
        repr(min([window.end for window in windows])),
        _array([window.ceiling.usd for window in windows]),
        _array([window.ceiling.tokens for window in windows]),
        step.ledger,
        step.owner,
    )


def _array(figures: Iterable[int]) -> str:
    # psycopg's own lists are slow.
    return "{" + ",".join(map(str, figures)) + "}"


def _answer(row: Sequence[Any]) -> Answer:
    status, usd, tokens, detail, now, warn = row
    return Answer(status, Amount(usd, tokens), detail, now, warn)


def _window(row: Sequence[Any]) -> WindowRecord:
    key, label, cu, ct, su, st, lu, lt = row
    return WindowRecord(key, label, Amount(cu, ct), Amount(su, st), Amount(lu, lt))


def _pairs(windows: str) -> tuple[tuple[str, str], ...]:
    keys, _, labels = windows.partition(_RECORD)
    return tuple(zip(keys.split(SEPARATOR), labels.split(SEPARATOR), strict=True))
