"""Puts a process of the script under the supervisor's guard. `site/sitecustomize.py` calls it."""

from __future__ import annotations

import atexit
import os
from importlib import import_module
from typing import Final

import budgetguard_http
from budgetguard_cli.run.link import Link
from budgetguard_cli.run.messages import SOCKET, Noted, Welcome
from budgetguard_cli.run.shared_guard import SharedGuard
from budgetguard_core import Budget, BudgetGuardError
from budgetguard_core.frame import Frame, bound_process

_INSTALLED_BY_IMPORT: Final = "budgetguard_langgraph"


def attach() -> None:
    """Bound every call of this process that the HTTP seam sees.

    Raises:
        ConnectionError: There is no supervisor.
    """
    link = Link(os.environ[SOCKET])
    welcome = link.enter()
    if welcome is None:
        raise ConnectionError("its supervisor does not answer")
    SharedGuard.link = link
    _bind(welcome)

    def forked() -> None:
        link.forked()
        # What the process that this is a copy of has in flight is none of this one's.
        _bind(welcome)

    os.register_at_fork(after_in_child=forked)
    budgetguard_http.install(watch_connections=True)
    atexit.register(_leave, link)


def adapt(adapter: str) -> None:
    """Install a framework's adapter, which ends its runs normally; the seam bounds them anyway.

    Args:
        adapter: The adapter's package.
    """
    try:
        module = import_module(adapter)
        if adapter != _INSTALLED_BY_IMPORT:
            module.install()
    except (ImportError, BudgetGuardError) as error:
        SharedGuard.link.tell(Noted(text=f"{adapter} is not used: {error}"[:200]))


def _bind(welcome: Welcome) -> None:
    # Its events are the supervisor's to write.
    guard = SharedGuard(Budget.from_json(welcome.budget), run_id=welcome.run_id, sinks=None)
    bound_process(Frame(guard))


def _leave(link: Link) -> None:
    for host, count in budgetguard_http.uncovered_hosts().items():
        link.tell(Noted(text=f"{count} connections to {host} went past BudgetGuard"[:200]))
    link.close()
