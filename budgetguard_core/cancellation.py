"""A token that tools and I/O can watch, so that work in flight ends when its run does."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable


class CancellationToken:
    """A signal to work in flight that its run was aborted; set once, from any thread."""

    def __init__(self, parent: CancellationToken | None = None) -> None:
        self._cancelled = False
        # Made when somebody waits, or when there is a sub-agent: thousands of runs have neither.
        self._event: threading.Event | None = None
        # Re-entrant, because a signal handler may cancel in the middle of anything here.
        self._lock = threading.RLock()
        # By a key of their own: thousands of calls at once each take theirs back.
        self._callbacks: dict[object, Callable[[], object]] = {}
        # Weak, so that a long run does not keep the tokens of all the sub-agents it has had.
        self._children: weakref.WeakSet[CancellationToken] | None = None
        if parent is not None:
            parent.adopt(self)

    @property
    def cancelled(self) -> bool:
        """True if the run was aborted."""
        return self._cancelled

    def wait(self, seconds: float | None = None) -> bool:
        """Block until the run is aborted, at most `seconds`; return whether it was."""
        with self._lock:
            if self._cancelled:
                return True
            if self._event is None:
                self._event = threading.Event()
            event = self._event
        return event.wait(seconds)

    def on_cancel(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` once when the run is aborted, at once if it is already.

        It runs in the thread that aborts: an event loop is reached with `call_soon_threadsafe`.

        Returns:
            A function that takes the callback back.
        """
        with self._lock:
            if not self._cancelled:
                key = object()
                self._callbacks[key] = callback
                return lambda: self._forget(key)
        callback()
        return lambda: None

    def cancel(self) -> list[Exception]:
        """Set the token and those of all sub-agents; return what the callbacks raised."""
        with self._lock:
            self._cancelled = True
            if self._event is not None:
                self._event.set()
            callbacks, self._callbacks = list(self._callbacks.values()), {}
            children = list(self._children or ())
        errors: list[Exception] = []
        for callback in callbacks:
            try:
                callback()
            except Exception as error:
                errors.append(error)
        for child in children:
            errors += child.cancel()
        return errors

    def adopt(self, child: CancellationToken) -> None:
        """Set `child` whenever this token is set."""
        with self._lock:
            if self._children is None:
                self._children = weakref.WeakSet()
            self._children.add(child)
            cancelled = self._cancelled
        if cancelled:
            child.cancel()

    def _forget(self, key: object) -> None:
        with self._lock:
            self._callbacks.pop(key, None)
