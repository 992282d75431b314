"""Stores by URL. A driver is imported only when its store is named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from budgetguard_core.clock import Clock
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.amounts import LARGEST_CEILING, LARGEST_CEILING_IN_LUA
from budgetguard_core.ledger.sqlite import SqliteLedgerStore, check_synchronous
from budgetguard_core.ledger.windows import CALENDAR, RUN, check_name

if TYPE_CHECKING:
    from budgetguard_core.ledger.postgres import PostgresLedgerStore
    from budgetguard_core.ledger.redis import RedisLedgerStore

Store: TypeAlias = "SqliteLedgerStore | RedisLedgerStore | PostgresLedgerStore"
"""One of the three stores. Every method is one bounded trip, may be called from any thread, may be
repeated, and raises `LedgerUnreachable` when the store does not answer."""
_REDIS = ("redis", "rediss", "unix")
_POSTGRES = ("postgresql", "postgres")
_OF_REPLIES = ("decode_responses", "encoding", "encoding_errors")
"""Options of redis-py that change what it returns."""
_OF_PLACES = ("db", "options", "service", "host", "hostaddr", "port", "dbname")
"""Options that name a ledger, as a schema or another server does."""


class Address(NamedTuple):
    """A store that can be opened, any number of times."""

    shown: str
    """The URL without user, password and options, for people."""
    fingerprint: str
    """Tells ledgers apart on the disk, without saying which."""
    open: Callable[[], Store]
    is_server: bool
    largest_ceiling: int
    windows: str
    """The kinds of its windows."""


def default_path() -> Path:
    """Return the file of the ledger that has no URL."""
    return Path.home() / ".budgetguard" / "ledger.sqlite3"


def parse_url(url: str | None, *, timeout: float = 1.0, clock: Clock | None = None) -> Address:
    """Find the store that a URL names, and its driver; nothing is opened.

    Args:
        url: `sqlite:///relative.sqlite3` or `sqlite:////absolute/path`, with `?synchronous=normal`;
            `redis://`, `rediss://`, with `?name=` for several ledgers in one data base;
            `postgresql://`, with libpq's own options. All of them with `?windows=run` for a ledger
            of one run. None is a file in the home directory.
        timeout: Seconds until a step gives up.
        clock: The ledger's clock, for SQLite; servers have their own.

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
        host = parts.netloc.rpartition("@")[2]  # of PostgreSQL several, each with a port
        if "," not in host:
            host = f"{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"
    except ValueError:
        raise _wrong("another") from None
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    windows = options.pop("windows", None)
    if windows not in (None, "run"):
        raise ConfigurationError(
            f"windows must be run, or left out for days and months, got {windows[:20]!r}. "
            "Use ?windows=run."
        )
    scheme, place, largest = parts.scheme, "", LARGEST_CEILING
    shown = f"{scheme}://{host}{parts.path}"
    bare = url.partition("?")[0]  # urlunsplit knows no unix://
    if scheme == "sqlite":
        shown, open_store = _sqlite(parts.netloc, unquote(parts.path), options, timeout, clock)
    elif scheme in _REDIS:
        _need("redis", "Redis", "redis")
        number = parts.path.strip("/")
        if scheme != "unix" and number and not (number.isascii() and number.isdigit()):
            # redis-py would take the first one.
            raise ConfigurationError(
                f"a data base of Redis must be a number, got {number[:40]!r}. "
                "Use redis://host:6379/0, and ?name= for several ledgers in it."
            )
        name = check_name(options.pop("name", "budgetguard"), "name")
        shown += f"?name={name}"
        kept = {option: value for option, value in options.items() if option not in _OF_REPLIES}
        open_store = partial(_open_redis, f"{bare}?{urlencode(kept)}", name, timeout)
        largest = LARGEST_CEILING_IN_LUA
    elif scheme in _POSTGRES:
        _need("postgres", "PostgreSQL", "psycopg", "psycopg_pool")
        query = urlencode(options, quote_via=quote)  # libpq takes no + for a space
        open_store = partial(_open_postgres, f"{bare}?{query}" if query else bare, timeout)
        # Where no data base is named, it is the user's.
        if not (parts.path.strip("/") or "dbname" in options or "service" in options):
            place = parts.username or options.get("user", "")
    else:
        raise _wrong(f"{scheme[:20]}://" if scheme else "none")
    place += "".join(f"&{name}={options[name]}" for name in _OF_PLACES if name in options)
    fingerprint = sha256((shown + place).encode()).hexdigest()[:16]
    kinds = CALENDAR if windows is None else RUN
    return Address(shown, fingerprint, open_store, scheme != "sqlite", largest, kinds)


def _sqlite(
    netloc: str, path: str, options: dict[str, str], timeout: float, clock: Clock | None
) -> tuple[str, Callable[[], Store]]:
    synchronous = check_synchronous(options.pop("synchronous", "FULL"))
    if netloc or options or len(path) < 2:
        raise ConfigurationError(
            "a ledger in SQLite must be named sqlite:///file, with synchronous as its only option, "
            f"got {f'sqlite://{netloc}{path}'[:80]!r}. "
            "Use sqlite:///ledger.sqlite3 or sqlite:////var/lib/ledger.sqlite3."
        )
    # sqlite:///a is relative and sqlite:////a absolute, as in SQLAlchemy.
    file = Path(path[1:]).absolute()
    store = partial(SqliteLedgerStore, file, synchronous=synchronous, timeout=timeout, clock=clock)
    return f"sqlite:///{file}", store


def _open_redis(url: str, name: str, timeout: float) -> Store:
    from budgetguard_core.ledger.redis import RedisLedgerStore

    return RedisLedgerStore(url, name=name, timeout=timeout)


def _open_postgres(url: str, timeout: float) -> Store:
    from budgetguard_core.ledger.postgres import PostgresLedgerStore

    return PostgresLedgerStore(url, timeout=timeout)


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
