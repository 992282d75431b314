"""What a model call sets aside with the ledger of its tenant, in the ledger's units."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

Amounts: TypeAlias = tuple[int, int]
"""Nano-dollars and tokens."""
NOTHING: Amounts = (0, 0)

_FEMTO_PER_NANO = 10**6
_ROUND_UP = _FEMTO_PER_NANO - 1
# Far above any call; a store counts no more in one step.
_MOST = 2**52 - 1


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
    # This and what follows are part of every step with a ledger: no `min`, which is a call.
    usd = (cost + _ROUND_UP) // _FEMTO_PER_NANO
    return usd if usd < _MOST else _MOST, tokens if tokens < _MOST else _MOST


def set_aside(cost: int, tokens: int) -> Amounts:
    """Return what a call reserves: at least one unit, or a used-up ceiling would admit it."""
    usd = (cost + _ROUND_UP) // _FEMTO_PER_NANO or 1
    return usd if usd < _MOST else _MOST, (tokens or 1) if tokens < _MOST else _MOST


def settle_charges(charges: Charges, spent: Amounts) -> None:
    """Tell every payer what a call used."""
    for payer, part, reserved in charges:
        if part is not None:
            payer.settle(part, reserved, spent)
        elif spent != NOTHING:
            payer.report(spent)
