"""What a guard knows of its run, and what the run may be asked. `Guard` adds the verbs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast

from budgetguard_core import limits
from budgetguard_core.breakers import BreakerRegistry
from budgetguard_core.budget import Budget
from budgetguard_core.cancellation import CancellationToken
from budgetguard_core.caps import INFINITY
from budgetguard_core.clock import Clock
from budgetguard_core.decision import Admit, Occurrences, ToolCall
from budgetguard_core.errors import ConfigurationError, shown
from budgetguard_core.events import (
    ContextWindowNearlyFull,
    EventBase,
    LimitNearlyReached,
    RunStarted,
    TripObserved,
    Tripped,
)
from budgetguard_core.exemptions import ExemptMeter, ReserveMeter
from budgetguard_core.meter import Chain, Meter
from budgetguard_core.outcome import Outcome, ToolCallRecord
from budgetguard_core.pricing import PriceBook
from budgetguard_core.run_breakers import BreakerLine, RunBreakers
from budgetguard_core.standing import Mode, Standing, as_mode
from budgetguard_core.stop import Trip, Violation
from budgetguard_core.tree import Tree
from budgetguard_core.usage import Usage

if TYPE_CHECKING:
    from budgetguard_core.tenancy import TenantPlace

RECORDS_KEPT = 256
_RECORDS_CUT = 2 * RECORDS_KEPT
_COUNTED = ("function", "hosted")
_NOBODY: frozenset[Any] = frozenset()
NAME_LENGTH = 200
"""Characters that are kept of a tool's name in the record of a call."""

WarningEvent: TypeAlias = LimitNearlyReached | ContextWindowNearlyFull
"""What `on_warning` is called with."""


@cache
def _no_caps() -> Budget:
    """Return the budget of a run without one; the same for all, because it is frozen."""
    return Budget()


@cache
def _no_usage() -> Usage:
    """Return what a run has used that has used nothing; the same for all, because it is frozen."""
    return Usage()


