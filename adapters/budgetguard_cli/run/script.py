"""The script's first process: started, its signals passed on, ended where it ignores a stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from budgetguard_cli.run.folder import RUN, RunFolder
from budgetguard_core import Budget, StopReason, SystemClock, Trip, Violation

SITE: Final = Path(__file__).with_name("site")
_LOOK_EVERY_S: Final = 0.05
_PASSED_ON: Final = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
_LADDER: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_SECOND: Final = 1_000_000_000


def run_script(command: Sequence[str], folder: RunFolder, budget: Budget, *, grace_s: float) -> int:
    """Run a script to its end.

    Args:
        command: The interpreter's arguments.
        folder: Of the run.
        budget: Its caps.
        grace_s: Seconds that the script has to end after a stop. If it calls models on, or time
            itself is over, it is then interrupted, after as long again terminated, and after as
            long again killed.

    Returns:
        The script's exit code; 128 and the number of the signal that killed it.
    """
    with _signals() as pass_on:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, *command], env=_environment(folder.url)
        )
        pass_on(process.send_signal)
        patience = Patience(folder, budget)
        steps = list(_LADDER)
        while True:
            try:
                code = process.wait(_LOOK_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                pass
            if steps and patience.waited_s() >= grace_s * (1 + len(_LADDER) - len(steps)):
                step = steps.pop(0)
                process.send_signal(step)
                folder.signal(step, but=process.pid)
    return code if code >= 0 else 128 - code


class Patience:
    """How long a script has gone on after a stop.

    A script that calls no model any more may take its time, for its children or for what it has:
    only a deadline and an abort count for themselves.
    """

    def __init__(self, folder: RunFolder, budget: Budget) -> None:
        self._folder = folder
        self._limit = budget.max_seconds
        self._started_ns = folder.facts().started_ns
        self._stopped_ns: int | None = None
        self._over_ns: int | None = None

    def waited_s(self) -> float:
        """Return the seconds from the stop to the latest call, or to now where time is over."""
        now = SystemClock.monotonic_ns()
        if self._over_ns is None and self._is_over(now):
            self._over_ns = now
        asked = self._folder.asked_ns()
        if asked is not None and self._stopped_ns is None:
            self._stopped_ns = asked
        waited = 0 if asked is None or self._stopped_ns is None else asked - self._stopped_ns
        return max(waited, 0 if self._over_ns is None else now - self._over_ns) / _SECOND

    def _is_over(self, now: int) -> bool:
        limit, used = self._limit, (now - self._started_ns) / _SECOND
        if limit is not None and used >= limit:
            reason = StopReason.MAX_SECONDS
            held = Violation(
                reason=reason, limit=limit, used=used, detail=f"{reason}={limit} reached"
            )
            run_id = self._folder.facts().run_id
            self._folder.end(Trip(reason=reason, violations=(held,), run_id=run_id))
            return True
        if self._folder.asked_ns() is None:
            return False
        stop = self._folder.stop()
        return stop is not None and stop.reason in (StopReason.ABORTED, StopReason.MAX_SECONDS)


def _environment(url: str) -> Mapping[str, str]:
    variables = {**os.environ, RUN: url}
    before = variables.get("PYTHONPATH")
    variables["PYTHONPATH"] = str(SITE) if not before else f"{SITE}{os.pathsep}{before}"
    return variables


@contextmanager
def _signals() -> Generator[Callable[[Callable[[int], object]], None]]:
    """Hold signals back until there is a process to pass them on to, and pass them on to it."""
    waiting: list[int] = []
    receivers: list[Callable[[int], object]] = []

    def heard(number: int, _: FrameType | None) -> None:
        if number in (signal.SIGINT, signal.SIGQUIT) and _is_at_terminal():
            return  # the terminal has sent it to the script as well
        waiting.append(number)
        if receivers:
            deliver()

    def deliver() -> None:
        while waiting:
            receivers[0](waiting.pop(0))

    def pass_on(receiver: Callable[[int], object]) -> None:
        receivers.append(receiver)
        deliver()

    if threading.current_thread() is not threading.main_thread():
        yield pass_on
        return
    # What was ignored before (nohup) stays so, and the script inherits it.
    heeded = [one for one in _PASSED_ON if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, heard) for number in heeded}
    try:
        yield pass_on
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_at_terminal() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
