"""A process's store: where it is, whether it answers, which ledger it holds, how its clock goes.

A driver is imported only when its store is named.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from budgetguard_core.clock import Clock
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.amounts import LARGEST_CEILING, LARGEST_CEILING_IN_LUA
from budgetguard_core.ledger.errors import LedgerChanged, LedgerUnreachable, OtherWindows
from budgetguard_core.ledger.in_thread import InThread
from budgetguard_core.ledger.postgres import PostgresLedgerStore
from budgetguard_core.ledger.redis import RedisLedgerStore
from budgetguard_core.ledger.sqlite import SqliteLedgerStore
from budgetguard_core.ledger.step import SEPARATOR, Answer, Identity, Step
from budgetguard_core.ledger.windows import CALENDAR, RUN, check_name

_R = TypeVar("_R")
Store: TypeAlias = SqliteLedgerStore | RedisLedgerStore | PostgresLedgerStore
"""One of the three stores. Every method is one bounded trip, may be called from any thread, may be
repeated, and raises `LedgerUnreachable` when the store does not answer."""


class Connection:
    """One store, opened when it is first needed.

    A file is used by one thread at a time. A server is asked by all, and for the main thread by
    another one, which no signal's handler interrupts between a request and its reply. For `timeout`
    seconds after a failure the next step fails at once. `known` is the id of the ledger that is
    expected; any is accepted at first if left out.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        clock: Clock,
        known: str = "",
        timeout: float = 1.0,
        *,
        is_server: bool = False,
    ) -> None:
        self.opener = open_store
        self.is_server = is_server
        self._clock = clock
        self._known = known
        self._sequence = 0
        self._seen = 0.0
        """The store's clock, when it last was the ledger that is known."""
        self._timeout = timeout
        self._pause_ns = int(timeout * 1e9)
        self._failed_ns: int | None = None
        self._failure = LedgerUnreachable("")
        self._store: Store | None = None
        self._inherited: list[Store] = []
        self._skew = 0.0
        self.trips = 0
        self._begin()

    def _begin(self) -> None:
        self._opening = threading.Lock()
        self._turn = threading.Lock()
        self._in_thread = InThread()

    def _trip(self, call: Callable[[], _R]) -> _R:
        """Make a trip, unless one has failed just now."""
        with nullcontext() if self.is_server else self._turn:
            failed = self._failed_ns
            if failed is not None and self._clock.monotonic_ns() - failed < self._pause_ns:
                raise LedgerUnreachable(
                    str(self._failure), is_absent=self._failure.is_absent, was_sent=False
                )
            try:
                result = self._in_thread(call) if self.is_server else call()
            except LedgerUnreachable as error:
                self._failed_ns, self._failure = self._clock.monotonic_ns(), error
                raise
            self._failed_ns = None
            return result

    def store(self) -> Store:
        """Return the store, opened."""
        if self._store is None:
            with self._opening:
                self._store = self._store or self._open()
        return self._store

    def _open(self) -> Store:
        try:
            connected = self._trip(self.opener)
        except LedgerUnreachable as error:
            error.was_sent = False
            raise
        try:
            self._meet(self._trip(connected.identity))
        except BaseException:
            connected.close()
            raise
        return connected

    def _meet(self, met: Identity) -> None:
        """Go on with the ledger that was met, if it is the one that is known, or was adopted."""
        known, found = self._known, ""
        if known and met.id == known and met.sequence < self._sequence:
            found = f"at change {self._sequence}, got {met.sequence}: it was rolled back"
        elif known and met.id != known and (not met.adopted or met.adopted < self._seen):
            got = met.id or "an empty store"
            found = f"{known}, got {got}: it was wiped, or is another"
        if found:
            raise LedgerChanged(
                f"the ledger must be {found}. Restore it, or accept it as it is with "
                "`budgetguard ledger adopt`."
            )
        if met.id != known:
            self._known, self._sequence = met.id, met.sequence

    def adopt(self) -> str:
        """Accept the store as it is under a new id, also for processes that know another one."""
        made = uuid.uuid4().hex
        store = self._trip(self.opener)
        try:
            self._trip(lambda: store.write("adopted", repr(store.now())))
            self._trip(lambda: store.write("id", made))
        finally:
            store.close()
        return made

    def ask(self, call: Callable[[Store], _R]) -> _R:
        """Make one trip that is no step."""
        store = self.store()
        return self._trip(lambda: call(store))

    def send(self, step: Step) -> Answer:
        """Make one step; `OtherWindows` where it does not name those of its hold."""
        store = self.store()
        while True:
            self.trips += 1
            known = step._replace(ledger=self._known, sequence=self._sequence)
            answer = self._trip(partial(store.step, known))
            if answer.status == "foreign":
                met, adopted, sequence = answer.detail.split(SEPARATOR)
                self._meet(Identity(met, float(adopted), int(sequence)))
                continue
            # Of several threads one may set it back: then less is asked of the store.
            self._sequence = max(self._sequence, answer.sequence)
            self._seen = answer.now
            if answer.status == "windows":
                raise OtherWindows(
                    "a hold must be reported in the windows that it was made in, got others. "
                    "Settle a reservation with the object that `reserve` returned."
                )
            if answer.status == "clock":
                self._skew = answer.now - self._clock.wall_ns() / 1e9
            return answer

    def now(self) -> float:
        """Return the time that this process takes for the store's."""
        return self._clock.wall_ns() / 1e9 + self._skew

    def before_fork(self) -> bool:
        """Close a file, and hold it closed until `after_fork`, which is due where this is True.

        SQLite keeps what it has locked in the memory of the process. A child would believe that it
        holds the locks of an open file, and the system knows of none: another process that closes
        the file then takes itself for the last, and what the child commits is lost with the log.
        """
        store = self._store
        # A step under way may wait for the file as long as that, and then takes its time.
        if self.is_server or store is None or not self._turn.acquire(timeout=2 * self._timeout):
            return False
        store.close()
        return True

    def after_fork(self) -> None:
        """Go on in the parent process."""
        self._turn.release()

    def forked(self) -> None:
        """Leave the connection to the parent process."""
        self._begin()
        if isinstance(self._store, SqliteLedgerStore):
            self._store.forked()
        elif self._store is not None:
            # Collected here, it would say good-bye to the server in the parent's name.
            self._inherited.append(self._store)
            self._store = None

    def close(self) -> None:
        """Close the connection; the next step opens it again."""
        with self._opening, self._turn:
            if self._store is not None:
                self._store.close()
                self._store = None
            self._in_thread.close()


