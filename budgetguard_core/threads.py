"""Threads and pools that code of a block starts: a part of the block, as tasks are.

While a block is open, `Thread.start` and the ways into pools are wrapped. What they start gets the
frame of the code that starts it, and nothing else of its context. A thread of `_thread`, a worker
that reads from a queue and is older than the block, and other processes are not covered.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from budgetguard_core.frame import FRAME, Frame

_LOG: Final = logging.getLogger("budgetguard")
_PROCESSES: Final = (
    "calls in other processes are not counted: a pool of processes was used in a bounded block. "
    "Use threads, or `budgetguard run` with a ledger."
)
_OURS: Final = "budgetguard-"
"""Threads of such a name serve all runs, whoever came first."""
_WARNED: set[str] = set()


def _within(frame: Frame | None, work: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as a part of a frame."""

    def inside(*args: Any, **kwargs: Any) -> Any:
        token = FRAME.set(frame)
        try:
            return work(*args, **kwargs)
        finally:
            FRAME.reset(token)

    return inside


def _start(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(thread: threading.Thread) -> Any:
        frame = FRAME.get()
        if frame is None or thread.name.startswith(_OURS) or thread.ident is not None:
            return original(thread)
        # On the instance: a class of the user's has a `run` of its own.
        vars(thread)["run"] = _within(frame, thread.run)
        return original(thread)

    return start


def _of_a_pool(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(pool: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
        frame = FRAME.get()
        if frame is None:
            return original(pool, work, *args, **kwargs)
        if _has_threads(pool):
            work = _within(frame, work)
        elif not _WARNED:
            _WARNED.add(_PROCESSES)
            _LOG.warning(_PROCESSES)
        # The workers that it starts serve others as well.
        token = FRAME.set(None)
        try:
            return original(pool, work, *args, **kwargs)
        finally:
            FRAME.reset(token)

    return method


def _has_threads(pool: object) -> bool:
    from concurrent.futures import ThreadPoolExecutor
    from multiprocessing.pool import ThreadPool

    return isinstance(pool, ThreadPoolExecutor | ThreadPool)


def _methods() -> list[tuple[type, str, Callable[..., Any]]]:
    # Here, because whoever opens no block need not import them.
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
    from multiprocessing.pool import Pool

    names = ("apply_async", "map", "map_async", "starmap", "starmap_async", "imap")
    # A timer has a `start` of its own where an instrumentation gave it one.
    starts = [one for one in (threading.Thread, threading.Timer) if "start" in vars(one)]
    return [
        *((one, "start", _start) for one in starts),
        (ThreadPoolExecutor, "submit", _of_a_pool),
        (ProcessPoolExecutor, "submit", _of_a_pool),
        *((Pool, name, _of_a_pool) for name in (*names, "imap_unordered")),
    ]


class Block:
    """A block that is open as long as it is kept, or until `Instrumentation.closed`."""

    __slots__ = ("__weakref__",)


class Instrumentation:
    """The wraps around the methods above, while blocks are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weak, because a run may be dropped without its end.
        self._blocks = weakref.WeakSet[Block]()
        self._wraps: dict[tuple[type, str], tuple[Any, Any]] = {}

    def open_block(self) -> Block:
        """Open a block; the first installs the wraps."""
        block = Block()
        with self._lock:
            is_first = not self._blocks
            self._blocks.add(block)
            if not is_first:
                return block
            for owner, name, wrap in _methods():
                if (owner, name) not in self._wraps:
                    original = getattr(owner, name)
                    ours = wrap(original)
                    ours.__wrapped__ = original
                    # As it stands in the class: a wrap of wrapt's differs on each access.
                    self._wraps[owner, name] = vars(owner)[name], ours
                    setattr(owner, name, ours)
        return block

    def closed(self, block: Block) -> None:
        """Close a block; the last takes the wraps off."""
        with self._lock:
            self._blocks.discard(block)
            if self._blocks:
                return
            for (owner, name), (original, ours) in list(self._wraps.items()):
                # One that somebody has wrapped since stays: without a frame it does nothing.
                if vars(owner).get(name) is ours:
                    setattr(owner, name, original)
                    del self._wraps[owner, name]


THREADS: Final = Instrumentation()
