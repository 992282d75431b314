"""The guard of one run: it admits model calls and tool calls, settles them, and trips once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, cast

from budgetguard_core import limits
from budgetguard_core.breakers import BreakerRegistry, StateTransition
from budgetguard_core.breakers.call import CallBreakers
from budgetguard_core.breakers.circuit_breaker import CallOutcome
from budgetguard_core.breakers.progress import NOTED, ProgressReport, read_report
from budgetguard_core.budget import DIMENSIONS, Budget
from budgetguard_core.cancellation import CancellationToken
from budgetguard_core.canonical import (
    arguments_key,
    digest_of,
    fingerprint_error,
    fingerprint_result,
    result_key,
)
from budgetguard_core.charges import NOTHING, Charge, Charges, measured, set_aside, settle_charges
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
    given_cost,
    projected_cost,
    wrong_model,
    wrong_projection,
)
from budgetguard_core.errors import (
    AdapterError,
    CheckpointError,
    ConfigurationError,
    text_of,
)
from budgetguard_core.events import (
    Aborted,
    BudgetExtended,
    CallDelayed,
    Checked,
    CircuitBreakerChanged,
    ContextWindowNearlyFull,
    Event,
    EventBase,
    GuardReset,
    IterationsRestarted,
    LimitNearlyReached,
    ModelCallAdmitted,
    ModelCallRefused,
    ModelCallSettled,
    ModelCallWithdrawn,
    NudgeTaken,
    ProgressReported,
    ReplyReported,
    RunEnded,
    RunPaused,
    RunRestored,
    RunResumed,
    Sink,
    StopHeld,
    TimeStarted,
    ToolCallRequested,
    ToolCallSettled,
    ToolCallsRequested,
    ToolCallTurnedAway,
    ToolCallWithdrawn,
    ToolMixUnusual,
    UserTurned,
)
from budgetguard_core.frame import FRAME, Frame, current
from budgetguard_core.meter import (
    INFINITY,
    charge,
    clamp,
    count_tool_call,
    far_from_caps,
    far_from_tool_caps,
    in_flight,
    largest_completion,
    model_call_fits,
    release,
    reserve,
    take_place,
    tool_calls_fit,
    uncount_tool_call,
)
from budgetguard_core.outcome import Outcome
from budgetguard_core.pricing import PriceBook, Rates, to_usd
from budgetguard_core.run_breakers import (
    correct_model_call,
    hold_model_call,
    hold_tool_call,
    model_call_within_pace,
    tool_call_within_pace,
    withdraw_tool_call,
)
from budgetguard_core.snapshot import Snapshot
from budgetguard_core.standing import Mode as Mode
from budgetguard_core.state import NAME_LENGTH, RunState
from budgetguard_core.state import WarningEvent as WarningEvent
from budgetguard_core.stop import StopReason, Trip, Violation, reason_of
from budgetguard_core.tree import UNPROJECTED, Tree, as_sink
from budgetguard_core.usage import TokenUsage, check_token_usage

if TYPE_CHECKING:
    from budgetguard_core.ledger import Ledger, LedgerRun, Refusal, Tenant, Warned

WarningHandler: TypeAlias = Callable[["Guard", WarningEvent], object]
_Warning: TypeAlias = tuple["Guard", WarningEvent]
_A = TypeVar("_A")
_Refusal = TypeVar("_Refusal", Refuse, Stop)

_REFUSED = result_key(NOT_AVAILABLE)
_NOTHING: frozenset[str] = frozenset()


class Guard(RunState):
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
        breakers: The circuit breakers, rate limits and bulkheads that this run shares with others;
            its own if left out. All who share it need one clock.
        ledger: The ledger that the run's model calls are charged to as well: a `Ledger`, or its
            URL. Its tenant's ceilings stop the run (`tenant_daily`, `tenant_monthly`), and so do
            its kill switches (`aborted`).
        tenant: Whom the run is for: a name, a `Key`, or several that are charged together.

    Raises:
        ConfigurationError: The budget is not a `Budget`, a sink takes no events, or only one of
            `ledger` and `tenant` was given.
    """

    __slots__ = ()

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
        breakers: BreakerRegistry | None = None,
        ledger: Ledger | str | None = None,
        tenant: Tenant | None = None,
    ) -> None:
        if breakers is not None and not isinstance(breakers, BreakerRegistry):
            raise ConfigurationError(
                f"breakers must be a BreakerRegistry, got {type(breakers).__name__}. "
                "Leave it out for one of the run's own."
            )
        tree = Tree(
            clock or SystemClock(),
            price_book or PriceBook(),
            [as_sink(sink) for sink in sinks],
            log_arguments,
            breakers or BreakerRegistry(),
        )
        self._set_up(tree, None, budget, mode, run_id, on_warning)
        self._charge_to(ledger, tenant)
        self._announce()

    def _charge_to(self, ledger: Ledger | str | None, tenant: Tenant | None) -> None:
        """Take the run's place in a ledger. Nothing is asked of its store yet."""
        if ledger is None and tenant is None:
            return
        if ledger is None or tenant is None:
            missing = "ledger" if ledger is None else "tenant"
            raise ConfigurationError(
                f"ledger and tenant must be given together, got no {missing}. "
                'Use Guard(..., ledger="sqlite:///ledger.sqlite3", tenant="acme").'
            )
        from budgetguard_core.ledger import as_ledger

        if self.mode is not Mode.OFF:
            me: weakref.ref[Guard] = weakref.ref(self)
            place = as_ledger(ledger).attach(
                self.run_id,
                tenant,
                on_kill=lambda detail: _told(me, lambda guard: guard.abort(detail)),
                on_warning=lambda warned: _told(me, lambda guard: guard._warn_tenant(warned)),
            )
            # A guard that nobody keeps has ended, whether or not somebody said so.
            weakref.finalize(self, place.abandon).atexit = False
            self._take_tenant(place)

    # Admission

    def start(self) -> None:
        """Let the run's time begin now instead of with the first admission."""
        with self._tree.lock:
            if self._meter.started_ns is None:
                now = self._now()
                self._meter.start(now)
                self._keep_time(now)
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
        rates = None
        if call.model is not None:
            if type(call.model) is not str:
                raise ConfigurationError(wrong_model(call.model))
            rates = tree.price_book.rates_for(call.model, call.provider)
        if tree.postponed:
            tree.deliver()
        if self._conditional:
            self._ask_conditions()
        bound = self._output_bound
        if call.max_output_tokens is not None:
            bound = call.max_output_tokens if bound is None else min(bound, call.max_output_tokens)
        # Put so that NaN fails too: reserved, it would be above no cap for ever.
        if (
            not call.input_tokens >= 0
            or not call.min_output_tokens >= 1
            or (bound is not None and not bound >= 1)
        ):
            raise ConfigurationError(wrong_projection(call))
        tokens = call.input_tokens if bound is None else call.input_tokens + bound
        cost = projected_cost(call, rates, bound)
        unpriced = self._needs_price and rates is None and call.cost_usd is None
        # Before the lock: a lease that is dry makes a trip to its store.
        charges = self._set_aside(call, rates, tokens, cost) if self._tenants else ()
        warnings: Sequence[_Warning] = ()
        decision: ModelDecision | None = None
        clamped_by: StopReason | None = None
        with tree.lock:
            now = tree.now()
            expected, kept = 0, (tokens, cost)
            if bound is None and self._expects:
                expected = largest_completion(self._chain)
                kept = tokens + expected, projected_cost(call, rates, expected)
                if expected and in_flight(self._chain):
                    tokens, cost = kept
            far = far_from_caps(self._chain, now, *kept)
            if not far:
                warnings = self._foresee(now, call, rates, bound, tokens, cost)
            if not warnings:
                held = bool(self._watched) and self._is_held(call, now)
                # A turn that begins may be one too many without progress.
                far = far and not (unpriced or held or self._meter.halt)
                trip = None
                if not far and (
                    not model_call_fits(self._chain, now, call.retry, tokens, cost)
                    or unpriced
                    or held
                ):
                    if bound is not None and not call.output_is_fixed:
                        bound, clamped_by = clamp(self._binding, call, rates, bound)
                        tokens = call.input_tokens + bound
                        cost = projected_cost(call, rates, bound)
                        kept = tokens, cost
                    trip = self._stop_model_call(now, call, tokens, cost, unpriced)
                if trip is not None:
                    decision = Stop(trip)
                else:
                    decision = self._start_model_call(call, rates, bound, *kept, now, charges)
                    decision.clamped_by = clamped_by
                    if expected:
                        first = projected_cost(call, rates, None)
                        decision.expected = expected, kept[1] - first
                    if not far:
                        warnings = self._look(now)
                    if rates is not None and rates.context_window is not None and call.input_tokens:
                        full = call.input_tokens >= rates.context_window * self._warn_at
                        if full is not self._window_warned:
                            warnings = self._watch_window(
                                now, call, rates, call.input_tokens, warnings
                            )
        if charges and not isinstance(decision, Admit):
            settle_charges(charges, NOTHING)
        if warnings or tree.outbox or tree.postponed:
            self._finish(warnings)
        if decision is None:
            # Whoever was warned may have raised the cap. A dimension is warned of once.
            return self.admit_model_call(call)
        if self._expects and not any(kept) and call.cost_usd is None:
            tree.warn_once(UNPROJECTED)
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
        if model is not None and not isinstance(model, str):
            model, problem = None, problem or ConfigurationError(wrong_model(model))
        if model is not None and model != ticket.call.model:
            # The provider's name may be a deployment's that no price is known for.
            rates = tree.price_book.rates_for(model, ticket.call.provider) or rates
        cost: int | None = None
        if cost_usd is not None:
            try:
                cost = given_cost(cost_usd)
            except ConfigurationError as wrong:
                cost_usd, problem = None, problem or wrong
        if cost_usd is None:
            if usage is not None and rates is not None:
                cost = rates.cost(usage)
            else:
                unknown = rates is None and ticket.call.cost_usd is None
                cost = None if unknown else ticket.reserved_cost - ticket.expected[1]
        warnings: Sequence[_Warning] = ()
        with tree.lock:
            if tree.open.get(ticket.call_id) is not ticket:
                return False
            now = tree.now()
            failed = error is not None
            used = ticket.estimate() if usage is None else usage
            said = model, usage, cost, cost_usd, error
            written = False
            try:
                near = charge(guard._chain, ticket, used, cost, failed, now)
                if tree.sinks:
                    guard._record_settled(ticket, now, *said)
                written = True
                del tree.open[ticket.call_id]
            except BaseException:
                # An interrupt, which goes on its way once the call is charged and written in whole.
                charge(guard._chain, ticket, used, cost, failed, now)
                if tree.sinks and not written:
                    guard._record_settled(ticket, now, *said)
                tree.open.pop(ticket.call_id, None)
                raise
            if near:
                warnings = guard._look(now)
            if ticket.breakers is not None:
                tokens = used.total_tokens - ticket.reserved_tokens
                dollars = (cost or 0) - ticket.reserved_cost
                correct_model_call(guard._watched, ticket.breakers, now, tokens, dollars)
            if (usage is None or cost is None) and not failed:
                guard._hold_uncharged(ticket, usage, cost, cost_given=cost_usd is not None)
            if usage is not None and rates is not None and rates.context_window is not None:
                full = usage.input_tokens >= rates.context_window * guard._warn_at
                if full is not guard._window_warned:
                    warnings = guard._watch_window(
                        now, ticket.call, rates, usage.input_tokens, warnings
                    )
        if ticket.charges:
            settle_charges(ticket.charges, measured(cost or 0, used.total_tokens))
        if warnings or tree.outbox or tree.postponed:
            guard._finish(warnings)
        if problem is not None:
            raise problem
        return True

    def withdraw_model_call(self, ticket: Admit) -> bool:
        """Take back a model call that was admitted and never made; it counts as nothing.

        Returns:
            False when the call was settled or withdrawn before.
        """
        guard: Guard = ticket.guard
        tree = guard._tree
        with tree.lock:
            if tree.open.pop(ticket.call_id, None) is not ticket:
                return False
            now = tree.now()
            release(guard._chain, ticket.call.retry, ticket.reserved_tokens, ticket.reserved_cost)
            if ticket.breakers is not None:
                taken = ticket.reserved_tokens, ticket.reserved_cost
                correct_model_call(guard._watched, ticket.breakers, now, -taken[0], -taken[1])
            guard._keep_time(now)
            if tree.sinks:
                guard._record(ModelCallWithdrawn, now, call_id=ticket.call_id)
        settle_charges(ticket.charges, NOTHING)
        tree.deliver()
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
        detector = self._standing.detector
        ignored = _NOTHING if detector is None else detector.ignored
        for call in calls:
            if call.key is None:
                call.key = arguments_key(call.arguments, ignore=ignored)
            if call.kind == "function" and self._standing.is_report(call.name):
                # It is about the run, so it has no place among what the run may do.
                call.kind = "output"
        if tree.postponed:
            tree.deliver()
        if self._conditional:
            self._ask_conditions()
        warnings: Sequence[_Warning] = ()
        decisions: list[ToolDecision] = []
        with tree.lock:
            now = tree.now()
            far = far_from_tool_caps(self._chain, now, len(calls))
            trip = None if far or tool_calls_fit(self._chain, now) else self._stop(now)
            shut: list[bool] = []
            for call in calls:
                decision = self._decide_tool_call(call, trip, now, shut)
                if type(decision) is Stop:
                    trip = decision.trip
                decisions.append(decision)
            if shut:
                self._end_round(False not in shut)
            if not far:
                warnings = self._look(now)
            if tree.sinks:
                requested = ToolCallRequested.of_batch(calls, decisions, tree.log_arguments)
                self._record(ToolCallsRequested, now, calls=requested)
                for decision in decisions:
                    if isinstance(decision, Admit):
                        self._record_delay(decision, now)
        if warnings or tree.outbox or tree.postponed:
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
        outcomes: Sequence[CallOutcome] | None = None,
        duration_ns: int | None = None,
    ) -> bool:
        """Report how a tool call ended. A call that is never settled counts as interrupted.

        Args:
            ticket: The answer of `admit_tool_calls`.
            result: What the tool returned; it is fingerprinted, not kept.
            error: What it raised, if it did.
            result_fingerprint: The fingerprint, where it is known already (replay).
            error_fingerprint: The `fingerprint_error` of the error's text, likewise.
            outcomes: What the call is to the circuit breakers that permitted it, likewise.
            duration_ns: How long its body took, likewise.

        Returns:
            False when the call was settled before.
        """
        guard: Guard = ticket.guard
        tree = guard._tree
        detector = guard._standing.detector
        key, kind = result_fingerprint, None
        if error is not None:
            text = text_of(error)
            key = result_key(text) if key is None else key
            kind = error_fingerprint or fingerprint_error(text)
        elif key is None:
            ignored = _NOTHING if detector is None else detector.ignored_results
            key = result_key(result, ignore=ignored)
        call: ToolCall = ticket.call
        held = ticket.breakers
        # Before the lock: the user's code says what a failure is.
        judged = [] if held is None else list(outcomes or guard._judge(held, result, error))
        warnings: Sequence[_Warning] = ()
        with tree.lock:
            if tree.open.pop(ticket.call_id, None) is not ticket:
                return False
            status = "completed" if error is None else "failed"
            guard._records.append((call.id, call.name[:NAME_LENGTH], status))
            # As `show` does; each step pays for a call. A report of progress is no function.
            detector = guard._standing.detector
            if detector is not None and (
                call.kind == "function" or not guard._standing.is_report(call.name)
            ):
                detector.observe(call.name, call.key or "", key, error=kind)
                if detector.tripped:
                    guard._standing.weigh()
            now = tree.now()
            if held is not None:
                took = max(now - held.start_ns, 0) if duration_ns is None else duration_ns
                duration_ns = took if judged else None
                changes = held.end(judged, took, now)
                if changes:
                    guard._record_changes(changes, now)
            for charged in guard._chain:
                if now >= charged.mark_at:
                    warnings = guard._look(now)
                    break
            if tree.sinks:
                guard._record(
                    ToolCallSettled,
                    now,
                    call_id=ticket.call_id,
                    fingerprint=digest_of(key),
                    error=_error_name(error),
                    error_fingerprint=kind,
                    outcomes=tuple(judged),
                    duration_ns=duration_ns,
                )
        if warnings or tree.outbox or tree.postponed:
            guard._finish(warnings)
        return True

    def withdraw_tool_call(self, ticket: Admit, *, waits: bool = False) -> bool:
        """Take back a tool call that was admitted but whose body did not start.

        For a call that waits for a person's approval, or that ended with its batch: it is not
        counted any more.

        Args:
            ticket: What admitted the call.
            waits: It is asked for again when the person has answered: nothing is said of it until
                then. Otherwise its record says `refused`, and it is still seen as a repetition.

        Returns:
            False when the call was settled or withdrawn before.
        """
        guard: Guard = ticket.guard
        tree = guard._tree
        call: ToolCall = ticket.call
        with tree.lock:
            if tree.open.pop(ticket.call_id, None) is not ticket:
                return False
            now = tree.now()
            if call.kind == "function":
                uncount_tool_call(guard._chain, call.name)
            if call.id:
                guard._occurrences.give_back(call, ticket.occurrence)
            if ticket.breakers is not None:
                withdraw_tool_call(guard._watched, ticket.breakers, now)
            if not waits:
                guard._records.append((call.id, call.name[:NAME_LENGTH], "refused"))
                guard._standing.show(call.name, call.key or "", _REFUSED)
            guard._keep_time(now)
            if tree.sinks:
                guard._record(ToolCallWithdrawn, now, call_id=ticket.call_id, waits=waits)
        tree.deliver()
        return True

    def start_tool_call(self, ticket: Admit) -> None:
        """Say that the body of a tool call begins now, for how long it takes. Not needed."""
        held = ticket.breakers
        if held is not None:
            held.put_off(ticket.guard.clock.monotonic_ns())

    def report_progress(self, arguments: object) -> str:
        """Take in what the model says of its work: the body of the tool `report_progress`.

        Args:
            arguments: What the model passed: an object, or its JSON text. It is digested, not kept.

        Returns:
            The tool's result. Without `Budget.progress` nothing is done with it.
        """
        report = read_report(arguments)
        if isinstance(report, str):
            return report
        self.note_progress(report)
        return NOTED

    def note_progress(self, report: ProgressReport) -> None:
        """Take in a report that was read already (replay)."""
        with self._tree.lock:
            own = self._breakers
            if own is not None and own.progress is not None:
                own.progress.note(report)
                self._standing.weigh()
                if self._tree.sinks:
                    self._record(ProgressReported, self._now(), **report._asdict())
        self._tree.deliver()

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
            before = [(guard.trip, guard.observed_trip) for guard in self._line]
            trip = self._stop(now)
            changed = before != [(guard.trip, guard.observed_trip) for guard in self._line]
            if changed and self._tree.sinks:
                self._record(Checked, now)
        self._tree.deliver()
        return trip

    # What the outside tells the run

    def user_turn(self) -> None:
        """Say that the user spoke: asking the same again is no repetition any more."""
        with self._tree.lock:
            if self._standing.detector is not None:
                self._standing.detector.user_turn()
            if self._breakers is not None and self._breakers.progress is not None:
                self._breakers.progress.user_turn()
            self._standing.weigh()
            if self._tree.sinks:
                self._record(UserTurned, self._now())
        self._tree.deliver()

    def report_reply(
        self, text: str, *, speaker: str | None = None, fingerprint: str | None = None
    ) -> None:
        """Tell what was said in a reply without a tool call, to see whether replies repeat.

        Args:
            text: The whole reply. It is fingerprinted, not kept; one without text is not looked at.
            speaker: Who said it, where several speak: an agent's or a node's name.
            fingerprint: The text's fingerprint, where it is known already (replay).
        """
        if self._standing.detector is None or not (fingerprint or text.strip()):
            return
        fingerprint = fingerprint or fingerprint_result(text)
        with self._tree.lock:
            detector = self._standing.detector
            detector.observe_reply(speaker, "", fingerprint=fingerprint)
            if detector.tripped:
                self._standing.weigh()
            if self._tree.sinks:
                self._record(
                    ReplyReported,
                    self._now(),
                    fingerprint=fingerprint,
                    speaker=None if speaker is None else speaker[:NAME_LENGTH],
                )
        self._tree.deliver()

    def note_warning(self, dimension: str, limit: float | str) -> None:
        """Take in a warning that was given at this very cap (replay)."""
        with self._tree.lock:
            if dimension in DIMENSIONS and _plain(getattr(self.budget, dimension)) == limit:
                self._meter.warn(dimension)

    def take_nudge(self) -> str | None:
        """Take the corrective message that is due, to deliver it in a tool's result.

        An adapter that can add a message before the model call gets it as `Nudge` and needs
        this not. None in OBSERVE: a message would change the run.
        """
        with self._tree.lock:
            message = self._standing.take_nudge() or self._standing.take_request()
            if message is not None and self._tree.sinks:
                self._record(NudgeTaken, self._now(), message=message)
        self._tree.deliver()
        return message if self.mode is Mode.ENFORCE else None

    def abort(self, detail: str = "aborted from outside") -> None:
        """End the run from any thread: at its next admission, at once where work is async.

        Sub-agents end with it. A second abort, or one of a stopped run, changes nothing.
        """
        # Whatever it is given: an exception here would leave the work in flight running.
        detail = text_of(detail)
        if self._tree.postpone(lambda: self.abort(detail)):
            return
        with self._tree.lock:
            going_on = self.trip is None
            if self._standing.abort(detail) and self._tree.sinks:
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
            self._standing.hold(violation)
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
            if self.trip is not None:
                raise AdapterError(
                    f"a stopped run cannot be extended, got a run stopped by {self.trip.reason}. "
                    "Resume it under a fresh budget."
                )
            self.budget = self.budget.raised(caps)
            self._meter.extend(self.budget)
            if self._tree.sinks:
                self._record(BudgetExtended, self._now(), budget=self.budget.to_json())
        self._tree.deliver()

    def pause(self, waiting: Iterable[Admit] = ()) -> None:
        """Say that a run on this guard waits for a person, whose time is not run time.

        From here on, until as many `go_on` as `pause`, time counts only while a call is in flight
        that does not wait, here or in a sub-agent: several runs may share the guard, and the
        others work on. Ancestors are not paused with it: each is paused by whoever knows that its
        run waits as well. Nothing is refused meanwhile, and an admission does not end the pause.

        Args:
            waiting: The calls of this run, and of its sub-agents, that are open and wait too, such
                as a tool whose body asks.
        """
        with self._tree.lock:
            now, ids = self._now(), [ticket.call_id for ticket in waiting]
            self._meter.pause()
            self._tree.waiting = self._tree.waiting.union(ids) & self._tree.open.keys()
            self._keep_time(now)
            if self._tree.sinks:
                self._record(RunPaused, now, waiting=tuple(ids))
        self._tree.deliver()

    def go_on(self, waiting: Iterable[Admit] = ()) -> None:
        """Say that the person has answered: the run's time counts again. Nothing without `pause`.

        Args:
            waiting: The calls that waited with the run and are in flight again.
        """
        with self._tree.lock:
            if not self.paused:
                return
            now, ids = self._now(), [ticket.call_id for ticket in waiting]
            self._meter.end_pause()
            self._tree.waiting.difference_update(ids)
            self._keep_time(now)
            if self._tree.sinks:
                self._record(RunResumed, now, waiting=tuple(ids))
        self._tree.deliver()

    def restart_iterations(self) -> None:
        """Begin the iterations anew for another leg of the same run; all else runs on."""
        with self._tree.lock:
            self._meter.restart_iterations()
            if self._tree.sinks:
                self._record(IterationsRestarted, self._now())
        self._tree.deliver()

    def reset(self) -> None:
        """Put the guard back to its beginning, for another run under the same budget.

        Raises:
            AdapterError: Calls are in flight, here or in a sub-agent, or this is a sub-agent.
        """
        with self._tree.lock:
            flying = sum(self in ticket.guard._line for ticket in self._tree.open.values())
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
        beside: Sequence[Self] = (),
        breakers: BreakerRegistry | None = None,
        ledger: Ledger | str | None = None,
        tenant: Tenant | None = None,
    ) -> Self:
        """Make the guard of a sub-agent: its own caps, and at most what is left of every ancestor.

        It charges this guard and all above it under one lock. Its trip ends the sub-agent alone;
        an ancestor's trip ends everything below. An advisory envelope takes `mode=Mode.OBSERVE`.

        Args:
            budget: Its own caps; without, it has none but those above.
            mode: ENFORCE, OBSERVE or OFF; this guard's if left out.
            run_id: Its name in logs and checkpoints; a random one if left out.
            on_warning: Called at the warning shares of its own caps.
            beside: Other guards of this tree that it charges too, each of their ancestors once.
            breakers: What its own circuit breakers and limits share with other runs; what this
                tree of guards shares if left out.
            ledger: As in `Guard`, for a tenant beside those above; each tenant is charged once.
            tenant: As in `Guard`.
        """
        child = type(self).__new__(type(self))
        child._set_up(
            self._tree, self, budget, mode or self.mode, run_id, on_warning, beside, breakers
        )
        for one in beside:
            one.cancellation.adopt(child.cancellation)
        child._charge_to(ledger, tenant)
        child._announce()
        return child

    @contextmanager
    def activate(self) -> Generator[Self]:
        """Bound every run of every adapter in the block, beside what bounds them already.

        It holds in this thread or task, in tasks that are started here, and in threads that get a
        copy of the context.
        """
        token = FRAME.set(Frame(self, above=FRAME.get()))
        try:
            yield self
        finally:
            FRAME.reset(token)

    @staticmethod
    def active() -> Guard | None:
        """Return the guard that calls from this code are charged to, or None outside of any."""
        frame = current()
        return None if frame is None else frame.guard

    def is_kin_of(self, other: Guard) -> bool:
        """Tell whether two guards are of one tree: admitted under one lock, in one log."""
        return self._tree is other._tree

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

    def number_from(self, seq: int) -> None:
        """Let the next event have the number after `seq`: for a guard that goes on with a log."""
        with self._tree.lock:
            self._tree.seq = seq

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
            self._tree.errors.append(what)
        else:
            self._tree.report(what, error)

    def conclude(self, outcome: Outcome) -> None:
        """Keep the outcome of a run, as `outcome`, and record its end, if it is one."""
        self.outcome = outcome
        if outcome.status == "paused":
            return
        if self._tenant is not None:
            self._tenant.close()
        self.emit(
            RunEnded,
            status=outcome.status,
            stop_reason=outcome.stop_reason,
            error=None if outcome.error is None else outcome.error.partition(":")[0],
            usage=outcome.usage,
        )

    # Checkpoints

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
        within: Sequence[Guard] = (),
        breakers: BreakerRegistry | None = None,
        ledger: Ledger | str | None = None,
        tenant: Tenant | None = None,
    ) -> Guard:
        """Go on from a snapshot, in this process or another.

        Without a budget the guard is what it was: same caps, same counters, same trip. Under a
        fresh budget the caps count from zero, nothing is tripped, and what was used before is kept
        in `earlier_usage`. Calls that were in flight keep their reservation in either case. Where
        the snapshot is of a paused run, so is the guard, until `go_on`.

        Args:
            snapshot: What `snapshot` or a store returned, or `Snapshot.of_outcome`.
            budget: A fresh budget; the recorded one, with what was used of it, if left out.
            stop_when: The conditions of the recorded budget, which are code and not in a snapshot.
            sinks: As in `Guard`; so are the arguments below.
            on_warning: Called with the guard and its warning.
            price_book: Where prices come from.
            clock: Where time comes from.
            log_arguments: Put the arguments of tool calls into events.
            within: Guards of one tree that the run is a part of: then it has their log, clock and
                prices, and what it had used before is not charged to them again.
            breakers: As in `Guard`.
            ledger: As in `Guard`; what the run had used before is not charged again.
            tenant: As in `Guard`.

        Raises:
            CheckpointError: The snapshot's run had stop conditions, and neither they nor a budget
                were given; or it does not fit together.
            ConfigurationError: Both `budget` and `stop_when` were given; or neither a budget was,
                nor does the snapshot know its caps.
        """
        if budget is not None and stop_when:
            raise ConfigurationError(
                "stop_when must not be given beside a budget, got both. "
                "Pass Budget(stop_when=...) in it."
            )
        if budget is None and snapshot.budget is None:
            raise ConfigurationError(
                "a run whose caps are not known needs a budget, got None. Pass a fresh Budget."
            )
        if budget is None and snapshot.stop_conditions and not stop_when:
            raise CheckpointError(
                "a run with stop conditions needs them again, got none: conditions are code "
                "and not in a snapshot. Pass stop_when=, or a fresh budget= that has them."
            )
        try:
            caps = budget or Budget.from_json(
                {**(snapshot.budget or {}), "stop_when": tuple(stop_when)}
            )
            if within:
                guard = within[0].child(
                    caps,
                    mode=snapshot.mode,
                    run_id=snapshot.run_id,
                    on_warning=on_warning,
                    beside=within[1:],
                    breakers=breakers,
                    ledger=ledger,
                    tenant=tenant,
                )
            else:
                guard = cls(
                    caps,
                    mode=snapshot.mode,
                    run_id=snapshot.run_id,
                    on_warning=on_warning,
                    price_book=price_book,
                    clock=clock,
                    log_arguments=log_arguments,
                    breakers=breakers,
                    ledger=ledger,
                    tenant=tenant,
                )
            with guard._tree.lock:
                guard._take_over(snapshot, fresh=budget is not None)
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise _misfit(snapshot, error) from None
        if not within:
            guard._tree.sinks = tuple(as_sink(sink) for sink in sinks)
        guard.emit(RunRestored, snapshot=guard.snapshot().model_dump(mode="json"))
        return guard

    def adopt(self, snapshot: Snapshot) -> bool:
        """Take over what an earlier leg of a run had counted, under this guard's own caps.

        For a guard that is made anew for each request while the run that it bounds waits for a
        person: what was used before the answer counts after it.

        Returns:
            False when this guard has counted something itself; then nothing was changed.

        Raises:
            CheckpointError: The snapshot does not fit together.
        """
        with self._tree.lock:
            if self._meter.model_calls or self._meter.tool_calls:
                return False
            try:
                self._take_over(snapshot, fresh=False)
            except (ArithmeticError, KeyError, TypeError, ValueError) as error:
                raise _misfit(snapshot, error) from None
        self.emit(RunRestored, snapshot=self.snapshot().model_dump(mode="json"))
        return True

    # Under the lock

    def _stop_model_call(
        self, now: int, call: ModelCall, tokens: int, cost: int, unpriced: bool
    ) -> Trip | None:
        found: list[tuple[Self, list[Violation]]] = []
        for guard in self._line:
            held = limits.model_call_violations(guard._meter, now, call.retry, tokens, cost)
            if guard._breakers is not None and guard._breakers.velocity is not None:
                held += guard._breakers.velocity.model_call_violations(now)
            if unpriced and guard._meter.caps.refuses_unpriced:
                held.append(limits.unpriced_model(call.model))
            found.append((guard, held))
        trip = self._stop(now, found)
        if trip is not None and self._tree.sinks:
            self._record(ModelCallRefused, now, call=replace(call), reason=trip.reason)
        return trip

    def _start_model_call(
        self,
        call: ModelCall,
        rates: Rates | None,
        bound: int | None,
        tokens: int,
        cost: int,
        now: int,
        charges: Charges,
    ) -> Admit:
        tree = self._tree
        tree.call_id += 1
        ticket = Admit(
            self,
            call,
            tree.call_id,
            bound if self._enforced else call.max_output_tokens,
            rates,
            tokens,
            cost,
        )
        message = None
        detector = self._standing.detector
        if detector is not None and detector.due:
            message = self._standing.take_nudge()
        if message is None and self._breakers is not None:
            message = self._standing.take_request()
        # A message would change the run, and OBSERVE only looks on.
        if message is not None and self.mode is Mode.ENFORCE:
            ticket = Nudge(ticket, message)
        ticket.charges = charges
        tree.open[tree.call_id] = ticket
        reserve(self._chain, call.retry, tokens, cost)
        if self._watched:
            ticket.breakers = hold_model_call(self._watched, now, tokens, cost)
        if tree.sinks:
            self._record(
                ModelCallAdmitted,
                now,
                call_id=ticket.call_id,
                call=replace(call),
                admitted_output_tokens=ticket.max_output_tokens,
                nudge=message,
                holds=tuple(part.id for _, part, _ in charges if part is not None),
            )
            self._record_delay(ticket, now)
        return ticket

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
        self._record(
            ModelCallSettled,
            now,
            call_id=ticket.call_id,
            model=model,
            usage=usage,
            cost_usd=None if cost is None else str(to_usd(cost)),
            given_cost_usd=None if given is None else str(given),
            error=_error_name(error),
        )

    def _record_delay(self, ticket: Admit, now: int) -> None:
        held = ticket.breakers
        if held is not None and held.start_ns > now:
            self._record(CallDelayed, now, call_id=ticket.call_id, delay_ns=held.start_ns - now)

    def _hold_uncharged(
        self, ticket: Admit, usage: TokenUsage | None, cost: int | None, *, cost_given: bool
    ) -> None:
        """Let a call that cannot be charged stand against the next step, where that matters."""
        kept = ticket.reserved_tokens, ticket.reserved_cost
        # A guess at the completion is not a projection.
        unmetered = usage is None and kept == ticket.expected
        for guard in self._line:
            caps = guard._meter.caps
            if cost is None and caps.refuses_unpriced:
                guard._standing.hold(limits.unpriced_model(ticket.call.model))
            capped = caps.tokens != INFINITY or (caps.cost != INFINITY and not cost_given)
            if unmetered and capped:
                guard._standing.hold(limits.unmetered_usage())

    def _decide_tool_call(
        self, call: ToolCall, trip: Trip | None, now: int, shut: list[bool]
    ) -> ToolDecision:
        kind = call.kind
        held: CallBreakers | None = None
        if kind == "function":
            if trip is not None:
                return self._refused(call, Stop(trip))
            detector = self._standing.detector
            if detector is not None and detector.due:
                # No model call came in between that could have brought the correction.
                message = self._standing.take_nudge()
                if message is not None and self.mode is Mode.ENFORCE:
                    return self._refused(call, Refuse(StopReason.NO_PROGRESS, message, message))
            if not take_place(self._chain, call.name):
                trip = self._stop_tool_calls(now)
                if trip is not None:
                    return self._refused(call, Stop(trip))
                refusal = self._quota_refusal(call.name)
                if refusal is not None:
                    # Asking again and again for what is refused brings nothing new either.
                    self._standing.show(call.name, call.key or "", _REFUSED)
                    return self._refused(call, refusal)
                count_tool_call(self._chain, call.name)
            if self._watched:
                answer = self._ask_breakers(call, now, shut)
                if isinstance(answer, Stop):
                    uncount_tool_call(self._chain, call.name)
                    return self._refused(call, answer)
                if isinstance(answer, Refuse):
                    uncount_tool_call(self._chain, call.name)
                    # Asking again and again for what is refused brings nothing new either.
                    self._standing.show(call.name, call.key or "", result_key(answer.message))
                    return self._refused(call, answer)
                held = answer
        elif kind == "hosted":
            count_tool_call(self._chain, call.name)
            for guard in self._line:
                for quota in guard._meter.tool(call.name).quotas:
                    # Any other call past its quota is refused, or in OBSERVE would have been.
                    if quota.used > quota.limit:
                        guard._standing.hold(limits.quota_passed(quota))
        elif kind == "handoff" and trip is not None:
            return self._refused(call, Stop(trip))
        tree = self._tree
        tree.call_id += 1
        ticket = Admit(self, call, tree.call_id)
        ticket.breakers = held
        if call.id:
            ticket.occurrence = self._occurrences.count(call)
        if kind != "hosted":
            tree.open[tree.call_id] = ticket
        return ticket

    def _is_held(self, call: ModelCall, now: int) -> bool:
        """Ask the breakers whether a model call may start; a new turn ends the one before."""
        own = self._breakers
        if own is not None and own.progress is not None and not call.retry:
            own.progress.iteration()
            if own.tripped:
                self._standing.weigh()
        return not model_call_within_pace(self._watched, now)

    def _ask_breakers(
        self, call: ToolCall, now: int, shut: list[bool]
    ) -> CallBreakers | Refuse | Stop:
        """Ask the breakers whether a tool call may start."""
        if not tool_call_within_pace(self._watched, now):
            trip = self._stop(
                now,
                [
                    (guard, guard._breakers.velocity.tool_call_violations(now))
                    for guard in self._braked
                    if guard._breakers is not None and guard._breakers.velocity is not None
                ],
            )
            if trip is not None:
                return Stop(trip)
        classes = [guard._meter.caps.class_of(call.name) for guard in self._braked]
        held, away, changes, is_shut = hold_tool_call(self._watched, call.name, classes, now)
        shut.append(is_shut)
        if changes:
            self._record_changes(changes, now)
        if away is not None:
            if self._tree.sinks:
                self._record(
                    ToolCallTurnedAway,
                    now,
                    name=call.name,
                    reason=away.reason,
                    detail=away.detail,
                )
            return Refuse(away.reason, away.detail, away.message)
        for one, guard in zip(self._watched, self._braked, strict=True):
            alarm = None if one.mix is None else one.mix.observe(call.name)
            if alarm is not None and self._tree.sinks:
                guard._record(
                    ToolMixUnusual,
                    now,
                    calls=alarm.calls,
                    p_value=alarm.p_value,
                    detail=alarm.detail,
                )
        return held

    def _record_changes(self, changes: Iterable[StateTransition], now: int) -> None:
        if self._tree.sinks:
            for change in changes:
                self._record(
                    CircuitBreakerChanged,
                    now,
                    breaker=change.breaker[:NAME_LENGTH],
                    from_state=str(change.from_state),
                    to_state=str(change.to_state),
                    detail=change.detail,
                )

    def _end_round(self, shut: bool) -> None:
        """Stop the run, or one above it, after too many rounds that met open circuit breakers."""
        for one, guard in zip(self._watched, self._braked, strict=True):
            violation = one.round_ended(shut)
            if violation is not None:
                guard._standing.hold(violation)

    def _refused(self, call: ToolCall, decision: _Refusal) -> _Refusal:
        self._records.append((call.id, call.name[:NAME_LENGTH], "refused"))
        return decision

    def _quota_refusal(self, name: str) -> Refuse | None:
        for guard in self._line:
            for quota in guard._meter.tool(name).quotas:
                if quota.used >= quota.limit and guard.mode is Mode.ENFORCE:
                    return Refuse(
                        StopReason.TOOL_QUOTA,
                        f"tool_quotas[{quota.pattern!r}]={quota.limit} reached",
                    )
        return None

    def _stop_tool_calls(self, now: int) -> Trip | None:
        found = [
            (guard, [limits.reached(StopReason.MAX_TOOL_CALLS, guard._meter, now)])
            for guard in self._line
            if guard._meter.tool_calls >= guard._meter.caps.tool_calls
        ]
        return self._stop(now, found) if found else None

    def _look(self, now: int) -> Sequence[_Warning]:
        """Look closely: does the time run, and is a warning due?"""
        if any(guard._meter.pauses for guard in self._line):
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
    ) -> Sequence[_Warning]:
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

    def _warn(self, due: Violation, now: int) -> _Warning:
        event = self._tree.make(
            LimitNearlyReached,
            self.run_id,
            now,
            dimension=due.reason.value,
            limit=_plain(due.limit),
            used=_plain(due.used),
        )
        self._meter.warn(due.reason.value)
        return self, event

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
        event = self._tree.make(
            ContextWindowNearlyFull,
            self.run_id,
            now,
            model=call.model or "",
            context_window=rates.context_window or 0,
            input_tokens=input_tokens,
        )
        return [*warnings, (self, event)]

    # Outside the lock

    def _judge(
        self, held: CallBreakers, result: object, error: BaseException | str | None
    ) -> list[CallOutcome]:
        try:
            return held.outcomes(result, error)
        except Exception as raised:
            self._tree.report("record_result", raised)
            return held.successes()

    def _set_aside(self, call: ModelCall, rates: Rates | None, tokens: int, cost: int) -> Charges:
        """Charge a call to the tenants, ahead of it; a refusal stands against the step."""
        charges: list[Charge] = []
        if self.trip is not None:
            return ()
        amount = set_aside(cost, tokens)
        unpriced = rates is None and call.cost_usd is None
        for guard in self._tenants:
            run = cast("LedgerRun", guard._tenant)
            if not run.is_open:  # a guard that is shared by several runs, one after the other
                run.open()
            part = None
            if not guard._meter.looks_on:
                if unpriced and guard.budget.on_unpriced == "stop" and run.caps_dollars():
                    guard.hold(limits.unpriced_model(call.model, "a tenant's ceiling in dollars"))
                    if guard.mode is Mode.ENFORCE:
                        break
                part = run.take(*amount) or run.obtain(*amount)
                if part.refusal is not None:
                    guard._stand_against(part.refusal)
                    if guard.mode is Mode.ENFORCE:
                        break
                    part = None
            charges.append((run, part, amount))
        return tuple(charges)

    def _stand_against(self, refusal: Refusal) -> None:
        if refusal.reason == StopReason.ABORTED:
            self.abort(refusal.detail)
        else:
            self.hold(
                Violation(
                    reason=StopReason(refusal.reason),
                    limit=refusal.limit,
                    used=refusal.used,
                    detail=refusal.detail,
                )
            )

    def _warn_tenant(self, warned: Warned) -> None:
        with self._tree.lock:
            event = self._tree.make(
                LimitNearlyReached,
                self.run_id,
                self._now(),
                dimension=warned.reason,
                limit=_plain(warned.limit),
                used=_plain(warned.used),
            )
            self._meter.warn(warned.reason)
        self._finish([(self, event)])

    def _ask_conditions(self) -> None:
        for guard in self._line:
            if guard._meter.looks_on:
                continue
            for condition in guard._standing.conditions:
                try:
                    reason = reason_of(condition, condition(guard))
                    if reason is not None and guard.trip is None:
                        guard.hold(Violation(reason=StopReason.STOP_CONDITION, detail=reason))
                except Exception as error:
                    self._tree.report("stop_when", error)

    def _finish(self, warnings: Sequence[_Warning]) -> None:
        if self._tree.outbox or self._tree.postponed:
            self._tree.deliver()
        for guard, event in warnings:
            if guard._on_warning is not None:
                try:
                    guard._on_warning(guard, event)
                except Exception as error:
                    self._tree.report("on_warning", error)


def _misfit(snapshot: Snapshot, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"snapshot of run {snapshot.run_id!r} does not fit together: {error}. Start the run anew."
    )


def _told(me: weakref.ref[Guard], act: Callable[[Guard], object]) -> None:
    guard = me()
    if guard is not None:
        act(guard)


def _error_name(error: BaseException | str | None) -> str | None:
    if error is None:
        return None
    return "error" if isinstance(error, str) else type(error).__name__


def _plain(amount: float | Decimal | None) -> int | float | str:
    return str(amount) if isinstance(amount, Decimal) else amount or 0
