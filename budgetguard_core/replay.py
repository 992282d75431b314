"""A recorded log, lived through again by the same counting code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from decimal import Decimal
from typing import Any

from budgetguard_core import events as past
from budgetguard_core.breakers.progress import ProgressReport
from budgetguard_core.budget import Budget
from budgetguard_core.clock import Clock, SystemClock
from budgetguard_core.counters import DIMENSIONS
from budgetguard_core.decision import Admit, ToolCall
from budgetguard_core.errors import BudgetGuardError, CheckpointError
from budgetguard_core.events import Event
from budgetguard_core.guard import Guard
from budgetguard_core.pricing import PriceBook
from budgetguard_core.run_state import plain
from budgetguard_core.sinks import Sink
from budgetguard_core.snapshot import Snapshot
from budgetguard_core.stop_state import as_mode
from budgetguard_core.tree import as_sink


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


class Replay:
    """One log, told event by event: for a reader that has several runs in one file.

    Args:
        budget: A candidate budget for the run at the root; the recorded one if left out.
        price_book: Prices, where they are not to come from the default book.
        clock: The clock of the guard when the log is through.
        sinks: What takes the events that the replay makes itself; none if left out.

    Attributes:
        root: The guard of the run at the root, as far as it has been told; None before its start.
    """

    def __init__(
        self,
        budget: Budget | None = None,
        *,
        price_book: PriceBook | None = None,
        clock: Clock | None = None,
        sinks: Iterable[Sink | Callable[[Event], object]] = (),
    ) -> None:
        self.root: Guard | None = None
        self._sinks = tuple(as_sink(sink) for sink in sinks)
        self._budget = budget
        self._prices = price_book
        self._clock = _RecordedClock(clock or SystemClock())
        self._guards: dict[str, Guard] = {}
        self._parents: dict[str, list[Guard]] = {}
        self._tickets: dict[tuple[str, int], Admit] = {}

    def apply(self, event: Event) -> None:
        """Apply the next event.

        Raises:
            CheckpointError: The event's run has no start in this log, or the event holds what no
                run can have.
        """
        self._clock.show(event.at_ns)
        try:
            self._apply(event)
        except CheckpointError:
            raise
        except (BudgetGuardError, ArithmeticError, ValueError) as error:
            raise CheckpointError(
                f"event {event.seq} does not fit: {error} Restore the log from its source."
            ) from None

    def _apply(self, event: Event) -> None:
        if isinstance(event, past.RunStarted):
            self._start(event)
        elif isinstance(event, past.RunRestored):
            self._restore(event)
        elif event.run_id in self._guards:
            self._notify(self._guards[event.run_id], event)
        else:
            raise CheckpointError(
                f"event {event.seq}: run {event.run_id!r} has no start in this log. "
                "Replay the log from its beginning."
            )

    def end(self) -> Guard:
        """Return the guard of the root, whose time goes on from here.

        Raises:
            CheckpointError: The log held no run.
        """
        if self.root is None:
            raise CheckpointError("the log holds no run. Replay the log from its beginning.")
        self._clock.go_on()
        return self.root

    def _start(self, event: past.RunStarted) -> None:
        recorded = Budget.from_json(event.budget)
        if event.parent_run_id is not None and event.parent_run_id in self._guards:
            names = (event.parent_run_id, *event.linked)
            outer = [self._guards[name] for name in names if name in self._guards]
            guard = outer[0].child(
                recorded, mode=as_mode(event.mode), run_id=event.run_id, linked=outer[1:]
            )
            self._parents[event.run_id] = outer
        else:
            guard = Guard(
                self._budget or recorded,
                mode=as_mode(event.mode),
                run_id=event.run_id,
                sinks=None,
                price_book=self._prices,
                clock=self._clock,
            )
            # Not through the guard: it would write to BUDGETGUARD_LOG as well, into what is read.
            guard.tree.sinks = self._sinks
            self.root = self.root or guard
        self._guards[event.run_id] = guard

    def _restore(self, event: past.RunRestored) -> None:
        snapshot = Snapshot.model_validate(event.snapshot)
        budget = self._budget or Budget.from_json(snapshot.budget or {})
        # A given budget makes the attempt a fresh one; the recorded one had its own counters.
        within = self._parents.get(event.run_id, ())
        if within:
            budget = Budget.from_json(snapshot.budget or {})
        guard = Guard.restore(
            snapshot.model_copy(
                update={"budget": budget.to_json(), "stop_conditions": 0, "tenant": ()}
            ),
            sinks=None,
            price_book=self._prices,
            clock=self._clock,
            within=within,
        )
        if not within:
            guard.tree.sinks = self._sinks
        if self.root is None or self.root.run_id == event.run_id:
            self.root = guard
        self._guards[event.run_id] = guard
        for open_call, ticket in zip(snapshot.open_calls, guard.open_calls(), strict=True):
            self._tickets[event.run_id, open_call.call_id] = ticket

    def _notify(self, guard: Guard, event: Event) -> None:
        match event:
            case past.ModelCallAdmitted() | past.ModelCallRefused():
                decision = guard.admit_model_call(replace(event.call))
                if isinstance(event, past.ModelCallAdmitted) and isinstance(decision, Admit):
                    self._tickets[event.run_id, event.call_id] = decision
            case past.ToolCallsRequested():
                calls = [
                    ToolCall(name=one.name, id=one.id, kind=one.kind, fingerprint=one.fingerprint)
                    for one in event.calls
                ]
                answers = guard.admit_tool_calls(calls)
                for call, answer in zip(event.calls, answers, strict=True):
                    if call.call_id is not None and isinstance(answer, Admit):
                        self._tickets[event.run_id, call.call_id] = answer
            case (
                past.ModelCallSettled()
                | past.ToolCallSettled()
                | past.ModelCallWithdrawn()
                | past.ToolCallWithdrawn()
            ):
                ticket = self._tickets.pop((event.run_id, event.call_id), None)
                if ticket is not None:
                    _end(guard, ticket, event)
            case past.LimitNearlyReached():
                is_cap = any(event.dimension == one.reason for one in DIMENSIONS)
                if is_cap and plain(getattr(guard.budget, event.dimension)) == event.limit:
                    with guard.tree.lock:
                        guard.state.counters.warn((event.dimension,))
            case past.BudgetExtended():
                self._extend(guard, Budget.from_json(event.budget))
            case past.RunPaused():
                guard.pause(self._waiting(event, guard))
            case past.RunResumed():
                guard.go_on(self._waiting(event, guard))
            case past.HousekeepingBegan():
                guard.clock.begin_housekeeping(self._waiting(event), answers_for=event.answers_for)
            case past.HousekeepingEnded():
                guard.clock.end_housekeeping(self._waiting(event))
            case _:
                _restore_fact(guard, event)

    def _waiting(
        self,
        event: past.RunPaused | past.RunResumed | past.HousekeepingBegan | past.HousekeepingEnded,
        within: Guard | None = None,
    ) -> list[Admit]:
        """Find the open calls by number; of one run and its sub-agents, where it is given."""
        return [
            ticket
            for (_, number), ticket in self._tickets.items()
            if number in event.waiting and (within is None or _is_part(ticket.guard, within))
        ]

    def _extend(self, guard: Guard, extended: Budget) -> None:
        caps = guard.budget.caps()
        raised: dict[str, Any] = {
            name: cap for name, cap in extended.caps().items() if name in caps and cap > caps[name]
        }
        if raised and guard.trip is None:
            guard.extend(**raised)


def _restore_fact(guard: Guard, event: Event) -> None:
    """Repeat what a guard was told besides its calls."""
    match event:
        case past.StopHeld():
            guard.hold(event.violation)
        case past.Aborted():
            guard.abort(event.detail)
        case past.ProgressReported():
            guard.report_progress(ProgressReport(event.subgoal, event.estimate))
        case past.ReplyReported():
            guard.report_reply("", speaker=event.speaker, fingerprint=event.fingerprint)
        case past.UserTurned():
            guard.user_turn()
        case past.NudgeTaken():
            guard.take_nudge()
        case past.TimeStarted():
            guard.start()
        case past.IterationsRestarted():
            guard.state.restart_iterations()
        case past.Checked():
            guard.check()
        case _:
            pass  # what the guard has recorded by itself


def _end(guard: Guard, ticket: Admit, event: Event) -> None:
    """Settle or withdraw a call."""
    match event:
        case past.ModelCallSettled():
            guard.settle_model_call(
                ticket,
                event.usage,
                error=event.error,
                model=event.model,
                cost_usd=None if event.given_cost_usd is None else Decimal(event.given_cost_usd),
            )
        case past.ToolCallSettled():
            guard.settle_tool_call(
                ticket,
                error=event.error,
                result_fingerprint=event.fingerprint,
                # Logs of others may hold the text's digest alone.
                error_fingerprint=event.error_fingerprint or event.fingerprint,
                alike=event.alike,
            )
        case past.ToolCallWithdrawn():
            guard.withdraw(ticket, waits=event.waits)
        case _:
            guard.withdraw(ticket)


def _is_part(below: Guard | None, outer: Guard) -> bool:
    while below is not None and below is not outer:
        below = below.parent
    return below is not None


class _Numbers:
    """Refuses a log that has lost an event: it would be counted wrong without a word."""

    def __init__(self) -> None:
        self._roots: dict[str, str] = {}
        self._last: dict[str, int] = {}

    def check(self, event: Event) -> None:
        parent = event.parent_run_id if isinstance(event, past.RunStarted) else None
        root = self._roots.get(parent or event.run_id)
        begins = isinstance(event, past.RunStarted) and parent not in self._roots
        # A part of a run that goes on from a snapshot stays in the log of the whole.
        restored = isinstance(event, past.RunRestored) and root in (None, event.run_id)
        if root is None or begins or restored:
            root = event.run_id
        elif event.seq != self._last[root] + 1:
            raise CheckpointError(
                f"event {event.seq}: event {self._last[root] + 1} of run {root!r} is missing. "
                "Restore the log from its source."
            )
        self._roots[event.run_id] = root
        self._last[root] = event.seq

    def last(self, run_id: str) -> int:
        return self._last[self._roots[run_id]]


def replay(
    events: Iterable[Event],
    *,
    budget: Budget | None = None,
    price_book: PriceBook | None = None,
    clock: Clock | None = None,
) -> Guard:
    """Replay a recorded log through the same counting code.

    With the budget of the log the result is what the original was, and the run can go on from
    it. Under another budget the guard shows what that would have made of the run: once it has
    stopped, only calls that were in flight are settled.

    Args:
        events: A log, as `read_events` reads it: whole, from the start of its run.
        budget: A candidate budget for the run at the root.
        price_book: Prices, where they are not to come from the default book.
        clock: The clock of the guard when the log is through.

    Raises:
        CheckpointError: The log does not begin with its run's start, or does not fit together.
    """
    run = Replay(budget, price_book=price_book, clock=clock)
    numbers = _Numbers()
    for event in events:
        numbers.check(event)
        run.apply(event)
    guard = run.end()
    guard.tree.go_on_from(numbers.last(guard.run_id), guard.tree.call_id, ())
    return guard
