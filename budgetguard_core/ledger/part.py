"""Money that the store, or the queue on the disk, has reserved for one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from budgetguard_core.ledger.refusal import Refusal
from budgetguard_core.ledger.windows import Window


@dataclass(frozen=True, slots=True)
class Part:
    """One reservation, in the windows that it was made in."""

    refusal: ClassVar[None] = None
    """None, so that a caller can distinguish it from a `Refusal` without an import."""

    id: str
    windows: Sequence[Window]
    local: bool = False
    """Recorded on the disk, because the store could not be reached."""


Obtained: TypeAlias = Part | Refusal
