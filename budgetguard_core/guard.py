"""The guard of one run: it admits model calls and tool calls, settles them, and trips once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Self, TypeAlias, TypeVar

from budgetguard_core import limits
from budgetguard_core.breakers import REPORT_PROGRESS
from budgetguard_core.breakers.call import CallBreakers
from budgetguard_core.breakers.circuit_breaker import CallOutcome
from budgetguard_core.canonical import (
    KEY_MARKS,
    arguments_key,
    fingerprint_error,
    result_key,
)
from budgetguard_core.caps import INFINITY
from budgetguard_core.charges import NOTHING, Charges, measured, settle_charges
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
from budgetguard_core.errors import ConfigurationError, text_of
from budgetguard_core.events import (
    ModelCallRefused,
    ModelCallWithdrawn,
    ToolCallWithdrawn,
)
from budgetguard_core.meter import (
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
    tool_calls_fit,
    uncount_tool_call,
)
from budgetguard_core.notices import Notice
from budgetguard_core.relations import RunRelations
from budgetguard_core.run_breakers import (
    correct_model_call,
    hold_model_call,
    withdraw_tool_call,
)
from budgetguard_core.standing import Mode as Mode
from budgetguard_core.state import WarningEvent as WarningEvent
from budgetguard_core.stop import StopReason, Trip, Violation
from budgetguard_core.tenancy import charge_ahead
from budgetguard_core.tree import UNPROJECTED
from budgetguard_core.usage import MOST_TOKENS, Counts, TokenUsage, check_token_usage

WarningHandler: TypeAlias = Callable[["Guard", WarningEvent], object]
_Refusal = TypeVar("_Refusal", bound=Refuse | Stop)

_REFUSED = result_key(NOT_AVAILABLE)
# The kind of error of a call that was answered without its body.
_REFUSED_KIND = fingerprint_error(NOT_AVAILABLE)
_NOTHING: frozenset[str] = frozenset()


class Guard(RunRelations):
    """The meter of one run: admits model calls and tool calls, settles them, and trips once.

    Safe under threads and asyncio tasks: every answer is given under one lock, without I/O and
    without waiting. A `Guard` given to several runs is shared by them; nothing resets.

    Args:
        budget: The caps. None bounds nothing but loops.
        mode: ENFORCE, OBSERVE or OFF.
        run_id: The run's name in logs, checkpoints and outcomes; a random one if left out.
        sinks: Where events go: sinks, or callables that take an event. They may raise.
            With `BUDGETGUARD_LOG` set, also to a file in that folder, unless this is None.
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

    # Admission

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
        asked = self._asked
        tree = self._tree
        model = call.model
        given = call.input_tokens
        if not asked:
            ticket = Admit().answers(self, call, 0)
            ticket.max_output_tokens = call.max_output_tokens
            return ticket
        # Before the lock: the first price of a process is looked up in a large table.
        rates = None
        if model is not None:
            if type(model) is not str:
                raise ConfigurationError(wrong_model(model))
            rates = tree.price_book.rates_for(model, call.provider)
        if tree.postponed:
            tree.deliver()
        if self._conditional:
            self._ask_conditions()
        # What is no whole number would be in every sum from now on.
        if (
            type(given) is not int
            or type(call.min_output_tokens) is not int
            or given < 0
            or given > MOST_TOKENS
            or call.min_output_tokens < 1
            or call.min_output_tokens > MOST_TOKENS
        ):
            raise ConfigurationError(wrong_projection(call))
        bound = self._output_bound
        own = call.max_output_tokens
        if own is not None:
            if type(own) is not int or not 1 <= own <= MOST_TOKENS:
                raise ConfigurationError(wrong_projection(call))
            if bound is None or own < bound or call.output_is_fixed:
                bound = own
        tokens = given if bound is None else given + bound
        if rates is None or call.cost_usd is not None:
            cost = projected_cost(call, rates, bound)
            unpriced = self._needs_price and call.cost_usd is None
        else:
            cost = rates.projected_cost(given, bound or 0)
            unpriced = False
        # Before the lock: a lease that is dry makes a trip to its store.
        charges: Charges = ()
        if self._tenants and self._standing.trip is None:
            unknown = rates is None and call.cost_usd is None
            last = self if self._answered else None
            charges = charge_ahead(self._tenants, call, tokens, cost, unknown, last)
        warnings: Sequence[Notice] = ()
        decision: ModelDecision | None = None
        watched = self._watched
        with tree.lock:
            read_clock = tree.now
            now = read_clock()
            kept_tokens, kept_cost, expected, unexpected = tokens, cost, 0, cost
            if bound is None and self._expects:
                expected = largest_completion(self._chain)
                kept_tokens, kept_cost = tokens + expected, projected_cost(call, rates, expected)
                if expected and in_flight(self._chain):
                    tokens, cost = kept_tokens, kept_cost
            far = far_from_caps(asked, now, kept_tokens, kept_cost)
            if not far:
                warnings = self._foresee(now, call, rates, bound, tokens, cost)
            if not warnings:
                start = now
                clamped_by: StopReason | None = None
                if watched or unpriced or not far:
                    held = unpriced
                    if watched:
                        fits, start = self._pace_of(call, now)
                        held = held or not fits
                        # A turn that begins may be one too many without progress.
                        far = far and not self._meter.halt
                    if not (far or model_call_fits(asked, now, call.retry, tokens, cost)) or held:
                        if bound is not None and not call.output_is_fixed:
                            bound, clamped_by = clamp(self._binding, call, rates, bound)
                            tokens = kept_tokens = given + bound
                            cost = kept_cost = projected_cost(call, rates, bound)
                        trip = self._stop_model_call(now, call, tokens, cost, unpriced)
                        decision = None if trip is None else Stop(trip)
                if decision is None:
                    # From here to the end of the block nothing refuses the call.
                    standing = self._standing
                    detector = standing.detector
                    braked = self._breakers if watched else None
                    message = None
                    if detector is not None:
                        detector.reply += 1
                    if (detector is not None and detector.due) or (
                        braked is not None and braked.due
                    ):
                        message = standing.take_message()
                    tree.call_id = call_id = tree.call_id + 1
                    # A message would change the run, and OBSERVE only looks on.
                    if message is not None and self.mode is Mode.ENFORCE:
                        decision = ticket = Nudge()
                        ticket.message = message
                    else:
                        decision = ticket = Admit()
                    ticket.guard = self
                    ticket.call = call
                    ticket.call_id = call_id
                    ticket.max_output_tokens = bound if self._enforced else own
                    ticket.rates = rates
                    ticket.reserved_tokens = kept_tokens
                    ticket.reserved_cost = kept_cost
                    if clamped_by is not None:
                        ticket.clamped_by = clamped_by
                    if expected:
                        ticket.expected = expected, kept_cost - unexpected
                    ticket.charges = charges
                    ticket.breakers = None
                    ticket.charged = 0
                    tree.open[call_id] = ticket
                    reserve(asked, call.retry, kept_tokens, kept_cost)
                    if watched and self._paced:
                        ticket.breakers = hold_model_call(
                            self._paced, start, kept_tokens, kept_cost
                        )
                    if tree.sinks:
                        self._record_admitted(ticket, now, message)
                    if not far:
                        warnings = self._look(now)
                    if rates is not None and given:
                        full = given >= rates.window * self._warn_at
                        if full is not self._window_warned:
                            warnings = self._watch_window(now, call, rates, given, warnings)
        if charges and not isinstance(decision, Admit):
            settle_charges(charges, NOTHING)
        if warnings or tree.outbox or tree.postponed:
            self._finish(warnings)
        if decision is None:
            # Whoever was warned may have raised the cap. A dimension is warned of once.
            return self.admit_model_call(call)
        if self._expects and not (kept_tokens or kept_cost) and call.cost_usd is None:
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
        rates = ticket.rates
        problem: ConfigurationError | None = None
        counts: Counts | None = None
        if usage is not None:
            try:
                counts = check_token_usage(usage)
            except ConfigurationError as wrong:
                usage, problem = None, wrong
        if model is not None:
            if not isinstance(model, str):
                model, problem = None, problem or ConfigurationError(wrong_model(model))
            elif model != ticket.call.model:
                # The provider's name may be a deployment's that no price is known for.
                rates = tree.price_book.rates_for(model, ticket.call.provider) or rates
        cost: int | None = None
        if cost_usd is not None:
            try:
                cost = given_cost(cost_usd)
            except ConfigurationError as wrong:
                cost_usd, problem = None, problem or wrong
        if cost_usd is None:
            if counts is not None and rates is not None:
                cost = rates.cost(counts)
            elif rates is not None or ticket.call.cost_usd is not None:
                cost = ticket.reserved_cost - ticket.expected[1]
        failed = error is not None
        used = ticket.estimate() if counts is None else counts
        call_id = ticket.call_id
        warnings: Sequence[Notice] = ()
        with tree.lock:
            if tree.open.get(call_id) is not ticket:
                return False
            read_clock = tree.now
            now = read_clock()
            written = False
            try:
                near = charge(guard._chain, ticket, used, cost, failed, now)
                if tree.sinks:
                    guard._record_settled(ticket, now, model, usage, cost, cost_usd, error)
                written = True
                del tree.open[call_id]
            except BaseException:
                # An interrupt, which goes on its way once the call is charged and written in whole.
                charge(guard._chain, ticket, used, cost, failed, now)
                if tree.sinks and not written:
                    guard._record_settled(ticket, now, model, usage, cost, cost_usd, error)
                tree.open.pop(call_id, None)
                raise
            if near:
                warnings = guard._look(now)
            if ticket.breakers is not None:
                tokens = used[0] + used[1] - ticket.reserved_tokens
                dollars = (cost or 0) - ticket.reserved_cost
                correct_model_call(guard._paced, ticket.breakers, now, tokens, dollars)
            if (usage is None or (cost is None and guard._needs_price)) and not failed:
                guard._hold_uncharged(ticket, usage, cost, cost_given=cost_usd is not None)
            if usage is not None and rates is not None:
                full = used[0] >= rates.window * guard._warn_at
                if full is not guard._window_warned:
                    warnings = guard._watch_window(now, ticket.call, rates, used[0], warnings)
        if ticket.charges:
            settle_charges(ticket.charges, measured(cost or 0, used[0] + used[1]))
            if (usage is None or cost is None) and not failed:
                projected = (ticket.reserved_tokens, ticket.reserved_cost) != ticket.expected
                for place in guard._tenants:
                    place.settle_untold(
                        ticket.call.model,
                        unpriced=cost is None,
                        unmetered=usage is None and not projected,
                        cost_given=cost_usd is not None,
                    )
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
            read_clock = tree.now
            now = read_clock()
            release(guard._asked, ticket.call.retry, ticket.reserved_tokens, ticket.reserved_cost)
            if ticket.breakers is not None:
                taken = ticket.reserved_tokens, ticket.reserved_cost
                correct_model_call(guard._paced, ticket.breakers, now, -taken[0], -taken[1])
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
        asked = self._asked
        tree = self._tree
        standing = self._standing
        if not asked:
            return [Admit().answers(self, call, 0) for call in calls]
        detector = standing.detector
        ignored = _NOTHING if detector is None else detector.ignored
        from_outside = False
        for call in calls:
            if call.key is None:
                call.key = arguments_key(call.arguments, ignored)
            elif call.key[:1] not in KEY_MARKS:
                from_outside = True
            # A report is about the run, so it has no place among what the run may do.
            if call.name == REPORT_PROGRESS and call.kind == "function" and standing.asks:
                call.kind = "output"
        if tree.postponed:
            tree.deliver()
        if self._conditional:
            self._ask_conditions()
        warnings: Sequence[Notice] = ()
        decisions: list[ToolDecision] = []
        with tree.lock:
            read_clock = tree.now
            now = read_clock()
            if from_outside and detector is not None:
                detector.settle_on_digests()
            far = far_from_tool_caps(asked, now, len(calls))
            if not (far or tool_calls_fit(asked, now)):
                self._stop(now)
            shut: list[bool] = []
            for call in calls:
                decisions.append(self._decide_tool_call(call, now, shut))
            if shut:
                self._end_round(False not in shut)
            if not far:
                warnings = self._look(now)
            if tree.sinks:
                self._record_tools(calls, decisions, now)
                for decision in decisions:
                    if isinstance(decision, Admit) and decision.breakers is not None:
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
        standing = guard._standing
        call: ToolCall = ticket.call
        held = ticket.breakers
        detector = standing.detector
        key, kind, status = result_fingerprint, None, "completed"
        if error is not None:
            status = "failed"
        if detector is None and not tree.sinks:
            key = ""  # nobody asks whether it was seen before
        elif error is not None:
            text = text_of(error)
            key = result_key(text) if key is None else key
            kind = error_fingerprint or fingerprint_error(text)
        elif key is None:
            ignored = _NOTHING if detector is None else detector.ignored_results
            key = result_key(result, ignored)
        # Before the lock: the user's code says what a failure is.
        judged: tuple[CallOutcome, ...] = ()
        if held is not None:
            judged = tuple(outcomes) if outcomes else guard._judge(held, result, error)
        warnings: Sequence[Notice] = ()
        with tree.lock:
            if tree.open.pop(ticket.call_id, None) is not ticket:
                return False
            guard._keep_record(call, status)
            # As `show` does; each step pays for a call.
            detector = standing.detector
            if detector is not None and not (call.name == REPORT_PROGRESS and standing.asks):
                if result_fingerprint is not None:
                    detector.settle_on_digests()
                detector.take(call.name, call.key or "", key, kind)
                if detector.tripped:
                    standing.weigh()
            read_clock = tree.now
            now = read_clock()
            if held is not None:
                took = now - held.start_ns if duration_ns is None else duration_ns
                if took < 0:
                    took = 0
                duration_ns = took if judged else None
                changes = held.end(judged, took, now)
                if changes:
                    guard._record_changes(changes, now)
            for charged in guard._chain:
                if now >= charged.mark_at:
                    warnings = guard._look(now)
                    break
            if tree.sinks:
                guard._record_tool_settled(ticket, now, key, error, kind, judged, duration_ns)
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
            read_clock = tree.now
            now = read_clock()
            if call.kind == "function":
                uncount_tool_call(guard._chain, call.name)
            if call.id:
                guard._occurrences.give_back(call, ticket.occurrence)
            if ticket.breakers is not None:
                withdraw_tool_call(guard._watched, ticket.breakers, now)
            if not waits:
                guard._keep_record(call, "refused")
                guard._standing.show(call.name, call.key or "", _REFUSED, error=_REFUSED_KIND)
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

    # Under the lock

    def _stop_model_call(
        self, now: int, call: ModelCall, tokens: int, cost: int, unpriced: bool
    ) -> Trip | None:
        found: list[tuple[Self, list[Violation]]] = []
        for guard, meter in zip(self._line, self._asked, strict=True):
            held = limits.model_call_violations(meter, now, call.retry, tokens, cost)
            if guard._breakers is not None and guard._breakers.velocity is not None:
                held += guard._breakers.velocity.model_call_violations(now)
            if unpriced and guard._meter.caps.refuses_unpriced:
                held.append(limits.unpriced_model(call.model))
            found.append((guard, held))
        trip = self._stop(now, found)
        if trip is not None and self._tree.sinks:
            self._record(ModelCallRefused, now, call=call.copied(), reason=trip.reason)
        return trip

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

    def _decide_tool_call(self, call: ToolCall, now: int, shut: list[bool]) -> ToolDecision:
        kind = call.kind
        held: CallBreakers | None = None
        standing = self._standing
        trip = standing.trip
        if kind == "function":
            if trip is not None:
                return self._refused(call, Stop(trip))
            detector = standing.detector
            if detector is not None and detector.due:
                # No model call came in between that could have brought the correction.
                message = standing.take_nudge()
                if message is not None and self.mode is Mode.ENFORCE:
                    return self._refused(call, Refuse(StopReason.NO_PROGRESS, message, message))
            if not count_tool_call(self._chain, call.name):
                uncount_tool_call(self._chain, call.name)
                trip = self._stop_tool_calls(now)
                if trip is not None:
                    return self._refused(call, Stop(trip))
                refusal = self._quota_refusal(call.name)
                if refusal is not None:
                    # To ask on for what is refused is an error of a kind.
                    standing.show(call.name, call.key or "", _REFUSED, error=_REFUSED_KIND)
                    return self._refused(call, refusal)
                count_tool_call(self._chain, call.name)
            if self._gated:
                answer = self._ask_breakers(call, now, shut)
                if not isinstance(answer, CallBreakers):
                    uncount_tool_call(self._chain, call.name)
                    if isinstance(answer, Refuse):
                        # To ask on for what is refused is an error of a kind.
                        message = answer.message
                        standing.show(
                            call.name, call.key or "", result_key(message), error=_REFUSED_KIND
                        )
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
        tree.call_id = call_id = tree.call_id + 1
        ticket = Admit()
        ticket.guard = self
        ticket.call = call
        ticket.call_id = call_id
        ticket.breakers = held
        if call.id:
            ticket.occurrence = self._occurrences.count(call)
        if kind != "hosted":
            tree.open[call_id] = ticket
        return ticket

    def _refused(self, call: ToolCall, decision: _Refusal) -> _Refusal:
        self._keep_record(call, "refused")
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
