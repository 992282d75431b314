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
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from pydantic import BaseModel, ValidationError

from budgetguard_core import Budget, StopReason, SystemClock, Trip, Violation
from budgetguard_core.ledger import Ledger

RUN: Final = "BUDGETGUARD_RUN"
"""The environment variable that names the ledger of the run: its URL."""
CALLS, TURNS, ANSWERS = "run", "iterations", "last answers"
"""The keys of the ledger: what every call is charged to, its turns, what is kept back."""
_TIMEOUT_S: Final = 10.0
_OPTIONS: Final = "?windows=run&synchronous=normal"


def quota_key(number: int) -> str:
    """Return the key of a tool quota, by its place in the budget."""
    return f"quota {number}"


class Facts(BaseModel):
    """The facts that every process has to know."""

    run_id: str
    budget: dict[str, Any]
    ledger_id: str
    ledger: str | None
    """The ledger of the tenant."""
    tenant: str | None
    started_ns: int
    """By the monotonic clock, which all processes of a machine share."""


class RunFolder:
    """One run's folder, made by `budgetguard run` and known by the URL of the ledger in it.

    Args:
        url: The ledger's.

    Attributes:
        url: The ledger's.
        logs: Where each process writes what it does.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        path = unquote(url.removeprefix("sqlite:///").partition("?")[0])
        self._path = Path(path).parent
        self.logs = self._path / "logs"
        self._alive, self._stop = self._path / "alive", self._path / "stop"
        self._held: int | None = None

    @classmethod
    @contextmanager
    def made(
        cls, budget: Budget, *, ledger: str | None = None, tenant: str | None = None
    ) -> Generator[RunFolder]:
        """Make a folder that only this user can enter. After the block nothing is admitted."""
        path = Path(tempfile.mkdtemp(prefix="budgetguard-"))
        folder = cls(f"sqlite:///{quote(str(path))}/ledger.sqlite3{_OPTIONS}")
        try:
            (path / "processes").mkdir()
            folder._held = _locked(folder._alive)
            with folder.ledger() as store:
                _set_ceilings(store, budget)
                facts = Facts(
                    run_id=uuid.uuid4().hex,
                    budget=budget.to_json(),
                    ledger_id=store.id,
                    ledger=ledger,
                    tenant=tenant,
                    started_ns=SystemClock.monotonic_ns(),
                )
            (path / "facts").write_text(facts.model_dump_json())
            yield folder
        finally:
            if folder._held is not None:
                os.close(folder._held)
            shutil.rmtree(path, ignore_errors=True)

    def facts(self) -> Facts:
        """Return what every process has to know.

        Raises:
            OSError: The run is over.
        """
        return Facts.model_validate_json((self._path / "facts").read_bytes())

    def ledger(self, ledger_id: str | None = None) -> Ledger:
        """Return the ledger of the run."""
        queue = self._path / "queue"
        return Ledger(self.url, timeout=_TIMEOUT_S, ledger_id=ledger_id, queue=queue)

    def enter(self, run_id: str) -> str:
        """Register this process with the run; return its name in the log.

        The first one has the name of the run.
        """
        if self._held is not None:  # of the process that this one is a copy of
            os.close(self._held)
        self._held = _locked(self._path / "processes" / str(os.getpid()))
        try:
            (self._path / "first").touch(exist_ok=False)
        except FileExistsError:
            return f"{run_id}-{uuid.uuid4().hex[:8]}"
        return run_id

    def signal(self, number: signal.Signals, *, but: int) -> None:
        """Send a signal to every process that lives, but one."""
        for file in (self._path / "processes").iterdir():
            if int(file.name) != but and _is_locked(file):
                with suppress(OSError):
                    os.kill(int(file.name), number)

    # Stops

    def stop(self) -> Trip | None:
        """Return why no process may start a call any more; None while they may."""
        try:
            if _is_locked(self._alive):
                return Trip.model_validate_json(self._stop.read_bytes())
        except (FileNotFoundError, ValidationError):  # or it is just being written
            return None
        gone = Violation(reason=StopReason.ABORTED, detail="`budgetguard run` is gone")
        return Trip(reason=gone.reason, violations=(gone,), run_id="")

    def end(self, trip: Trip) -> None:
        """Stop all processes; the first reason stays."""
        with suppress(FileExistsError), self._stop.open("x") as file:
            file.write(trip.model_dump_json())

    def ask_on(self) -> None:
        """Record that a call was refused."""
        with suppress(OSError):
            os.utime(self._stop)

    def asked_ns(self) -> int | None:
        """Return when a call was refused last, or the stop came; None without a stop."""
        try:
            return self._stop.stat().st_mtime_ns
        except OSError:
            return None

    # What the report says beside

    def note(self, text: str) -> None:
        """Add a note to the report."""
        with (self._path / "notes").open("a") as file:
            file.write(f"{' '.join(text.split())[:200]}\n")

    def notes(self) -> list[str]:
        """Return what the processes wanted to be said, each once."""
        try:
            return [*dict.fromkeys((self._path / "notes").read_text().splitlines())]
        except OSError:
            return []


def _set_ceilings(ledger: Ledger, budget: Budget) -> None:
    kept = {} if budget.finalize_reserve is None else budget.finalize_reserve.of_caps()
    usd, tokens = kept.get("max_cost_usd"), kept.get("max_total_tokens")
    caps = (budget.max_cost_usd, budget.max_total_tokens)
    ledger.set_ceilings(
        CALLS,
        run_usd=None if caps[0] is None else caps[0] - (usd or 0),
        run_tokens=None if caps[1] is None else caps[1] - int(tokens or 0),
        run_model_calls=budget.max_model_calls,
        run_tool_calls=budget.max_tool_calls,
    )
    ledger.set_ceilings(TURNS, run_model_calls=budget.max_iterations)
    ledger.set_ceilings(ANSWERS, run_usd=usd, run_tokens=None if tokens is None else int(tokens))
    for number, limit in enumerate(budget.tool_quotas.values()):
        ledger.set_ceilings(quota_key(number), run_tool_calls=limit)


def _locked(path: Path) -> int:
    """Hold a file as long as this process lives."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _is_locked(path: Path) -> bool:
    """Return whether the process that holds a file lives."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
