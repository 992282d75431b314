"""The runs of this process."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from budgetguard_core.charges import Amounts
from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.ceilings import Ceilings
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.errors import LedgerUnreachable
from budgetguard_core.ledger.exact import Exact
from budgetguard_core.ledger.outbox import Outbox
from budgetguard_core.ledger.part import Part
from budgetguard_core.ledger.refusal import Refusal, Warned
from budgetguard_core.ledger.step import Step, new_id

_LOG = logging.getLogger("budgetguard")


class LedgerRun:
    """One run's place in the ledger: what its guard asks, and what it is told.

    `obtain` makes a trip; `settle` works in memory, and the trip is made by another thread.
    """

    __slots__ = (
        *("_attached", "_exact", "account", "is_open", "on_kill", "on_warning"),
        *("payer", "run", "settle", "started"),
    )

    def __init__(
        self,
        attached: AttachedRuns,
        run: str,
        exact: Exact,
        on_kill: Callable[[str], object],
        on_warning: Callable[[Warned], object],
    ) -> None:
        self._attached = attached
        self.payer = (id(attached), exact.account.names)
        """The same for all runs that are charged to the same keys."""
        self.is_open = False
        self.run = run
        self.account = exact.account
        self.started = attached.connection.now()
        self.on_kill = on_kill
        self.on_warning = on_warning
        self._exact = exact
        self.settle = exact.settle

    def obtain(self, usd: int, tokens: int) -> Part | Refusal:
        """Set an amount aside, with a trip to the store; bounded, never under a lock."""
        answer = self._exact.obtain(usd, tokens, self.run)
        if isinstance(answer, Refusal) and self._attached.deliver():
            # What was on its way to the store has made room.
            answer = self._exact.obtain(usd, tokens, self.run)
        return answer

    def caps_dollars(self) -> bool:
        """Tell whether a ceiling in dollars holds for the run; a trip at most once a second."""
        return any(ceiling.usd for ceiling in self._attached.ceilings.of(self.account))

    def caps_tokens(self) -> bool:
        """Tell whether a ceiling in tokens holds for the run; a trip at most once a second."""
        return any(ceiling.tokens for ceiling in self._attached.ceilings.of(self.account))

    def report(self, spent: Amounts) -> None:
        """Charge what nothing was set aside for: the run only looks on, and was not refused."""
        self._attached.report(self, Amount(*spent))

    def open(self) -> None:
        """Say that the run begins, or goes on after it was said to have ended."""
        self.is_open = True
        self._attached.add(self)

    def close(self) -> None:
        """Say that the run has ended; what it set aside can still be settled."""
        self.is_open = False
        self._attached.remove(self)

    def abandon(self) -> None:
        """Say that nobody keeps the run any more: from a finalizer, so no lock is taken."""
        self._attached.forget(self)


class AttachedRuns:
    """The runs of this process that go on.

    Args:
        connection: To the store.
        outbox: For what a run reports.
        ceilings: What may hold for a run.
        wake: Called when there is something to do for the heartbeat.
    """

    def __init__(
        self,
        connection: Connection,
        outbox: Outbox,
        ceilings: Ceilings,
        wake: Callable[[], object],
    ) -> None:
        self.connection = connection
        self.ceilings = ceilings
        self._outbox = outbox
        self._wake = wake
        self._runs: dict[int, LedgerRun] = {}
        self.begin()

    def begin(self) -> None:
        """Begin anew in a child process. A guard that crossed the fork goes on asking."""
        for run in self._runs.values():
            run.is_open = False
        # Another thread of the parent may have held it.
        self._lock = threading.Lock()
        self._runs = {}
        self._gone: deque[LedgerRun] = deque()

    def add(self, run: LedgerRun) -> None:
        """Look after a run from now on."""
        with self._lock:
            self._runs[id(run)] = run
        self._wake()

    def remove(self, run: LedgerRun) -> None:
        """Look after a run no longer: it has ended."""
        with self._lock:
            self._runs.pop(id(run), None)

    def forget(self, run: LedgerRun) -> None:
        """Remove a run at the next beat."""
        self._gone.append(run)

    def report(self, run: LedgerRun, spent: Amount) -> None:
        """Charge a run what nothing was set aside for, as soon as the store answers."""
        windows = run.account.windows(self.connection.now())
        self._outbox.add(Step(new_id(), 1, windows, spent=spent, close=True, owner=run.run))
        self._wake()

    def deliver(self) -> bool:
        """Send what waits for the ledger's thread; False where nothing did, or no store answers."""
        if not len(self._outbox):
            return False
        try:
            self._outbox.deliver(self.connection.send)
        except LedgerUnreachable:
            return False
        return True

    def remove_forgotten(self) -> None:
        """Remove the runs that nobody keeps any more."""
        while self._gone:
            self.remove(self._gone.popleft())

    def all(self) -> list[LedgerRun]:
        """Return the runs that go on."""
        with self._lock:
            return list(self._runs.values())

    def leave_runs(self) -> None:
        """Look after no run; one that goes on all the same says so by opening itself."""
        with self._lock:
            for run in self._runs.values():
                run.is_open = False
            self._runs.clear()


def call_listener(listener: Callable[[Any], object], fact: object) -> None:
    """Tell a run's listener something; that it fails changes nothing."""
    try:
        listener(fact)
    except Exception as error:
        _LOG.warning("ledger: a listener failed: %s", type(error).__name__)
