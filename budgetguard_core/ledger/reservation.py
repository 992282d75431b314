"""A round trip for each call: reserved before it, settled after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal

from budgetguard_core.errors import BudgetGuardError, ConfigurationError
from budgetguard_core.ledger.amounts import ZERO, Amount, to_amount, to_dollars
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.errors import (
    ABORTED,
    LedgerRefused,
    LedgerUnreachable,
    OtherWindows,
    Warned,
    reason_of,
    refusal_of,
)
from budgetguard_core.ledger.outbox import Outbox
from budgetguard_core.ledger.step import Answer, Step, new_id
from budgetguard_core.ledger.windows import Account, Window

_REPEATED_WITHIN = 86_400.0


class Allowance:
    """The amount that this process may admit while its store is absent.

    Args:
        most: In all, from the store's last answer to its next; nothing if left out.
    """

    def __init__(self, most: Amount = ZERO) -> None:
        self._most = most
        self.begin()

    def begin(self) -> None:
        """Begin anew in a child process."""
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
        """Count what a call used beyond what it had taken, or give back."""
        with self._lock:
            self._taken = self._taken.plus(amount)

    def restore(self) -> None:
        """Forget what was taken: the store knows it."""
        if self._taken != ZERO:
            with self._lock:
                self._taken = ZERO


@dataclass(frozen=True, slots=True)
class Part:
    """The reservation of one call, in the windows that it was made in."""

    id: str
    windows: Sequence[Window]
    amount: Amount
    owner: str = ""
    local: bool = False
    """Recorded on the disk, because the store could not be reached."""


class Reservations:
    """Reservations of one set of keys.

    Args:
        connection: To the store.
        account: The keys.
        outbox: For what could not be sent.
        allowance: What may be admitted when the store is absent, to be charged later; None refuses.
        wake: Called when there is something to send.
        warn: Called after a trip that brought windows to 80 %, outside of every lock.
    """

    def __init__(
        self,
        connection: Connection,
        account: Account,
        outbox: Outbox,
        *,
        allowance: Allowance | None = None,
        wake: Callable[[], object],
        warn: Callable[[Sequence[Warned]], object],
    ) -> None:
        self.account = account
        self._connection = connection
        self._outbox = outbox
        self._allowance = allowance
        self._wake = wake
        self._warn = warn
        self._exceeded = False
        """A call used more than it had reserved, and the store may not have heard of it yet."""

    def reserve(self, amount: Amount, run: str, name: str | None = None) -> Part | LedgerRefused:
        """Reserve with one trip; under a name of the caller's, a repeat is the same reservation.

        Raises:
            ConfigurationError: The name is that of a reservation of less, or of other keys.
        """
        if self._exceeded:
            self._exceeded = False
            # A store that does not answer is met again below.
            with suppress(LedgerUnreachable):
                self._outbox.deliver(self._connection.send)
        made = name or new_id()
        flags = self.account.flags
        if run:
            flags = tuple(sorted((*flags, f"r:{run}")))

        def make(windows: Sequence[Window]) -> Step:
            return Step("reserve", made, windows, amount, flags, run)

        try:
            answer, windows = self._take(make)
        except LedgerUnreachable as error:
            windows = error.windows or self.account.windows(self._connection.now())
            part = Part(made, windows, amount, run, local=True)
            if self._allowance is not None and error.is_absent:
                return self._allow(self._allowance, part, error)
            if error.was_sent and name is None:
                self._take_back(part)
            return LedgerRefused(ABORTED, f"{error}{_HOW if error.is_absent else ''}")
        except BudgetGuardError:
            raise
        except BaseException:  # a signal's handler; the store may have taken it
            if name is None:
                windows = self.account.windows(self._connection.now())
                self._take_back(Part(made, windows, amount, run))
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
            self._allowance.restore()
        if answer.warn:
            self._warn(_warned(answer, windows))
        return Part(made, windows, amount, run)

    def _take(self, make: Callable[[Sequence[Window]], Step]) -> tuple[Answer, Sequence[Window]]:
        try:
            return self._connection.take(self.account, make)
        except OtherWindows:
            now = self._connection.now()
        # A repeat of what was reserved before midnight: of each key's, one after the other.
        windows = self.account.windows(now)
        while (edge := max([window.start for window in windows])) > now - _REPEATED_WITHIN:
            windows = self.account.windows(edge - 0.001)
            try:
                return self._connection.send(make(windows)), windows
            except OtherWindows:
                continue
        raise ConfigurationError(
            "reservation_id must name one reservation, got one of another tenant's. "
            "Use another name for another call."
        )

    def _take_back(self, part: Part) -> None:
        """Close a reservation at nothing, also before it arrives.

        Never one under a name of the caller's: a retry under it may be under way, here or in
        another process.
        """
        self._outbox.add(_settlement(part, ZERO))
        self._wake()

    def _allow(self, allowance: Allowance, part: Part, error: Exception) -> Part | LedgerRefused:
        if not allowance.take(part.amount):
            return LedgerRefused(
                ABORTED, f"{error} What is allowed without it is used up (allow_usd)."
            )
        try:
            self._outbox.record(_settlement(part, part.amount))
        except LedgerUnreachable as full:
            allowance.count(ZERO.minus(part.amount))
            return LedgerRefused(ABORTED, f"{error} {full}")
        return part

    def settle(self, part: Part, spent: Amount) -> None:
        """Settle it in the thread that talks to the store.

        Should the process be killed before, the reservation stays charged. What was used beyond it
        is written to the disk first.
        """
        step = _settlement(part, spent)
        if spent.exceeds(part.amount):
            self._exceeded = True
            with suppress(LedgerUnreachable):
                self._outbox.record(step, synced=False)
        self._count_beyond(part, spent)
        self._outbox.add(step)
        self._wake()

    def _count_beyond(self, part: Part, spent: Amount) -> None:
        if part.local and self._allowance is not None:
            self._allowance.count(spent.larger(part.amount).minus(part.amount))

    def settle_now(self, part: Part, spent: Amount) -> None:
        """Settle with one trip; later, where the store does not answer."""
        step = _settlement(part, spent)
        self._count_beyond(part, spent)
        try:
            if part.local:
                self._outbox.add(step)
            else:
                self._connection.send(step)
        except LedgerUnreachable:
            self._outbox.add(step)
            self._outbox.save()
            self._wake()


_HOW = " (on_ledger_error is refuse)"


class Reservation:
    """Money set aside for one call, until it is settled or released.

    A reservation that is never settled stays charged in full.
    """

    __slots__ = ("_part", "_reservations", "amount", "id")

    def __init__(self, reservations: Reservations, part: Part) -> None:
        self._reservations = reservations
        self._part = part
        self.amount = part.amount
        self.id = part.id

    def settle(self, usd: Decimal | float = 0, tokens: int = 0) -> None:
        """Charge what was measured instead of what was reserved; repeats change nothing.

        More than was reserved is charged too: the provider has billed it. The calls that were
        reserved were made.

        Raises:
            ConfigurationError: A figure makes no sense.
            LedgerError: The store holds this reservation in other windows.
        """
        self._reservations.settle_now(self._part, to_amount(usd, tokens, *self.amount[2:]))

    def release(self) -> None:
        """Charge nothing: the call was not made."""
        self._reservations.settle_now(self._part, ZERO)


def _settlement(part: Part, spent: Amount) -> Step:
    return Step("settle", part.id, part.windows, spent, owner=part.owner)


def _warned(answer: Answer, windows: Sequence[Window]) -> list[Warned]:
    return [
        Warned(window.key, reason_of(window.label, 0), window.label)
        for place, window in enumerate(windows)
        if answer.warn >> place & 1
    ]
