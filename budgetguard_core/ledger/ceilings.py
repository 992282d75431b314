"""The ceilings that the ledger itself holds, which win over a process's, and what is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeAlias

from budgetguard_core.clock import Clock
from budgetguard_core.ledger.amounts import Amount, to_dollars
from budgetguard_core.ledger.connection import Connection
from budgetguard_core.ledger.errors import LedgerUnreachable
from budgetguard_core.ledger.step import WindowRecord, ceiling_name
from budgetguard_core.ledger.windows import Account, check_name

_KNOWN_SECONDS = 1.0
Stored: TypeAlias = Mapping[tuple[str, str], Amount]
"""Ceilings by key and kind of window."""


class Ceilings:
    """The stored ceilings, by key ("" is the default of all keys) and kind of window."""

    def __init__(self, connection: Connection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._known: Stored | None = None
        self._known_ns = 0

    def store(self, tenant: str | None, ceilings: Mapping[str, Amount | None]) -> None:
        """Store the ceilings of a key by kind of window; None takes it away."""
        key = "" if tenant is None else check_name(tenant, "tenant")
        texts = {
            ceiling_name(key, kind): None if ceiling is None else ceiling.to_text()
            for kind, ceiling in ceilings.items()
        }
        self._connection.ask(lambda store: [store.write(*note) for note in texts.items()])
        self._known = None

    def all(self) -> Stored:
        """Return all of them, by key and kind."""
        notes = self._connection.ask(lambda store: store.notes("c:"))
        return {(name[4:], name[2]): Amount.of_text(text) for name, text in notes.items()}

    def _recent(self) -> Stored | None:
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
        return [ceiling_of(one.key, one.label, stored, one.ceiling) for one in windows]

    def bound(self, account: Account) -> bool:
        """Return whether a ceiling is set for any key of an account.

        A ceiling of none that is stored for a key, or as the default, was meant so.
        """
        windows = account.windows(self._connection.now())
        if any(any(window.ceiling) for window in windows):
            return True
        stored = self._recent()
        return stored is None or any(
            (key, window.label[0]) in stored for window in windows for key in (window.key, "")
        )


def ceiling_of(key: str, label: str, stored: Stored, default: Amount) -> Amount:
    """Return what holds for a window: its key's own, else the stored default, else another."""
    return stored.get((key, label[0]), stored.get(("", label[0]), default))


@dataclass(frozen=True, slots=True)
class WindowUsage:
    """The use of one key in one window."""

    key: str
    window: str
    """The label: `d:2026-11-22`, `m:2026-11`, or `r:run` of a ledger for one run."""
    spent_usd: Decimal
    """Measured."""
    reserved_usd: Decimal
    """Set aside for calls under way, or left by a process that died."""
    ceiling_usd: Decimal | None
    spent_tokens: int
    reserved_tokens: int
    ceiling_tokens: int | None
    spent_model_calls: int
    reserved_model_calls: int
    ceiling_model_calls: int | None
    spent_tool_calls: int
    reserved_tool_calls: int
    ceiling_tool_calls: int | None

    @property
    def remaining_usd(self) -> Decimal | None:
        """The amount that may still be reserved; None without a ceiling."""
        if self.ceiling_usd is None:
            return None
        return max(Decimal(0), self.ceiling_usd - self.spent_usd - self.reserved_usd)

    @property
    def remaining_tokens(self) -> int | None:
        """The amount that may still be reserved; None without a ceiling."""
        if self.ceiling_tokens is None:
            return None
        return max(0, self.ceiling_tokens - self.spent_tokens - self.reserved_tokens)


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """The use of one key today and this month."""

    daily: WindowUsage
    monthly: WindowUsage


def usage_of(record: WindowRecord, stored: Stored, default: Amount | None = None) -> WindowUsage:
    """Return a store's record of a window with the ceiling that holds now.

    `default` is this process's; that of the process that reserved last if left out.
    """
    spent, reserved = record.spent, record.charged.minus(record.spent)
    given = record.ceiling if default is None else default
    ceiling = ceiling_of(record.key, record.label, stored, given)
    return WindowUsage(
        record.key,
        record.label,
        to_dollars(spent.usd),
        to_dollars(reserved.usd),
        to_dollars(ceiling.usd) if ceiling.usd else None,
        *(spent.tokens, reserved.tokens, ceiling.tokens or None),
        *(spent.model_calls, reserved.model_calls, ceiling.model_calls or None),
        *(spent.tool_calls, reserved.tool_calls, ceiling.tool_calls or None),
    )
