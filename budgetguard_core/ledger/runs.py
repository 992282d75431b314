"""The runs of this process, and the thread that looks after them."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from budgetguard_core.ledger.amounts import ZERO, Amount
from budgetguard_core.ledger.ceilings import Ceilings, ceiling_of
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.errors import (
    LedgerRefused,
    LedgerUnreachable,
    Warned,
    in_units,
    reason_of,
)
from budgetguard_core.ledger.kill_switch import kill_of
from budgetguard_core.ledger.outbox import Outbox
from budgetguard_core.ledger.reservation import Reservation, Reservations
from budgetguard_core.ledger.windows import RUN, Account, Window

_LOG = logging.getLogger("budgetguard")
BEAT_SECONDS = 0.5
"""Between two looks at the store. A kill is seen within it and one trip."""
_DELIVERY_SECONDS = 0.3
"""Of one beat: what is left is sent behind the next look at the kill switches."""


class LedgerRun:
    """One run's place in the ledger: what its guard asks, and what it is told.

    `obtain` makes a trip; `settle` works in memory, and the trip is made by another thread.
    A run that nobody keeps any more has ended.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        reservations: Reservations,
        account: Account,
        run: str,
        on_kill: Callable[[str], object],
        on_warning: Callable[[Warned], object],
    ) -> None:
        self._heartbeat = heartbeat
        self._reservations = reservations
        self.account = account
        self.payer = (id(heartbeat), account.names)
        """The same for all runs that are charged to the same keys."""
        self.run = run
        self.on_kill = on_kill
        self.on_warning = on_warning
        self.settle = reservations.settle

    def obtain(self, amount: Amount) -> Reservation | LedgerRefused:
        """Reserve an amount, with a trip to the store; bounded, never under a lock."""
        answer = self._reservations.reserve(self.account, amount, self.run)
        if isinstance(answer, LedgerRefused) and self._reservations.deliver():
            # What was on its way to the store has made room.
            answer = self._reservations.reserve(self.account, amount, self.run)
        return answer

    def caps(self) -> Amount:
        """Return the ceilings that hold for the run, 0 for none; a trip at most once a second."""
        caps = ZERO
        for ceiling in self._heartbeat.ceilings.of(self.account):
            caps = caps.larger(ceiling)
        return caps

    def report(self, spent: Amount) -> None:
        """Charge what nothing was reserved for: the run only observes, and was not refused."""
        self._reservations.report(self.account, spent, self.run)

    def open(self) -> None:
        """Look after a run that begins, or goes on after its end, its ledger's or a fork."""
        self._heartbeat.add(self)

    def close(self) -> None:
        """End the run; what it reserved can still be settled."""
        self._heartbeat.remove(self)


