"""The ceilings that the ledger itself holds; for a key, they win over what a process names."""

from __future__ import annotations

from collections.abc import Mapping

from budgetguard_core.clock import Clock
from budgetguard_core.ledger.account import Account
from budgetguard_core.ledger.amounts import Amount, check_ceiling
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.errors import LedgerUnreachable
from budgetguard_core.ledger.step import Store
from budgetguard_core.ledger.windows import KINDS, Window

_KNOWN_SECONDS = 1.0


class Ceilings:
    """The stored ceilings, by key ("" is the default of all keys) and kind of window.

    Args:
        connection: To the store.
        clock: Monotonic time.
    """

    def __init__(self, connection: Connection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._known: Mapping[tuple[str, str], Amount] | None = None
        self._known_ns = 0

    def store(self, key: str, *ceilings: Amount | None) -> None:
        """Store the ceilings of a key, one for each kind of window; None takes it away.

        Raises:
            ConfigurationError: A ceiling is larger than the store can count.
            LedgerUnreachable: The store does not answer.
        """

        def put(store: Store) -> None:
            for ceiling in ceilings:
                if ceiling is not None:
                    check_ceiling(ceiling, store.largest_ceiling)
            for kind, ceiling in zip(KINDS, ceilings, strict=True):
                store.set_ceiling(key, kind, ceiling)

        self._connection.ask(put)
        self._known = None

    def by_key(self) -> dict[str, dict[str, Amount]]:
        """Return all of them, by key and by kind.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        found: dict[str, dict[str, Amount]] = {}
        for (key, kind), ceiling in self._connection.ask(lambda store: store.ceilings()).items():
            found.setdefault(key, {})[kind] = ceiling
        return found

    def of(self, account: Account) -> list[Amount]:
        """Return the ceilings that hold for an account's keys, now.

        As the store said within the last second. A store that does not answer leaves it at what
        it said before; if it never did, an unknown ceiling is none that a call may pass.
        """
        now = self._clock.monotonic_ns()
        stored = self._known
        if stored is None or now - self._known_ns > _KNOWN_SECONDS * 1e9:
            try:
                stored = self._connection.ask(lambda store: store.ceilings())
            except LedgerUnreachable:
                if stored is None:
                    return [Amount(1, 1)]
            self._known, self._known_ns = stored, now
        return [ceiling_of(one, stored) for one in account.windows(self._connection.now())]


def ceiling_of(window: Window, stored: Mapping[tuple[str, str], Amount]) -> Amount:
    """Return what holds for a window: its key's own, else the stored default, else its own."""
    kind = window.label[0]
    return stored.get((window.key, kind), stored.get(("", kind), window.ceiling))
