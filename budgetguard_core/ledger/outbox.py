"""Reports that could not be sent: kept on the disk, sent by this process or the next one."""

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

from budgetguard_core.errors import ConfigurationError
from budgetguard_core.file_lock import FileLock
from budgetguard_core.ledger.amounts import LARGEST_STEP, Amount
from budgetguard_core.ledger.errors import LedgerError, LedgerUnreachable
from budgetguard_core.ledger.step import Step
from budgetguard_core.ledger.windows import Window, check_name

_LOG = logging.getLogger("budgetguard")


class Outbox:
    """What the store has still to be told, the latest of each hold.

    Args:
        folder: Where a file is made when it is needed. One file for each process, locked while it
            lives; what a dead process left is sent by the next one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._waiting: dict[str, Step] = {}
        self._recorded: dict[str, int] = {}
        """On the disk: the latest message of each hold."""
        self._path: Path | None = None
        self._fd = -1
        self._held: FileLock | None = None

    def __len__(self) -> int:
        """Return how many reports wait."""
        return len(self._waiting)

    def record(self, step: Step) -> None:
        """Write down what is to be charged if this process dies before it knows better.

        Raises:
            LedgerUnreachable: The disk does not take it.
        """
        with self._lock:
            self._write(step)

    def add(self, step: Step) -> None:
        """Have a report sent as soon as the store answers; in memory until then."""
        with self._lock:
            self._waiting[step.id] = step

    def save(self) -> None:
        """Write down what waits, so that a kill loses nothing of it.

        Raises:
            LedgerUnreachable: The disk does not take it.
        """
        with self._lock:
            for step in self._waiting.values():
                if self._recorded.get(step.id, 0) < step.op:
                    self._write(step)

    def deliver(self, send: Callable[[Step], object]) -> None:
        """Send what waits. What the store refuses to hear is dropped: it is a mistake of ours.

        Raises:
            LedgerUnreachable: The store does not answer; what was not sent waits on.
        """
        with self._lock:
            waiting = list(self._waiting.values())
        for step in waiting:
            _send(send, step)
            with self._lock:
                if self._waiting.get(step.id) is step:
                    del self._waiting[step.id]
                if step.id in self._recorded:
                    # Else what was written as a precaution would be charged after all.
                    self._append(json.dumps({"id": step.id, "done": True}))
                    del self._recorded[step.id]
                if not self._recorded and not self._waiting:
                    self._remove()

    def deliver_orphans(self, send: Callable[[Step], object]) -> int:
        """Send what dead processes left; return how many reports that were.

        Raises:
            LedgerUnreachable: The store does not answer; what was not sent stays on the disk.
        """
        sent = 0
        for path in sorted(self._folder.glob("*.jsonl")):
            if path == self._path:
                continue
            try:
                lock = FileLock(path, 0.0)
            except OSError:
                continue
            try:
                if lock.acquire():
                    steps, rejected = _read(path)
                    for step in steps:
                        _send(send, step)
                        sent += 1
                    if rejected:
                        _LOG.warning("ledger: %s: %d reports no store can count", path, rejected)
                        path.rename(path.with_suffix(".rejected"))
                    else:
                        path.unlink(missing_ok=True)
            except LedgerUnreachable:
                raise
            except Exception as error:
                _LOG.warning("ledger: %s cannot be sent, and stays: %s", path, type(error).__name__)
            finally:
                lock.close()
        return sent

    def _write(self, step: Step) -> None:
        self._append(_to_line(step))
        self._recorded[step.id] = step.op

    def _append(self, line: str) -> None:
        try:
            while self._path is None:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                path = self._folder / f"{uuid.uuid4().hex}.jsonl"
                held = FileLock(path, 0.0)
                # Before it was locked, another process may have taken it for a dead one's.
                if held.acquire() and path.exists():
                    self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)
                    self._held, self._path = held, path
                else:
                    held.close()
            # A line break first: a line that was cut short takes no other with it.
            _write_whole(self._fd, b"\n" + line.encode() + b"\n")
            os.fsync(self._fd)
        except OSError as error:
            raise LedgerUnreachable(
                f"the queue of unsent reports must be writable, got {error.strerror}. "
                "Name another folder with queue=."
            ) from None

    def _remove(self) -> None:
        if self._path is not None and self._held is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._held.close()
            self._path = self._held = None

    def forked(self) -> None:
        """Leave the file to the parent process."""
        self._lock = threading.Lock()
        if self._held is not None:
            # Closing the child's copy keeps the parent's lock; keeping it would outlive the parent.
            os.close(self._fd)
            self._held.close()
        self._path = self._held = None
        self._waiting = {}
        self._recorded = {}

    def close(self) -> None:
        """Close the file; what it holds stays for the next process."""
        with self._lock:
            if self._held is not None:
                os.close(self._fd)
                self._held.close()
                self._path = self._held = None


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
            "op": step.op,
            "windows": [[window.key, window.label] for window in step.windows],
            "spent": [*step.spent],
            "owner": step.owner,
        }
    )


def _read(path: Path) -> tuple[list[Step], int]:
    """Return the latest report of each hold, and how many reports no store can take.

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
                id=str(record["id"]),
                op=int(record["op"]),
                windows=tuple(
                    Window(str(key), str(label), 0.0, 0.0) for key, label in record["windows"]
                ),
                spent=Amount(*map(int, record["spent"])),
                close=True,
                owner=str(record["owner"]),
            )
            if not _can_be_sent(step):
                rejected += 1
                continue
            known = found.get(step.id)
            if known is None or step.op > known.op:
                found[step.id] = step
    return list(found.values()), rejected


def _can_be_sent(step: Step) -> bool:
    """Return whether every store can take a report that was read from a file."""
    try:
        for name in (step.id, *(name for window in step.windows for name in window[:2])):
            check_name(name, "a name")
        check_name(step.owner or "-", "a run")
    except ConfigurationError:
        return False
    figures = (*step.spent, step.op)
    return bool(step.windows) and all(0 <= figure <= LARGEST_STEP for figure in figures)