class Heartbeat:
    """Looks after the runs of this process that go on, and sends what waits, twice a second.

    Its thread lives while there are runs or settlements.
    """

    def __init__(self, connection: Connection, outbox: Outbox, ceilings: Ceilings) -> None:
        self.ceilings = ceilings
        self._connection = connection
        self._outbox = outbox
        self.restart()

    def restart(self) -> None:
        """Begin anew in a child process. A guard that crossed the fork goes on asking."""
        self._lock = threading.Lock()
        self._runs = weakref.WeakSet[LedgerRun]()
        self._event = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_stopped = self._orphans_sent = False

    def add(self, run: LedgerRun) -> None:
        """Look after a run from now on."""
        if run not in self._runs:
            with self._lock:
                self._runs.add(run)
            self.wake()

    def remove(self, run: LedgerRun) -> None:
        """Look after a run no longer: it has ended."""
        with self._lock:
            self._runs.discard(run)

    def all(self) -> list[LedgerRun]:
        """Return the runs that go on."""
        with self._lock:
            return list(self._runs)

    # The thread

    def wake(self) -> None:
        """Request a beat soon; starts the thread where there is none."""
        self._event.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._is_stopped:
                    self._thread = threading.Thread(
                        target=self._run, name="budgetguard-ledger", daemon=True
                    )
                    self._thread.start()

    def _run(self) -> None:
        while True:
            self._event.wait(BEAT_SECONDS)
            self._event.clear()
            if not self._is_stopped and self.tick():
                self._event.set()
            with self._lock:
                is_needed = self._runs or len(self._outbox) or self._event.is_set()
                if self._is_stopped or not is_needed:
                    self._thread = None
                    return

    def finish(self, seconds: float) -> None:
        """End the thread and look after no run; send what waits, and write the rest down.

        Args:
            seconds: To wait for the beat under way, and again for sending. A run that goes on all
                the same says so by opening itself.
        """
        with self._lock:
            self._is_stopped = True
            self._runs.clear()
            thread = self._thread
        self._event.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        with self._lock:
            self._is_stopped = False
        try:
            self._outbox.deliver(self._connection.send, seconds)
        except LedgerUnreachable as error:
            _LOG.info("ledger: %s", error)
        self._save()

    def tick(self) -> bool:
        """Make a beat, of which nothing fails; return whether the next one is due at once."""
        try:
            return self.beat()
        except LedgerUnreachable as error:
            _LOG.info("ledger: %s", error)
            self._save()
        except Exception as error:
            # A thread that died would be missed by everyone.
            _LOG.warning("ledger: the heartbeat failed: %s", type(error).__name__)
        return False

    def beat(self) -> bool:
        """Do what is due; return whether more is to be sent than there was time for."""
        runs = self.all()
        if runs:  # those that are set, and so none where thousands of tenants live in peace
            kills = self._connection.ask(lambda store: store.notes("f:"))
            for run in runs if kills else ():
                for flag in (*run.account.flags, f"r:{run.run}"):
                    if (text := kills.get(f"f:{flag}")) is not None:
                        _call(run.on_kill, kill_of(flag, text).detail)
                        break
        if not self._outbox.deliver(self._connection.send, _DELIVERY_SECONDS):
            return True
        if not self._orphans_sent:  # last: what cannot be sent holds nothing up
            self._outbox.deliver_orphans(self._connection.send)
            self._orphans_sent = True
        return False

    def _save(self) -> None:
        try:
            self._outbox.save()
        except LedgerUnreachable as full:
            _LOG.warning("ledger: %s", full)

    # Warnings

    def warn(self, windows: Sequence[Window]) -> None:
        """Notify the runs that are charged in windows which reached 80 % of a ceiling."""
        for window in windows:
            if window.label[0] != RUN:  # that is for whoever made a ledger for one run
                _LOG.warning(
                    "%s reached 80 %% of its ceiling (%s)", ascii(window.key), window.label
                )
            runs = [run for run in self.all() if window.key in run.account.names]
            warned = self._warned(window) if runs else None
            for run in runs:
                _call(run.on_warning, warned)

    def _warned(self, window: Window) -> Warned:
        """Return a warning with the figures of the dimension that is nearest to its ceiling."""
        nearest = limit = used = 0
        with suppress(LedgerUnreachable):
            stored = self.ceilings.all()
            for row in self._connection.ask(lambda store: store.windows(window.key)):
                if row.label == window.label:
                    ceiling = ceiling_of(row.key, row.label, stored, window.ceiling)
                    shares = [a / b if b else 0 for a, b in zip(row.charged, ceiling, strict=True)]
                    nearest = shares.index(max(shares))
                    limit, used = ceiling[nearest], row.charged[nearest]
        figures = in_units(limit, nearest), in_units(used, nearest)
        return Warned(window.key, reason_of(window.label, nearest), window.label, *figures)


def _call(listener: Callable[[Any], object], fact: object) -> None:
    """Notify a run's listener; its failure changes nothing."""
    try:
        listener(fact)
    except Exception as error:
        _LOG.warning("ledger: a listener failed: %s", type(error).__name__)
