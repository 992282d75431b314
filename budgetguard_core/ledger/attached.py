"""The runs of this process, and the meters that they are charged through."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from budgetguard_core.charges import Amounts
from budgetguard_core.ledger.account import Account
from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.ceilings import Ceilings
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.exact import Exact
from budgetguard_core.ledger.lease import Lease
from budgetguard_core.ledger.outbox import Outbox
from budgetguard_core.ledger.part import Part
from budgetguard_core.ledger.refusal import Refusal, Warned
from budgetguard_core.ledger.step import Step, new_id
from budgetguard_core.ledger.windows import Key

_LOG = logging.getLogger("budgetguard")
_IDLE_SECONDS = 5.0

Meter: TypeAlias = Lease | Exact


class LedgerRun:
    """One run's place in the ledger: what its guard asks, and what it is told.

    `take` and `settle` work in memory, `obtain` makes a trip; see `Lease`.
    """

    __slots__ = (
        *("_attached", "account", "is_open", "meter", "on_kill", "on_warning"),
        *("payer", "run", "settle", "started", "take"),
    )

    def __init__(
        self,
        attached: AttachedRuns,
        run: str,
        meter: Meter,
        on_kill: Callable[[str], object],
        on_warning: Callable[[Warned], object],
    ) -> None:
        self._attached = attached
        self.payer = (id(attached), meter.account.names)
        """The same for all runs that are charged to the same keys."""
        self.is_open = False
        self.run = run
        self.account = meter.account
        self.started = attached.connection.now()
        self.on_kill = on_kill
        self.on_warning = on_warning
        self.use(meter)

    def use(self, meter: Meter) -> None:
        """Have the run charged through a meter."""
        self.meter = meter
        # Bound once: these two are part of every step.
        self.take = meter.take
        self.settle = meter.settle

    def obtain(self, usd: int, tokens: int) -> Part | Refusal:
        """Set an amount aside, with a trip to the store; bounded, never under a lock."""
        return self.meter.obtain(usd, tokens, self.run)

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
    """The runs of this process that go on, and one meter for all that are charged to the same keys.

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
        self._meters: dict[tuple[Key, ...], Meter] = {}
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[int, LedgerRun] = {}
        self._gone: deque[LedgerRun] = deque()

    def meter_of(self, keys: tuple[Key, ...], make: Callable[[tuple[Key, ...]], Meter]) -> Meter:
        """Return the meter of a set of keys, made where there is none."""
        with self._lock:
            meter = self._meters.get(keys)
            if meter is None:
                meter = self._meters[keys] = make(keys)
            return meter

    def add(self, run: LedgerRun) -> None:
        """Look after a run from now on."""
        with self._lock:
            self._runs[id(run)] = run
            # Its own may have been left, and another begun: what is in neither is not looked after.
            run.use(self._meters.setdefault(run.account.keys, run.meter))
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

    def remove_forgotten(self) -> None:
        """Remove the runs that nobody keeps any more."""
        while self._gone:
            self.remove(self._gone.popleft())

    def all(self) -> list[LedgerRun]:
        """Return the runs that go on."""
        with self._lock:
            return list(self._runs.values())

    def of(self, account: Account) -> list[LedgerRun]:
        """Return those of them that are charged to an account."""
        with self._lock:
            return [run for run in self._runs.values() if run.account.keys == account.keys]

    def meters(self) -> list[Meter]:
        """Return the meters in use, and those that were until a moment ago."""
        with self._lock:
            return list(self._meters.values())

    def leases(self) -> list[Lease]:
        """Return those of them that set amounts aside ahead of need, and so have to be tended."""
        return [meter for meter in self.meters() if isinstance(meter, Lease)]

    def leave_idle(self) -> None:
        """Give back what no run of this process has asked for in a while.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        for meter in self.meters():
            if self.of(meter.account):
                continue
            if isinstance(meter, Lease):
                if meter.idle_seconds() <= _IDLE_SECONDS:
                    continue
                meter.close()
            if meter.is_idle:
                with self._lock:
                    busy = any(run.meter is meter for run in self._runs.values())
                    if not busy:
                        self._leave(meter)

    def leave_runs(self) -> None:
        """Look after no run; one that goes on all the same says so by opening itself."""
        with self._lock:
            for run in self._runs.values():
                run.is_open = False
            self._runs.clear()

    def leave_settled(self) -> None:
        """Forget the meters but for those that a call is under way in: it settles there."""
        for meter in self.meters():
            if meter.is_idle:
                with self._lock:
                    self._leave(meter)

    def _leave(self, meter: Meter) -> None:
        keys = meter.account.keys
        if self._meters.get(keys) is meter:
            del self._meters[keys]

    def forked(self) -> None:
        """Begin anew in a child process. A guard that crossed the fork goes on asking its meter."""
        # Another thread of the parent may have held it.
        self._lock = threading.Lock()
        for lease in self.leases():
            lease.forked()
        self.leave_runs()
        self._begin()


def call_listener(listener: Callable[[Any], object], fact: object) -> None:
    """Tell a run's listener something; that it fails changes nothing."""
    try:
        listener(fact)
    except Exception as error:
        _LOG.warning("ledger: a listener failed: %s", type(error).__name__)
