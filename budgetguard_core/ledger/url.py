"""Stores by URL. A driver is imported only when its store is named."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

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
_REDIS = frozenset({"redis", "rediss", "unix"})
_POSTGRES = frozenset({"postgresql", "postgres"})
_OF_REPLIES = ("decode_responses", "encoding", "encoding_errors")
"""Options of redis-py that change what it returns."""
_OF_LIBPQ = ("service", "host", "hostaddr", "port", "dbname")


class Address(NamedTuple):
    """A store that can be opened, any number of times."""

    shown: str
    """The URL without user, password and options, for people."""
    fingerprint: str
    """Tells ledgers apart on the disk, without saying which."""
    open: Callable[[], Store]
    largest_ceiling: int = LARGEST_CEILING
    windows: str = CALENDAR
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
    if url is None:
        url = f"sqlite:///{default_path()}"
    if not isinstance(url, str):
        raise ConfigurationError(
            f"a ledger must be a URL or a Ledger, got {type(url).__name__}. "
            "Use sqlite:///ledger.sqlite3, redis://host:6379/0 or postgresql://host/name."
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", None
        if parts.scheme in _POSTGRES and "," in parts.netloc:  # several, each with a port
            host = parts.netloc.rpartition("@")[2]
        else:
            port = parts.port
    except ValueError:
        raise _wrong("another") from None
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    shown = f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}"
    windows, url = _windows(options, url)
    name = options.pop("name", "budgetguard") if parts.scheme in _REDIS else ""
    if name:
        shown += f"?name={check_name(name, 'name')}"
    if parts.scheme == "sqlite":
        path = unquote(parts.path)
        return _sqlite(parts.netloc, path, options, shown, timeout, clock)._replace(windows=windows)
    if parts.scheme in _REDIS:
        _need("redis", "redis", "Redis")
        number = parts.path.strip("/")
        if parts.scheme != "unix" and number and not (number.isascii() and number.isdigit()):
            # redis-py would take the first one.
            raise ConfigurationError(
                f"a data base of Redis must be a number, got {number[:40]!r}. "
                "Use redis://host:6379/0, and ?name= for several ledgers in it."
            )
        options = {option: value for option, value in options.items() if option not in _OF_REPLIES}
        bare = f"{url.partition('?')[0]}?{urlencode(options)}"  # urlunsplit knows no unix://

        def open_redis() -> Store:
            from budgetguard_core.ledger.redis import RedisLedgerStore

            return RedisLedgerStore(bare, name=name, timeout=timeout)

        return _address(shown, open_redis, _which(options, ("db",)))._replace(
            largest_ceiling=LARGEST_CEILING_IN_LUA, windows=windows
        )
    if parts.scheme in _POSTGRES:
        _need("psycopg", "postgres", "PostgreSQL")

        def open_postgres() -> Store:
            from budgetguard_core.ledger.postgres import PostgresLedgerStore

            return PostgresLedgerStore(url, timeout=timeout)

        # Another schema is another ledger; so is another user's data base, where none is named.
        which = options.pop("options", "") + _which(options, _OF_LIBPQ)
        if not (parts.path.strip("/") or "dbname" in options or "service" in options):
            which += parts.username or options.get("user", "")
        return _address(shown, open_postgres, which)._replace(windows=windows)
    raise _wrong(f"{parts.scheme[:20]}://" if parts.scheme else "none")


def _windows(options: dict[str, str], url: str) -> tuple[str, str]:
    """Return the kinds of windows that a URL asks for, and the URL without that option."""
    given = options.pop("windows", None)
    if given is None:
        return CALENDAR, url
    if given != "run":
        raise ConfigurationError(
            f"windows must be run, or left out for days and months, got {given[:20]!r}. "
            "Use ?windows=run."
        )
    base, _, query = url.partition("?")
    rest = "&".join(one for one in query.split("&") if one != "windows=run")
    return RUN, f"{base}?{rest}" if rest else base


def _sqlite(
    netloc: str,
    path: str,
    options: dict[str, str],
    shown: str,
    timeout: float,
    clock: Clock | None,
) -> Address:
    synchronous = check_synchronous(options.pop("synchronous", "FULL"))
    if netloc or options or len(path) < 2:
        raise ConfigurationError(
            "a ledger in SQLite must be named sqlite:///file, with synchronous as its only option, "
            f"got {shown[:80]!r}. Use sqlite:///ledger.sqlite3 or sqlite:////var/lib/ledger.sqlite3."
        )
    # sqlite:///a is relative and sqlite:////a absolute, as in SQLAlchemy.
    file = Path(path[1:]).absolute()

    def open_sqlite() -> Store:
        return SqliteLedgerStore(file, synchronous=synchronous, timeout=timeout, clock=clock)

    return _address(f"sqlite:///{file}", open_sqlite)


def _which(options: dict[str, str], names: tuple[str, ...]) -> str:
    """Return the options that say which ledger it is."""
    return "".join(f"&{name}={options[name]}" for name in names if name in options)


def _address(shown: str, open_: Callable[[], Store], more: str = "") -> Address:
    return Address(shown, sha256((shown + more).encode()).hexdigest()[:16], open_)


def _need(module: str, extra: str, what: str) -> None:
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
