"""Puts a process of the script under the caps of its run. `site/sitecustomize.py` calls it."""

from __future__ import annotations

import atexit
import os
from importlib import import_module

import budgetguard_http
from budgetguard_cli.run.folder import RUN, Facts, RunFolder
from budgetguard_cli.run.plug import RunLedger, Stops
from budgetguard_core import Budget, BudgetGuardError, Guard
from budgetguard_core.frame import Frame, around, bound_process
from budgetguard_core.kit import end_run
from budgetguard_core.run_log import RunLog


def attach() -> None:
    """Bound every call of this process that the HTTP seam sees.

    Raises:
        OSError: The run is over.
    """
    folder = RunFolder(os.environ[RUN])
    facts = folder.facts()
    plug = RunLedger(folder.ledger(facts.ledger_id), folder, Budget.from_json(facts.budget))

    def bind() -> None:
        bound_process(Frame(guard_of(folder, facts, plug)))

    def forked() -> None:
        plug.forked()
        # What the process that this is a copy of has in flight is none of this one's.
        bind()

    bind()
    os.register_at_fork(after_in_child=forked)
    budgetguard_http.install(watch_connections=True)
    atexit.register(_leave, folder)


def guard_of(folder: RunFolder, facts: Facts, plug: RunLedger) -> Guard:
    """Make the guard of a process: the caps of the whole run, also for this process alone."""
    name = folder.enter(facts.run_id)
    guard = Guard(
        plug.budget,
        run_id=name,
        sinks=(RunLog(folder.logs), Stops(folder, name)),
        ledger=facts.ledger,
        tenant=facts.tenant,
    )
    guard.start()
    guard.state.counters.started_ns = facts.started_ns
    guard.state.set_plugs((plug, *guard.state.own_plugs))
    return guard


def adapt(adapter: str) -> None:
    """Install a framework's adapter, which ends its runs normally; the seam bounds them anyway.

    Args:
        adapter: The adapter's package, which installs itself.
    """
    try:
        import_module(adapter)
    except (ImportError, BudgetGuardError) as error:
        RunFolder(os.environ[RUN]).note(f"{adapter} is not used: {error}")


def _leave(folder: RunFolder) -> None:
    for host, count in budgetguard_http.uncovered_hosts().items():
        folder.note(f"{count} connections to {host} went past BudgetGuard")
    frame = around()
    if frame is not None:
        end_run(frame.guard, trip=frame.guard.trip)
