"""The runs of this process: their reservations, and the thread that looks after them.

A model call costs one round trip: reserved before it; settled after it, by the thread.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

from budgetguard_core.errors import BudgetGuardError, ConfigurationError
from budgetguard_core.ledger.amounts import ZERO, Amount, to_amount
from budgetguard_core.ledger.ceilings import Ceilings, ceiling_of
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.errors import (
    ABORTED,
    LedgerRefused,
    LedgerUnreachable,
    OtherWindows,
    Warned,
    in_units,
    reason_of,
    refusal_of,
)
from budgetguard_core.ledger.kill_switch import kill_of
from budgetguard_core.ledger.outbox import Outbox
from budgetguard_core.ledger.step import Answer, Step, new_id
from budgetguard_core.ledger.windows import RUN, Account, Window

_LOG = logging.getLogger("budgetguard")
HEARTBEAT_SECONDS = 0.5
"""Between two looks at the store. A kill is seen within it and one trip."""
_DELIVERY_SECONDS = 0.3
"""Of one beat: what is left is sent behind the next look at the kill switches."""
_ATTEMPTS = 3
"""To name the windows that the store's clock lies in."""
_TAKEN = (
    "reservation_id must name one reservation, got one of another tenant or day, or of less. "
    "Use another name for another call."
)


class Reservation:
    """Money set aside for one call, in the windows that it was made in, until it is settled.

    A reservation that is never settled or released stays charged in full.
    """

    __slots__ = ("_maker", "amount", "id", "is_local", "owner", "windows")

    def __init__(self, maker: Reservations, name: str, amount: Amount, owner: str) -> None:
        self._maker = maker
        self.id = name
        self.amount = amount
        self.owner = owner
        self.windows: Sequence[Window] = ()
        self.is_local = False
        """Recorded on the disk, because the store could not be reached."""

    def settlement(self, spent: Amount) -> Step:
        """Return the message that closes it."""
        return Step("settle", self.id, self.windows, spent, owner=self.owner)

    def settle(self, usd: Decimal | float = 0, tokens: int = 0) -> None:
        """Charge what was measured instead of what was reserved; repeats change nothing.

        More than was reserved is charged too: the provider has billed it. The calls that were
        reserved were made.
        """
        self._maker.settle_now(self, to_amount(usd, tokens, *self.amount[2:]))

    def release(self) -> None:
        """Charge nothing: the call was not made."""
        self._maker.settle_now(self, ZERO)


