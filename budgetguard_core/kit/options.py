"""The options that every adapter takes beside its budget, typed; `Envelope` documents them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from budgetguard_core.breakers import BreakerRegistry
from budgetguard_core.budget import Budget
from budgetguard_core.clock import Clock
from budgetguard_core.events import Event

# pdoc 16 looks here for what a handler takes.
from budgetguard_core.guard import Guard as Guard
from budgetguard_core.guard import Mode, WarningHandler
from budgetguard_core.kit.pruning import Prune
from budgetguard_core.outcome import Outcome
from budgetguard_core.pricing import PriceBook
from budgetguard_core.profiles import Profile, Selector
from budgetguard_core.sinks import Sink
from budgetguard_core.stop import AsksPerson
from budgetguard_core.stop_state import ModeName
from budgetguard_core.stores import CheckpointStore

if TYPE_CHECKING:
    from budgetguard_core.ledger import Ledger, Tenant

OnTrip: TypeAlias = Literal["return", "raise", "ask"] | AsksPerson
"""The result of a stopped run: its partial result, or `BudgetExceeded`; or who is asked
before a cap stops it."""


class _CommonOptions(TypedDict, total=False):
    mode: Mode | ModeName
    sinks: Iterable[Sink | Callable[[Event], object]]
    on_warning: WarningHandler | None
    on_outcome: Callable[[Outcome], object] | None
    price_book: PriceBook | None
    clock: Clock | None
    breakers: BreakerRegistry | None
    store: CheckpointStore | None
    on_trip: OnTrip
    prune: Prune | None
    ledger: Ledger | str | None
    tenant: Tenant | Callable[[Any], Tenant] | None
    conversation: Budget | None
    conversation_id: str | Callable[[Any], str | None] | None


class EnvelopeOptions(_CommonOptions, total=False):
    """The options that every adapter takes beside its budget; `Envelope` documents them."""

    profile: str | Profile | Selector | None


class ProfileOptions(_CommonOptions):
    """The options beside a profile that takes the place of a budget."""

    profile: str | Profile | Selector
