"""The ledger in PostgreSQL: one function call for each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from importlib.resources import files
from typing import Any, TypeVar, cast

from budgetguard_core.clock import SystemClock
from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.errors import LedgerUnreachable
from budgetguard_core.ledger.sql import SqlStore
from budgetguard_core.ledger.step import SEPARATOR, Answer, Status, Step, lines_of

_R = TypeVar("_R")

_FORMAT = "1"
# Of the advisory lock under which the schema is made: IF NOT EXISTS alone races in the catalogues.
_MIGRATION = 7305803
_RESERVE = (
    "SELECT * FROM bg_reserve_v1(%s, %s::bigint[], %s, %s, %s::bigint, %s, %s::float8, %s, %s, "
    "%s::float8, %s::float8, %s::bigint[])"
)
_SETTLE = "SELECT * FROM bg_settle_v1(%s, %s::bigint[], %s, %s, %s::bigint, %s)"
_FORGET = (
    "DELETE FROM bg_holds WHERE id IN (SELECT id FROM bg_holds WHERE closed AND expires < "
    "extract(epoch FROM clock_timestamp()) LIMIT 2000 FOR UPDATE SKIP LOCKED)"
)
_REFUSALS: dict[str, Status] = {
    "BG001": "refused",
    "BG002": "clock",
    "BG003": "killed",
    "BG004": "foreign",
}
_STEPS_BETWEEN_CLEANINGS = 500
_CONNECTIONS = 8
_IDLE_SECONDS = 30.0
_LEAST_CONNECT_SECONDS = 2  # libpq's own
_READ_ONLY = "25006"
_ABSENT = ("08", "57", "55P03", "53300")  # no connection, stopped or timed out, a lock, too many
_POOL = "budgetguard"


class PostgresLedgerStore(SqlStore):
    """A `Store` in PostgreSQL 12 or later."""

    vector = "{0}[{1}]"

    def __init__(self, url: str, *, timeout: float = 1.0) -> None:
        import psycopg
        import psycopg_pool

        self._psycopg: Any = psycopg
        logging.getLogger("psycopg.pool").addFilter(_is_of_another)
        self._timeout = timeout
        # A little more: the server's own time-outs come first.
        connection = _bounded(psycopg.Connection, timeout / 2 + 0.1)
        options: dict[str, Any] = {
            "autocommit": True,
            "connect_timeout": max(_LEAST_CONNECT_SECONDS, int(timeout)),
            "application_name": "budgetguard",
            "client_encoding": "utf8",  # whatever the URL or the environment says
        }
        self._steps = 0
        # The pool would only say that it could not connect.
        try:
            with connection.connect(url, **options) as db:
                self._set_up(db)
                self._migrate(db)
        except psycopg.Error as error:
            raise _unreachable(error) from None
        self._pool: Any = psycopg_pool.ConnectionPool(
            url,
            connection_class=connection,
            kwargs=options,
            configure=self._set_up,
            min_size=0,
            max_size=_CONNECTIONS,
            max_idle=_IDLE_SECONDS,
            timeout=timeout,
            reconnect_timeout=timeout,
            num_workers=2,
            name=_POOL,
            open=True,
        )

    def close(self) -> None:
        """Close the connections."""
        self._pool.close(timeout=self._timeout)

    def _set_up(self, db: Any) -> None:
        milliseconds = max(1, int(self._timeout * 500))
        # A default of `repeatable read` would make most concurrent steps fail.
        db.execute(
            "SET default_transaction_isolation = 'read committed'; "
            f"SET statement_timeout = {milliseconds}; SET lock_timeout = {milliseconds}; "
            f"SET idle_in_transaction_session_timeout = {milliseconds * 10}; "
            "SET synchronous_commit = on; SET extra_float_digits = 1"
        )

    def _migrate(self, db: Any) -> None:
        if _format(db) is None:
            db.execute("SET lock_timeout = 0; SET statement_timeout = 0")
            db.execute("SELECT pg_advisory_lock(%s)", (_MIGRATION,))  # until this connection ends
            if _format(db) is None:
                schema = files("budgetguard_core.ledger").joinpath("schema_v1.sql")
                with db.transaction():
                    db.execute(schema.read_text("utf-8"))
                    db.execute("INSERT INTO bg_notes VALUES('format', %s)", (_FORMAT,))
        found = _format(db)
        if found != _FORMAT:
            raise LedgerUnreachable(
                f"the ledger's format must be {_FORMAT}, got {str(found)[:20]}. "
                "Upgrade BudgetGuard.",
                is_absent=False,
            )

    def _ask(self, work: Callable[[Any], _R]) -> _R:
        """Do some work on a connection, and once more on a new one where it was lost.

        A server was restarted or has become a replica, or something between has dropped what was
        idle: only the next statement tells. All of it counts once, however often it is sent.
        """
        pool = self._pool
        try:
            try:
                with pool.connection() as db:
                    return work(db)
            except (self._psycopg.OperationalError, self._psycopg.InternalError) as error:
                state = error.sqlstate or _READ_ONLY
                if state != _READ_ONLY and not state.startswith(("57P", "08")):
                    raise
            pool.drain()
            with pool.connection() as db:
                return work(db)
        except self._psycopg.Error as error:
            raise _unreachable(error) from None

    def step(self, step: Step) -> Answer:
        """Apply a step once, in one statement."""
        windows = step.windows
        arguments: tuple[str, ...] = (
            *(step.id, _array(step.amount), lines_of(windows)),
            *(step.ledger, str(step.sequence), step.owner),
        )
        if step.verb == "settle":
            return self._ask(lambda db: self._step(db, _SETTLE, arguments))
        arguments += (
            repr(step.ttl),
            SEPARATOR.join([f"f:{flag}" for flag in step.flags]),
            SEPARATOR.join([window.oldest for window in windows]),
            repr(max([window.start for window in windows])),
            repr(min([window.end for window in windows])),
            _array([figure for window in windows for figure in window.ceiling]),
        )
        return self._ask(lambda db: self._step(db, _RESERVE, arguments))

    def _step(self, db: Any, statement: str, arguments: Sequence[Any]) -> Answer:
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_CLEANINGS == 1:  # the first one, for processes of a few
            db.execute(_FORGET)
        try:
            status, amount, now, warn, number = db.execute(statement, arguments).fetchone()
        except self._psycopg.Error as error:
            refused = _REFUSALS.get(error.sqlstate or "")
            if refused is None:
                raise
            text = error.diag.message_primary or ""
            if refused == "clock":
                return Answer("clock", now=float(text))
            return Answer(refused, detail=text)
        return Answer(status, Amount(*amount), now=now, warn=warn, sequence=number)

    def all(self, statement: str, *arguments: Any) -> list[Any]:
        """Return the rows of one statement."""

        def work(db: Any) -> list[Any]:
            done = db.execute(statement.replace("?", "%s"), arguments)
            return cast("list[Any]", done.fetchall() if done.description else [])

        return self._ask(work)

    def now(self) -> float:
        """Return the server's clock."""
        return float(self.all("SELECT extract(epoch FROM clock_timestamp())")[0][0])