class Address(NamedTuple):
    """A store that can be opened, any number of times."""

    shown: str
    """The URL without user, password and options, for people."""
    fingerprint: str
    """A name that keeps ledgers apart on the disk, without revealing which."""
    open: Callable[[], Store]
    windows: str = CALENDAR
    """The kinds of its windows."""
    largest_ceiling: int = LARGEST_CEILING
    is_server: bool = True


def default_path() -> Path:
    """Return the file of the ledger that has no URL."""
    return Path.home() / ".budgetguard" / "ledger.sqlite3"


def parse_url(url: str | None, *, timeout: float = 1.0, clock: Clock | None = None) -> Address:
    """Find the store that a URL names, and its driver; nothing is opened.

    Raises:
        ConfigurationError: The URL makes no sense, or the driver is missing.
    """
    url = f"sqlite:///{default_path()}" if url is None else url
    if not isinstance(url, str):
        raise ConfigurationError(
            f"a ledger must be a URL or a Ledger, got {type(url).__name__}. "
            "Use sqlite:///ledger.sqlite3, redis://host:6379/0 or postgresql://host/name."
        )
    try:
        parts = urlsplit(url)
        # Of PostgreSQL there may be several, each with a port.
        _ = None if "," in parts.netloc else parts.port
    except ValueError:
        raise _wrong("another") from None
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    windows = options.pop("windows", None)
    if windows not in (None, "run"):
        raise ConfigurationError(
            f"windows must be run, or left out for days and months, got {windows[:20]!r}. "
            "Use ?windows=run."
        )
    kinds = CALENDAR if windows is None else RUN
    connected: Callable[[], Store]
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if parts.scheme == "sqlite":
        path = unquote(parts.path)
        synchronous = options.pop("synchronous", "FULL").upper()
        if parts.netloc or options or len(path) < 2 or synchronous not in ("FULL", "NORMAL"):
            raise ConfigurationError(
                "a ledger in SQLite must be named sqlite:///file, with ?synchronous=full or "
                f"normal as its only option, got {f'sqlite://{parts.netloc}{path}'[:80]!r}. "
                "Use sqlite:///ledger.sqlite3 or sqlite:////var/lib/ledger.sqlite3."
            )
        # sqlite:///a is relative and sqlite:////a absolute, as in SQLAlchemy.
        file = Path(path[1:]).absolute()
        shown = f"sqlite:///{file}"
        connected = partial(
            SqliteLedgerStore, file, synchronous=synchronous, timeout=timeout, clock=clock
        )
        return Address(shown, _fingerprint(shown), connected, kinds, is_server=False)
    # A password may change: the ledger stays the same.
    facts = sorted(one for one in options.items() if one[0] != "password")
    fingerprint = _fingerprint(f"{parts.username}@{shown}?{urlencode(facts)}")
    bare = url.partition("?")[0]  # urlunsplit knows no unix://
    if parts.scheme in ("redis", "rediss", "unix"):
        _need("redis", "Redis", "redis")
        number = parts.path.strip("/")
        if parts.scheme != "unix" and number and not (number.isascii() and number.isdigit()):
            # redis-py would take the first one.
            raise ConfigurationError(
                f"a data base of Redis must be a number, got {number[:40]!r}. "
                "Use redis://host:6379/0, and ?name= for several ledgers in it."
            )
        name = check_name(options.pop("name", "budgetguard"), "name")
        options.pop("decode_responses", None)
        full, shown = f"{bare}?{urlencode(options)}", f"{shown}?name={name}"
        connected = partial(RedisLedgerStore, full, name=name, timeout=timeout)
        return Address(shown, fingerprint, connected, kinds, LARGEST_CEILING_IN_LUA)
    if parts.scheme in ("postgresql", "postgres"):
        _need("postgres", "PostgreSQL", "psycopg", "psycopg_pool")
        query = urlencode(options, quote_via=quote)  # libpq takes no + for a space
        full = f"{bare}?{query}" if query else bare
        connected = partial(PostgresLedgerStore, full, timeout=timeout)
        return Address(shown, fingerprint, connected, kinds)
    raise _wrong(f"{parts.scheme[:20]}://" if parts.scheme else "none")


def _fingerprint(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def _need(extra: str, what: str, *modules: str) -> None:
    for module in modules:
        if find_spec(module) is None:
            raise ConfigurationError(
                f"a ledger in {what} needs {module}, which is not installed. "
                f'Install the extra from the checkout: pip install ".[{extra}]"'
            )


def _wrong(got: str) -> ConfigurationError:
    # Not the URL itself: it may hold a password.
    return ConfigurationError(
        "a ledger's URL must begin with sqlite:///, redis://, rediss:// or postgresql://, "
        f"got {got}. Use sqlite:///ledger.sqlite3 for a file."
    )
