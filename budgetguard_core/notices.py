"""What a run tells those who watch it: warnings, events, failures of their own code."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias

from budgetguard_core import limits
from budgetguard_core.breakers.circuit_breaker import CallOutcome
from budgetguard_core.canonical import digest_of
from budgetguard_core.decision import Admit, ModelCall, ToolCall, ToolDecision, projected_cost
from budgetguard_core.events import (
    CallDelayed,
    ContextWindowNearlyFull,
    EventBase,
    LimitNearlyReached,
    ModelCallAdmitted,
    ModelCallSettled,
    ToolCallRequested,
    ToolCallSettled,
    ToolCallsRequested,
)
from budgetguard_core.meter import clamp
from budgetguard_core.pricing import Rates, usd_text
from budgetguard_core.run_snapshots import RunSnapshots
from budgetguard_core.state import WarningEvent
from budgetguard_core.stop import Violation
from budgetguard_core.usage import TokenUsage

if TYPE_CHECKING:
    from budgetguard_core.ledger import Warned

Notice: TypeAlias = tuple["RunNotices", WarningEvent]
"""A warning, and the run that it is about."""


class RunNotices(RunSnapshots):
    """A run's warnings, conditions and events: whatever calls code that is not the engine's."""

    __slots__ = ()

    # Under the lock

    def _look(self, now: int) -> Sequence[Notice]:
        """Look closely: does the time run, and is a warning due?"""
        if any(guard._meter.may_stand for guard in self._line):
            self._keep_time(now)
        return [
            guard._warn(due, now)
            for guard in self._line
            for due in limits.due_warnings(guard._meter, now)
        ]

    def _foresee(
        self,
        now: int,
        call: ModelCall,
        rates: Rates | None,
        bound: int | None,
        tokens: int,
        cost: int,
    ) -> Sequence[Notice]:
        """Warn of the caps that a projection alone would stop the run by, where nobody was yet."""
        if any(guard.trip is not None for guard in self._line):
            return ()
        if bound is not None and not call.output_is_fixed:
            bound, _ = clamp(self._binding, call, rates, bound)
            tokens, cost = call.input_tokens + bound, projected_cost(call, rates, bound)
        return [
            guard._warn(due, now)
            for guard in self._line
            if not guard._meter.looks_on
            for due in limits.foreseen_warnings(guard._meter, now, tokens, cost)
        ]

    def _warn(self, due: Violation, now: int) -> Notice:
        event = self._tree.make(
            LimitNearlyReached,
            self.run_id,
            now,
            {
                "dimension": due.reason.value,
                "limit": plain(due.limit),
                "used": plain(due.used),
            },
        )
        self._meter.warn(due.reason.value)
        return self, event

    def _watch_window(
        self,
        now: int,
        call: ModelCall,
        rates: Rates,
        input_tokens: int,
        warnings: Sequence[Notice],
    ) -> Sequence[Notice]:
        """Warn of a prompt near its window; armed again once a pruning hook has cut it."""
        if rates.context_window is None:
            return warnings
        self._window_warned = not self._window_warned
        if not self._window_warned:
            return warnings
        event = self._tree.make(
            ContextWindowNearlyFull,
            self.run_id,
            now,
            {
                "model": call.model or "",
                "context_window": rates.context_window,
                "input_tokens": input_tokens,
            },
        )
        return [*warnings, (self, event)]

    def _warn_tenant(self, warned: Warned) -> None:
        with self._tree.lock:
            event = self._tree.make(
                LimitNearlyReached,
                self.run_id,
                self._now(),
                {
                    "dimension": warned.reason,
                    "limit": plain(warned.limit),
                    "used": plain(warned.used),
                },
            )
            self._meter.warn(warned.reason)
        self._finish([(self, event)])

    def _finish(self, warnings: Sequence[Notice]) -> None:
        self._tree.deliver()
        for guard, event in warnings:
            if guard._on_warning is not None:
                try:
                    guard._on_warning(guard, event)
                except Exception as error:
                    self._tree.report("on_warning", error)

    def emit(self, kind: type[EventBase], **facts: Any) -> None:
        """Record an event about this run, for the sinks; nothing is built when there are none."""
        if self._tree.sinks:
            with self._tree.lock:
                self._record(kind, self._now(), **facts)
            self._tree.deliver()

    def number_from(self, seq: int) -> None:
        """Let the next event have the number after `seq`: for a guard that goes on with a log."""
        with self._tree.lock:
            self._tree.number_from(seq)

    def flush(self) -> None:
        """Have every sink make what it took safe. A failing sink is reported, not raised."""
        self._tree.deliver(wait=True)
        for sink in self._tree.sinks:
            try:
                sink.flush()
            except Exception as error:
                self._tree.report(f"sink {type(sink).__name__}", error)

    def report(self, what: str, error: Exception | None = None) -> None:
        """Add a failure that changed nothing to `errors`, and so to the outcome and the log.

        Args:
            what: What failed, in a word; the whole sentence where there is no exception.
            error: What it raised. Its text is in `errors`, only its type in the log.
        """
        if error is None:
            self._tree.keep_error(what)
        else:
            self._tree.report(what, error)

    # The four events of every step: their fields are written out in their order, which takes a
    # quarter of what it takes to put those that are given into their places.

    def _record_admitted(self, ticket: Admit, now: int, message: str | None) -> None:
        tree, charges = self._tree, ticket.charges
        fields = {
            "seq": tree.seq + 1,
            "run_id": self.run_id,
            "at_ns": now,
            "wall_ns": tree.wall(),
            "call": ticket.call.copied(),
            "event": "model_call_admitted",
            "call_id": ticket.call_id,
            "admitted_output_tokens": ticket.max_output_tokens,
            "nudge": message,
            "holds": tuple([part.id for _, part, _ in charges if part]) if charges else (),
        }
        tree.take(ModelCallAdmitted, fields)
        if ticket.breakers is not None:
            self._record_delay(ticket, now)

    def _record_settled(
        self,
        ticket: Admit,
        now: int,
        model: str | None,
        usage: TokenUsage | None,
        cost: int | None,
        given: Decimal | None,
        error: BaseException | str | None,
    ) -> None:
        tree = self._tree
        fields = {
            "seq": tree.seq + 1,
            "run_id": self.run_id,
            "at_ns": now,
            "wall_ns": tree.wall(),
            "event": "model_call_settled",
            "call_id": ticket.call_id,
            "model": model,
            "usage": usage,
            "cost_usd": None if cost is None else usd_text(cost),
            "given_cost_usd": None if given is None else str(given),
            "error": None if error is None else _error_name(error),
        }
        tree.take(ModelCallSettled, fields)

    def _record_tools(
        self, calls: Sequence[ToolCall], decisions: Sequence[ToolDecision], now: int
    ) -> None:
        tree = self._tree
        fields = {
            "seq": tree.seq + 1,
            "run_id": self.run_id,
            "at_ns": now,
            "wall_ns": tree.wall(),
            "event": "tool_calls_requested",
            "calls": ToolCallRequested.of_batch(calls, decisions, tree.log_arguments),
        }
        tree.take(ToolCallsRequested, fields)

    def _record_tool_settled(
        self,
        ticket: Admit,
        now: int,
        key: str,
        error: BaseException | str | None,
        kind: str | None,
        outcomes: tuple[CallOutcome, ...],
        duration_ns: int | None,
    ) -> None:
        tree = self._tree
        fields = {
            "seq": tree.seq + 1,
            "run_id": self.run_id,
            "at_ns": now,
            "wall_ns": tree.wall(),
            "event": "tool_call_settled",
            "call_id": ticket.call_id,
            "fingerprint": digest_of(key),
            "error": None if error is None else _error_name(error),
            "error_fingerprint": kind,
            "outcomes": outcomes,
            "duration_ns": duration_ns,
        }
        tree.take(ToolCallSettled, fields)

    def _record_delay(self, ticket: Admit, now: int) -> None:
        held = ticket.breakers
        if held is not None and held.start_ns > now:
            self._record(CallDelayed, now, call_id=ticket.call_id, delay_ns=held.start_ns - now)


def plain(amount: float | Decimal | None) -> int | float | str:
    """Put an amount into an event."""
    return str(amount) if isinstance(amount, Decimal) else amount or 0


def _error_name(error: BaseException | str) -> str:
    return "error" if isinstance(error, str) else type(error).__name__