def _is_of_another(record: logging.LogRecord) -> bool:
    """Keep the words of this pool out of the logs: those of errors may quote the URL."""
    return _POOL not in record.getMessage()


def _unreachable(error: Any) -> LedgerUnreachable:
    state = error.sqlstate or ""
    code = f" {state}" if state else ""
    # Never the text: it may hold the URL, and with it the password.
    return LedgerUnreachable(
        f"the ledger's PostgreSQL must answer in time, got {type(error).__name__}{code}. "
        "Check that it runs and can be reached.",
        is_absent=not state or state.startswith(_ABSENT),
    )


def _bounded(connection: Any, seconds: float) -> Any:
    """Make a connection class whose reads end after so many seconds.

    No option of libpq ends a read from a server that stands still but whose kernel answers:
    `tcp_user_timeout`, keepalives and `statement_timeout` all wait for it.
    """

    def wait(self: Any, gen: Any, *args: Any, **options: Any) -> Any:
        return connection.wait(self, _until(gen, seconds, self.pgconn), *args, **options)

    return type("Bounded", (connection,), {"wait": wait})


def _until(gen: Generator[Any, Any, _R], seconds: float, pgconn: Any) -> Generator[Any, Any, _R]:
    from psycopg import OperationalError

    deadline = SystemClock.monotonic_ns() + seconds * 1e9
    try:
        state = next(gen)
        while True:
            ready = yield state
            if not ready and SystemClock.monotonic_ns() > deadline:
                pgconn.finish()
                raise OperationalError("nothing came in time")
            state = gen.send(ready)
    except StopIteration as end:
        return cast("_R", end.value)


def _format(db: Any) -> str | None:
    (table,) = db.execute("SELECT to_regclass('bg_notes')").fetchone()
    if table is None:
        return None
    row = db.execute("SELECT text FROM bg_notes WHERE name = 'format'").fetchone()
    return None if row is None else str(row[0])


def _array(figures: Iterable[int]) -> str:
    # psycopg's own lists are slow.
    return "{" + ",".join(map(str, figures)) + "}"
