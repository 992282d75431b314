"""What a model call sets aside with the ledger of its tenant, in the ledger's units."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

Amounts: TypeAlias = tuple[int, int]
"""Nano-dollars and tokens."""
NOTHING: Amounts = (0, 0)

FEMTO_PER_NANO = 10**6
ROUND_UP = FEMTO_PER_NANO - 1
MOST = 2**52 - 1
"""Far above any call; a store counts no more in one step."""


class Payer(Protocol):
    """One run's place in a ledger."""

    def settle(self, part: Any, reserved: Amounts, spent: Amounts) -> None:
        """Replace what was set aside by what was measured, in memory."""
        ...

    def report(self, spent: Amounts) -> None:
        """Charge what nothing was set aside for."""
        ...


Charge: TypeAlias = tuple[Payer, Any, Amounts]
"""Who pays, from what part, and how much was set aside; no part where the run only looks on."""
Charges: TypeAlias = tuple[Charge, ...]


def measured(cost: int, tokens: int) -> Amounts:
    """Turn the engine's figures into the ledger's; money is rounded up."""
    # Part of every step with a ledger: no `min`, which is a call.
    usd = (cost + ROUND_UP) // FEMTO_PER_NANO
    return usd if usd < MOST else MOST, tokens if tokens < MOST else MOST


def settle_charges(charges: Charges, spent: Amounts) -> None:
    """Tell every payer what a call used."""
    for payer, part, reserved in charges:
        if part is not None:
            payer.settle(part, reserved, spent)
        elif spent != NOTHING:
            payer.report(spent)
