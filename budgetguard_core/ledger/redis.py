"""The ledger in Redis or Valkey: one script call for each step."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.errors import LedgerError, LedgerUnreachable
from budgetguard_core.ledger.step import (
    SEPARATOR,
    TOMBSTONE_SECONDS,
    Answer,
    HoldRecord,
    Identity,
    Step,
    WindowRecord,
    lines_of,
    pairs_of,
)

_LOG = logging.getLogger("budgetguard")
_SCRIPT = files("budgetguard_core.ledger").joinpath("step.lua").read_text("utf-8")
_SHA = hashlib.sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()
_SAFE_POLICY = "noeviction"
_AT_ONCE = 500


class RedisLedgerStore:
    """A `Store` in Redis 6 or later, or Valkey.

    All keys have one hash tag, so that a step is one script on one server. Two ledgers in one data
    base have different names.
    """

    def __init__(self, url: str, *, name: str = "budgetguard", timeout: float = 1.0) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.exceptions import NoScriptError
        from redis.retry import Retry

        # redis-py's own defaults hold a caller for a minute: 5 s, and ten attempts. Here a second
        # try on a new connection, within the time-out: a server was restarted or has become a
        # replica, or something between has dropped what was idle. Every command counts once,
        # however often it is sent.
        options: dict[str, Any] = {
            "socket_timeout": timeout / 2,
            "socket_connect_timeout": timeout / 2,
            "retry": Retry(NoBackoff(), 1),
            "retry_on_error": [redis.ReadOnlyError],
        }
        self._errors = (redis.RedisError, OSError)
        self._absent = (redis.ConnectionError, redis.TimeoutError, OSError)
        self._prefix = "{" + quote(name, safe="") + "}"
        self._conf, self._flags = f"{self._prefix}:conf", f"{self._prefix}:flags"
        self._missing: type[Exception] = NoScriptError
        client: Any = redis.Redis
        try:
            self._client: Any = client.from_url(url, **options)
            self._check_server()
        except (ValueError, TypeError):  # an option that redis-py does not take
            raise ConfigurationError(
                "a ledger's URL must be one that redis-py understands, got another. "
                "Use redis://host:6379/0."
            ) from None

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _call(self, *command: Any) -> Any:
        return self._ask(self._client.execute_command, *command)

    def _ask(self, work: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return work(*arguments)
        except self._missing:
            raise
        except self._errors as error:
            # Never the text: it may hold the URL, and with it the password.
            raise LedgerUnreachable(
                f"the ledger's Redis must answer in time, got {type(error).__name__}. "
                "Check that it runs and can be reached.",
                is_absent=isinstance(error, self._absent),
            ) from None

    def _check_server(self) -> None:
        facts: dict[str, Any] = {}
        for section in ("memory", "persistence", "cluster"):  # CONFIG is often forbidden
            facts |= self._call("INFO", section)
        if int(facts.get("cluster_enabled", 0)):
            raise LedgerError(
                "the ledger's Redis must be one server, got a part of a cluster, which may move "
                "the ledger's keys away. Give the ledger a server of its own."
            )
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

    def step(self, step: Step) -> Answer:
        """Apply a step once, in one script."""
        windows = step.windows
        keys = [self._conf, self._flags, f"{self._prefix}:h:{step.id}"]
        keys += [f"{self._prefix}:w:{window.key}" for window in windows]
        arguments: list[Any] = [
            *(step.verb, step.ledger, step.sequence, *step.amount),
            max([window.start for window in windows]),
            min([window.end for window in windows]),
            *(step.ttl, TOMBSTONE_SECONDS, step.owner, lines_of(windows)),
            *(len(step.flags), len(windows), *step.flags),
        ]
        for window in windows:
            arguments += (window.key, window.label, window.oldest, *window.ceiling)
        try:
            got = self._call("EVALSHA", _SHA, len(keys), *keys, *arguments)
        except self._missing:
            got = self._call("EVAL", _SCRIPT, len(keys), *keys, *arguments)
        status, amount, detail, now, warn, sequence = got
        figures = Amount.of_text(amount), detail.decode(), float(now), int(warn), int(sequence)
        return Answer(status.decode(), *figures)

    def now(self) -> float:
        """Return the server's clock."""
        seconds, micros = self._call("TIME")
        return float(seconds) + float(micros) / 1e6

    def identity(self) -> Identity:
        """Return which ledger it is; made at first use."""
        self._call("HSETNX", self._conf, "id", uuid.uuid4().hex)
        found, adopted, sequence = self._call("HMGET", self._conf, "id", "adopted", "sequence")
        return Identity(found.decode(), float(adopted or 0), int(sequence or 0))

    def notes(self, prefix: str) -> dict[str, str]:
        """Return the notes whose name begins so."""
        # The switches alone have a hash: every process reads all of them, twice a second.
        where, cut = (self._flags, "f:") if prefix == "f:" else (self._conf, "")
        found = self._call("HGETALL", where)
        notes = {cut + name.decode(): text.decode() for name, text in found.items()}
        return {name: text for name, text in notes.items() if name.startswith(prefix)}

    def write(self, name: str, text: str | None) -> None:
        """Set a note, or take it away."""
        where = self._flags if name.startswith("f:") else self._conf
        name = name.removeprefix("f:")
        if text is None:
            self._call("HDEL", where, name)
        else:
            self._call("HSET", where, name, text)

    def windows(self, key: str = "") -> list[WindowRecord]:
        """Return every window, looking through all keys of the data base, or those of one."""
        found: list[WindowRecord] = []
        for name in [key] if key else self._names("w"):
            rows = self._call("HGETALL", f"{self._prefix}:w:{name}")
            for label, row in rows.items():
                figures = [*map(int, row.split())]
                vectors = Amount(*figures[:4]), Amount(*figures[4:8]), Amount(*figures[8:12])
                found.append(WindowRecord(name, label.decode(), *vectors))
        return sorted(found)

    def holds(self) -> list[HoldRecord]:
        """Return every hold. Looks through all keys; closed ones have no windows any more."""
        found: list[HoldRecord] = []
        for name in self._names("h"):
            text = self._call("GET", f"{self._prefix}:h:{name}")
            if text is not None:  # a tombstone may expire in between
                found.append(_hold(name, text.decode()))
        return found

    def _names(self, what: str) -> list[str]:
        prefix = f"{self._prefix}:{what}:"
        found = self._ask(lambda: set(self._client.scan_iter(prefix + "*", _AT_ONCE)))
        return sorted(name.decode().removeprefix(prefix) for name in found)


def _hold(hold_id: str, text: str) -> HoldRecord:
    figures, *memo = text.split(SEPARATOR)
    state, numbers = figures.split(" ", 1)
    expires, made, owner, windows = memo or ("0", "0", "", "")
    return HoldRecord(
        id=hold_id,
        owner=owner,
        charge=Amount.of_text(numbers),
        closed=state == "c",
        made=float(made),
        expires=float(expires),
        windows=pairs_of(windows),
    )
