"""One thread per process: settlements and kill switches."""

from __future__ import annotations

import threading
from collections.abc import Callable

BEAT_SECONDS = 0.5
"""Between two looks at the store. A kill is seen within it and one trip."""


class Heartbeat:
    """Calls `tick` while there is something to do; the thread ends with the last of it.

    Args:
        tick: Returns whether there is more to do.
        seconds: Between two calls.
    """

    def __init__(self, tick: Callable[[], bool], seconds: float = BEAT_SECONDS) -> None:
        self._tick = tick
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Forget the thread, which stayed in the parent process."""
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def hurry(self) -> None:
        """Have `tick` called soon, if the thread runs."""
        if self._thread is not None:
            self._event.set()

    def wake(self) -> None:
        """Have `tick` called soon; starts the thread where there is none."""
        self._event.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._stopped:
                    self._thread = threading.Thread(
                        target=self._run, name="budgetguard-ledger", daemon=True
                    )
                    self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait until the call of `tick` under way has returned."""
        with self._lock:
            self._stopped = True
            thread = self._thread
        self._event.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._lock:
            self._stopped = False

    def _run(self) -> None:
        while True:
            self._event.wait(self._seconds)
            self._event.clear()
            more = not self._stopped and self._tick()
            with self._lock:
                if self._stopped or not (more or self._event.is_set()):
                    self._thread = None
                    return