class RunState:
    """One run's place in its tree, its meter, and what stands against it.

    Attributes:
        lineage: The guard and everyone that its calls are charged to, the guard first.
    """

    __slots__ = (
        "__weakref__",
        "_answered",
        "_asked",
        "_binding",
        "_braked",
        "_breakers",
        "_chain",
        "_completed",
        "_conditional",
        "_earlier",
        "_enforced",
        "_exempt",
        "_expects",
        "_gated",
        "_is_housekeeping",
        "_line",
        "_meter",
        "_mixed",
        "_needs_price",
        "_occurrences",
        "_on_warning",
        "_output_bound",
        "_paced",
        "_records",
        "_standing",
        "_tenant",
        "_tenants",
        "_tree",
        "_warn_at",
        "_watched",
        "_window_warned",
        "budget",
        "cancellation",
        "lineage",
        "mode",
        "outcome",
        "parent",
        "run_id",
    )

    def _set_up(
        self,
        tree: Tree,
        parent: Self | None,
        budget: Budget | None,
        mode: Mode | str,
        run_id: str | None,
        on_warning: Callable[[Self, WarningEvent], object] | None,
        beside: Sequence[Self] = (),
        breakers: BreakerRegistry | None = None,
    ) -> None:
        if budget is not None and not isinstance(budget, Budget):
            raise ConfigurationError(
                f"budget must be a Budget, got {type(budget).__name__}. "
                "Build one with Budget(max_iterations=25)."
            )
        if on_warning is not None and not callable(on_warning):
            raise ConfigurationError(
                f"on_warning must be callable, got {type(on_warning).__name__}. Pass a function."
            )
        if run_id is not None and not (isinstance(run_id, str) and run_id):
            raise ConfigurationError(
                f"run_id must be a text, not empty, got {shown(run_id)}. "
                "Leave it out for a random one."
            )
        budget = budget or _no_caps()
        self.budget: Budget = budget if parent is None else budget.inheriting(parent.budget)
        self.mode = as_mode(mode)
        self.run_id = run_id or uuid.uuid4().hex
        self.parent: Self | None = parent
        self.outcome: Outcome | None = None
        self.cancellation: CancellationToken = CancellationToken(
            None if parent is None else parent.cancellation
        )
        self._tree = tree
        self._on_warning = on_warning
        self._meter = Meter(self.budget)
        self._breakers = (
            None
            if self.mode is Mode.OFF
            else RunBreakers.of(
                self.budget, self.mode is Mode.ENFORCE, lambda: breakers or tree.breakers
            )
        )
        self._standing = Standing(self._meter, self.budget, self.mode, self._breakers)
        above = () if parent is None else (parent, *beside)
        self.lineage: tuple[Self, ...] = tuple(
            dict.fromkeys((self, *(guard for one in above for guard in one.lineage)))
        )
        # This guard and those above it, and what the steps of each are counted on.
        self._line: tuple[Self, ...] = tuple(
            guard for guard in self.lineage if guard.mode is not Mode.OFF
        )
        self._chain: Chain = tuple(guard._meter for guard in self._line)
        self._is_housekeeping = False
        # The runs whose housekeeping this is, or is a part of.
        self._exempt: frozenset[Self] = _NOBODY.union(*(one._exempt for one in above)) or _NOBODY
        self._asked: Chain = self._askable()
        # The stopped runs whose last answer this is.
        self._answered: frozenset[Self] = _NOBODY
        self._tenant: TenantPlace | None = None
        self._tenants = self._payers()
        self._begin()

    def _take_tenant(self, place: TenantPlace) -> None:
        self._tenant = place
        self._tenants = self._payers()

    def _payers(self) -> tuple[TenantPlace, ...]:
        """Whoever pays for this guard and the ones above it, each tenant once."""
        payers: dict[object, TenantPlace] = {}
        for guard in reversed(self._line):
            if guard._tenant is not None:
                payers.setdefault(guard._tenant.payer, guard._tenant)
        return tuple(payers.values())

    def _be_housekeeping(self) -> None:
        self._is_housekeeping = True
        # What bounds housekeeping around it goes on to do so.
        self._exempt = frozenset(one for one in self.lineage[1:] if not one._is_housekeeping)
        self._asked = self._askable()

    def _askable(self) -> Chain:
        """Return the chain with which caps the run is bound by; the same but in housekeeping."""
        if not self._exempt:
            return self._chain
        return tuple(
            cast("Meter", ExemptMeter(guard._meter)) if guard in self._exempt else guard._meter
            for guard in self._line
        )

    def _begin(self) -> None:
        """Put what is the guard's own to its beginning."""
        self._earlier = _no_usage()
        self._records: list[tuple[str | None, str, str]] = []
        self._completed: int = 0
        self._occurrences = Occurrences()
        self._window_warned = False
        # Asked on every step and never changed by `extend`, so worked out once.
        self._warn_at = self.budget.warn_at
        self._needs_price = any(meter.caps.refuses_unpriced for meter in self._chain)
        self._brake_with(tuple(guard for guard in self._line if guard._breakers is not None))
        self._conditional = any(guard._standing.conditions for guard in self._line)
        # An advisory envelope must not cut what the enforced ones allow.
        enforced = tuple(guard for guard in self._line if guard.mode is Mode.ENFORCE)
        self._enforced = bool(enforced)
        self._binding: Chain = tuple(guard._meter for guard in enforced) or self._chain
        self._output_bound = min(
            (
                bound
                for meter in self._binding
                if (bound := meter.caps.budget.max_output_tokens_per_call) is not None
            ),
            default=None,
        )
        # Nothing else tells what calls at the same time may come to.
        self._expects = self._output_bound is None and any(
            meter.caps.tokens != INFINITY or meter.caps.cost != INFINITY for meter in self._chain
        )

    def _be_last_answer(self, of: Self) -> None:
        """Be bound by the reserve of a stopped run alone, and by what is above that run."""
        stopped = frozenset(one for one in self.lineage[1:] if of in one.lineage)
        self._answered = stopped
        self._asked = tuple(
            cast("Meter", ReserveMeter(guard._meter)) if guard in stopped else asked
            for guard, asked in zip(self._line, self._asked, strict=True)
        )
        self._binding = tuple(
            meter
            for guard, meter in zip(self._line, self._asked, strict=True)
            if guard.mode is Mode.ENFORCE
        )
        self._brake_with(tuple(one for one in self._braked if one not in stopped))

    def _brake_with(self, braked: tuple[Self, ...]) -> None:
        """Ask the breakers of these runs before a step."""
        self._braked = braked
        self._watched: BreakerLine = tuple(
            guard._breakers for guard in braked if guard._breakers is not None
        )
        self._paced: BreakerLine = tuple(one for one in self._watched if one.velocity is not None)
        self._mixed: tuple[tuple[Self, RunBreakers], ...] = tuple(
            (guard, one)
            for guard, one in zip(braked, self._watched, strict=True)
            if one.mix is not None
        )
        # Whether there is anything to ask before a tool call: progress is about the turns.
        self._gated = bool(self._paced or self._mixed) or any(one.gates for one in self._watched)

    def _announce(self, beside: Sequence[Self] = ()) -> None:
        if self._tree.sinks:
            with self._tree.lock:
                self._record(
                    RunStarted,
                    self._now(),
                    budget=self.budget.to_json(),
                    mode=str(self.mode),
                    parent_run_id=None if self.parent is None else self.parent.run_id,
                    price_book=self._tree.price_book.version,
                    stop_conditions=len(self.budget.stop_when),
                    tenant=() if self._tenant is None else self._tenant.names,
                    beside=tuple(one.run_id for one in beside),
                )
            self._tree.deliver()

    # What a run may ask about itself

    @property
    def trip(self) -> Trip | None:
        """Why the run was stopped, or None while it may go on."""
        return self._standing.trip

    @property
    def observed_trip(self) -> Trip | None:
        """In OBSERVE: the trip that ENFORCE would have made, at the step where it would have."""
        return self._standing.observed

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Everything that held when the run was stopped, in order."""
        return () if self.trip is None else self.trip.violations

    @property
    def usage(self) -> Usage:
        """What the run has used so far, its sub-agents included."""
        with self._tree.lock:
            return self._meter.usage(self._now())

    @property
    def earlier_usage(self) -> Usage:
        """What earlier legs of a run used that was resumed under a fresh budget."""
        return self._earlier

    @property
    def tool_counts(self) -> dict[str, int]:
        """How many bodies of each tool were started (the first 1,024 names)."""
        with self._tree.lock:
            return self._meter.tools_started()

    @property
    def completed_tool_calls(self) -> int:
        """How many tool calls of this run were completed: no handoffs, none of sub-agents."""
        return self._completed

    @property
    def tool_calls(self) -> tuple[ToolCallRecord, ...]:
        """What became of the last 256 tool calls; those in flight follow as interrupted."""
        with self._tree.lock:
            records = self._records[-RECORDS_KEPT:]
            records += [
                (ticket.call.id, ticket.call.name[:NAME_LENGTH], "interrupted")
                for ticket in self._open_tool_calls()
            ]
        return tuple(
            ToolCallRecord.model_validate({"id": id_, "name": name, "status": status})
            for id_, name, status in records
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """The dimensions that have reached their warning share, in the order they did."""
        return self._meter.warned

    @property
    def window_nearly_full(self) -> bool:
        """Whether the last prompt reached the warning share of its model's context window."""
        return self._window_warned

    @property
    def errors(self) -> tuple[str, ...]:
        """The last 20 failures of sinks, listeners and conditions; they changed nothing."""
        return tuple(self._tree.errors)

    @property
    def price_book(self) -> PriceBook:
        """Where this guard's prices come from."""
        return self._tree.price_book

    @property
    def clock(self) -> Clock:
        """Where this guard's time comes from."""
        return self._tree.clock

    @property
    def has_sinks(self) -> bool:
        """Whether anybody takes this guard's events."""
        return bool(self._tree.sinks)

    @property
    def is_housekeeping(self) -> bool:
        """Whether this is the guard of a `housekeeping` block."""
        return self._is_housekeeping

    def keeps_house_for(self, guard: RunState) -> bool:
        """Tell whether this is housekeeping of a run, whose deadline does not bind it then."""
        return guard in self._exempt

    @property
    def paused(self) -> bool:
        """Whether a run on this guard waits for a person."""
        return self._meter.pauses > 0

    def open_tool_calls(self) -> tuple[Admit, ...]:
        """Return the tool calls that were started and have not been settled."""
        with self._tree.lock:
            return tuple(self._open_tool_calls())

    def open_calls(self) -> tuple[Admit, ...]:
        """Return every call of this run, of models and tools, that has not been settled."""
        with self._tree.lock:
            return tuple(t for t in self._tree.open.values() if t.guard is self)

    def time_left(self) -> float | None:
        """Seconds until the deadline of this run or of an ancestor; 0 when it has passed.

        None without a deadline. A deadline in OBSERVE cuts nothing and is not among them. It does
        not shrink while the time stands still (see `pause`).
        """
        with self._tree.lock:
            left = INFINITY
            for guard, meter in zip(self._line, self._asked, strict=True):
                if guard.mode is Mode.ENFORCE:
                    cap = meter.caps.nanoseconds
                    if cap != INFINITY:
                        left = min(left, cap - meter.elapsed(self._now()))
        if left == INFINITY:
            return None
        return left / 1_000_000_000 if left > 0 else 0.0

    @property
    def is_late(self) -> bool:
        """Whether the deadline of this run or of an ancestor has passed."""
        now = self._now()
        for meter in self._asked:
            if now >= meter.mark_at:
                return self.time_left() == 0
        return False

    # Under the lock

    def _now(self) -> int:
        return self._tree.now()

    def _stop(
        self, now: int, found: Sequence[tuple[Self, list[Violation]]] | None = None
    ) -> Trip | None:
        """Trip every guard of the chain whose limits hold; None when nothing stops this run."""
        if found is None:
            found = [
                (guard, limits.tool_call_violations(meter, now))
                for guard, meter in zip(self._line, self._asked, strict=True)
            ]
        if self.trip is not None:
            return self.trip
        refused = {guard for guard, caps in found if caps}
        for guard in self._line:
            if guard.trip is not None and (guard not in self._answered or refused):
                self._set_trip(guard.trip, now)
                return guard.trip
        every: list[Violation] = []
        owner = self
        for guard, caps in found:
            if guard._meter.looks_on or guard in self._answered:
                continue
            held = limits.in_order([*caps, *guard._standing.violations(guard is self)])
            if not held:
                continue
            own = Trip(reason=held[0].reason, violations=tuple(held), run_id=guard.run_id)
            if guard.mode is Mode.OBSERVE:
                guard._standing.observe_trip(own)
                if self._tree.sinks:
                    guard._record(TripObserved, now, trip=own)
                continue
            every = limits.in_order([*every, *held])
            if every[0] is held[0]:
                owner = guard
            if guard is not self:
                guard._set_trip(own, now)
        if not every:
            return None
        trip = Trip(reason=every[0].reason, violations=tuple(every), run_id=owner.run_id)
        self._set_trip(trip, now)
        return trip

    def _set_trip(self, trip: Trip, now: int) -> None:
        self._standing.set_trip(trip)
        if self._tree.sinks:
            self._record(Tripped, now, trip=trip)

    def _keep_time(self, now: int) -> None:
        """Let time stand still on the meters of runs that wait, where nothing is in flight."""
        for guard in self._line:
            meter = guard._meter
            if meter.may_stand and not guard._is_busy():
                meter.stand_still(now)
            else:
                meter.run_on(now)

    def _is_busy(self) -> bool:
        return any(
            self in ticket.guard._line
            and self not in ticket.guard._exempt
            and call_id not in self._tree.waiting
            for call_id, ticket in self._tree.open.items()
        )

    def _open_tool_calls(self) -> list[Admit]:
        return [
            ticket
            for ticket in self._tree.open.values()
            if ticket.guard is self and type(ticket.call) is ToolCall
        ]

    def _keep_record(self, call: ToolCall, status: str) -> None:
        if status == "completed" and call.kind in _COUNTED:
            self._completed += 1
        records = self._records
        records.append((call.id, call.name[:NAME_LENGTH], status))
        if len(records) > _RECORDS_CUT:
            del records[:-RECORDS_KEPT]

    def _record(self, kind: type[EventBase], now: int, **facts: Any) -> None:
        self._tree.make(kind, self.run_id, now, facts)
