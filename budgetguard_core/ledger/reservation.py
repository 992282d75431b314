"""A round trip for each call: reserved before it, settled after it."""

from __future__ import annotations

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
from budgetguard_core.ledger.step import Answer, Step, new_id
from budgetguard_core.ledger.windows import Account, Window

_ATTEMPTS = 3


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

        Raises:
            ConfigurationError: A figure makes no sense.
            LedgerError: The store holds this reservation in other windows.
        """
        self._maker.settle_now(self, to_amount(usd, tokens, *self.amount[2:]))

    def release(self) -> None:
        """Charge nothing: the call was not made."""
        self._maker.settle_now(self, ZERO)


class Reservations:
    """Makes and settles the reservations of one ledger.

    Args:
        connection: To the store.
        outbox: For what could not be sent.
        allows: Whether a call is admitted when the store is absent, to be charged later.
        wake: Called when there is something to send.
        warn: Called after a trip that brought some windows to 80 %, outside of every lock.
    """

    def __init__(
        self,
        connection: Connection,
        outbox: Outbox,
        *,
        allows: bool,
        wake: Callable[[], object],
        warn: Callable[[Sequence[Window]], object],
    ) -> None:
        self._connection = connection
        self._outbox = outbox
        self._allows = allows
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
        made = Reservation(self, name or new_id(), amount, run)
        try:
            answer = self._ask(account, made)
        except OtherWindows:
            raise ConfigurationError(
                "reservation_id must name one reservation, got one of another tenant or day. "
                "Use another name for another call."
            ) from None
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
            raise ConfigurationError(
                "reservation_id must name one reservation, got one that was made of "
                f"${to_dollars(answer.amount.usd)} and {answer.amount.tokens} tokens for more. "
                "Use another name for another call."
            )
        if answer.warn:
            self._warn([one for place, one in enumerate(made.windows) if answer.warn >> place & 1])
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
        self._wake()

    def deliver(self) -> bool:
        """Send what waits for the ledger's thread; False where nothing did, or no store answers."""
        if not len(self._outbox):
            return False
        try:
            return self._outbox.deliver(self._connection.send)
        except LedgerUnreachable:
            return False
