"""The ceilings that the ledger itself holds; for a key, they win over what a process names."""

from __future__ import annotations

from collections.abc import Mapping

from budgetguard_core.clock import Clock
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.ledger.amounts import Amount
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.errors import LedgerUnreachable
from budgetguard_core.ledger.step import Store
from budgetguard_core.ledger.windows import Account, Window, quoted

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

    def store(self, key: str, ceilings: Mapping[str, Amount | None]) -> None:
        """Store the ceilings of a key by kind of window; None takes it away.

        Raises:
            LedgerUnreachable: The store does not answer.
        """

        def put(store: Store) -> None:
            for kind, ceiling in ceilings.items():
                store.set_ceiling(key, kind, ceiling)

        self._connection.ask(put)
        self._known = None

    def all(self) -> Mapping[tuple[str, str], Amount]:
        """Return all of them, by key and kind.

        Raises:
            LedgerUnreachable: The store does not answer.
        """
        return self._connection.ask(lambda store: store.ceilings())

    def _recent(self) -> Mapping[tuple[str, str], Amount] | None:
        """Return them as the store said within the last second, or when it last answered."""
        now = self._clock.monotonic_ns()
        if self._known is None or now - self._known_ns > _KNOWN_SECONDS * 1e9:
            try:
                self._known = self.all()
            except LedgerUnreachable:
                if self._known is None:
                    return None
            self._known_ns = now
        return self._known

    def of(self, account: Account) -> list[Amount]:
        """Return the ceilings that hold for an account's windows, now.

        If the store never answered, an unknown ceiling is none that a call may exceed.
        """
        stored = self._recent()
        windows = account.windows(self._connection.now())
        if stored is None:
            return [Amount(1, 1, 1, 1)] * len(windows)
        return [ceiling_of(one, stored) for one in windows]

    def require(self, account: Account, shown: str) -> None:
        """Refuse a run that nothing would bound.

        A ceiling of none that is stored for a key, or as the default, was meant so.

        Raises:
            ConfigurationError: No ceiling is set for any key of the account.
        """
        windows = account.windows(self._connection.now())
        if any(any(window.ceiling) for window in windows):
            return
        stored = self._recent()
        if stored is None or any(
            (key, window.label[0]) in stored for window in windows for key in (window.key, "")
        ):
            return
        name = quoted(account.names[0])
        raise ConfigurationError(
            f"a ceiling must be set for {name} in {shown}, got none, so nothing would bound the "
            f"run. Set one with `budgetguard ledger set {account.names[0]} --daily-usd 20`, or a "
            "default for all tenants with Ledger(url, daily_usd=20)."
        )


def ceiling_of(window: Window, stored: Mapping[tuple[str, str], Amount]) -> Amount:
    """Return what holds for a window: its key's own, else the stored default, else its own."""
    kind = window.label[0]
    return stored.get((window.key, kind), stored.get(("", kind), window.ceiling))
