"""Connections to providers that go past the seam, seen by their look-ups of hosts."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from budgetguard_http._policy import is_provider

Counts: TypeAlias = dict[str, int]

_LOOK_UP: Final = "socket.getaddrinfo"


class _Watcher:
    """Counts look-ups of provider hosts that no request in flight explains."""

    def __init__(self) -> None:
        # Again by the same thread: a signal's handler may look up a host of its own.
        self.lock = threading.RLock()
        self.on = False
        self.expected: Counter[str] = Counter()
        self.uncovered: Counter[str] = Counter()

    def heard(self, event: str, args: tuple[Any, ...]) -> None:
        """Take an audit event of the interpreter."""
        if event != _LOOK_UP or not args:
            return
        host = args[0]
        if isinstance(host, bytes):
            host = host.decode("ascii", "replace")
        # Where a name is looked up in a thread of an event loop's, no context tells whose it is:
        # a request in flight to the same host explains it.
        if not isinstance(host, str) or not is_provider(host):
            return
        with self.lock:
            if not self.expected.get(_plain(host)):
                self.uncovered[_plain(host)] += 1


def _plain(host: str) -> str:
    return host.lower().removesuffix(".")


_WATCHER: Final = _Watcher()


def watch() -> None:
    """Begin to count; the hook stays in the process, because Python takes none back."""
    with _WATCHER.lock:
        if _WATCHER.on:
            return
        _WATCHER.on = True
    sys.addaudithook(_WATCHER.heard)


def uncovered_hosts() -> Counts:
    """Return how often each provider's host was connected to past the seam, since `watch`.

    Websockets, aiohttp, `requests` and the like are seen when they look a host up: a connection
    that is used again counts once. gRPC looks up names without a word to Python.
    """
    with _WATCHER.lock:
        return dict(_WATCHER.uncovered)


def is_on() -> bool:
    """Return whether connections are counted."""
    return _WATCHER.on


@contextmanager
def expected(host: str) -> Generator[None]:
    """Mark requests to a host as going through the seam in this block."""
    host = _plain(host)
    with _WATCHER.lock:
        _WATCHER.expected[host] += 1
    try:
        yield
    finally:
        with _WATCHER.lock:
            _WATCHER.expected[host] -= 1
