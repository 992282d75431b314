"""Who is told that a window reached 80 % of its ceiling."""

from __future__ import annotations

import contextlib
import logging
import threading

from budgetguard_core.ledger.amounts import to_dollars
from budgetguard_core.ledger.attached import AttachedRuns, LedgerRun, call_listener
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.errors import LedgerUnreachable
from budgetguard_core.ledger.refusal import Warned

_LOG = logging.getLogger("budgetguard")
_WARNINGS_KEPT = 1000


class CeilingWarnings:
    """Tells the runs of this process what its steps were warned of.

    Args:
        connection: To the store; keeps what steps were warned of.
        attached: Whom to tell.
    """

    def __init__(self, connection: Connection, attached: AttachedRuns) -> None:
        self._connection = connection
        self._attached = attached
        self.begin()

    def begin(self) -> None:
        """Begin anew in a child process; the parent tells."""
        self._lock = threading.Lock()
        self._untold: dict[tuple[str, str], Warned] = {}

    def tell(self) -> None:
        """Tell the runs of this process which windows of theirs reached 80 %.

        Also of what was reported when no run was left to be told: the next one is.
        """
        due = self._connection.warned
        while due:
            with contextlib.suppress(IndexError):  # another thread was quicker
                one = due.popleft()
                with self._lock:
                    self._untold[one.key, one.window] = one
                    for name in list(self._untold)[:-_WARNINGS_KEPT]:
                        del self._untold[name]
                _LOG.warning("%s reached 80 %% of its ceiling (%s)", ascii(one.key), one.window)
        if not self._untold:
            return
        now = self._connection.now()
        charged: dict[tuple[str, str], list[LedgerRun]] = {}
        for run in self._attached.all():
            for window in run.account.windows(now):
                charged.setdefault(window[:2], []).append(run)
        with self._lock:
            told = [
                (self._untold.pop(name), charged[name])
                for name in charged.keys() & self._untold.keys()
            ]
        for one, runs in told:
            shown = self._with_figures(one)
            for run in runs:
                call_listener(run.on_warning, shown)

    def _with_figures(self, warned: Warned) -> Warned:
        try:
            record = self._connection.ask(lambda store: store.window(warned.key, warned.window))
        except LedgerUnreachable:
            return warned
        charged, ceiling = record.charged, record.ceiling
        if ceiling.usd and charged.usd * 5 >= ceiling.usd * 4:
            return warned._replace(limit=to_dollars(ceiling.usd), used=to_dollars(charged.usd))
        return warned._replace(limit=ceiling.tokens, used=charged.tokens)
