"""A recorded log, lived through again by the same counting code."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

from budgetguard_core.budget import Budget
from budgetguard_core.checkpoint import Snapshot
from budgetguard_core.clock import Clock, SystemClock
from budgetguard_core.decision import Admit, ModelCall, ToolCall
from budgetguard_core.errors import CheckpointError
from budgetguard_core.events import (
    Aborted,
    BudgetExtended,
    Event,
    GuardReset,
    IterationsRestarted,
    ModelCallAdmitted,
    ModelCallRefused,
    ModelCallSettled,
    NudgeTaken,
    RunRestored,
    RunStarted,
    StopHeld,
    TimeStarted,
    ToolCallSettled,
    ToolCallsRequested,
    UserTurned,
)
from budgetguard_core.guard import Guard
from budgetguard_core.pricing import PriceBook


class _RecordedClock:
    """The log's time while the log lasts, then time that passes on from there."""

    def __init__(self, live: Clock) -> None:
        self._live = live
        self._recorded_ns: int | None = 0
        self._offset_ns = 0

    def monotonic_ns(self) -> int:
        if self._recorded_ns is None:
            return self._live.monotonic_ns() + self._offset_ns
        return self._recorded_ns

    def wall_ns(self) -> int:
        return self._live.wall_ns()

    def show(self, at_ns: int) -> None:
        self._recorded_ns = at_ns

    def go_on(self) -> None:
        self._offset_ns = self.monotonic_ns() - self._live.monotonic_ns()
        self._recorded_ns = None


class _Replay:
    def __init__(self, budget: Budget | None, prices: PriceBook | None, clock: Clock) -> None:
        self.root: Guard | None = None
        self._budget = budget
        self._prices = prices
        self._clock = _RecordedClock(clock)
        self._guards: dict[str, Guard] = {}
        self._tickets: dict[int, Admit] = {}

    def apply(self, event: Event) -> None:
        self._clock.show(event.at_ns)
        if isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, RunRestored):
            self._restore(event)
        elif event.run_id not in self._guards:
            raise CheckpointError(
                f"event {event.seq}: run {event.run_id!r} has no start in this log. "
                "Replay the log from its beginning."
            )
        else:
            self._tell(self._guards[event.run_id], event)

    def end(self) -> Guard:
        if self.root is None:
            raise CheckpointError("the log holds no run. Replay the log from its beginning.")
        self._clock.go_on()
        return self.root

    def _start(self, event: RunStarted) -> None:
        recorded = Budget.from_json(event.budget)
        if event.parent_run_id is not None and event.parent_run_id in self._guards:
            parent = self._guards[event.parent_run_id]
            guard = parent.child(recorded, mode=event.mode, run_id=event.run_id)
        else:
            guard = Guard(
                self._budget or recorded,
                mode=event.mode,
                run_id=event.run_id,
                price_book=self._prices,
                clock=self._clock,
            )
            self.root = self.root or guard
        self._guards[event.run_id] = guard

    def _restore(self, event: RunRestored) -> None:
        snapshot = Snapshot.model_validate(event.snapshot)
        budget = self._budget or Budget.from_json(snapshot.budget)
        # A budget that is given makes the leg a fresh one; the recorded leg had its own counters.
        guard = Guard.restore(
            snapshot.model_copy(update={"budget": budget.to_json(), "stop_conditions": 0}),
            price_book=self._prices,
            clock=self._clock,
        )
        self.root = guard
        self._guards = {event.run_id: guard}
        self._tickets = {ticket.call_id: ticket for ticket in guard.open_calls()}

    def _tell(self, guard: Guard, event: Event) -> None:
        if isinstance(event, ModelCallAdmitted | ModelCallRefused):
            decision = guard.admit_model_call(
                ModelCall(
                    model=event.model,
                    provider=event.provider,
                    retry=event.retry,
                    input_tokens=event.input_tokens,
                    max_output_tokens=event.max_output_tokens,
                    seconds=event.seconds,
                    cost_usd=None if event.cost_usd is None else Decimal(event.cost_usd),
                )
            )
            if isinstance(event, ModelCallAdmitted) and isinstance(decision, Admit):
                self._tickets[event.call_id] = decision
        elif isinstance(event, ModelCallSettled):
            ticket = self._tickets.pop(event.call_id, None)
            if ticket is not None:
                given = event.given_cost_usd
                guard.settle_model_call(
                    ticket,
                    event.usage,
                    error=event.error,
                    model=event.model,
                    cost_usd=None if given is None else Decimal(given),
                )
        elif isinstance(event, ToolCallsRequested):
            decisions = guard.admit_tool_calls(
                [
                    ToolCall(
                        name=call.name, id=call.id, kind=call.kind, fingerprint=call.fingerprint
                    )
                    for call in event.calls
                ]
            )
            for call, decision in zip(event.calls, decisions, strict=True):
                if call.call_id is not None and isinstance(decision, Admit):
                    self._tickets[call.call_id] = decision
        elif isinstance(event, ToolCallSettled):
            ticket = self._tickets.pop(event.call_id, None)
            if ticket is not None:
                guard.settle_tool_call(
                    ticket, error=event.error, result_fingerprint=event.fingerprint
                )
        elif isinstance(event, StopHeld):
            guard.hold(event.violation)
        elif isinstance(event, Aborted):
            guard.abort(event.detail)
        elif isinstance(event, BudgetExtended):
            self._extend(guard, Budget.from_json(event.budget))
        elif isinstance(event, UserTurned):
            guard.user_turn()
        elif isinstance(event, NudgeTaken):
            guard.take_nudge()
        elif isinstance(event, TimeStarted):
            guard.start()
        elif isinstance(event, IterationsRestarted):
            guard.restart_iterations()
        elif isinstance(event, GuardReset):
            guard.reset()

    def _extend(self, guard: Guard, extended: Budget) -> None:
        caps = guard.budget.caps()
        raised = {
            name: cap for name, cap in extended.caps().items() if name in caps and cap > caps[name]
        }
        if raised and guard.trip is None:
            guard.extend(**raised)


def replay(
    events: Iterable[Event],
    *,
    budget: Budget | None = None,
    price_book: PriceBook | None = None,
    clock: Clock | None = None,
) -> Guard:
    """Do what `Guard.replay` says."""
    run = _Replay(budget, price_book, clock or SystemClock())
    for event in events:
        run.apply(event)
    return run.end()
