"""Settlements that the store has not got yet; a kill loses none of those that are on the disk."""

from __future__ import annotations

import json
import logging
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from budgetguard_core.clock import SystemClock
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.amounts import LARGEST_STEP, Amount
from budgetguard_core.ledger.errors import LedgerError, LedgerUnreachable
from budgetguard_core.ledger.step import Step
from budgetguard_core.ledger.windows import Window, check_name

_LOG = logging.getLogger("budgetguard")


class Outbox:
    """The messages of this process, and a file for each that must outlive it.

    A message counts once, however often and by whomever it is sent: no file is locked.

    Args:
        folder: Where files are made when they are needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.forked()

    def forked(self) -> None:
        """Begin anew in a child process; what waits and its files stay with the parent."""
        self._lock = threading.Lock()
        self._own = uuid.uuid4().hex
        self._waiting: dict[str, Step] = {}
        self._recorded: dict[str, Step] = {}
        """On the disk: the latest message of each hold."""

    def __len__(self) -> int:
        """Return how many settlements wait."""
        return len(self._waiting)

    def _path(self, step: Step) -> Path:
        return self._folder / f"{self._own}-{sha256(step.id.encode()).hexdigest()[:32]}.json"

    def record(self, step: Step, *, synced: bool = True) -> None:
        """Write down what is to be charged if this process dies before it is sent.

        Args:
            step: The settlement.
            synced: Wait for the disk; without, it survives a kill and no loss of power.

        Raises:
            LedgerUnreachable: The disk does not take it.
        """
        path = self._path(step)
        part = path.with_suffix(".part")
        try:
            with self._lock:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with part.open("w", encoding="utf-8") as file:
                    file.write(_to_text(step))
                    if synced:
                        file.flush()
                        os.fsync(file.fileno())
                part.replace(path)
                self._recorded[step.id] = step
        except OSError as error:
            raise LedgerUnreachable(
                f"the queue of unsent reports must be writable, got {error.strerror}. "
                "Name another folder with queue=."
            ) from None

    def add(self, step: Step) -> None:
        """Send a settlement as soon as the store answers; it is kept in memory until then."""
        with self._lock:
            self._waiting[step.id] = step

    def save(self) -> None:
        """Write down what waits, so that a kill loses nothing of it.

        Raises:
            LedgerUnreachable: The disk does not take it.
        """
        for step in [*self._waiting.values()]:
            if self._recorded.get(step.id) is not step:
                self.record(step)

    def deliver(self, send: Callable[[Step], object], seconds: float | None = None) -> bool:
        """Send what waits; False where it was too much for so many seconds.

        What the store refuses to hear is dropped: it is a mistake of ours.

        Raises:
            LedgerUnreachable: The store does not answer; what was not sent waits on.
        """
        started = SystemClock.monotonic_ns()
        for step in [*self._waiting.values()]:
            if seconds is not None and SystemClock.monotonic_ns() - started > seconds * 1e9:
                return False
            _send(send, step)
            with self._lock:
                if self._waiting.get(step.id) is step:
                    del self._waiting[step.id]
                    if self._recorded.pop(step.id, None) is not None:
                        with suppress(OSError):
                            self._path(step).unlink()
        return True

    def deliver_orphans(self, send: Callable[[Step], object]) -> None:
        """Send what other processes have on the disk: most of them are dead.

        One that lives may find a call that it was allowed without the store charged as reserved.

        Raises:
            LedgerUnreachable: The store does not answer; what was not sent stays on the disk.
        """
        for path in sorted(self._folder.glob("*.json")):
            if path.name.startswith(self._own):
                continue
            with suppress(OSError):  # it is not ours to open, or was sent just now
                try:
                    step = _to_step(path.read_text("utf-8"))
                except (ValueError, KeyError, TypeError, ConfigurationError):
                    _LOG.warning("ledger: %s is a report that no store can count", path)
                    path.rename(path.with_suffix(".rejected"))
                else:
                    _send(send, step)
                    path.unlink()


def _send(send: Callable[[Step], object], step: Step) -> None:
    try:
        send(step)
    except LedgerUnreachable:
        raise
    except LedgerError as error:
        _LOG.warning("ledger: a report was not taken: %s", error)


def _to_text(step: Step) -> str:
    windows = [window[:2] for window in step.windows]
    record = {"id": step.id, "windows": windows, "spent": step.amount, "owner": step.owner}
    return json.dumps(record)


def _to_step(text: str) -> Step:
    """Read a settlement that every store can take.

    Raises:
        ValueError: It is none. So do KeyError, TypeError and ConfigurationError say.
    """
    record: dict[str, Any] = json.loads(text)
    spent = Amount(*map(int, record["spent"]))
    windows = tuple(
        Window(check_name(key, "a key"), check_name(label, "a label"), 0.0, 0.0)
        for key, label in record["windows"]
    )
    owner = record["owner"] and check_name(record["owner"], "a run")
    if not windows or not all(0 <= figure <= LARGEST_STEP for figure in spent):
        raise ValueError
    return Step("settle", check_name(record["id"], "an id"), windows, spent, owner=owner)
