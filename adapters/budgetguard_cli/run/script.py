"""The script's first process: started, its signals passed on, ended where it ignores a stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from budgetguard_cli.run.folder import RUN, RunFolder, trip_of
from budgetguard_core import Budget, StopReason
from budgetguard_core.kit import SystemClock

SITE: Final = Path(__file__).with_name("site")
_LOOK_EVERY_S: Final = 0.05
_PASSED_ON: Final = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
)
_LADDER: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def run_script(command: Sequence[str], folder: RunFolder, budget: Budget, *, grace_s: float) -> int:
    """Run a script to its end; return its exit code, or 128 and the number of what killed it.

    After a stop it has `grace_s` seconds to end: see `Patience`. Then it is interrupted, after as
    long again terminated, and after as long again killed.
    """
    path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, RUN: folder.url, "PYTHONPATH": path}
    patience, steps = Patience(folder, budget), 0
    with _signals() as heard:
        process = subprocess.Popen([sys.executable, *command], env=environment)  # noqa: S603
        while True:
            try:
                code = process.wait(_LOOK_EVERY_S)
            except subprocess.TimeoutExpired:
                while heard:
                    process.send_signal(heard.pop(0))
                if steps < len(_LADDER) and patience.waited_s() >= grace_s * (steps + 1):
                    process.send_signal(_LADDER[steps])
                    folder.signal(_LADDER[steps], but=process.pid)
                    steps += 1
            else:
                return code if code >= 0 else 128 - code


class Patience:
    """The time that a script has gone on after a stop.

    A script that calls no model any more may take its time, for its children or for what it has:
    only a deadline and an abort count for themselves.
    """

    def __init__(self, folder: RunFolder, budget: Budget) -> None:
        self._folder = folder
        self._limit = budget.max_seconds
        self._started_ns = folder.facts().started_ns
        self._stopped_ns = 0

    def waited_s(self) -> float:
        """Return the seconds from the stop to the latest call, or to now where time is over."""
        limit, used = self._limit, (SystemClock.monotonic_ns() - self._started_ns) / 1e9
        over = 0.0 if limit is None else max(used - limit, 0.0)
        if over:
            reason = StopReason.MAX_SECONDS
            self._folder.end(trip_of(reason, f"{reason}={limit} reached", limit, used))
        stop = self._folder.stop()
        if stop is None:
            return over
        requested = self._folder.stop_requested_ns()
        self._stopped_ns = self._stopped_ns or requested
        until = SystemClock.wall_ns() if stop.reason is StopReason.ABORTED else requested
        return max((until - self._stopped_ns) / 1e9, over)


@contextmanager
def _signals() -> Generator[list[int]]:
    """Collect the signals that the script is to get."""
    heard: list[int] = []

    def hear(number: int, _: FrameType | None) -> None:
        # The terminal has sent its own to the script as well.
        if number not in (signal.SIGINT, signal.SIGQUIT) or not _is_at_terminal():
            heard.append(number)

    # What was ignored before (nohup) stays so, and the script inherits it.
    heeded = [one for one in _PASSED_ON if signal.getsignal(one) is not signal.SIG_IGN]
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
