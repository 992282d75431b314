"""One writer at a time over all processes, its checkpoint included.

SQLite before 3.51.3 (3.50.7, 3.44.6 in their lines) may lose committed pages when a checkpoint
meets a commit; here they never meet. Its own waiting also lets one process starve for seconds.
The kernel frees the lock when its holder is killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from pathlib import Path

from budgetguard_core.clock import SystemClock

_FIRST_PAUSE = 0.0001
_LONGEST_PAUSE = 0.002

if sys.platform == "win32":  # pragma: no cover
    import msvcrt

    def _try_lock(fd: int) -> bool:
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _lock(fd: int) -> None:  # noqa: ARG001
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    def _unlock(fd: int) -> None:
        os.lseek(fd, 0, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _try_lock(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _lock(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX)

    def _unlock(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)


class FileLock:
    """A lock on a file beside a database; a context manager for one thread at a time.

    Entering it raises `TimeoutError` when another process holds it for longer than `timeout`
    seconds.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self._timeout = timeout
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        self._was_held = False
        self._waiter: _Waiter | None = None

    def acquire(self) -> bool:
        """Take the lock if it is free; closing the file frees it."""
        return _try_lock(self._fd)

    def __enter__(self) -> None:
        waiter = self._waiter
        # While a thread waits for this very file, the kernel would give it to both.
        if (waiter is None or not waiter.is_waiting) and _try_lock(self._fd):
            return
        deadline = SystemClock.monotonic_ns() + int(self._timeout * 1e9)
        # Who never had it polls: attempts to open a file that stays locked leave no threads behind.
        if waiter is None and self._was_held and sys.platform != "win32":
            # No more threads, as while the interpreter ends: then it polls as well.
            with contextlib.suppress(RuntimeError):
                waiter = self._waiter = _Waiter(self._fd)
        taken = waiter.wait(self._timeout) if waiter else _poll(self._fd, deadline)
        if not taken:
            raise TimeoutError(
                f"the file must be free within {self._timeout} s, got a process that held it "
                "for longer. Find the process that stands still, or raise timeout."
            )

    def __exit__(self, *_: object) -> None:
        self._was_held = True
        _unlock(self._fd)

    def close(self) -> None:
        """Close the file; frees the lock where no other process inherited it."""
        if self._waiter is None or not self._waiter.close():
            os.close(self._fd)


class _Waiter:
    """A thread that waits for a lock in the kernel, which knows no time-out.

    With 8 processes on one ledger that takes two thirds of the processor time of polling, gives
    more pairs a second, and half the longest wait.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        # Both held from the start: releasing one is a signal to the other thread.
        self._asked, self._granted = threading.Lock(), threading.Lock()
        self._asked.acquire()
        self._granted.acquire()
        self._wanted = False
        self._closed = False
        self.is_waiting = False
        threading.Thread(target=self._run, name="budgetguard-lock", daemon=True).start()

    def wait(self, timeout: float) -> bool:
        """Tell whether the lock was granted in time."""
        with self._mutex:
            self._wanted = True
            if not self.is_waiting:
                self.is_waiting = True
                self._asked.release()
        granted = False
        try:
            granted = self._granted.acquire(timeout=timeout)
        finally:
            if not granted:
                with self._mutex:
                    self._wanted = False
                    if self._granted.acquire(blocking=False):
                        _unlock(self._fd)
        return granted

    def close(self) -> bool:
        """End the thread; tell whether it is the one that closes the file."""
        if self._pid != os.getpid():
            return False  # the thread stayed in the parent process
        with self._mutex:
            self._closed = True
            if not self.is_waiting:
                self._asked.release()
            return self.is_waiting

    def _run(self) -> None:
        while True:
            self._asked.acquire()
            if not self.is_waiting:  # closed
                return
            try:
                _lock(self._fd)
                locked = True
            except OSError:
                locked = False
            with self._mutex:
                self.is_waiting = False
                if self._closed:
                    os.close(self._fd)
                    return
                if locked and self._wanted:
                    self._wanted = False
                    self._granted.release()
                elif locked:
                    _unlock(self._fd)


def _poll(fd: int, deadline: int) -> bool:
    pause, event = _FIRST_PAUSE, threading.Event()
    while SystemClock.monotonic_ns() < deadline:
        # Spread by the time of day, so that two that wait do not wake together for ever.
        event.wait(pause * (0.5 + SystemClock.wall_ns() % 1024 / 2048))
        if _try_lock(fd):
            return True
        pause = min(pause * 1.5, _LONGEST_PAUSE)
    return False
