"""Calls of a server that no signal's handler interrupts half way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_R = TypeVar("_R")


class InThread:
    """Makes the calls of the main thread in another one.

    Handlers run in the main thread. One that raises between a request and its reply would leave a
    connection behind whose next reply is that of another question.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self, call: Callable[[], _R]) -> _R:
        """Make a call, and wait for it."""
        if threading.current_thread() is not threading.main_thread():
            return call()
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "budgetguard-call")
            pool = self._pool
        try:
            future = pool.submit(call)
        except RuntimeError:  # the interpreter ends
            return call()
        return future.result()

    def close(self) -> None:
        """End the thread behind what it does."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False)
                self._pool = None
