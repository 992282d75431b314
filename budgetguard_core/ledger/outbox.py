"""Settlements that the store has not got yet; a kill loses none of those that are on the disk."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from budgetguard_core.clock import SystemClock
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.amounts import LARGEST_STEP, ZERO, Amount
from budgetguard_core.ledger.errors import LedgerError, LedgerUnreachable
from budgetguard_core.ledger.step import Step
from budgetguard_core.ledger.windows import Window, check_name

_LOG = logging.getLogger("budgetguard")

_Name = Annotated[str, AfterValidator(lambda name: check_name(name, "a name"))]
_Figure = Annotated[int, Field(ge=0, le=LARGEST_STEP)]


class _Report(BaseModel):
    """A settlement on the disk, that every store can take."""

    id: _Name
    windows: Annotated[list[tuple[_Name, _Name]], Field(min_length=1)]
    spent: Annotated[list[_Figure], Field(min_length=1, max_length=4)]
    owner: Annotated[str, AfterValidator(lambda name: name and check_name(name, "a run"))] = ""


class Outbox:
    """The messages of this process, and a file for each that must outlive it.

    A message counts once, however often and by whomever it is sent: no file is locked.
    """

    def __init__(self, folder: Path, most: Amount = ZERO) -> None:
        self._folder = folder
        self._most = most
        """The amount that may be admitted while the store is absent; 0 is no limit."""
        self.forked()

    def forked(self) -> None:
        """Begin anew in a child process; what waits and its files stay with the parent."""
        self._lock = threading.Lock()
        self._own = uuid.uuid4().hex
        self._waiting: dict[str, Step] = {}
        self._recorded: dict[str, Step] = {}
        """On the disk: the latest message of each hold."""
        self._admitted: dict[str, Amount] = {}
        """The amounts that were admitted without the store, which has not heard of them yet."""

    def __len__(self) -> int:
        """Return how many settlements wait."""
        return len(self._waiting)

    def _path(self, step: Step) -> Path:
        return self._folder / f"{self._own}-{sha256(step.id.encode()).hexdigest()[:32]}.json"

    def admit(self, step: Step) -> bool:
        """Write down a call that the store is not asked for; False where it is one too many."""
        with self._lock:
            total = step.amount
            for amount in self._admitted.values():
                total = total.plus(amount)
            if any(used > most for used, most in zip(total, self._most, strict=True) if most):
                return False
            self._admitted[step.id] = step.amount
        try:
            self.record(step)
        except LedgerUnreachable:
            del self._admitted[step.id]
            raise
        return True

    def record(self, step: Step, *, synced: bool = True) -> None:
        """Write down what is to be charged if this process dies before it is sent.

        Raises `LedgerUnreachable` where the disk does not take it. What is not `synced` survives a
        kill and no loss of power.
        """
        windows = [(window.key, window.label) for window in step.windows]
        report = _Report(id=step.id, windows=windows, spent=[*step.amount], owner=step.owner)
        path = self._path(step)
        part = path.with_suffix(".part")
        try:
            with self._lock:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with part.open("w", encoding="utf-8") as file:
                    file.write(report.model_dump_json())
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
            if step.id in self._admitted:
                self._admitted[step.id] = self._admitted[step.id].larger(step.amount)

    def save(self) -> None:
        """Write down what waits, so that a kill loses nothing of it."""
        for step in [*self._waiting.values()]:
            if self._recorded.get(step.id) is not step:
                self.record(step)

    def deliver(self, send: Callable[[Step], object], seconds: float | None = None) -> bool:
        """Send what waits; False where it was too much for so many seconds.

        What the store refuses to hear is dropped: it is a mistake of ours.
        """
        started = SystemClock.monotonic_ns()
        for step in [*self._waiting.values()]:
            if seconds is not None and SystemClock.monotonic_ns() - started > seconds * 1e9:
                return False
            _send(send, step)
            with self._lock:
                if self._waiting.get(step.id) is step:
                    del self._waiting[step.id]
                    self._admitted.pop(step.id, None)
                    if self._recorded.pop(step.id, None) is not None:
                        with suppress(OSError):
                            self._path(step).unlink()
        return True

    def deliver_orphans(self, send: Callable[[Step], object]) -> None:
        """Send what other processes have on the disk: most of them are dead.

        One that lives may find a call that it was allowed without the store charged as reserved.
        """
        for path in sorted(self._folder.glob("*.json")):
            if path.name.startswith(self._own):
                continue
            with suppress(OSError):  # it is not ours to open, or was sent just now
                try:
                    report = _Report.model_validate_json(path.read_bytes())
                except (ValidationError, ConfigurationError):
                    _LOG.warning("ledger: %s is a report that no store can count", path)
                    path.rename(path.with_suffix(".rejected"))
                    continue
                windows = tuple(Window(*pair, 0.0, 0.0) for pair in report.windows)
                spent = Amount(*report.spent)
                _send(send, Step("settle", report.id, windows, spent, owner=report.owner))
                path.unlink()


def _send(send: Callable[[Step], object], step: Step) -> None:
    try:
        send(step)
    except LedgerUnreachable:
        raise
    except LedgerError as error:
        _LOG.warning("ledger: a report was not taken: %s", error)
