"""A round trip for each call: reserved before it, settled after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal

from budgetguard_core.errors import BudgetGuardError, ConfigurationError
from budgetguard_core.ledger.amounts import ZERO, Amount, to_amount, to_dollars
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.errors import (
    ABORTED,
    LedgerRefused,
    LedgerUnreachable,
    OtherWindows,
    refusal_of,
)
from budgetguard_core.ledger.outbox import Outbox
from budgetguard_core.ledger.step import Step, new_id
from budgetguard_core.ledger.windows import Account, Window

_HOW = " (on_ledger_error is refuse)"


class Allowance:
    """The amount that this process may admit from its store's last answer to the next.

    Args:
        most: In all; 0 in a dimension is no limit.
    """

    def __init__(self, most: Amount) -> None:
        self._most = most
        self.begin()

    def begin(self) -> None:
        """Begin anew: the store knows what was taken, or this is a child process."""
        self._lock = threading.Lock()
        self._taken = ZERO

    def take(self, amount: Amount) -> bool:
        """Take an amount, if all of it fits."""
        with self._lock:
            taken = self._taken.plus(amount)
            if any(used > most for used, most in zip(taken, self._most, strict=True) if most):
                return False
            self._taken = taken
            return True

    def count(self, amount: Amount) -> None:
        """Count what a call used beyond what it had taken."""
        with self._lock:
            self._taken = self._taken.plus(amount)


class Reservation:
    """Money set aside for one call, in the windows that it was made in, until it is settled.

    A reservation that is never settled or released stays charged in full.
    """

    __slots__ = ("_desk", "amount", "id", "is_local", "owner", "windows")

    def __init__(
        self,
        desk: Reservations,
        name: str,
        windows: Sequence[Window],
        amount: Amount,
        owner: str = "",
        *,
        is_local: bool = False,
    ) -> None:
        self._desk = desk
        self.id = name
        self.windows = windows
        self.amount = amount
        self.owner = owner
        self.is_local = is_local
        """Recorded on the disk, because the store could not be reached."""

    def settlement(self, spent: Amount) -> Step:
        """Return the message that closes it."""
        return Step("settle", self.id, self.windows, spent, owner=self.owner)

    def settle(self, usd: Decimal | float = 0, tokens: int = 0) -> None:
        """Charge what was measured instead of what was reserved; repeats change nothing.

        More than was reserved is charged too: the provider has billed it. The calls that were
        reserved were made.

        Raises:
            ConfigurationError: A figure makes no sense.
            LedgerError: The store holds this reservation in other windows.
        """
        self._desk.settle_now(self, to_amount(usd, tokens, *self.amount[2:]))

    def release(self) -> None:
        """Charge nothing: the call was not made."""
        self._desk.settle_now(self, ZERO)


class Reservations:
    """Makes and settles the reservations of one ledger.

    Args:
        connection: To the store.
        outbox: For what could not be sent.
        allowance: What may be admitted when the store is absent, to be charged later; None refuses.
        wake: Called when there is something to send.
        warn: Called after a trip that brought some windows to 80 %, outside of every lock.
    """

    def __init__(
        self,
        connection: Connection,
        outbox: Outbox,
        allowance: Allowance | None,
        *,
        wake: Callable[[], object],
        warn: Callable[[Sequence[Window]], object],
    ) -> None:
        self._connection = connection
        self._outbox = outbox
        self._allowance = allowance
        self._wake = wake
        self._warn = warn
        self._exceeded = False
        """A call used more than it had reserved, and the store may not have heard of it yet."""

    def reserve(
        self, account: Account, amount: Amount, run: str, name: str | None = None
    ) -> Reservation | LedgerRefused:
        """Reserve with one trip; under a name of the caller's, a repeat is the same reservation.

        Raises:
            ConfigurationError: The name is that of a reservation of less, or of other windows.
        """
        if self._exceeded:
            self._exceeded = False
            self.deliver()
        made = name or new_id()
        flags = tuple(sorted((*account.flags, f"r:{run}"))) if run else account.flags
        try:
            answer, windows = self._connection.take(
                account, lambda windows: Step("reserve", made, windows, amount, flags, run)
            )
        except OtherWindows:
            raise ConfigurationError(
                "reservation_id must name one reservation, got one of another tenant's or day's. "
                "Use another name for another call."
            ) from None
        except LedgerUnreachable as error:
            # By now another day may have begun.
            windows = error.windows or account.windows(self._connection.now())
            if self._allowance is not None and error.is_absent:
                local = Reservation(self, made, windows, amount, run, is_local=True)
                return self._allow(self._allowance, local, error)
            if error.was_sent and name is None:
                self._take_back(Reservation(self, made, windows, amount, run))
            return LedgerRefused(ABORTED, f"{error}{_HOW if error.is_absent else ''}")
        except BudgetGuardError:
            raise
        except BaseException:  # a signal's handler; the store may have taken it
            if name is None:
                windows = account.windows(self._connection.now())
                self._take_back(Reservation(self, made, windows, amount, run))
            raise
        if answer.status != "ok":
            return refusal_of(answer, windows)
        if amount.exceeds(answer.amount):
            raise ConfigurationError(
                "reservation_id must name one reservation, got one that was made of "
                f"${to_dollars(answer.amount.usd)} and {answer.amount.tokens} tokens for more. "
                "Use another name for another call."
            )
        if self._allowance is not None and not len(self._outbox):
            self._allowance.begin()
        if answer.warn:
            self._warn([one for place, one in enumerate(windows) if answer.warn >> place & 1])
        return Reservation(self, made, windows, amount, run)

    def _take_back(self, reservation: Reservation) -> None:
        """Close a reservation at nothing, also before it arrives.

        Never one under a name of the caller's: a retry under it may be under way, here or in
        another process.
        """
        self._outbox.add(reservation.settlement(ZERO))
        self._wake()

    def _allow(
        self, allowance: Allowance, local: Reservation, error: Exception
    ) -> Reservation | LedgerRefused:
        if not allowance.take(local.amount):
            return LedgerRefused(
                ABORTED, f"{error} What is allowed without it is used up (allow_usd)."
            )
        try:
            self._outbox.record(local.settlement(local.amount))
        except LedgerUnreachable as full:
            allowance.count(ZERO.minus(local.amount))
            return LedgerRefused(ABORTED, f"{error} {full}")
        return local

    def settle(self, reservation: Reservation, spent: Amount) -> None:
        """Settle it in the thread that talks to the store.

        Should the process be killed before, the reservation stays charged. What was used beyond it
        is written to the disk first.
        """
        step = reservation.settlement(spent)
        if spent.exceeds(reservation.amount):
            self._exceeded = True
            with suppress(LedgerUnreachable):
                self._outbox.record(step, synced=False)
        self._count_beyond(reservation, spent)
        self._outbox.add(step)
        self._wake()

    def settle_now(self, reservation: Reservation, spent: Amount) -> None:
        """Settle with one trip; later, where the store does not answer."""
        step = reservation.settlement(spent)
        self._count_beyond(reservation, spent)
        if reservation.is_local:
            self._outbox.add(step)
            return
        try:
            self._connection.send(step)
        except LedgerUnreachable:
            self._outbox.add(step)
            self._outbox.save()
            self._wake()

    def _count_beyond(self, reservation: Reservation, spent: Amount) -> None:
        if reservation.is_local and self._allowance is not None:
            self._allowance.count(spent.larger(reservation.amount).minus(reservation.amount))

    def report(self, account: Account, spent: Amount, run: str) -> None:
        """Charge what nothing was reserved for, as soon as the store answers."""
        windows = account.windows(self._connection.now())
        self._outbox.add(Step("settle", new_id(), windows, spent, owner=run))
        self._wake()

    def deliver(self) -> bool:
        """Send what waits for the ledger's thread; False where nothing did, or no store answers."""
        if not len(self._outbox):
            return False
        try:
            return self._outbox.deliver(self._connection.send)
        except LedgerUnreachable:
            return False
