"""Settlements that could not be sent: kept on the disk, sent by this process or the next one."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from filelock import FileLock, Timeout

from budgetguard_core.clock import SystemClock
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.amounts import LARGEST_STEP, Amount
from budgetguard_core.ledger.errors import LedgerError, LedgerUnreachable
from budgetguard_core.ledger.step import Step
from budgetguard_core.ledger.windows import Window, check_name

_LOG = logging.getLogger("budgetguard")


class Outbox:
    """The messages that the store has not got yet.

    Args:
        folder: Where a file is made when it is needed. One file for each process, locked while it
            lives; what a dead process left is sent by the next one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inherited: list[FileLock] = []
        self._held: FileLock | None = None
        self.forked()

    _fd: int

    def forked(self) -> None:
        """Begin anew in a child process; the file stays with the parent."""
        if self._held is not None:
            os.close(self._fd)
            # Collected here, it would free the parent's lock.
            self._inherited.append(self._held)
        self._lock = threading.Lock()
        self._waiting: dict[str, Step] = {}
        self._recorded: dict[str, Step] = {}
        """On the disk: the latest message of each hold."""
        self._path: Path | None = None
        self._fd = -1
        self._held = None

    def __len__(self) -> int:
        """Return how many settlements wait."""
        return len(self._waiting)

    def record(self, step: Step, *, synced: bool = True) -> None:
        """Write down what is to be charged if this process dies before it is sent.

        Args:
            step: The settlement.
            synced: Wait for the disk; without, it survives a kill and no loss of power.

        Raises:
            LedgerUnreachable: The disk does not take it.
        """
        with self._lock:
            self._write(step, synced)

    def add(self, step: Step) -> None:
        """Send a settlement as soon as the store answers; it is kept in memory until then."""
        with self._lock:
            self._waiting[step.id] = step

    def save(self) -> None:
        """Write down what waits, so that a kill loses nothing of it.

        Raises:
            LedgerUnreachable: The disk does not take it.
        """
        with self._lock:
            for step in self._waiting.values():
                if self._recorded.get(step.id) is not step:
                    self._write(step, synced=True)

    def deliver(self, send: Callable[[Step], object], seconds: float | None = None) -> bool:
        """Send what waits; False where it was too much for so many seconds.

        What the store refuses to hear is dropped: it is a mistake of ours.

        Raises:
            LedgerUnreachable: The store does not answer; what was not sent waits on.
        """
        started = SystemClock.monotonic_ns()
        with self._lock:
            waiting = list(self._waiting.values())
        for step in waiting:
            if seconds is not None and SystemClock.monotonic_ns() - started > seconds * 1e9:
                return False
            _send(send, step)
            with self._lock:
                if self._waiting.get(step.id) is step:
                    del self._waiting[step.id]
                if self._recorded.pop(step.id, None) is None:
                    continue
                if self._recorded or self._waiting:
                    # Else what was written as a precaution would be charged after all.
                    self._append(json.dumps({"id": step.id, "done": True}))
                else:
                    os.ftruncate(self._fd, 0)
        return True

    def deliver_orphans(self, send: Callable[[Step], object]) -> int:
        """Send what dead processes left; return how many settlements that were.

        Raises:
            LedgerUnreachable: The store does not answer; what was not sent stays on the disk.
        """
        sent = 0
        for path in sorted(self._folder.glob("*.jsonl")):
            if path == self._path:
                continue
            lock = _lock_of(path)
            try:
                lock.acquire()
            except (OSError, RuntimeError, Timeout):
                continue  # its process lives, or it is not ours to open
            try:
                steps, rejected = _read(path)
                for step in steps:
                    _send(send, step)
                    sent += 1
                if rejected:
                    _LOG.warning("ledger: %s: %d reports no store can count", path, rejected)
                    path.rename(path.with_suffix(".rejected"))
                else:
                    path.unlink()
                Path(lock.lock_file).unlink(missing_ok=True)
            except LedgerUnreachable:
                raise
            except Exception as error:
                _LOG.warning("ledger: %s cannot be sent, and stays: %s", path, type(error).__name__)
            finally:
                lock.release()
        return sent

    def _write(self, step: Step, synced: bool) -> None:
        self._append(_to_line(step), synced)
        self._recorded[step.id] = step

    def _append(self, line: str, synced: bool = False) -> None:
        try:
            if self._held is None:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                path = self._folder / f"{uuid.uuid4().hex}.jsonl"
                held = _lock_of(path)
                held.acquire()  # before the file is there for others to find
                self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                self._path, self._held = path, held
            # A line break first: a line that was cut short takes no other with it.
            _write_whole(self._fd, b"\n" + line.encode() + b"\n")
            if synced:
                os.fsync(self._fd)
        except OSError as error:
            raise LedgerUnreachable(
                f"the queue of unsent reports must be writable, got {error.strerror}. "
                "Name another folder with queue=."
            ) from None

    def close(self) -> None:
        """Close the file; what it holds stays for the next process."""
        with self._lock:
            held, path = self._held, self._path
            if held is None or path is None:
                return
            if not self._recorded:
                path.unlink(missing_ok=True)
                Path(held.lock_file).unlink(missing_ok=True)
            os.close(self._fd)
            self._path = self._held = None
            self._recorded = {}
            held.release()


def _lock_of(path: Path) -> FileLock:
    # Any thread of the process frees it.
    return FileLock(path.with_suffix(".lock"), timeout=0, thread_local=False)


def _send(send: Callable[[Step], object], step: Step) -> None:
    try:
        send(step)
    except LedgerUnreachable:
        raise
    except LedgerError as error:
        _LOG.warning("ledger: a report was not taken: %s", error)


def _write_whole(fd: int, data: bytes) -> None:
    if os.write(fd, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _to_line(step: Step) -> str:
    return json.dumps(
        {
            "id": step.id,
            "windows": [[window.key, window.label] for window in step.windows],
            "spent": step.amount,
            "owner": step.owner,
        }
    )


def _read(path: Path) -> tuple[list[Step], int]:
    """Return the latest settlement of each hold, and how many no store can take.

    A line that was cut off by a kill is left out.
    """
    found: dict[str, Step] = {}
    rejected = 0
    for line in path.read_text("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            read = json.loads(line)
            if not isinstance(read, dict):
                continue
            record = cast("dict[str, Any]", read)
            if record.get("done"):
                found.pop(str(record["id"]), None)
                continue
            step = Step(
                "settle",
                str(record["id"]),
                tuple(Window(str(key), str(label), 0.0, 0.0) for key, label in record["windows"]),
                Amount(*map(int, record["spent"])),
                owner=str(record["owner"]),
            )
            if _can_be_sent(step):
                found[step.id] = step
            else:
                rejected += 1
    return list(found.values()), rejected


def _can_be_sent(step: Step) -> bool:
    """Return whether every store can take a settlement that was read from a file."""
    try:
        for name in (step.id, *(name for window in step.windows for name in window[:2])):
            check_name(name, "a name")
        check_name(step.owner or "-", "a run")
    except ConfigurationError:
        return False
    return bool(step.windows) and all(0 <= figure <= LARGEST_STEP for figure in step.amount)
