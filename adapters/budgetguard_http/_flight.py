"""A blocking call in flight: ended from another thread by shutting its connection down."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from budgetguard_core import Trip
from budgetguard_core.kit import Run, Watch

_CONNECTED: Final = ("connection.connect_tcp.complete", "connection.start_tls.complete")


class Flight:
    """One blocking request, from before it is sent to the end of its answer.

    At the deadline, and when the run is aborted, the socket that it waits on is shut down, so that
    the wait ends at once. A connection that others share (HTTP/2), and one that was taken from the
    pool before its answer has begun, is left alone: there the time-out of the request ends the wait
    at the deadline, and an abort is seen when the answer begins.

    Attributes:
        shut: Ends the wait; None where nothing can.
        left: Seconds until the deadline when the request was about to be sent; None without one.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.shut: Callable[[], object] | None = None
        self._extensions: dict[str, Any] = {}
        self._is_over = False
        self._watch = Watch(run, self._cut, blocking=True)
        self.rest = self._watch.rest

    @property
    def trip(self) -> Trip | None:
        """Why the request was cut; None where it was not."""
        return self._watch.trip

    def is_late(self) -> bool:
        """Return whether the run has ended while the request was in flight."""
        return ended(self._run, self.trip) is not None

    def trace(self, extensions: dict[str, Any]) -> None:
        """Trace the connection by an extension of the request, httpx's `trace`."""
        if "trace" not in extensions:
            extensions["trace"] = self._traced
            self._extensions = extensions

    def _traced(self, event: str, info: Any) -> None:
        """Take an event of the connection."""
        if event[:4] == "http":
            if event[:6] == "http2.":
                self.shut = None
            # It is connected. What follows is told for nothing, event by event.
            self._extensions.pop("trace", None)
        elif event in _CONNECTED:
            self.shut = functools.partial(_shut_down, info.get("return_value"))

    def answered(self, response: Any) -> None:
        """Take the beginning of the answer, which tells its connection."""
        extensions = response.extensions
        stream = extensions.get("network_stream")
        is_shared = stream is None or extensions.get("http_version") == b"HTTP/2"
        self.shut = None if is_shared else functools.partial(_shut_down, stream)

    def close(self) -> None:
        """Close it; safe to call again."""
        if self._is_over:
            return
        self._is_over = True
        self.shut = None
        self._extensions = {}
        self._watch.close()

    def _cut(self) -> None:
        if self.shut is not None:
            with suppress(Exception):
                # The answer may have come to its end by itself.
                self.shut()


def ended(run: Run, cut: Trip | None) -> Trip | None:
    """Return why a run has ended: what has cut a call of it, or what holds now."""
    is_over = run.aborted or run.time_left() == 0
    return run.check() if cut is None and is_over else cut


def _shut_down(stream: Any) -> None:
    connection = stream.get_extra_info("socket")
    if isinstance(connection, socket.socket):
        # Not that of a TLS socket, which would forget its encryption while it is read.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
