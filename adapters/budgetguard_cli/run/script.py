"""The script's first process: started, its signals passed on, ended where it ignores a stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from budgetguard_cli.run.folder import RUN, RunFolder, trip_of
from budgetguard_core import Budget, StopReason
from budgetguard_core.kit import SystemClock

SITE: Final = Path(__file__).with_name("site")
_LOOK_EVERY_S: Final = 0.05
_NAMES: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_LADDER: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def run_script(command: Sequence[str], folder: RunFolder, budget: Budget, *, grace_s: float) -> int:
    """Run a script to its end.

    Args:
        command: The interpreter's arguments.
        folder: Of the run.
        budget: Its caps.
        grace_s: Seconds that the script has to end after a stop: see `Patience`. Then it is
            interrupted, after as long again terminated, and after as long again killed.

    Returns:
        The script's exit code; 128 and the number of the signal that killed it.
    """
    arguments = [sys.executable, *command]
    with _signals() as heard:
        process = subprocess.Popen(arguments, env=_environment(folder.url))  # noqa: S603
        patience = Patience(folder, budget)
        steps = list(_LADDER)
        while True:
            try:
                code = process.wait(_LOOK_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                pass
            while heard:
                process.send_signal(heard.pop(0))
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
        limit, used, reason = self._limit, (now - self._started_ns) / 1e9, StopReason.MAX_SECONDS
        is_over = limit is not None and used >= limit
        if is_over:
            self._folder.end(trip_of(reason, f"{reason}={limit} reached", limit, used))
        asked = self._folder.asked_ns()
        if asked is None:
            return 0
        if self._stopped_ns is None:
            self._stopped_ns = asked
            stop = self._folder.stop()
            is_over = is_over or (stop is not None and stop.reason in (StopReason.ABORTED, reason))
        if is_over and self._over_ns is None:
            self._over_ns = now
        timed = 0 if self._over_ns is None else now - self._over_ns
        return max(asked - self._stopped_ns, timed) / 1e9


def _environment(url: str) -> Mapping[str, str]:
    before = os.environ.get("PYTHONPATH")
    path = str(SITE) if not before else f"{SITE}{os.pathsep}{before}"
    return {**os.environ, RUN: url, "PYTHONPATH": path}


@contextmanager
def _signals() -> Generator[list[int]]:
    """Collect the signals that the script is to get."""
    heard: list[int] = []

    def hear(number: int, _: FrameType | None) -> None:
        # The terminal has sent its own to the script as well.
        if number not in (signal.SIGINT, signal.SIGQUIT) or not _is_at_terminal():
            heard.append(number)

    numbers = [getattr(signal, name) for name in _NAMES]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    # What was ignored before (nohup) stays so, and the script inherits it.
    heeded = [one for one in numbers if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, hear) for number in heeded}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_at_terminal() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