class Reservations:
    """Makes and settles the reservations of one ledger.

    `allows` admits calls when the store is absent, to be charged later.
    """

    def __init__(
        self, connection: Connection, outbox: Outbox, heartbeat: Heartbeat, *, allows: bool
    ) -> None:
        self.heartbeat = heartbeat
        self._connection = connection
        self._outbox = outbox
        self._allows = allows
        self._exceeded = False
        """A call used more than it had reserved, and the store may not have heard of it yet."""

    def reserve(
        self, account: Account, amount: Amount, run: str, name: str | None = None
    ) -> Reservation | LedgerRefused:
        """Reserve with one trip; under a name of the caller's, a repeat is the same reservation."""
        if self._exceeded:
            self._exceeded = False
            self.deliver()
        made = Reservation(self, name or new_id(), amount, run)
        try:
            answer = self._ask(account, made)
        except OtherWindows:
            raise ConfigurationError(_TAKEN) from None
        except LedgerUnreachable as error:
            if error.is_absent and self._allows:
                return self._allow(made, error)
            # Never one under a name of the caller's: a retry may be under way, here or elsewhere.
            if error.was_sent and name is None:
                self._send_later(made.settlement(ZERO))
            how = " (on_ledger_error is refuse)" if error.is_absent else ""
            return LedgerRefused(ABORTED, f"{error}{how}")
        except BudgetGuardError:
            raise
        except BaseException:  # a signal's handler; the store may have taken it
            if name is None and made.windows:
                self._send_later(made.settlement(ZERO))
            raise
        if answer.status != "ok":
            return refusal_of(answer, made.windows)
        if amount.exceeds(answer.amount):
            raise ConfigurationError(_TAKEN)
        for number, window in enumerate(made.windows):
            if answer.warn >> number & 1:
                self.heartbeat.warn(window)
        return made

    def _ask(self, account: Account, made: Reservation) -> Answer:
        """Ask for a reservation in the windows of now.

        Ours is a guess, the store's clock decides: one more trip at an edge, none otherwise.
        """
        flags = account.flags
        if made.owner:
            flags = tuple(sorted((*flags, f"r:{made.owner}")))
        for _ in range(_ATTEMPTS):
            made.windows = account.windows(self._connection.now())
            step = Step("reserve", made.id, made.windows, made.amount, flags, made.owner)
            answer = self._connection.send(step)
            if answer.status != "clock":
                return answer
        raise LedgerUnreachable(
            f"the store's clock must stand still for a moment, got {_ATTEMPTS} times outside of "
            "its windows. Check the clocks."
        )

    def _allow(self, made: Reservation, error: LedgerUnreachable) -> Reservation | LedgerRefused:
        made.is_local = True
        try:
            if self._outbox.admit(made.settlement(made.amount)):
                return made
            why = "What is allowed without it is used up (allow_usd)."
        except LedgerUnreachable as full:
            why = str(full)
        return LedgerRefused(ABORTED, f"{error} {why}")

    def settle(self, made: Reservation, spent: Amount) -> None:
        """Settle it in the thread that talks to the store.

        Should the process be killed before, the reservation stays charged. What was used beyond it
        is written to the disk first.
        """
        step = made.settlement(spent)
        if spent.exceeds(made.amount):
            self._exceeded = True
            with suppress(LedgerUnreachable):
                self._outbox.record(step, synced=False)
        self._send_later(step)

    def settle_now(self, made: Reservation, spent: Amount) -> None:
        """Settle with one trip; later, where the store does not answer."""
        step = made.settlement(spent)
        if made.is_local:
            self._outbox.add(step)
            return
        try:
            self._connection.send(step)
        except LedgerUnreachable:
            self._send_later(step)
            self._outbox.save()

    def report(self, account: Account, spent: Amount, run: str) -> None:
        """Charge what nothing was reserved for, as soon as the store answers."""
        windows = account.windows(self._connection.now())
        self._send_later(Step("settle", new_id(), windows, spent, owner=run))

    def _send_later(self, step: Step) -> None:
        self._outbox.add(step)
        self.heartbeat.wake()

    def deliver(self) -> bool:
        """Send what waits for the ledger's thread; False where nothing did, or no store answers."""
        if not len(self._outbox):
            return False
        try:
            return self._outbox.deliver(self._connection.send)
        except LedgerUnreachable:
            return False


class LedgerRun:
    """One run's place in the ledger: what its guard asks, and what it is told.

    `obtain` makes a trip; `settle` works in memory, and the trip is made by another thread.
    A run that nobody keeps any more has ended.
    """

    def __init__(
        self,
        reservations: Reservations,
        account: Account,
        run: str,
        on_kill: Callable[[str], object],
        on_warning: Callable[[Warned], object],
    ) -> None:
        self._reservations = reservations
        self._heartbeat = reservations.heartbeat
        self.account = account
        self.payer = (id(reservations), account.names)
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
            self._event.wait(HEARTBEAT_SECONDS)
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

        Waits for the beat under way, and again for sending. A run that goes on opens itself again.
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
            return self.send_heartbeat()
        except LedgerUnreachable as error:
            _LOG.info("ledger: %s", error)
            self._save()
        except Exception as error:
            # A thread that died would be missed by everyone.
            _LOG.warning("ledger: the heartbeat failed: %s", type(error).__name__)
        return False

    def send_heartbeat(self) -> bool:
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

    def warn(self, window: Window) -> None:
        """Notify the runs that are charged in a window which reached 80 % of a ceiling."""
        if window.label[0] != RUN:  # that is for whoever made a ledger for one run
            _LOG.warning("%s reached 80 %% of its ceiling (%s)", ascii(window.key), window.label)
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
