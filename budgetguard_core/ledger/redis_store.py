"""The ledger in Redis or Valkey: one script call for each step."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Sequence
from importlib.resources import files
from typing import Any
from urllib.parse import quote, unquote

from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.amounts import LARGEST_CEILING_IN_LUA, Amount
from budgetguard_core.ledger.errors import LedgerError, LedgerUnreachable
from budgetguard_core.ledger.step import (
    SEPARATOR,
    TOMBSTONE_SECONDS,
    Answer,
    HoldRecord,
    Step,
    WindowRecord,
)

_LOG = logging.getLogger("budgetguard")
_SCRIPT = files("budgetguard_core.ledger").joinpath("step.lua").read_text("utf-8")
_SHA = hashlib.sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()
_SAFE_POLICY = "noeviction"
_AT_ONCE = 500


class RedisLedgerStore:
    """A `Store` in Redis 6 or later, or Valkey.

    All keys have one hash tag, so that on a cluster tenant, user and kill switches are one step.

    Args:
        url: As redis-py takes it.
        name: Two ledgers in one data base have different names.
        timeout: Seconds until a step gives up.

    Raises:
        ConfigurationError: The URL makes no sense, or redis-py is missing.
        LedgerUnreachable: The server does not answer.
        LedgerError: The server would throw keys away.
    """

    largest_ceiling = LARGEST_CEILING_IN_LUA

    def __init__(self, url: str, *, name: str = "budgetguard", timeout: float = 1.0) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.exceptions import NoScriptError
            from redis.retry import Retry
        except ModuleNotFoundError as error:
            if error.name != "redis":
                raise
            raise ConfigurationError(
                "a ledger in Redis needs redis-py, which is not installed. "
                'Install the extra from the checkout: pip install ".[redis]"'
            ) from None
        self._url = url
        # redis-py's own defaults hold a caller for a minute: 5 s, and ten attempts.
        self._options: dict[str, Any] = {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 0),
        }
        self._errors = (redis.RedisError, OSError)
        self._cut: type[Exception] = redis.ConnectionError
        self._missing: type[Exception] = NoScriptError
        self._class: Any = redis.Redis
        self._prefix = "{" + quote(name, safe="") + "}"
        self._conf = f"{self._prefix}:conf"
        self._client = self._connect()
        try:
            self._check_policy()
        except TypeError:  # an option that redis-py's connections do not take
            raise _wrong_url() from None

    def _connect(self) -> Any:
        try:
            return self._class.from_url(self._url, **self._options)
        except (ValueError, TypeError):
            raise _wrong_url() from None

    def _call(self, *command: Any) -> Any:
        try:
            try:
                return self._client.execute_command(*command)
            except self._cut:
                # A server that was restarted, or a proxy that ends what was idle. Once more on a
                # new connection: every command counts once, however often it is sent. A time-out
                # is not among these errors.
                return self._client.execute_command(*command)
        except self._missing:
            raise
        except self._errors as error:
            raise _unreachable(error) from None

    def _check_policy(self) -> None:
        # INFO, because CONFIG is often forbidden.
        facts = {**self._call("INFO", "memory"), **self._call("INFO", "persistence")}
        policy = str(facts.get("maxmemory_policy", _SAFE_POLICY))
        if int(facts.get("maxmemory", 0)) and policy != _SAFE_POLICY:
            raise LedgerError(
                f"maxmemory-policy must be {_SAFE_POLICY}, got {policy[:30]}: a window that is "
                "evicted frees its whole ceiling. Set it, or give the ledger a server of its own."
            )
        if not int(facts.get("aof_enabled", 0)):
            _LOG.warning(
                "the ledger's Redis keeps no append-only file: when it is killed, every ceiling "
                "is free again. Set appendonly yes."
            )

    # The step

    def step(self, step: Step) -> Answer:
        """Apply a step once, in one script."""
        windows = step.windows
        names = [quote(window.key, safe="") for window in windows[::2]]
        keys = [
            self._conf,
            f"{self._prefix}:h:{quote(step.id, safe='')}",
            f"{self._prefix}:o:{names[0]}",
            *[f"{self._prefix}:w:{name}" for name in names],
        ]
        made_in: list[str] = []
        of_keys: list[Any] = []
        for name, day, month in zip(names, windows[::2], windows[1::2], strict=True):
            made_in += (name, day.label, month.label)
            of_keys += (name, day.label, *day.ceiling, day.oldest)
            of_keys += (month.label, *month.ceiling, month.oldest)
        arguments = [
            step.id,
            step.op,
            int(step.close),
            step.ttl,
            step.share,
            TOMBSTONE_SECONDS,
            *step.spent,
            *step.keep,
            *step.need,
            *step.want,
            max([window.start for window in windows]),
            min([window.end for window in windows]),
            len(step.flags),
            len(names),
            step.ledger,
            step.owner,
            " ".join(made_in),
            *step.flags,
            *of_keys,
        ]
        try:
            got = self._call("EVALSHA", _SHA, len(keys), *keys, *arguments)
        except self._missing:
            got = self._call("EVAL", _SCRIPT, len(keys), *keys, *arguments)
        status, usd, tokens, detail, now, warn = got
        return Answer(status.decode(), Amount(usd, tokens), detail.decode(), float(now), int(warn))

    # Notes, ceilings, reports

    def now(self) -> float:
        """Return the server's clock."""
        seconds, micros = self._call("TIME")
        return float(seconds) + float(micros) / 1e6

    def identity(self) -> str:
        """Return the id of the ledger, made at first use."""
        self._call("HSETNX", self._conf, "id", uuid.uuid4().hex)
        return str(self._call("HGET", self._conf, "id").decode())

    def adopt(self) -> str:
        """Say that this ledger is meant; return its id."""
        found = self.identity()
        self._call("HSET", self._conf, "adopted", "1")
        return found

    def read(self, names: Sequence[str]) -> list[str | None]:
        """Return notes by name."""
        found = self._call("HMGET", self._conf, *names)
        return [None if text is None else text.decode() for text in found]

    def scan(self, prefix: str) -> dict[str, str]:
        """Return the notes whose name begins so."""
        notes: dict[str, str] = {}
        cursor: Any = 0
        while True:
            cursor, found = self._call("HSCAN", self._conf, cursor, "COUNT", _AT_ONCE)
            for name, text in found.items():
                if name.decode().startswith(prefix):
                    notes[name.decode()] = text.decode()
            if int(cursor) == 0:
                return notes

    def write(self, name: str, text: str | None) -> None:
        """Set a note, or take it away."""
        if text is None:
            self._call("HDEL", self._conf, name)
        else:
            self._call("HSET", self._conf, name, text)

    def ceilings(self) -> dict[tuple[str, str], Amount]:
        """Return the stored ceilings by key and kind; key "" is the default."""
        found: dict[tuple[str, str], Amount] = {}
        for name, text in self.scan("c:").items():
            key, _, kind = name[2:].rpartition(":")
            usd, tokens = map(int, text.split())
            found[unquote(key), kind] = Amount(usd, tokens)
        return found

    def set_ceiling(self, key: str, kind: str, ceiling: Amount | None) -> None:
        """Store a ceiling, or take it away."""
        text = None if ceiling is None else f"{ceiling.usd} {ceiling.tokens}"
        self.write(f"c:{quote(key, safe='')}:{kind}", text)

    def windows(self) -> list[WindowRecord]:
        """Return every window. Looks through all keys of the data base."""
        found: list[WindowRecord] = []
        for name in self._names("w"):
            key = unquote(name.rpartition(":")[2])
            fields = self._call("HGETALL", name)
            found += [_window(key, label.decode(), row) for label, row in fields.items()]
        return sorted(found)

    def window(self, key: str, label: str) -> WindowRecord:
        """Return one window, also one that was never used."""
        row = self._call("HGET", f"{self._prefix}:w:{quote(key, safe='')}", label)
        return _window(key, label, row or b"0 0 0 0 0 0 0")

    def holds(self) -> list[HoldRecord]:
        """Return every hold. Looks through all keys; closed ones have no windows any more."""
        found: list[HoldRecord] = []
        for name in self._names("h"):
            text = self._call("GET", name)
            if text is not None:  # a tombstone may expire in between
                found.append(_hold(unquote(name.rpartition(":")[2]), text.decode()))
        return found

    def _names(self, what: str) -> list[str]:
        names: set[str] = set()
        cursor: Any = 0
        pattern = f"{self._prefix}:{what}:*"
        while True:
            cursor, found = self._call("SCAN", cursor, "MATCH", pattern, "COUNT", _AT_ONCE)
            names.update(name.decode() for name in found)
            if int(cursor) == 0:
                return sorted(names)

    def before_fork(self) -> bool:
        """Do nothing: what a child takes along is closed for nobody."""
        return False

    def after_fork(self) -> None:
        """Do nothing."""

    def forked(self) -> None:
        """Leave the connections to the parent process; called in a forked child."""
        self._client = self._connect()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _wrong_url() -> ConfigurationError:
    return ConfigurationError(
        "a ledger's URL must be one that redis-py understands, got another. "
        "Use redis://host:6379/0."
    )


def _unreachable(error: Exception) -> LedgerUnreachable:
    # Never the text: it may hold the URL, and with it the password.
    return LedgerUnreachable(
        f"the ledger's Redis must answer in time, got {type(error).__name__}. "
        "Check that it runs and can be reached."
    )


def _window(key: str, label: str, row: bytes) -> WindowRecord:
    cu, ct, su, st, _, lu, lt = map(int, row.split())
    return WindowRecord(key, label, Amount(cu, ct), Amount(su, st), Amount(lu, lt))


def _hold(hold_id: str, text: str) -> HoldRecord:
    figures, *memo = text.split(SEPARATOR)
    gu, gt, su, st, op, closed, lease, *expires = figures.split()
    made, owner, names = memo or ("0", "", "")
    parts = names.split(" ") if names else []
    return HoldRecord(
        id=hold_id,
        owner=owner,
        granted=Amount(int(gu), int(gt)),
        spent=Amount(int(su), int(st)),
        op=int(op),
        closed=closed == "1",
        lease=lease == "1",
        made=float(made),
        expires=float(expires[0]) if expires else 0.0,
        windows=tuple(
            (unquote(parts[place]), label)
            for place in range(0, len(parts), 3)
            for label in parts[place + 1 : place + 3]
        ),
    )
