"""Connections to providers that go past the seam, seen by the interpreter's audit events."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
        """Be called by the interpreter."""
        if event != _LOOK_UP or not args:
            return
        host = args[0]
        if isinstance(host, bytes):
            host = host.decode("ascii", "replace")
        # Where a name is looked up in a thread of an event loop's, no context tells whose it is:
        # a request in flight to the same host explains it.
        if not isinstance(host, str) or not is_provider(host):
            return
        host = host.lower().removesuffix(".")
        if not self.expected.get(host):
            with self.lock:
                self.uncovered[host] += 1


_WATCHER: Final = _Watcher()


def watch() -> None:
    """Begin to count; the hook stays in the process, because Python takes none back."""
    with _WATCHER.lock:
        if _WATCHER.on:
            return
        _WATCHER.on = True
    sys.addaudithook(_WATCHER.heard)


def uncovered_hosts() -> Counts:
    """Return how often each provider's host was looked up past the seam, since `watch`.

    Websockets, aiohttp, `requests` and the like are seen, a gRPC channel with a resolver of its own
    is not. A connection that is used again is looked up once.
    """
    with _WATCHER.lock:
        return dict(_WATCHER.uncovered)


_NOTHING: Final = nullcontext()


def expected(url: Any) -> AbstractContextManager[None]:
    """Say that a request to an address goes through the seam in this block."""
    return _expected(url.host) if _WATCHER.on else _NOTHING


@contextmanager
def _expected(host: str) -> Generator[None]:
    host = host.lower().removesuffix(".")
    with _WATCHER.lock:
        _WATCHER.expected[host] += 1
    try:
        yield
    finally:
        with _WATCHER.lock:
            _WATCHER.expected[host] -= 1
