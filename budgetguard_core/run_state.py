"""The state that every step of a run works on: the chain it charges, its stops, plugs and log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias

from budgetguard_core import counters, events
from budgetguard_core.budget import Budget
from budgetguard_core.counters import Chain, Counters, Found, Link
from budgetguard_core.decision import Admit, ModelCall, ToolCall
from budgetguard_core.errors import ConfigurationError, shown
from budgetguard_core.loops import LoopDetector
from budgetguard_core.plugs import Ask, Ended, Plug
from budgetguard_core.stop import AsksPerson, Trip, Violation
from budgetguard_core.stop_state import Mode, StopState, in_order

_NAME_LENGTH = 200
Notice: TypeAlias = tuple[Any, events.LimitNearlyReached]
"""A warning to be given, and the guard that it is about."""
WITHDRAWN = Ended(withdrawn=True)
"""The status of a call that was never made."""


class RunState:
    """The state that the parts of one guard share. The tree's lock guards it, unless noted.

    Args:
        guard: The guard.
        outer: The states of the guards that it charges beside itself.
        on_warning: Called with the guard and the event of a warning.
        on_limit: Asked before a cap of the guard stops a step.

    Attributes:
        chain: The links that a call is charged to, the guard's own first.
        counters: What the run has counted.
        stops: What stands against it.
        detector: What sees repetition; None without.
        own_plugs: The plugs of the run.
        plugs: Those of the whole chain, each with its guard.
        deciding: Those of them that are asked about a step.
        completed_tool_calls: Tool calls of the run that were completed; none of sub-agents.
        own_tools: The tools that the run's plugs give the model.
        last_answer: What the last run on the guard, or right inside it, has answered.
        falls_back: Whether its requests go to the cheaper model.
        wraps_up: Whether the model is still to be asked to finish.
    """

    def __init__(
        self,
        guard: Any,
        outer: Iterable[RunState],
        on_warning: Callable[[Any, events.LimitNearlyReached], object] | None,
    ) -> None:
        self.guard = guard
        self.tree = guard.tree
        self.mode: Mode = guard.mode
        self.on_warning = on_warning
        self.on_limit: AsksPerson | None = None
        self.counters = Counters(guard.budget)
        self.stops = StopState()
        self.completed_tool_calls = 0
        self.last_answer = ""
        self.wraps_up = guard.budget.wrap_up_at is not None and self.mode is Mode.ENFORCE
        self.falls_back = False
        detection = None if self.mode is Mode.OFF else guard.budget.loop_detection
        self.detector = None if detection is None else LoopDetector(detection)
        links = {} if self.mode is Mode.OFF else {guard: Link(guard, self.counters)}
        for one in outer:
            for link in one.chain:
                links.setdefault(link.owner, link)
        self.chain: Chain = tuple(links.values())
        # Aborts of before the start: kill switches that the plugs have found.
        self._early: list[str] | None = []
        self.set_plugs(())

    def begin(self, own: tuple[Plug, ...], linked: Sequence[str]) -> None:
        """Set the run's plugs, and record its start; what they found goes into the log after it."""
        guard = self.guard
        self.set_plugs(own)
        with self.tree.lock:
            if self.tree.sinks:
                self.record(
                    events.RunStarted,
                    self.tree.now(),
                    budget=guard.budget.to_json(),
                    mode=str(self.mode),
                    parent_run_id=None if guard.parent is None else guard.parent.run_id,
                    price_book=self.tree.price_book.version,
                    stop_conditions=len(guard.budget.stop_when),
                    tenant=self.tenant(),
                    linked=tuple(linked),
                )
            early, self._early = self._early, None
        self.tree.deliver()
        for detail in early or ():
            self.abort(detail)

    def set_plugs(self, own: tuple[Plug, ...]) -> None:
        """Set the run's plugs, and find those that are asked about its calls."""
        self.own_plugs = own
        plugs: dict[object, tuple[Any, Plug]] = {}
        for link in reversed(self.chain):  # of those that are one, the outermost
            of = own if link.owner is self.guard else link.owner.state.own_plugs
            for plug in of:
                plugs.setdefault(plug.identity, (link.owner, plug))
        self.plugs = tuple(reversed(plugs.values()))
        self._reserving = tuple(
            (owner, plug) for owner, plug in self.plugs if type(plug).reserve is not Plug.reserve
        )
        # Of a stopped run, a last answer has to pass the tenant's ledger alone.
        stopped = {link.owner for link in self.chain if link.answers}
        self.deciding = tuple(
            (owner, plug)
            for owner, plug in self.plugs
            if owner not in stopped and type(plug).before is not Plug.before
        )
        self.own_tools = {plug.own_tool for plug in own if plug.own_tool}

    def tenant(self) -> tuple[str, ...]:
        """Return whom the run's own calls are charged to in a ledger."""
        return tuple(name for plug in self.own_plugs for name in plug.payers)

    def payers(self) -> set[str]:
        """Return everyone whom the run's calls are charged to, for it and for those above it."""
        return {name for _, plug in self.plugs for name in plug.payers}

    @property
    def is_last_answer(self) -> bool:
        """True if this is the run of a stopped run's last answer."""
        return any(link.answers for link in self.chain)

    # Outside the lock

    @property
    def may_wait(self) -> bool:
        """True if a step may wait: a plug of the chain for a store, or a cap for a person."""
        return self.tree.asks or any(plug.waits for _, plug in self._reserving)

    def ask_before_a_stop(self, handler: AsksPerson) -> None:
        """Ask a person before a cap of this run's stops it."""
        self.on_limit = handler
        self.tree.asks = True

    def reserve(
        self,
        call: ModelCall | None,
        tokens: int = 0,
        cost: int = 0,
        *,
        unpriced: bool = False,
        calls: Sequence[ToolCall] = (),
    ) -> Ask | None:
        """Ask the plugs for what needs I/O or the user's code; None without plugs."""
        if self.tree.postponed:
            self.tree.deliver()
        if not self.plugs:
            return None
        ask = Ask(self.guard, call, tokens, cost, unpriced=unpriced, calls=calls)
        for owner, plug in self._reserving:
            if not plug.reserve(owner, ask):
                break
        return ask

    def finish(self, warnings: Sequence[Notice]) -> None:
        """Deliver what a step has recorded, and give its warnings."""
        tree = self.tree
        if tree.outbox or tree.postponed:
            tree.deliver()
        for guard, event in warnings:
            handler = guard.state.on_warning
            if handler is not None:
                try:
                    handler(guard, event)
                except Exception as error:
                    tree.report("on_warning", error)

    # Stopping

    def ask(self, ask: Ask | None, objections: dict[Any, list[Violation]], now: int) -> Trip | None:
        """Ask the plugs about a step, and stop where they, the caps or anything else object."""
        if ask is not None:
            ask.now, ask.objections = now, objections
            for owner, plug in self.deciding:
                plug.before(owner, ask)
            if ask.records:
                self._write(ask)
        detector = self.detector
        looped = detector is not None and detector.tripped
        return self.stop(now, objections) if objections or looped or self.tree.halted else None

    def stop(self, now: int, objections: dict[Any, list[Violation]]) -> Trip | None:
        """Trip every guard of the chain whose limits hold; None when nothing stops this run."""
        if self.stops.trip is not None:
            return self.stops.trip
        for link in self.chain:
            outer: Trip | None = link.owner.state.stops.trip
            if outer is not None and (not link.answers or link.owner in objections):
                self.set_trip(outer, now)
                return outer
        every: list[Violation] = []
        owner = self.guard
        for link in self.chain:
            guard, state = link.owner, link.owner.state
            if state.stops.observed is not None or link.answers:
                continue
            held = [*objections.get(guard, ()), *state.stops.violations()]
            # A loop is a conversation's: that of an ancestor ends with the ancestor's own step.
            if state is self and self.detector is not None and self.detector.tripped:
                held.append(self.detector.violation())
            if not held:
                continue
            held = in_order(held)
            own = Trip(reason=held[0].reason, violations=tuple(held), run_id=guard.run_id)
            if state.mode is Mode.OBSERVE:
                state.stops.observed = own
                state.counters.binds = False
                state.record(events.TripObserved, now, trip=own)
                continue
            every = in_order([*every, *held])
            if every[0] is held[0]:
                owner = guard
            if state is not self:
                state.set_trip(own, now)
        if not every:
            return None
        trip = Trip(reason=every[0].reason, violations=tuple(every), run_id=owner.run_id)
        self.set_trip(trip, now)
        return trip

    def set_trip(self, trip: Trip, now: int) -> None:
        """Stop the run."""
        self.stops.trip = trip
        self.tree.halted = True
        self.record(events.Tripped, now, trip=trip)

    def hold(self, violation: Violation) -> None:
        """Hold a limit against the next step."""
        self.stops.hold(violation)
        self.tree.halted = True

    def check(self) -> Trip | None:
        """Stop the run where something stands against it, without a step. Takes the lock."""
        if not self.chain:
            return None
        ask, ancestry = self.reserve(None), self.guard.ancestry
        with self.tree.step() as now:
            before = [(guard.trip, guard.observed_trip) for guard in ancestry]
            found = counters.violations(self.chain, now, counters.BATCH)
            trip = self.ask(ask, objections_of(found), now)
            if before != [(guard.trip, guard.observed_trip) for guard in ancestry]:
                self.record(events.Checked, now)
        return trip

    def abort(self, detail: str) -> None:
        """Hold the wish for an end, and cancel what is in flight. Takes the lock."""
        tree = self.tree
        if tree.postpone(lambda: self.abort(detail)):
            return
        with tree.lock:
            if self._early is not None:
                self._early.append(detail)
                return
            going_on = self.stops.trip is None or self.counters.housekeeping > 0
            tree.halted = True
            if self.stops.abort(detail):
                self.record(events.Aborted, tree.now(), detail=detail)
        # Work in flight goes on where nothing is refused.
        if going_on and self.mode is Mode.ENFORCE:
            for error in self.guard.cancellation.cancel():
                tree.report("on_cancel", error)
        tree.deliver()

    def restart_iterations(self) -> None:
        """Begin the iterations anew for another attempt of the same run. Takes the lock."""
        with self.tree.step() as now:
            self.counters.used[counters.ITERATIONS] = 0
            self.record(events.IterationsRestarted, now)

    # Plugs

    def take_message(self) -> str | None:
        """Take what the model should be told before its next call: at most one sentence."""
        if not self.counters.binds:
            return None
        detector = self.detector
        message = detector.nudge() if detector is not None and detector.due else None
        for plug in self.own_plugs:
            message = message or plug.message()
        return message

    def wrap_up(self, now: int) -> str | None:
        """Take the request to finish, where a cap has reached its share; the lock is held."""
        mine, budget = self.counters, self.guard.budget
        mine.tick(now)
        used = zip(mine.used, mine.caps, strict=True)
        if self.is_last_answer or not any(one >= cap * budget.wrap_up_at for one, cap in used):
            return None
        self.wraps_up = False
        message: str = budget.wrap_up_message
        return message

    def fallback(self) -> str | None:
        """Return the model that the chain's calls go to instead of their own; None for none.

        That of the nearest run whose cap on tokens or dollars has come to its share. Takes the
        lock where it begins.
        """
        for link in self.chain:
            mine, state = link.counters, link.owner.state
            model, at = mine.budget.fallback_model, mine.budget.fallback_at
            if model is None or at is None or state.mode is not Mode.ENFORCE:
                continue
            for one in counters.METERED:
                if mine.used[one] >= mine.caps[one] * at:
                    if not state.falls_back:
                        state.falls_back = True
                        dimension = counters.DIMENSIONS[one].reason.value
                        link.owner.emit(events.FallbackStarted, model=model, dimension=dimension)
                    return str(model)
        return None

    def book(self, ask: Ask, ticket: Admit) -> None:
        """Book a call that nothing refuses any more with the plugs."""
        for owner, plug in self.deciding:
            plug.admitted(owner, ask)
        ticket.holds = ask.holds
        if ask.records:
            self._write(ask)

    def _write(self, ask: Ask) -> None:
        for guard, kind, facts in ask.records:
            guard.state.record(kind, ask.now, **facts)
        ask.records = ()

    def end_holds(self, ticket: Admit, ended: Ended, now: int) -> None:
        """Give back what the plugs hold for a call that ended."""
        for hold in ticket.holds:
            for kind, facts in hold.ended(ended, ticket, now):
                self.record(kind, now, **facts)

    # Warnings

    def look(self, now: int) -> Sequence[Notice]:
        """Keep the time after a step, and warn of what has reached its share."""
        self.tree.keep_time(self.chain, now)
        due = counters.due_warnings(self.chain, now)
        return self.warn(due, now) if due else ()

    def warn(self, due: Sequence[tuple[Link, int]], now: int) -> list[Notice]:
        """Record the warnings of these dimensions; they are given by `finish`."""
        notices: list[Notice] = []
        for link, dimension in due:
            reached = link.describe(dimension)
            facts = {
                "dimension": reached.reason.value,
                "limit": plain(reached.limit),
                "used": plain(reached.used),
            }
            link.counters.warn((reached.reason.value,))
            event = link.owner.state.make(events.LimitNearlyReached, now, facts)
            notices.append((link.owner, event))
        return notices

    def warn_of(self, dimension: str, limit: Any, used: Any) -> None:
        """Warn of a limit that is not the run's own. Takes the lock."""
        with self.tree.step() as now:
            facts = {"dimension": dimension, "limit": plain(limit), "used": plain(used)}
            event = self.make(events.LimitNearlyReached, now, facts)
            self.counters.warn((dimension,))
        self.finish([(self.guard, event)])

    # Events

    def record(self, kind: type[events.EventBase], now: int, **facts: Any) -> None:
        """Record an event; nothing is built where nobody takes it."""
        if self.tree.sinks:
            self.make(kind, now, facts)

    def make(self, kind: type[Any], now: int, facts: dict[str, Any]) -> Any:
        """Make an event, and record it where somebody takes it."""
        return self.tree.make(kind, self.guard.run_id, now, facts)

    def record_delay(self, ticket: Admit, now: int) -> None:
        """Record that a call has to wait before it starts."""
        held = ticket.breakers
        if held is not None and held.start_ns > now:
            delay = held.start_ns - now
            self.record(events.CallDelayed, now, call_id=ticket.call_id, delay_ns=delay)


def check_options(budget: object, run_id: object, on_warning: object) -> None:
    """Check the arguments of a guard."""
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
            f"run_id must be a text, not empty, got {shown(run_id)}. Leave it out for a random one."
        )


def refuse_unknown(options: Mapping[str, object]) -> None:
    """Return the error for an option that a guard does not have, with its place."""
    for name, value in options.items():
        field = name if name in Budget.model_fields else Budget.nearest(name)
        given = shown(value)
        if field is None:
            raise ConfigurationError(
                f"{name} is not an option of Guard, got {given}. Leave it out."
            )
        raise ConfigurationError(
            f"{name} is a budget's, got {given}. Use Guard(Budget({field}={given}))."
        )


def objections_of(found: Found) -> dict[Any, list[Violation]]:
    """Return violations by the guard whose caps they are."""
    return {
        link.owner: [link.describe(one, needed[one]) for one in over]
        for link, over, needed in found
    }


def plain(amount: float | Decimal | None) -> int | float | str:
    """Return an amount as a log holds it."""
    return str(amount) if isinstance(amount, Decimal) else amount or 0
