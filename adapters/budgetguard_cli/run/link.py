"""A process's line to its supervisor."""

from __future__ import annotations

import socket
import threading
from typing import TypeVar

from budgetguard_cli.run.messages import LONGEST, REPLY, Hello, Reply, Request, Stopped, Welcome
from budgetguard_core import StopReason, SystemClock, Trip, Violation

_R = TypeVar("_R", bound=Reply)
_CHUNK = 2**16

GONE = "the supervisor of this run is gone"


class Link:
    """Asks the supervisor, one question at a time; from any thread, also after a fork.

    Once the supervisor does not answer, it is gone for good: every question is answered with a
    stop.

    Args:
        path: The supervisor's socket.

    Attributes:
        places: The supervisor's numbers of this process's open calls, by the process's own.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._clock = SystemClock()
        self._deadline_ns: int | None = None
        self._run_id = ""
        self.places: dict[int, int] = {}
        self._stream: _Stream | None = None
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._asking: int | None = None
        self._is_lost = False

    def forked(self) -> None:
        """Forget what belongs to the process that this one was copied from."""
        self._begin()
        self.close()
        self.places.clear()

    def close(self) -> None:
        """Hang up; the next question connects anew."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def enter(self) -> Welcome | None:
        """Learn what bounds this process; None where there is no supervisor."""
        welcome = self._asked(Hello())
        if not isinstance(welcome, Welcome):
            return None
        self._run_id = welcome.run_id
        if welcome.seconds_left is not None:
            left = int(welcome.seconds_left * 1_000_000_000)
            self._deadline_ns = self._clock.monotonic_ns() + left
        return welcome

    def time_left(self) -> float | None:
        """Return the seconds until the deadline of the whole run; None without one."""
        if self._deadline_ns is None:
            return None
        return max(self._deadline_ns - self._clock.monotonic_ns(), 0) / 1_000_000_000

    def ask(self, request: Request, kind: type[_R]) -> _R | Stopped:
        """Ask; the answer is of this kind, or a stop."""
        reply = self._asked(request)
        if isinstance(reply, kind | Stopped):
            return reply
        gone = Violation(reason=StopReason.ABORTED, detail=GONE)
        return Stopped(
            trip=Trip(reason=StopReason.ABORTED, violations=(gone,), run_id=self._run_id)
        )

    def tell(self, request: Request) -> None:
        """Send a message that needs no answer."""
        self._asked(request)

    def _asked(self, request: Request) -> Reply | None:
        if self._asking == threading.get_ident():
            # A finalizer or a signal handler, in the midst of another question.
            try:
                with _Stream(self._path) as stream:
                    return stream.exchange(request)
            except OSError:
                return None
        with self._lock:
            self._asking = threading.get_ident()
            try:
                return None if self._is_lost else self._over_stream(request)
            finally:
                self._asking = None

    def _over_stream(self, request: Request) -> Reply | None:
        reply: Reply | None = None
        try:
            if self._stream is None:
                self._stream = _Stream(self._path)
            reply = self._stream.exchange(request)
        except OSError:
            pass
        except BaseException:
            # An interrupt: the answer to this would be taken for that to the next question.
            self.close()
            raise
        if reply is None:
            self._is_lost = True
            self.close()
        return reply


class _Stream:
    """One connection."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(path)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def exchange(self, request: Request) -> Reply | None:
        """Send a question and wait for its answer; None where there is none."""
        self._socket.sendall(request.model_dump_json().encode() + b"\n")
        line = b""
        # One answer to one question: nothing can come after it.
        while not line.endswith(b"\n"):
            more = self._socket.recv(_CHUNK)
            if not more or len(line) > LONGEST:
                return None
            line += more
        return REPLY.validate_json(line)

    def close(self) -> None:
        """Close it."""
        self._socket.close()
