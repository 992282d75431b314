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

from budgetguard_cli.run.messages import SOCKET
from budgetguard_cli.run.supervisor import Supervisor
from budgetguard_core import SystemClock

SITE: Final = Path(__file__).with_name("site")
_LOOK_EVERY_S: Final = 0.05
_PASSED_ON: Final = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
_LADDER: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def run_script(command: Sequence[str], supervisor: Supervisor, *, grace_s: float) -> int:
    """Run a script to its end.

    Args:
        command: The interpreter's arguments.
        supervisor: Who bounds it.
        grace_s: Seconds that the script has to end after a stop. Then it is interrupted, after
            as long again terminated, and after as long again killed.

    Returns:
        The script's exit code; 128 and the number of the signal that killed it.
    """
    clock = SystemClock()
    with supervisor.listening() as path, _signals() as pass_on:
        supervisor.guard.start()
        process = subprocess.Popen([sys.executable, *command], env=_environment(path))  # noqa: S603
        pass_on(process.send_signal)
        stopped_ns: int | None = None
        steps = list(_LADDER)
        while True:
            try:
                code = process.wait(_LOOK_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                pass
            if supervisor.is_over:
                supervisor.guard.check()
            if supervisor.guard.trip is None:
                continue
            now = clock.monotonic_ns()
            stopped_ns = now if stopped_ns is None else stopped_ns
            waited_s = (now - stopped_ns) / 1_000_000_000
            if steps and waited_s >= grace_s * (1 + len(_LADDER) - len(steps)):
                step = steps.pop(0)
                process.send_signal(step)
                supervisor.send(step, but=process.pid)
    return code if code >= 0 else 128 - code


def _environment(path: str) -> Mapping[str, str]:
    variables = {**os.environ, SOCKET: path}
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
