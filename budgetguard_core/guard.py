"""The live meter of one run. Nothing else changes a counter."""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from decimal import Decimal
from enum import StrEnum
from typing import Any, Literal, Self, TypeAlias, TypeVar, cast

from budgetguard_core.budget import Budget
from budgetguard_core.cancellation import CancellationToken
from budgetguard_core.canonical import (
    arguments_key,
    digest_of,
    fingerprint_error,
    result_key,
)
from budgetguard_core.checkpoint import OpenCall, Snapshot
from budgetguard_core.clock import Clock, SystemClock
from budgetguard_core.decision import (
    NOT_AVAILABLE,
    Admit,
    ModelCall,
    ModelDecision,
    Nudge,
    Refuse,
    Stop,
    ToolCall,
    ToolDecision,
)
from budgetguard_core.errors import AdapterError, CheckpointError, ConfigurationError
from budgetguard_core.events import (
    Aborted,
    BudgetExtended,
    Checked,
    ContextWindowNearlyFull,
    Event,
    EventBase,
    GuardReset,
    IterationsRestarted,
    LimitNearlyReached,
    ModelCallAdmitted,
    ModelCallRefused,
    ModelCallSettled,
    NudgeTaken,
    RunEnded,
    RunRestored,
    RunStarted,
    Sink,
    StopHeld,
    TimeStarted,
    ToolCallRequested,
    ToolCallSettled,
    ToolCallsRequested,
    ToolCallWithdrawn,
    TripObserved,
    Tripped,
    UserTurned,
)
from budgetguard_core.limits import (
    INFINITY,
    Caps,
    Marks,
    Tool,
    due_warnings,
    in_order,
    model_call_fits,
    model_call_violations,
    quota_passed,
    reached,
    tool_call_violations,
    tool_calls_fit,
    unmetered_usage,
    unpriced_model,
)
from budgetguard_core.loops import LoopDetector
from budgetguard_core.outcome import Outcome, ToolCallRecord
from budgetguard_core.pricing import PriceBook, Rates, from_usd, to_usd
from budgetguard_core.stop import StopReason, Trip, Violation, as_condition
from budgetguard_core.tree import Tree, as_sink
from budgetguard_core.usage import Counters, TokenUsage, Usage, check_token_usage

_LOG = logging.getLogger("budgetguard")
_NAMES_KEPT = 1024
_RECORDS_KEPT = 256
_NAME_LENGTH = 200

WarningEvent: TypeAlias = LimitNearlyReached | ContextWindowNearlyFull
WarningHandler: TypeAlias = Callable[["Guard", WarningEvent], object]
_Warning: TypeAlias = tuple["Guard", WarningEvent]
_E = TypeVar("_E", bound=EventBase)
_A = TypeVar("_A")
_ACTIVE: ContextVar[Guard | None] = ContextVar("budgetguard_active", default=None)
_Refusal = TypeVar("_Refusal", Refuse, Stop)

_REFUSED = result_key(NOT_AVAILABLE)
_NOTHING: frozenset[str] = frozenset()
_ANSWERS: dict[type, Literal["admit", "refuse", "stop"]] = {
    Admit: "admit",
    Refuse: "refuse",
    Stop: "stop",
}


class Mode(StrEnum):
    """What a guard does with its limits."""

    ENFORCE = "enforce"
    """Count, warn, and stop the run."""
    OBSERVE = "observe"
    """Count and warn, record the trip that ENFORCE would have made, refuse nothing."""
    OFF = "off"
    """Do nothing."""


