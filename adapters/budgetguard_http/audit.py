"""Connections to providers that go past the seam, seen by their look-ups of hosts."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from budgetguard_http._policy import is_provider, plain_host

# Again by the same thread: a signal's handler may look up a host of its own.
_LOCK: Final = threading.RLock()
_EXPECTED: Final = Counter[str]()
_UNCOVERED: Final = Counter[str]()
_HOOKS: Final[list[Any]] = []


def _heard(event: str, args: tuple[Any, ...]) -> None:
    """Take an audit event of the interpreter: a look-up that no request in flight explains."""
    host = args[0] if event == "socket.getaddrinfo" and args else None
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    # No context tells whose look-up in a thread of an event loop's it is: a request in flight does.
    if isinstance(host, str) and is_provider(host):
        with _LOCK:
            if not _EXPECTED[plain_host(host)]:
                _UNCOVERED[plain_host(host)] += 1


def watch() -> None:
    """Begin to count; the hook stays in the process, because Python takes none back."""
    with _LOCK:
        if not _HOOKS:
            _HOOKS.append(_heard)
            sys.addaudithook(_heard)


def uncovered_hosts() -> dict[str, int]:
    """Return how often each provider's host was connected to past the seam, since `watch`.

    Websockets, aiohttp, `requests` and the like are seen when they look a host up: a connection
    that is used again counts once. gRPC looks up names without a word to Python.
    """
    with _LOCK:
        return dict(_UNCOVERED)


def is_on() -> bool:
    """Return whether connections are counted."""
    return bool(_HOOKS)


@contextmanager
def expected(host: str) -> Generator[None]:
    """Mark requests to a host as going through the seam in this block."""
    host = plain_host(host)
    with _LOCK:
        _EXPECTED[host] += 1
    try:
        yield
    finally:
        with _LOCK:
            _EXPECTED[host] -= 1
