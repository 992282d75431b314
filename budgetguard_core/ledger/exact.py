"""A round trip for each call: reserved before it, settled after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal

from budgetguard_core.charges import Amounts
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.account import Account
from budgetguard_core.ledger.amounts import ZERO, Amount, to_amount, to_dollars
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.errors import LedgerChanged, LedgerUnreachable, OtherWindows
from budgetguard_core.ledger.outbox import Outbox
from budgetguard_core.ledger.part import Obtained, Part
from budgetguard_core.ledger.refusal import ABORTED, Refusal, refusal_of
from budgetguard_core.ledger.step import Answer, Step, new_id
from budgetguard_core.ledger.windows import Window

_REPEATED_WITHIN = 86_400.0
TTL_SECONDS = 600.0
"""Seconds until the store lists a reservation: a call that hangs may be billed long after."""


class Exact:
    """Reservations of one set of keys.

    Args:
        connection: To the store.
        account: The keys.
        outbox: For what could not be sent.
        allow: When the store cannot be reached: admit, and have it charged later.
        wake: Called when there is something to send.
        tell: Called after a trip that brought a window to 80 %, outside of every lock.
    """

    def __init__(
        self,
        connection: Connection,
        account: Account,
        outbox: Outbox,
        *,
        allow: bool = False,
        wake: Callable[[], object],
        tell: Callable[[], object],
    ) -> None:
        self.account = account
        self._connection = connection
        self._outbox = outbox
        self._allow = allow
        self._wake = wake
        self._tell = tell
        self._passed = False
        """A call cost more than it had reserved, and the store may not have heard of it yet."""

    def obtain(self, usd: int, tokens: int, run: str = "") -> Obtained:
        """Reserve, with one trip; one more at the edge of a window."""
        return self.reserve(Amount(usd, tokens), run, new_id())

    def reserve(self, amount: Amount, run: str, name: str) -> Obtained:
        """Reserve under a name of the caller's: a repeat is the same reservation.

        Raises:
            ConfigurationError: The name is that of a reservation of less, or of other keys.
        """
        if self._passed:
            self._passed = False
            # A store that does not answer is met again below.
            with suppress(LedgerUnreachable):
                self._outbox.deliver(self._connection.send)
        flags = self.account.flags
        if run:
            flags = tuple(sorted((*flags, f"r:{run}")))

        def make(windows: Sequence[Window]) -> Step:
            return Step(
                name, 1, windows, need=amount, want=amount, ttl=TTL_SECONDS, flags=flags, owner=run
            )

        try:
            answer, windows = self._take(make)
        except LedgerUnreachable as error:
            return self._without_store(amount, run, name, error)
        if answer.status != "ok":
            return refusal_of(answer, windows)
        if answer.granted.usd < amount.usd or answer.granted.tokens < amount.tokens:
            raise ConfigurationError(
                "reservation_id must name one reservation, got one that was made of "
                f"${to_dollars(answer.granted.usd)} and {answer.granted.tokens} tokens for more. "
                "Use another name for another call."
            )
        if answer.warn:
            self._tell()
        return Part(name, windows)

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

    def _without_store(
        self, amount: Amount, run: str, name: str, error: LedgerUnreachable
    ) -> Obtained:
        windows = error.windows or self.account.windows(self._connection.now())
        if isinstance(error, LedgerChanged):
            return Refusal(ABORTED, str(error))
        if not self._allow:
            if error.was_sent:
                # It may have arrived: closed at nothing, also before it does.
                self._outbox.add(Step(name, 2, windows, close=True, owner=run))
                self._wake()
            return Refusal(ABORTED, f"{error} (on_ledger_error is refuse)")
        try:
            self._outbox.record(Step(name, 1, windows, spent=amount, owner=run))
        except LedgerUnreachable as full:
            return Refusal(ABORTED, f"{error} {full}")
        return Part(name, windows, local=True)

    def settle(self, part: Part, reserved: Amounts, spent: Amounts) -> None:
        """Have it settled by the thread that talks to the store: this one may hold a lock."""
        self._outbox.add(self.settlement(part, Amount(*spent)))
        self._passed |= spent[0] > reserved[0] or spent[1] > reserved[1]
        self._wake()

    def settle_now(self, part: Part, spent: Amount) -> None:
        """Settle with one trip; later, where the store does not answer."""
        step = self.settlement(part, spent)
        if part.local:
            self._outbox.add(step)
        else:
            try:
                if self._connection.send(step).warn:
                    self._tell()
            except LedgerUnreachable:
                self._outbox.add(step)
                self._outbox.save()
                self._wake()

    def settlement(self, part: Part, spent: Amount = ZERO) -> Step:
        """Return the message that closes a reservation."""
        return Step(part.id, 2, part.windows, spent=spent, close=True)


class Reservation:
    """Money set aside for one call, until it is settled or released.

    A reservation that is never settled stays charged in full.
    """

    __slots__ = ("_exact", "_part", "amount", "id")

    def __init__(self, exact: Exact, part: Part, amount: Amount) -> None:
        self._exact = exact
        self._part = part
        self.amount = amount
        self.id = part.id

    def settle(self, usd: Decimal | float = 0, tokens: int = 0) -> None:
        """Charge what was measured instead of what was reserved; repeats change nothing.

        More than was reserved is charged too: the provider has billed it.

        Raises:
            ConfigurationError: A figure makes no sense.
            LedgerError: The store holds this reservation in other windows.
        """
        self._exact.settle_now(self._part, to_amount(usd, tokens))

    def release(self) -> None:
        """Charge nothing: the call was not made."""
        self.settle()