class Guard:
    """The meter of one run: admits model calls and tool calls, settles them, and trips once.

    Safe under threads and asyncio tasks: every answer is given under one lock, without I/O and
    without waiting. A `Guard` given to several runs is shared by them; nothing resets.

    Args:
        budget: The caps. None bounds nothing but loops.
        mode: ENFORCE, OBSERVE or OFF.
        run_id: The run's name in logs, checkpoints and outcomes; a random one if left out.
        sinks: Where events go: sinks, or callables that take an event. They may raise.
        on_warning: Called with the guard and a `LimitNearlyReached` or `ContextWindowNearlyFull`
            event; it may call `extend` or `abort`. Runs in the thread whose step reached it.
        price_book: Where prices come from.
        clock: Where time comes from.
        log_arguments: Put the arguments of tool calls into events; only their hash otherwise.

    Raises:
        ConfigurationError: The budget is not a `Budget`, or a sink takes no events.
    """

    __slots__ = (
        "__weakref__",
        "_aborted",
        "_binding",
        "_caps",
        "_chain",
        "_conditional",
        "_conditions",
        "_counters",
        "_detector",
        "_earlier",
        "_enforced",
        "_halt",
        "_held",
        "_mark_at",
        "_marks",
        "_needs_price",
        "_observed",
        "_on_warning",
        "_output_bound",
        "_records",
        "_started_ns",
        "_tools",
        "_tree",
        "_trip",
        "_warn_at",
        "_warned",
        "_window_warned",
        "budget",
        "cancellation",
        "mode",
        "outcome",
        "parent",
        "run_id",
    )

    def __init__(
        self,
        budget: Budget | None = None,
        *,
        mode: Mode | str = Mode.ENFORCE,
        run_id: str | None = None,
        sinks: Iterable[Sink | Callable[[Event], object]] = (),
        on_warning: WarningHandler | None = None,
        price_book: PriceBook | None = None,
        clock: Clock | None = None,
        log_arguments: bool = False,
    ) -> None:
        tree = Tree(
            clock or SystemClock(),
            price_book or PriceBook(),
            [as_sink(sink) for sink in sinks],
            log_arguments,
        )
        self._set_up(tree, None, budget, mode, run_id, on_warning)
        self._announce()

    def _set_up(
        self,
        tree: Tree,
        parent: Guard | None,
        budget: Budget | None,
        mode: Mode | str,
        run_id: str | None,
        on_warning: WarningHandler | None,
    ) -> None:
        if budget is not None and not isinstance(budget, Budget):
            raise ConfigurationError(
                f"budget must be a Budget, got {type(budget).__name__}. "
                "Build one with Budget(max_iterations=25)."
            )
        self.budget = budget or Budget()
        self.mode = _as_mode(mode)
        self.run_id = run_id or uuid.uuid4().hex
        self.parent = parent
        self.outcome: Outcome | None = None
        self.cancellation: CancellationToken = CancellationToken(
            None if parent is None else parent.cancellation
        )
        self._tree = tree
        self._on_warning = on_warning
        above = () if parent is None else parent._chain
        self._chain: tuple[Guard, ...] = above if self.mode is Mode.OFF else (self, *above)
        self._begin()

    def _begin(self) -> None:
        """Put every counter to its beginning."""
        self._counters = Counters()
        self._earlier = Usage()
        self._tools: dict[str, Tool] = {}
        self._records: deque[tuple[str | None, str, str]] = deque(maxlen=_RECORDS_KEPT)
        self._started_ns: int | None = None
        self._trip: Trip | None = None
        self._observed: Trip | None = None
        self._aborted: str | None = None
        self._held: list[Violation] = []
        self._halt = False
        self._warned: dict[str, None] = {}
        self._window_warned = False
        self._warn_at = self.budget.warn_at
        detection = None if self.mode is Mode.OFF else self.budget.loop_detection
        self._detector = None if detection is None else LoopDetector(detection)
        self._conditions = tuple(as_condition(one) for one in self.budget.stop_when)
        self._compile()
        # Asked on every step and never changed by `extend`, so worked out once.
        self._needs_price = any(guard._caps.refuses_unpriced for guard in self._chain)
        self._conditional = any(guard._conditions for guard in self._chain)
        # An advisory envelope must not cut what the enforced ones allow.
        self._binding = (
            tuple(guard for guard in self._chain if guard.mode is Mode.ENFORCE) or self._chain
        )
        self._output_bound = min(
            (
                guard.budget.max_output_tokens_per_call
                for guard in self._binding
                if guard.budget.max_output_tokens_per_call is not None
            ),
            default=None,
        )
        self._enforced = any(guard.mode is Mode.ENFORCE for guard in self._chain)

    def _compile(self, quotas_used: Mapping[str, int] | None = None) -> None:
        caps = Caps(self.budget)
        # In OBSERVE the caps are gone after the trip; the warnings are not.
        self._set_caps(caps if self._observed is None else Caps(Budget()))
        for quota in self._caps.quotas:
            quota.used = (quotas_used or {}).get(quota.pattern, 0)
        self._set_marks(Marks(caps, self._warned))

    def _set_caps(self, caps: Caps) -> None:
        self._caps = caps
        for name, tool in self._tools.items():
            tool.quotas = caps.quotas_of(name)

    def _announce(self) -> None:
        if self._tree.sinks:
            with self._tree.lock:
                self._record(
                    RunStarted,
                    self._now(),
                    budget=self.budget.to_json(),
                    mode=str(self.mode),
                    parent_run_id=None if self.parent is None else self.parent.run_id,
                    price_book=self._tree.price_book.version,
                    stop_conditions=len(self._conditions),
                )
            self._tree.deliver()

    # What a run may ask about itself

    @property
    def trip(self) -> Trip | None:
        """Why the run was stopped, or None while it may go on."""
        return self._trip

    @property
    def observed_trip(self) -> Trip | None:
        """In OBSERVE: the trip that ENFORCE would have made, at the step where it would have."""
        return self._observed

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Everything that held when the run was stopped, in order."""
        return () if self._trip is None else self._trip.violations

    @property
    def usage(self) -> Usage:
        """What the run has used so far, its sub-agents included."""
        with self._tree.lock:
            return self._usage(self._now())

    @property
    def earlier_usage(self) -> Usage:
        """What earlier legs of a run used that was resumed under a fresh budget."""
        return self._earlier

    @property
    def tool_counts(self) -> dict[str, int]:
        """How many bodies of each tool were started (the first 1,024 names)."""
        with self._tree.lock:
            return self._tools_started()

    @property
    def tool_calls(self) -> tuple[ToolCallRecord, ...]:
        """What became of the last 256 tool calls; those in flight follow as interrupted."""
        with self._tree.lock:
            records = [*self._records]
            records += [
                (ticket.call.id, ticket.call.name[:_NAME_LENGTH], "interrupted")
                for ticket in self._open_tool_calls()
            ]
        return tuple(
            ToolCallRecord.model_validate({"id": id_, "name": name, "status": status})
            for id_, name, status in records
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """The dimensions that have reached their warning share, in the order they did."""
        return tuple(self._warned)

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

        None without a deadline. A deadline in OBSERVE cuts nothing and is not among them.
        """
        with self._tree.lock:
            return self._time_left(self._now())

    # Admission

    def start(self) -> None:
        """Let the run's time begin now instead of with the first admission."""
        with self._tree.lock:
            if self._started_ns is None:
                now = self._now()
                self._start(now)
                if self._tree.sinks:
                    self._record(TimeStarted, now)
        self._tree.deliver()

    def admit_model_call(self, call: ModelCall | None = None) -> ModelDecision:
        """Ask whether a model call may start; counts it when it may.

        Returns:
            `Admit` (or `Nudge`, an `Admit` with a message for the model), to be settled with
            `settle_model_call`; or `Stop`: the run ends.

        Raises:
            ConfigurationError: A figure of the call makes no sense; nothing was counted.
        """
        if call is None:
            call = ModelCall()
        if not self._chain:
            return Admit(self, call, 0, call.max_output_tokens)
        tree = self._tree
        # Before the lock: the first price of a process is looked up in a large table.
        rates = None if call.model is None else tree.price_book.rates_for(call.model, call.provider)
        if self._conditional:
            self._ask_conditions()
        bound = self._output_bound
        if call.max_output_tokens is not None:
            bound = call.max_output_tokens if bound is None else min(bound, call.max_output_tokens)
        # Put so that NaN fails too: reserved, it would be above no cap for ever.
        if not call.input_tokens >= 0 or (bound is not None and not bound >= 1):
            raise ConfigurationError(_wrong_projection(call))
        tokens = call.input_tokens if bound is None else call.input_tokens + bound
        cost = _projected_cost(call, rates, bound)
        unpriced = self._needs_price and rates is None and call.cost_usd is None
        warnings: Sequence[_Warning] = ()
        tree.lock.acquire()
        try:
            now = tree.now()
            far = not unpriced and self._is_far_from_caps(now, tokens, cost)
            if not far and (unpriced or not self._model_call_fits(now, call.retry, tokens, cost)):
                if bound is not None and not call.output_is_fixed:
                    bound = self._clamp(call, rates, bound)
                    tokens = call.input_tokens + bound
                    cost = _projected_cost(call, rates, bound)
                trip = self._stop_model_call(now, call, tokens, cost, unpriced)
            else:
                trip = None
            if trip is None:
                decision: ModelDecision = self._start_model_call(
                    call, rates, bound, tokens, cost, now
                )
                if not far:
                    warnings = self._warn(now)
                if rates is not None and rates.context_window is not None and call.input_tokens:
                    full = call.input_tokens >= rates.context_window * self._warn_at
                    if full is not self._window_warned:
                        warnings = self._watch_window(now, call, rates, call.input_tokens, warnings)
            else:
                decision = Stop(trip)
        finally:
            tree.lock.release()
        if warnings or tree.outbox:
            self._finish(warnings)
        return decision

    def settle_model_call(
        self,
        ticket: Admit,
        usage: TokenUsage | None = None,
        *,
        error: BaseException | str | None = None,
        model: str | None = None,
        cost_usd: Decimal | None = None,
    ) -> bool:
        """Charge a model call that ended. Never stops the run; the next admission does.

        Args:
            ticket: The answer of `admit_model_call`.
            usage: What the provider reported. None when it reported nothing: then the reservation
                is charged and marked as estimated, and a run with a cap on tokens or dollars
                whose call had no reservation is stopped (`unmetered_usage`), unless it failed.
            error: What ended a failed call. Attempts, time and tokens of failed calls count.
            model: The model that was really called, if the provider says so.
            cost_usd: What the provider says it cost, used in place of the price book.

        Returns:
            False when the call was settled before; nothing is charged twice.

        Raises:
            ConfigurationError: The figures make no sense. The reservation has been charged.
        """
        guard: Guard = ticket.guard
        tree = guard._tree
        problem: ConfigurationError | None = None
        if usage is not None:
            try:
                check_token_usage(usage)
            except ConfigurationError as wrong:
                usage, problem = None, wrong
        rates = ticket.rates
        if model is not None and model != ticket.call.model:
            # The provider's name may be a deployment's that no price is known for.
            rates = tree.price_book.rates_for(model, ticket.call.provider) or rates
        cost: int | None = None
        if cost_usd is not None:
            try:
                cost = _amount(cost_usd)
            except ConfigurationError as wrong:
                cost_usd, problem = None, problem or wrong
        if cost_usd is None:
            if usage is not None and rates is not None:
                cost = rates.cost(usage)
            else:
                unknown = rates is None and ticket.call.cost_usd is None
                cost = None if unknown else ticket.reserved_cost
        warnings: Sequence[_Warning] = ()
        tree.lock.acquire()
        try:
            if tree.open.pop(ticket.call_id, None) is not ticket:
                return False
            now = tree.now()
            if guard._charge(ticket, usage, cost, error is not None, cost_usd is not None, now):
                warnings = guard._warn(now)
            if usage is not None and rates is not None and rates.context_window is not None:
                full = usage.input_tokens >= rates.context_window * guard._warn_at
                if full is not guard._window_warned:
                    warnings = guard._watch_window(
                        now, ticket.call, rates, usage.input_tokens, warnings
                    )
            if tree.sinks:
                guard._record(
                    ModelCallSettled,
                    now,
                    call_id=ticket.call_id,
                    model=model,
                    usage=usage,
                    cost_usd=None if cost is None else str(to_usd(cost)),
                    given_cost_usd=None if cost_usd is None else str(cost_usd),
                    error=_error_name(error),
                )
        finally:
            tree.lock.release()
        if warnings or tree.outbox:
            guard._finish(warnings)
        if problem is not None:
            raise problem
        return True

    def admit_tool_calls(self, calls: Sequence[ToolCall]) -> list[ToolDecision]:
        """Ask for a whole batch of tool calls, in the order in which the model wrote them.

        Returns:
            One answer for each call: `Admit`, to be settled with `settle_tool_call`; `Refuse`:
            this call may not start, the run goes on; `Stop`: this call may not start, and the run
            ends before its next model call.
        """
        if not self._chain:
            return [Admit(self, call, 0) for call in calls]
        tree = self._tree
        ignored = _NOTHING if self._detector is None else self._detector.ignored
        for call in calls:
            if call.key is None:
                call.key = arguments_key(call.arguments, ignore=ignored)
        if self._conditional:
            self._ask_conditions()
        warnings: Sequence[_Warning] = ()
        decisions: list[ToolDecision] = []
        tree.lock.acquire()
        try:
            now = tree.now()
            far = self._is_far_from_tool_caps(now, len(calls))
            trip = None if far or self._tool_calls_fit(now) else self._stop(now)
            for call in calls:
                decision = self._decide_tool_call(call, trip, now)
                if type(decision) is Stop:
                    trip = decision.trip
                decisions.append(decision)
            if not far:
                warnings = self._warn(now)
            if tree.sinks:
                self._record_batch(now, calls, decisions)
        finally:
            tree.lock.release()
        if warnings or tree.outbox:
            self._finish(warnings)
        return decisions

    def admit_tool_call(self, call: ToolCall) -> ToolDecision:
        """Ask for one tool call: a batch of one."""
        return self.admit_tool_calls((call,))[0]

    def settle_tool_call(
        self,
        ticket: Admit,
        result: object = None,
        *,
        error: BaseException | str | None = None,
        result_fingerprint: str | None = None,
        error_fingerprint: str | None = None,
    ) -> bool:
        """Report how a tool call ended. A call that is never settled counts as interrupted.

        Args:
            ticket: The answer of `admit_tool_calls`.
            result: What the tool returned; it is fingerprinted, not kept.
            error: What it raised, if it did.
            result_fingerprint: The fingerprint, where it is known already (replay).
            error_fingerprint: The `fingerprint_error` of the error's text, likewise.

        Returns:
            False when the call was settled before.
        """
        guard: Guard = ticket.guard
        tree = guard._tree
        detector = guard._detector
        key, kind = result_fingerprint, None
        if error is not None:
            text = _error_text(error)
            key = result_key(text) if key is None else key
            kind = error_fingerprint or fingerprint_error(text)
        elif key is None:
            ignored = _NOTHING if detector is None else detector.ignored_results
            key = result_key(result, ignore=ignored)
        call: ToolCall = ticket.call
        warnings: Sequence[_Warning] = ()
        tree.lock.acquire()
        try:
            if tree.open.pop(ticket.call_id, None) is not ticket:
                return False
            status = "completed" if error is None else "failed"
            guard._records.append((call.id, call.name[:_NAME_LENGTH], status))
            detector = guard._detector
            if detector is not None:
                detector.observe(call.name, call.key or "", key, error=kind)
                if detector.tripped:
                    guard._halt = True
            now = tree.now()
            for charged in guard._chain:
                if now >= charged._mark_at:
                    warnings = guard._warn(now)
                    break
            if tree.sinks:
                guard._record(
                    ToolCallSettled,
                    now,
                    call_id=ticket.call_id,
                    fingerprint=digest_of(key),
                    error=_error_name(error),
                    error_fingerprint=kind,
                )
        finally:
            tree.lock.release()
        if warnings or tree.outbox:
            guard._finish(warnings)
        return True

    def withdraw_tool_call(self, ticket: Admit) -> bool:
        """Take back a tool call that was admitted but whose body did not start.

        For a call that waits for a person's approval, or that ended with its batch: it is not
        counted any more, and its record says `refused`. It is still seen as a repetition.

        Returns:
            False when the call was settled or withdrawn before.
        """
        guard: Guard = ticket.guard
        tree = guard._tree
        call: ToolCall = ticket.call
        with tree.lock:
            if tree.open.pop(ticket.call_id, None) is not ticket:
                return False
            if call.kind == "function":
                guard._uncount_tool_call(call.name)
            guard._records.append((call.id, call.name[:_NAME_LENGTH], "refused"))
            detector = guard._detector
            if detector is not None:
                detector.observe(call.name, call.key or "", _REFUSED)
                if detector.tripped:
                    guard._halt = True
            if tree.sinks:
                guard._record(ToolCallWithdrawn, tree.now(), call_id=ticket.call_id)
        tree.deliver()
        return True

    def check(self) -> Trip | None:
        """Ask whether the run has to end now, without starting anything; trips it if so.

        For a watchdog that found the deadline passed or the run aborted while a call hangs.
        """
        if not self._chain:
            return None
        if self._conditional:
            self._ask_conditions()
        with self._tree.lock:
            now = self._now()
            before = [(guard._trip, guard._observed) for guard in self._chain]
            trip = self._stop(now)
            changed = before != [(guard._trip, guard._observed) for guard in self._chain]
            if changed and self._tree.sinks:
                self._record(Checked, now)
        self._tree.deliver()
        return trip

    # What the outside tells the run

    def user_turn(self) -> None:
        """Say that the user spoke: asking the same again is no repetition any more."""
        with self._tree.lock:
            if self._detector is not None:
                self._detector.user_turn()
                self._halt = self._is_halted()
            if self._tree.sinks:
                self._record(UserTurned, self._now())
        self._tree.deliver()

    def take_nudge(self) -> str | None:
        """Take the corrective message that is due, to deliver it in a tool's result.

        An adapter that can add a message before the model call gets it as `Nudge` and needs
        this not. None in OBSERVE: a message would change the run.
        """
        with self._tree.lock:
            message = None if self._detector is None else self._detector.nudge()
            if message is not None and self._tree.sinks:
                self._record(NudgeTaken, self._now(), message=message)
        self._tree.deliver()
        return message if self.mode is Mode.ENFORCE else None

    def abort(self, detail: str = "aborted from outside") -> None:
        """End the run from any thread: at its next admission, at once where work is async.

        Sub-agents end with it. A second abort, or one of a stopped run, changes nothing.
        """
        # Whatever it is given: an exception here would leave the work in flight running.
        detail = str(detail)
        with self._tree.lock:
            going_on = self._trip is None
            if going_on and self._aborted is None and self._observed is None:
                self._aborted = detail
                self._halt = True
                if self._tree.sinks:
                    self._record(Aborted, self._now(), detail=detail)
        # Work in flight goes on where nothing is refused.
        if going_on and self.mode is Mode.ENFORCE:
            for error in self.cancellation.cancel():
                self._tree.report("on_cancel", error)
        self._tree.deliver()

    def hold(self, violation: Violation) -> None:
        """Report a limit that is not the engine's own; the next admission or `check` stops.

        For a framework's own cap (`framework_limit`) and whatever else an adapter can see.
        """
        with self._tree.lock:
            self._hold(violation)
            if self._tree.sinks:
                self._record(StopHeld, self._now(), violation=violation)
        self._tree.deliver()

    def extend(self, **caps: Any) -> None:
        """Raise caps of a run that goes on: `guard.extend(max_iterations=40)`.

        The new caps are absolute, not additional. What an ancestor allows stays the bound.

        Raises:
            ConfigurationError: A cap is not one of the run's, or would not be raised.
            AdapterError: The run was stopped already; resume it under a fresh budget instead.
        """
        with self._tree.lock:
            if self._trip is not None:
                raise AdapterError(
                    f"a stopped run cannot be extended, got a run stopped by {self._trip.reason}. "
                    "Resume it under a fresh budget."
                )
            self.budget = self.budget.raised(caps)
            self._compile(self._quotas_used())
            if self._tree.sinks:
                self._record(BudgetExtended, self._now(), budget=self.budget.to_json())
        self._tree.deliver()

    def restart_iterations(self) -> None:
        """Begin the iterations anew for another leg of the same run; all else runs on."""
        with self._tree.lock:
            self._counters.iterations = 0
            if self._tree.sinks:
                self._record(IterationsRestarted, self._now())
        self._tree.deliver()

    def reset(self) -> None:
        """Put the guard back to its beginning, for another run under the same budget.

        Raises:
            AdapterError: Calls are in flight, here or in a sub-agent, or this is a sub-agent.
        """
        with self._tree.lock:
            flying = sum(self in ticket.guard._chain for ticket in self._tree.open.values())
            if flying or self.parent is not None:
                raise AdapterError(
                    "reset needs a guard without a parent and without calls in flight, got "
                    f"{flying} in flight. Settle them first, or make a new Guard."
                )
            self._begin()
            self._tree.errors.clear()
            self.outcome = None
            self.cancellation = CancellationToken()
            if self._tree.sinks:
                self._record(GuardReset, self._now())
        self._tree.deliver()

    def child(
        self,
        budget: Budget | None = None,
        *,
        mode: Mode | str | None = None,
        run_id: str | None = None,
        on_warning: WarningHandler | None = None,
    ) -> Guard:
        """Make the guard of a sub-agent: its own caps, and at most what is left of every ancestor.

        It charges this guard and all above it under one lock. Its trip ends the sub-agent alone;
        an ancestor's trip ends everything below. An advisory envelope takes `mode=Mode.OBSERVE`.
        """
        child = Guard.__new__(type(self))
        child._set_up(self._tree, self, budget, mode or self.mode, run_id, on_warning)
        child._announce()
        return child

    @contextmanager
    def activate(self) -> Generator[Self]:
        """Make this the guard of the code in the block, wherever its configuration is out of reach.

        Adapters with an ambient hook find it: in this thread or task, in tasks that are started
        here, and in threads that get a copy of the context.
        """
        token = _ACTIVE.set(self)
        try:
            yield self
        finally:
            _ACTIVE.reset(token)

    @staticmethod
    def active() -> Guard | None:
        """Return the guard of the innermost `activate` block around this code, or None."""
        return _ACTIVE.get()

    def attachment(self, kind: type[_A]) -> _A:
        """Return what an adapter keeps with this tree of guards, made on first use.

        Two layers of an adapter that see the same call find each other here.
        """
        with self._tree.lock:
            found = self._tree.attachments.get(kind)
            if found is None:
                found = self._tree.attachments[kind] = kind()
        return cast("_A", found)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the guard itself: a copy would be a second allowance of the same budget."""
        return self

    def emit(self, kind: type[EventBase], **facts: Any) -> None:
        """Record an event about this run, for the sinks; nothing is built when there are none."""
        if self._tree.sinks:
            with self._tree.lock:
                self._record(kind, self._now(), **facts)
            self._tree.deliver()

    def flush(self) -> None:
        """Have every sink make what it took safe. A failing sink is reported, not raised."""
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
            self._tree.errors.append(what)
        else:
            self._tree.report(what, error)

    def conclude(self, outcome: Outcome) -> None:
        """Keep the outcome of a run that ended, as `outcome`, and record its end."""
        self.outcome = outcome
        self.emit(
            RunEnded,
            status=outcome.status,
            stop_reason=outcome.stop_reason,
            usage=outcome.usage,
        )

    # Checkpoints

    def snapshot(self, messages: Sequence[Any] = ()) -> Snapshot:
        """Take everything that the guard knows, and the conversation it is given, as plain data.

        Args:
            messages: The conversation, in any form that JSON can hold.
        """
        with self._tree.lock:
            now = self._now()
            return Snapshot(
                run_id=self.run_id,
                parent_run_id=None if self.parent is None else self.parent.run_id,
                mode=str(self.mode),
                budget=self.budget.to_json(),
                stop_conditions=len(self.budget.stop_when),
                counters=self._counters.to_dict(),
                quotas=self._quotas_used(),
                tool_counts=self._tools_started(),
                records=tuple(self._records),
                elapsed_ns=None if self._started_ns is None else now - self._started_ns,
                trip=self._trip,
                observed=self._observed,
                aborted=self._aborted,
                held=tuple(self._held),
                warned=tuple(self._warned),
                window_warned=self._window_warned,
                detector=None if self._detector is None else self._detector.state(),
                open_calls=tuple(
                    OpenCall.of(ticket)
                    for ticket in self._tree.open.values()
                    if ticket.guard is self
                ),
                earlier=self._earlier,
                seq=self._tree.seq,
                call_id=self._tree.call_id,
                price_book=self._tree.price_book.version,
                messages=tuple(messages),
            )

    @classmethod
    def restore(
        cls,
        snapshot: Snapshot,
        budget: Budget | None = None,
        *,
        stop_when: Sequence[Callable[..., str | bool | None]] = (),
        sinks: Iterable[Sink | Callable[[Event], object]] = (),
        on_warning: WarningHandler | None = None,
        price_book: PriceBook | None = None,
        clock: Clock | None = None,
        log_arguments: bool = False,
    ) -> Self:
        """Go on from a snapshot, in this process or another.

        Without a budget the guard is what it was: same caps, same counters, same trip. Under a
        fresh budget the caps count from zero, nothing is tripped, and what was used before is kept
        in `earlier_usage`. Calls that were in flight keep their reservation in either case.

        Args:
            snapshot: What `snapshot` or a store returned.
            budget: A fresh budget; the recorded one, with what was used of it, if left out.
            stop_when: The conditions of the recorded budget, which are code and not in a snapshot.
            sinks: As in `Guard`; so are the arguments below.
            on_warning: Called with the guard and its warning.
            price_book: Where prices come from.
            clock: Where time comes from.
            log_arguments: Put the arguments of tool calls into events.

        Raises:
            CheckpointError: The snapshot's run had stop conditions, and neither they nor a budget
                were given; or it does not fit together.
            ConfigurationError: Both `budget` and `stop_when` were given.
        """
        if budget is not None and stop_when:
            raise ConfigurationError(
                "stop_when must not be given beside a budget, got both. "
                "Pass Budget(stop_when=...) in it."
            )
        if budget is None and snapshot.stop_conditions and not stop_when:
            raise CheckpointError(
                "a run with stop conditions needs them again, got none: conditions are code "
                "and not in a snapshot. Pass stop_when=, or a fresh budget= that has them."
            )
        try:
            guard = cls(
                budget or Budget.from_json({**snapshot.budget, "stop_when": tuple(stop_when)}),
                mode=snapshot.mode,
                run_id=snapshot.run_id,
                on_warning=on_warning,
                price_book=price_book,
                clock=clock,
                log_arguments=log_arguments,
            )
            guard._take_over(snapshot, fresh=budget is not None)
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"snapshot of run {snapshot.run_id!r} does not fit together: {error}. "
                "Start the run anew."
            ) from None
        guard._tree.sinks = tuple(as_sink(sink) for sink in sinks)
        guard.emit(RunRestored, snapshot=guard.snapshot().model_dump(mode="json"))
        return guard

    def _take_over(self, snapshot: Snapshot, *, fresh: bool) -> None:
        tree = self._tree
        tree.seq = snapshot.seq
        tree.call_id = snapshot.call_id
        if snapshot.counters.keys() != set(Counters.__slots__):
            raise ValueError("its counters are not those of a guard")
        self._earlier = snapshot.earlier
        for call in snapshot.open_calls:
            ticket = call.ticket(self, tree.price_book)
            tree.open[ticket.call_id] = ticket
        self._records.extend(snapshot.records)
        if fresh:
            self._earlier = snapshot.earlier + snapshot.usage()
            for ticket in tree.open.values():
                self._counters.reserved_tokens += ticket.reserved_tokens
                self._counters.reserved_cost += ticket.reserved_cost
            return
        self._counters = Counters(**snapshot.counters)
        self._compile(snapshot.quotas)
        for name, started in snapshot.tool_counts.items():
            self._tool(name).started = started
        if snapshot.elapsed_ns is not None:
            self._start(self._now() - snapshot.elapsed_ns)
        self._trip = snapshot.trip
        self._aborted = snapshot.aborted
        if snapshot.aborted is not None:
            self.cancellation.cancel()
        self._held = list(snapshot.held)
        self._warned = dict.fromkeys(snapshot.warned)
        self._window_warned = snapshot.window_warned
        self._set_marks(Marks(self._caps, self._warned))
        detection = self.budget.loop_detection
        if detection is not None and snapshot.detector is not None:
            self._detector = LoopDetector.from_state(detection, snapshot.detector)
        if snapshot.observed is not None:
            self._observe_trip(snapshot.observed, self._now())
        self._halt = self._is_halted()

    @classmethod
    def replay(
        cls,
        events: Iterable[Event],
        *,
        budget: Budget | None = None,
        price_book: PriceBook | None = None,
        clock: Clock | None = None,
    ) -> Guard:
        """Let the same counting code live through a recorded log again.

        With the budget of the log the result is what the original was, and the run can go on from
        it. Under another budget the guard shows what that would have made of the run: once it
        has stopped, only calls that were in flight are settled.

        Args:
            events: A log, as `read_events` reads it: whole, from the start of its run.
            budget: A candidate budget for the run at the root.
            price_book: Prices, where they are not to come from the default book.
            clock: The clock of the guard when the log is through.

        Raises:
            CheckpointError: The log does not begin with its run's start, or does not fit together.
        """
        from budgetguard_core.replay import replay

        guard, seq = replay(events, budget=budget, price_book=price_book, clock=clock)
        guard._tree.seq = seq
        return guard

    # Under the lock

    def _now(self) -> int:
        return self._tree.now()

    def _quotas_used(self) -> dict[str, int]:
        return {quota.pattern: quota.used for quota in self._caps.quotas}

    def _elapsed(self, now: int) -> int:
        return 0 if self._started_ns is None else now - self._started_ns

    def _start(self, at_ns: int) -> None:
        self._started_ns = at_ns
        self._set_marks(self._marks)

    def _set_marks(self, marks: Marks) -> None:
        self._marks = marks
        # The time from which a step is looked at closely: also the first, which starts the clock.
        started = self._started_ns
        self._mark_at = -INFINITY if started is None else started + marks.nanoseconds

    def _is_far_from_caps(self, now: int, tokens: int, cost: int) -> bool:
        """Tell whether one more model call leaves every dimension below its mark."""
        for guard in self._chain:
            counters, marks = guard._counters, guard._marks
            if (
                guard._halt
                or now >= guard._mark_at
                or counters.iterations + 1 >= marks.iterations
                or counters.model_calls + 1 >= marks.model_calls
                or counters.tokens + counters.reserved_tokens + tokens >= marks.tokens
                or counters.cost + counters.reserved_cost + cost >= marks.cost
                or counters.tool_calls >= marks.tool_calls
            ):
                return False
        return True

    def _model_call_fits(self, now: int, retry: bool, tokens: int, cost: int) -> bool:
        for guard in self._chain:
            if guard._started_ns is None:
                guard._start(now)
            if guard._halt or not model_call_fits(
                guard._counters, guard._caps, guard._elapsed(now), retry, tokens, cost
            ):
                return False
        return True

    def _is_far_from_tool_caps(self, now: int, calls: int) -> bool:
        """Tell whether a batch of this size leaves every dimension below its mark."""
        for guard in self._chain:
            counters, marks = guard._counters, guard._marks
            if (
                guard._halt
                or now >= guard._mark_at
                or counters.tokens >= marks.tokens
                or counters.cost >= marks.cost
                or counters.tool_calls + calls >= marks.tool_calls
            ):
                return False
        return True

    def _tool_calls_fit(self, now: int) -> bool:
        for guard in self._chain:
            if guard._started_ns is None:
                guard._start(now)
            if guard._halt or not tool_calls_fit(guard._counters, guard._caps, guard._elapsed(now)):
                return False
        return True

    def _clamp(self, call: ModelCall, rates: Rates | None, bound: int) -> int:
        """Cut the completion bound to what is left of tokens and dollars; at least 1."""
        for guard in self._binding:
            counters, caps = guard._counters, guard._caps
            if caps.tokens != INFINITY:
                left = caps.tokens - counters.tokens - counters.reserved_tokens
                bound = min(bound, int(left) - call.input_tokens)
            if caps.cost != INFINITY and rates is not None and call.cost_usd is None and bound > 0:
                room = int(caps.cost) - counters.cost - counters.reserved_cost
                room = max(room - rates.input_cost(call.input_tokens), 0)
                full = rates.output_cost(bound, input_tokens=call.input_tokens)
                if full > room:
                    bound = room * bound // full
        return max(bound, 1)

    def _stop_model_call(
        self, now: int, call: ModelCall, tokens: int, cost: int, unpriced: bool
    ) -> Trip | None:
        found: list[tuple[Guard, list[Violation]]] = []
        for guard in self._chain:
            held = model_call_violations(
                guard._counters, guard._caps, guard._elapsed(now), call.retry, tokens, cost
            )
            if unpriced and guard._caps.refuses_unpriced:
                held.append(unpriced_model(call.model))
            found.append((guard, held))
        trip = self._stop(now, found)
        if trip is not None and self._tree.sinks:
            self._record(ModelCallRefused, now, **_facts(call), reason=trip.reason)
        return trip

    def _stop(
        self, now: int, found: list[tuple[Guard, list[Violation]]] | None = None
    ) -> Trip | None:
        """Trip every guard of the chain whose limits hold; None when nothing stops this run."""
        if found is None:
            found = [
                (guard, tool_call_violations(guard._counters, guard._caps, guard._elapsed(now)))
                for guard in self._chain
            ]
        if self._trip is not None:
            return self._trip
        for guard in self._chain:
            if guard._trip is not None:
                self._set_trip(guard._trip, now)
                return guard._trip
        every: list[Violation] = []
        owner = self
        for guard, limits in found:
            held = in_order([*limits, *guard._standing(self)])
            if not held:
                continue
            own = Trip(reason=held[0].reason, violations=tuple(held), run_id=guard.run_id)
            if guard.mode is Mode.OBSERVE:
                guard._observe_trip(own, now)
                continue
            every = in_order([*every, *held])
            if every[0] is held[0]:
                owner = guard
            if guard is not self:
                guard._set_trip(own, now)
        if not every:
            return None
        trip = Trip(reason=every[0].reason, violations=tuple(every), run_id=owner.run_id)
        self._set_trip(trip, now)
        return trip

    def _standing(self, asking: Guard) -> list[Violation]:
        """List what holds against any step, whatever it is."""
        held = list(self._held)
        if self._aborted is not None:
            held.append(Violation(reason=StopReason.ABORTED, detail=self._aborted))
        # An ancestor's loop is the ancestor's conversation: its own next step ends it.
        if self is asking and self._detector is not None and self._detector.tripped:
            held.append(self._detector.violation())
        return held

    def _set_trip(self, trip: Trip, now: int) -> None:
        self._trip = trip
        self._halt = True
        if self._tree.sinks:
            self._record(Tripped, now, trip=trip)

    def _observe_trip(self, trip: Trip, now: int) -> None:
        """Record the trip once, and go on without caps: nothing is refused in OBSERVE."""
        self._observed = trip
        self._set_caps(Caps(Budget()))
        self._conditions = ()
        self._held = []
        self._aborted = None
        self._detector = None
        self._halt = False
        if self._tree.sinks:
            self._record(TripObserved, now, trip=trip)

    def _is_halted(self) -> bool:
        return (
            self._trip is not None
            or self._aborted is not None
            or bool(self._held)
            or (self._detector is not None and self._detector.tripped)
        )

    def _hold(self, violation: Violation) -> None:
        if self._observed is not None or violation in self._held:
            return
        self._held.append(violation)
        self._halt = True

    def _start_model_call(
        self,
        call: ModelCall,
        rates: Rates | None,
        bound: int | None,
        tokens: int,
        cost: int,
        now: int,
    ) -> Admit:
        tree = self._tree
        tree.call_id += 1
        detector = self._detector
        message = detector.nudge() if detector is not None and detector.due else None
        # A message would change the run, and OBSERVE only looks on.
        kind = Admit if message is None or self.mode is not Mode.ENFORCE else Nudge
        ticket = kind(
            self,
            call,
            tree.call_id,
            bound if self._enforced else call.max_output_tokens,
            rates,
            tokens,
            cost,
        )
        if type(ticket) is Nudge and message is not None:
            ticket.message = message
        tree.open[tree.call_id] = ticket
        for guard in self._chain:
            counters = guard._counters
            if not call.retry:
                counters.iterations += 1
            counters.model_calls += 1
            counters.reserved_tokens += tokens
            counters.reserved_cost += cost
        if tree.sinks:
            self._record(
                ModelCallAdmitted,
                now,
                call_id=ticket.call_id,
                **_facts(call),
                admitted_output_tokens=ticket.max_output_tokens,
                nudge=message,
            )
        return ticket

    def _charge(
        self,
        ticket: Admit,
        usage: TokenUsage | None,
        cost: int | None,
        failed: bool,
        priced: bool,
        now: int,
    ) -> bool:
        """Replace the reservation by what was used; True when a mark was reached."""
        near = unmetered = False
        reserved_tokens, reserved_cost = ticket.reserved_tokens, ticket.reserved_cost
        if usage is None:
            unmetered = not (failed or reserved_tokens or reserved_cost)
            given = ticket.call.input_tokens
            usage = TokenUsage(given, reserved_tokens - given, estimated=True)
        inputs, outputs, read, write, write_1h, reasoning, estimated = usage
        for guard in self._chain:
            counters = guard._counters
            marks = guard._marks
            counters.reserved_tokens -= reserved_tokens
            counters.reserved_cost -= reserved_cost
            counters.input_tokens += inputs
            counters.output_tokens += outputs
            counters.tokens += inputs + outputs
            if counters.tokens >= marks.tokens or now >= guard._mark_at:
                near = True
            if read or write:
                counters.cache_read_tokens += read
                counters.cache_write_tokens += write
                counters.cache_write_1h_tokens += write_1h
            if reasoning:
                counters.reasoning_tokens += reasoning
            if estimated:
                counters.estimated_calls += 1
            if failed:
                counters.failed_calls += 1
            if cost is not None:
                counters.cost += cost
                if counters.cost >= marks.cost:
                    near = True
            else:
                counters.unpriced_calls += 1
                if guard._caps.refuses_unpriced and not failed:
                    guard._hold(unpriced_model(ticket.call.model))
            if unmetered:
                caps = guard._caps
                if caps.tokens != INFINITY or (caps.cost != INFINITY and not priced):
                    guard._hold(unmetered_usage())
        return near

    def _decide_tool_call(self, call: ToolCall, trip: Trip | None, now: int) -> ToolDecision:
        kind = call.kind
        if kind == "function":
            if trip is not None:
                return self._refused(call, Stop(trip))
            detector = self._detector
            if detector is not None and detector.due:
                # No model call came in between that could have brought the correction.
                message = detector.nudge()
                if message is not None and self.mode is Mode.ENFORCE:
                    return self._refused(call, Refuse(StopReason.NO_PROGRESS, message, message))
            if not self._take_place(call.name):
                trip = self._stop_tool_calls(now)
                if trip is not None:
                    return self._refused(call, Stop(trip))
                refusal = self._quota_refusal(call.name)
                if refusal is not None:
                    if detector is not None:
                        # Asking again and again for what is refused brings nothing new either.
                        detector.observe(call.name, call.key or "", _REFUSED)
                        self._halt = self._is_halted()
                    return self._refused(call, refusal)
                self._count_tool_call(call.name)
        elif kind == "hosted":
            self._count_tool_call(call.name, hosted=True)
        elif kind == "handoff" and trip is not None:
            return self._refused(call, Stop(trip))
        tree = self._tree
        tree.call_id += 1
        ticket = Admit(self, call, tree.call_id)
        if kind != "hosted":
            tree.open[tree.call_id] = ticket
        return ticket

    def _refused(self, call: ToolCall, decision: _Refusal) -> _Refusal:
        self._records.append((call.id, call.name[:_NAME_LENGTH], "refused"))
        return decision

    def _take_place(self, name: str) -> bool:
        """Count the call if every guard of the chain has a place for it."""
        for guard in self._chain:
            if guard._counters.tool_calls >= guard._caps.tool_calls:
                return False
            for quota in (guard._tools.get(name) or guard._tool(name)).quotas:
                if quota.used >= quota.limit:
                    return False
        self._count_tool_call(name)
        return True

    def _quota_refusal(self, name: str) -> Refuse | None:
        for guard in self._chain:
            for quota in guard._tool(name).quotas:
                if quota.used >= quota.limit and guard.mode is Mode.ENFORCE:
                    return Refuse(
                        StopReason.TOOL_QUOTA,
                        f"tool_quotas[{quota.pattern!r}]={quota.limit} reached",
                    )
        return None

    def _stop_tool_calls(self, now: int) -> Trip | None:
        found: list[tuple[Guard, list[Violation]]] = []
        for guard in self._chain:
            counters, caps = guard._counters, guard._caps
            if counters.tool_calls >= caps.tool_calls:
                cap = reached(StopReason.MAX_TOOL_CALLS, counters, caps, guard._elapsed(now))
                found.append((guard, [cap]))
        return self._stop(now, found) if found else None

    def _count_tool_call(self, name: str, hosted: bool = False) -> None:
        for guard in self._chain:
            guard._counters.tool_calls += 1
            tool = guard._tools.get(name) or guard._tool(name)
            tool.started += 1
            for quota in tool.quotas:
                quota.used += 1
                # Any other call past its quota is refused, and in OBSERVE would have been.
                if hosted and quota.used > quota.limit:
                    guard._hold(quota_passed(quota))

    def _uncount_tool_call(self, name: str) -> None:
        for guard in self._chain:
            guard._counters.tool_calls -= 1
            tool = guard._tool(name)
            tool.started -= 1
            for quota in tool.quotas:
                quota.used -= 1

    def _tool(self, name: str) -> Tool:
        tool = self._tools.get(name)
        if tool is None:
            tool = Tool(self._caps.quotas_of(name))
            # Names come from the model: what is kept must not grow with what it invents.
            if len(self._tools) < _NAMES_KEPT:
                self._tools[name] = tool
        return tool

    def _tools_started(self) -> dict[str, int]:
        return {name: tool.started for name, tool in self._tools.items() if tool.started}

    def _warn(self, now: int) -> Sequence[_Warning]:
        warnings: list[_Warning] = []
        for guard in self._chain:
            # The budget's caps: in OBSERVE those of the guard are gone after the trip.
            caps = Caps(guard.budget)
            for due in due_warnings(guard._counters, caps, guard._warned, guard._elapsed(now)):
                guard._warned[due.reason.value] = None
                event = guard._make(
                    LimitNearlyReached,
                    now,
                    dimension=due.reason.value,
                    limit=_plain(due.limit),
                    used=_plain(due.used),
                )
                warnings.append((guard, event))
                guard._set_marks(Marks(caps, guard._warned))
        return warnings

    def _watch_window(
        self,
        now: int,
        call: ModelCall,
        rates: Rates,
        input_tokens: int,
        warnings: Sequence[_Warning],
    ) -> Sequence[_Warning]:
        """Warn of a prompt near its window; armed again once a pruning hook has cut it."""
        self._window_warned = not self._window_warned
        if not self._window_warned:
            return warnings
        event = self._make(
            ContextWindowNearlyFull,
            now,
            model=call.model or "",
            context_window=rates.context_window or 0,
            input_tokens=input_tokens,
        )
        return [*warnings, (self, event)]

    def _time_left(self, now: int) -> float | None:
        left = INFINITY
        for guard in self._chain:
            if guard.mode is Mode.ENFORCE:
                left = min(left, guard._caps.nanoseconds - guard._elapsed(now))
        return None if left == INFINITY else max(left, 0) / 1_000_000_000

    def _open_tool_calls(self) -> list[Admit]:
        return [
            ticket
            for ticket in self._tree.open.values()
            if ticket.guard is self and type(ticket.call) is ToolCall
        ]

    def _usage(self, now: int) -> Usage:
        counters = self._counters
        return Usage(
            iterations=counters.iterations,
            model_calls=counters.model_calls,
            tool_calls=counters.tool_calls,
            total_tokens=counters.tokens,
            input_tokens=counters.input_tokens,
            output_tokens=counters.output_tokens,
            cache_read_tokens=counters.cache_read_tokens,
            cache_write_tokens=counters.cache_write_tokens,
            cache_write_1h_tokens=counters.cache_write_1h_tokens,
            reasoning_tokens=counters.reasoning_tokens,
            cost_usd=to_usd(counters.cost),
            seconds=self._elapsed(now) / 1_000_000_000,
            reserved_tokens=counters.reserved_tokens,
            reserved_usd=to_usd(counters.reserved_cost),
            unpriced_calls=counters.unpriced_calls,
            estimated_calls=counters.estimated_calls,
            failed_calls=counters.failed_calls,
        )

    def _make(self, kind: type[_E], now: int, **facts: Any) -> _E:
        tree = self._tree
        if tree.sinks:
            tree.seq += 1
        event = kind(
            seq=tree.seq, run_id=self.run_id, at_ns=now, wall_ns=tree.clock.wall_ns(), **facts
        )
        if tree.sinks:
            tree.outbox.append(event)  # type: ignore[arg-type]
        return event

    def _record(self, kind: type[_E], now: int, **facts: Any) -> None:
        self._make(kind, now, **facts)

    def _record_batch(
        self, now: int, calls: Sequence[ToolCall], decisions: Sequence[ToolDecision]
    ) -> None:
        self._record(
            ToolCallsRequested,
            now,
            calls=tuple(
                ToolCallRequested(
                    call_id=decision.call_id if isinstance(decision, Admit) else None,
                    id=call.id,
                    name=call.name,
                    kind=call.kind,
                    fingerprint=call.fingerprint or "",
                    arguments=call.arguments if self._tree.log_arguments else None,
                    decision=_ANSWERS[type(decision)],
                )
                for call, decision in zip(calls, decisions, strict=True)
            ),
        )

    # Outside the lock

    def _ask_conditions(self) -> None:
        for guard in self._chain:
            for condition in guard._conditions:
                try:
                    reason = condition(guard)
                    if reason is not None and guard._trip is None:
                        guard.hold(Violation(reason=StopReason.STOP_CONDITION, detail=reason))
                except Exception as error:
                    self._tree.report("stop_when", error)

    def _finish(self, warnings: Sequence[_Warning]) -> None:
        if self._tree.outbox:
            self._tree.deliver()
        for guard, event in warnings:
            if guard._on_warning is not None:
                try:
                    guard._on_warning(guard, event)
                except Exception as error:
                    self._tree.report("on_warning", error)


def _as_mode(mode: Mode | str) -> Mode:
    try:
        return Mode(mode)
    except ValueError:
        known = ", ".join(Mode)
        raise ConfigurationError(f"mode must be one of {known}, got {mode!r}.") from None


def _facts(call: ModelCall) -> dict[str, Any]:
    return {
        "model": call.model,
        "provider": call.provider,
        "retry": call.retry,
        "input_tokens": call.input_tokens,
        "max_output_tokens": call.max_output_tokens,
        "output_is_fixed": call.output_is_fixed,
        "seconds": call.seconds,
        "cost_usd": None if call.cost_usd is None else str(call.cost_usd),
    }


def _wrong_projection(call: ModelCall) -> str:
    if not call.input_tokens >= 0:
        return f"input_tokens must be >= 0, got {call.input_tokens}. Use 0 where it is not known."
    return f"max_output_tokens must be >= 1, got {call.max_output_tokens}. Use None for no bound."


def _amount(cost_usd: Decimal) -> int:
    if type(cost_usd) is not Decimal or not (cost_usd.is_finite() and cost_usd >= 0):
        raise ConfigurationError(
            f"cost_usd must be a Decimal >= 0, got {cost_usd!r}. Use None where it is not known."
        )
    return from_usd(cost_usd)


def _projected_cost(call: ModelCall, rates: Rates | None, bound: int | None) -> int:
    if call.cost_usd is not None:
        return _amount(call.cost_usd)
    if rates is None or not (call.input_tokens or bound):
        return 0
    return rates.projected_cost(call.input_tokens, bound or 0)


def _error_text(error: BaseException | str) -> str:
    try:
        return str(error)
    except Exception:  # the error's own code runs here, and the call has to be settled
        return type(error).__name__


def _error_name(error: BaseException | str | None) -> str | None:
    if error is None:
        return None
    return "error" if isinstance(error, str) else type(error).__name__


def _plain(amount: float | Decimal | None) -> int | float | str:
    return str(amount) if isinstance(amount, Decimal) else amount or 0
