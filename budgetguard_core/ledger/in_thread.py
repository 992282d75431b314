"""Calls of a server that no signal's handler interrupts half way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

_R = TypeVar("_R")


class InThread:
    """Makes the calls of the main thread, where handlers run, in another one.

    A handler that raises between a request and its reply would leave a connection behind whose next
    reply is that of another question, and a lock written in Python (`concurrent.futures`) held.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: SimpleQueue[Callable[[], None] | None] | None = None

    def __call__(self, call: Callable[[], _R]) -> _R:
        """Make a call, and wait for it."""
        is_main = threading.current_thread() is threading.main_thread()
        return self.send(call)() if is_main else call()

    def send(self, call: Callable[[], _R]) -> Callable[[], _R]:
        """Queue a call for the thread, behind those before it; return what waits for it."""
        done, results, errors = threading.Lock(), list[_R](), list[BaseException]()

        def make() -> None:
            try:
                results.append(call())
            except BaseException as error:
                errors.append(error)
            finally:
                done.release()

        def wait() -> _R:
            with done:
                pass
            for error in errors:
                raise error
            return results[0]

        done.acquire()
        with self._lock:
            if self._calls is None:
                calls = SimpleQueue[Callable[[], None] | None]()
                threading.Thread(target=_serve, args=(calls,), daemon=True).start()
                self._calls = calls
            self._calls.put(make)
        return wait

    def close(self) -> None:
        """End the thread behind what it does."""
        with self._lock:
            if self._calls is not None:
                self._calls.put(None)
                self._calls = None


def _serve(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
