"""The ledgers that are open in this process: closed at its end, and kept out of its forks."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from multiprocessing import parent_process, util
from typing import Protocol

from budgetguard_core.ledger.connection import Connection


class OpenLedger(Protocol):
    """A ledger that has to end with its process."""

    @property
    def connection(self) -> Connection:
        """The connection to the store."""
        ...

    def close(self) -> None:
        """Send what waits, and give the rest back."""
        ...

    def forked(self) -> None:
        """Begin anew in a child process."""
        ...


_LEDGERS: weakref.WeakSet[OpenLedger] = weakref.WeakSet()
_FORKING = threading.local()
"""What this thread holds closed while it forks."""


def end_with_process(ledger: OpenLedger) -> None:
    """Close a ledger when the process ends, and begin it anew in its children."""
    _LEDGERS.add(ledger)


def _end_with_worker(_: object = None) -> None:
    """Close at the end of a worker of `multiprocessing`, most of which leave without `atexit`."""
    if parent_process() is not None:
        util.Finalize(None, _close_all, exitpriority=0)


def _close_all() -> None:
    for ledger in list(_LEDGERS):
        ledger.close()


def _before_fork() -> None:
    connections = [ledger.connection for ledger in list(_LEDGERS)]
    _FORKING.held = [one for one in connections if one.before_fork()]


def _after_fork() -> None:
    for connection in _FORKING.held:
        connection.after_fork()
    _FORKING.held = []


def _forked() -> None:
    _FORKING.held = []
    for ledger in list(_LEDGERS):
        ledger.forked()


atexit.register(_close_all)
_end_with_worker()
# Before a forked worker begins, it forgets what its parent was to do at its end.
util.register_after_fork(_LEDGERS, _end_with_worker)
if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forked)
