"""One writer at a time over all processes, its checkpoint included.

SQLite before 3.51.3 (3.50.7, 3.44.6 in their lines) may lose committed pages when a checkpoint
meets a commit; here they never meet. Its own waiting also lets one process starve for seconds.
The kernel frees the lock when its holder is killed.
"""

from __future__ import annotations

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

    def _unlock(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)


class FileLock:
    """A lock on a file beside a database; a context manager, not re-entrant.

    Entering it raises `TimeoutError` when another process holds it for longer than `timeout`
    seconds.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self._timeout = timeout
        self._pause = threading.Event()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)

    def acquire(self) -> bool:
        """Take the lock if it is free; closing the file frees it."""
        return _try_lock(self._fd)

    def __enter__(self) -> None:
        if _try_lock(self._fd):
            return
        deadline = SystemClock.monotonic_ns() + int(self._timeout * 1e9)
        pause = _FIRST_PAUSE
        while SystemClock.monotonic_ns() < deadline:
            # Spread by the time of day, so that two that wait do not wake together for ever.
            self._pause.wait(pause * (0.5 + SystemClock.wall_ns() % 1024 / 2048))
            if _try_lock(self._fd):
                return
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        raise TimeoutError(
            f"the file must be free within {self._timeout} s, got a process that held it "
            "for longer. Find the process that stands still, or raise timeout."
        )

    def __exit__(self, *_: object) -> None:
        _unlock(self._fd)

    def close(self) -> None:
        """Close the file; frees the lock where no other process inherited it."""
        os.close(self._fd)
