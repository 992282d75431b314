"""The folder of one run: what its processes and `budgetguard run` share beside the ledger."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from pydantic import BaseModel, ValidationError

from budgetguard_core import Budget, StopReason, Trip
from budgetguard_core.kit import SystemClock, Violation
from budgetguard_core.ledger import Ledger

RUN: Final = "BUDGETGUARD_RUN"
"""The environment variable that names the ledger of the run: its URL."""
CALLS, TURNS, ANSWERS, QUOTA = "run", "iterations", "last answers", "quota {}"
"""The keys of the ledger: of all calls, of turns, of what is kept back, of a quota by its place."""
OF_A_PROCESS: Final = ("no_progress", "oscillation", "stalled", "velocity", "circuit_open")
"""Limits that each process checks by itself; they stop no other one."""
_TIMEOUT_S: Final = 10.0
_GONE: Final = "`budgetguard run` is gone"


class Facts(BaseModel):
    """The facts that every process has to know. `ledger` is that of the tenant."""

    run_id: str
    budget: dict[str, Any]
    ledger: str | None
    tenant: str | None
    started_ns: int
    """By the monotonic clock, which all processes of a machine share."""


class RunFolder:
    """One run's folder, made by `budgetguard run` and known by the URL of the ledger in it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._path = Path(unquote(url.removeprefix("sqlite:///").partition("?")[0])).parent
        self.logs = self._path / "logs"
        """The file of each process's record."""
        self._alive, self._stop = self._path / "alive", self._path / "stop"
        self._notes = self._path / "notes"
        self._held: int | None = None

    @classmethod
    @contextmanager
    def made(
        cls, budget: Budget, *, ledger: str | None = None, tenant: str | None = None
    ) -> Generator[RunFolder]:
        """Make a folder that only this user can enter. After the block nothing is admitted."""
        path = Path(tempfile.mkdtemp(prefix="budgetguard-"))
        folder = cls(f"sqlite:///{quote(f'{path}/ledger')}?windows=run&synchronous=normal")
        try:
            (path / "processes").mkdir()
            folder._notes.touch()
            folder._hold(folder._alive)
            with folder.ledger() as store:
                _set_ceilings(store, budget)
            facts = Facts(
                run_id=uuid.uuid4().hex,
                budget=budget.to_json(),
                ledger=ledger,
                tenant=tenant,
                started_ns=SystemClock.monotonic_ns(),
            )
            (path / "facts").write_text(facts.model_dump_json())
            yield folder
        finally:
            folder._release()
            shutil.rmtree(path, ignore_errors=True)

    def facts(self) -> Facts:
        """Return what every process has to know; an `OSError` where the run is over."""
        if not _is_held(self._alive):
            raise ProcessLookupError(_GONE)
        return Facts.model_validate_json((self._path / "facts").read_bytes())

    def ledger(self) -> Ledger:
        """Return the ledger of the run."""
        return Ledger(self.url, timeout=_TIMEOUT_S, queue=self._path / "queue")

    def enter(self, run_id: str) -> str:
        """Register this process with the run; return its name: of the first one the run's."""
        self._release()  # what is held by the process that this one is a copy of
        self._hold(self._path / "processes" / str(os.getpid()))
        try:
            (self._path / "first").touch(exist_ok=False)
        except FileExistsError:
            return f"{run_id}-{uuid.uuid4().hex[:8]}"
        return run_id

    def signal(self, number: signal.Signals, *, but: int) -> None:
        """Send a signal to every process that lives, but one."""
        for file in (self._path / "processes").iterdir():
            if int(file.name) != but and _is_held(file):
                with suppress(OSError):
                    os.kill(int(file.name), number)

    def _hold(self, file: Path) -> None:
        """Hold a file as long as this process lives."""
        self._held = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._held, fcntl.LOCK_EX)

    def _release(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def stop(self) -> Trip | None:
        """Return why no process may start a call any more; None while they may."""
        if not _is_held(self._alive):
            return trip_of(StopReason.ABORTED, _GONE)
        try:
            return Trip.model_validate_json(self._stop.read_bytes())
        except (FileNotFoundError, ValidationError):  # or it is just being written
            return None

    def end(self, trip: Trip) -> None:
        """Stop all processes; the first reason stays."""
        with suppress(FileExistsError), self._stop.open("x") as file:
            file.write(trip.model_dump_json())

    def ask_on(self) -> None:
        """Record that a call was refused."""
        with suppress(OSError):
            os.utime(self._stop)

    def stop_requested_ns(self) -> int:
        """Return when a call was refused last, or the stop came, by the wall clock."""
        return self._stop.stat().st_mtime_ns

    def note(self, text: str) -> None:
        """Add a note to the report."""
        with self._notes.open("a") as file:
            file.write(f"{' '.join(text.split())[:200]}\n")

    def notes(self) -> list[str]:
        """Return what the processes wanted to be said, each once."""
        return [*dict.fromkeys(self._notes.read_text().splitlines())]


def trip_of(reason: StopReason, detail: str, limit: Any = None, used: Any = None) -> Trip:
    """Return a stop of the whole run for one reason."""
    held = Violation(reason=reason, detail=detail, limit=limit, used=used)
    return Trip(reason=reason, violations=(held,), run_id="")


def _set_ceilings(ledger: Ledger, budget: Budget) -> None:
    usd, tokens = budget.max_cost_usd, budget.max_total_tokens
    if budget.finalize_reserve is not None:
        kept_usd, kept = budget.finalize_reserve.cost_usd, budget.finalize_reserve.tokens
        ledger.set_ceilings(ANSWERS, run_usd=kept_usd, run_tokens=kept)
        usd = None if usd is None else Decimal(usd) - Decimal(kept_usd or 0)
        tokens = None if tokens is None else tokens - (kept or 0)
    calls, tools = budget.max_model_calls, budget.max_tool_calls
    ledger.set_ceilings(
        CALLS, run_usd=usd, run_tokens=tokens, run_model_calls=calls, run_tool_calls=tools
    )
    ledger.set_ceilings(TURNS, run_model_calls=budget.max_iterations)
    for number, limit in enumerate(budget.tool_quotas.values()):
        ledger.set_ceilings(QUOTA.format(number), run_tool_calls=limit)


def _is_held(file: Path) -> bool:
    """Return whether the process that holds a file lives."""
    try:
        with file.open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
