"""Puts a process of the script under the caps of its run. `site/sitecustomize.py` calls it."""

from __future__ import annotations

import atexit
import os
from importlib import import_module

import budgetguard_http
from budgetguard_cli.run.folder import RUN, RunFolder
from budgetguard_cli.run.plug import RunLedger
from budgetguard_core import BudgetGuardError
from budgetguard_core.frame import Frame, around, bound_process
from budgetguard_core.kit import end_run


def attach() -> None:
    """Bound every call of this process that the HTTP seam sees.

    Raises:
        OSError: The run is over.
    """
    plug = RunLedger(RunFolder(os.environ[RUN]))

    def bind() -> None:
        bound_process(Frame(plug.guard()))

    bind()
    os.register_at_fork(after_in_child=bind)
    budgetguard_http.install(watch_connections=True)
    atexit.register(_leave)


def adapt(adapter: str) -> None:
    """Install a framework's adapter, which ends its runs normally; the seam bounds them anyway."""
    try:
        import_module(adapter)
    except (ImportError, BudgetGuardError) as error:
        RunFolder(os.environ[RUN]).note(f"{adapter} is not used: {error}")


def _leave() -> None:
    for host, count in budgetguard_http.uncovered_hosts().items():
        note = f"{count} connections to {host} went past BudgetGuard"
        RunFolder(os.environ[RUN]).note(note)
    frame = around()
    if frame is not None:
        end_run(frame.guard, trip=frame.guard.trip)
