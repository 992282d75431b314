"""The guard of one run: it admits model calls and tool calls, settles them, and trips once."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Never, Self, TypeAlias, TypedDict, TypeVar, Unpack

from budgetguard_core import counters, events
from budgetguard_core.assembly import plugs_of
from budgetguard_core.breakers.progress import NOTED, ProgressReport, read_report
from budgetguard_core.budget import DIMENSIONS as CAPS
from budgetguard_core.budget import Budget
from budgetguard_core.cancellation import CancellationToken
from budgetguard_core.canonical import digest, fingerprint_result, result_text
from budgetguard_core.canonical import fingerprint as fingerprint_arguments
from budgetguard_core.clock import Clock, SystemClock
from budgetguard_core.counters import (
    COST,
    INFINITY,
    ITERATIONS,
    MODEL_CALLS,
    TIME,
    TOKENS,
    TOOL_CALLS,
    Chain,
    Counters,
    Found,
    Link,
)
from budgetguard_core.decision import (
    NOT_AVAILABLE,
    Admit,
    ModelCall,
    ModelDecision,
    Nudge,
    Occurrences,
    Refuse,
    Stop,
    ToolCall,
    ToolDecision,
    check_projection,
    given_cost,
    projected_cost,
    wrong_model,
)
from budgetguard_core.errors import AdapterError, ConfigurationError, shown, text_of
from budgetguard_core.frame import FRAME, Frame, around
from budgetguard_core.housekeeping import Housekeeping
from budgetguard_core.loops import LoopDetector
from budgetguard_core.masking import fingerprint_error, fingerprint_reply
from budgetguard_core.outcome import Outcome, ToolCallRecord
from budgetguard_core.plugs import Ask, Ended, Plug
from budgetguard_core.pricing import PriceBook, Rates, shared_prices, usd_text
from budgetguard_core.run_log import followed
from budgetguard_core.sinks import Sink
from budgetguard_core.stop import StopReason, Trip, Violation
from budgetguard_core.stop_state import Mode as Mode
from budgetguard_core.stop_state import (
    StopState,
    as_mode,
    in_order,
    quota_passed,
    unmetered_usage,
    unpriced_model,
)
from budgetguard_core.threads import THREADS
from budgetguard_core.tree import UNPROJECTED, Tree, as_sink
from budgetguard_core.usage import Counts, TokenUsage, Usage, check_token_usage

if TYPE_CHECKING:
    from budgetguard_core.breakers import BreakerRegistry
    from budgetguard_core.ledger import Ledger, Tenant
    from budgetguard_core.snapshot import OpenCall, Snapshot

WarningEvent: TypeAlias = events.LimitNearlyReached | events.ContextWindowNearlyFull
"""What `on_warning` is called with."""
WarningHandler: TypeAlias = Callable[["Guard", WarningEvent], object]
_Notice: TypeAlias = tuple["Guard", WarningEvent]
_Sinks: TypeAlias = Iterable[Sink | Callable[[events.Event], object]] | None
_Refusal = TypeVar("_Refusal", bound=Refuse | Stop)


class RunOptions(TypedDict, total=False):
    """Arguments of every run's guard; `Guard` describes them."""

    run_id: str | None
    on_warning: Callable[[Any, WarningEvent], object] | None
    breakers: BreakerRegistry | None
    ledger: Ledger | str | None
    tenant: Tenant | None


_AS_IT_IS: Any = ...
RECORDS_KEPT = 256
_RECORDS_CUT = 2 * RECORDS_KEPT
_NAME_LENGTH = 200
_NOTHING: frozenset[str] = frozenset()
_REFUSED = fingerprint_result(NOT_AVAILABLE)
# The kind of error of a call that was answered without its body.
_REFUSED_KIND = fingerprint_error(NOT_AVAILABLE)
_WITHDRAWN = Ended(withdrawn=True)
_NO_GUESS = (0, 0)
_HOUSEKEEPING = frozenset({ITERATIONS, TIME})
_LAST_ANSWER = frozenset({ITERATIONS, MODEL_CALLS, TOOL_CALLS, TIME})
_LOG: Final = logging.getLogger("budgetguard")
_NOTHING_ADMITTED: Final = (
    "guard.activate(): no call was admitted in the block, so nothing in it was bounded. Import the "
    "adapter of your framework before the block, or give the run to the adapter itself; raw "
    "clients need budgetguard_http.install()."
)


class Guard:
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

    Attributes:
        budget: The caps as they are now, after every `extend`.
        lineage: The guard and everyone that its calls are charged to, the guard first.
        tree: What it shares with its sub-agents: lock, log, clock, prices, failures.
        cancellation: Cancelled by `abort`, with that of every sub-agent.
        outcome: The outcome of the latest run that was ended on it.
        earlier_usage: What earlier runs used that this one goes on from under a fresh budget.
        completed_tool_calls: Tool calls of this run that were completed; none of sub-agents.
        window_nearly_full: The last prompt reached the warning share of its model's window.
        is_housekeeping: This is the guard of a `housekeeping` block.

    Raises:
        ConfigurationError: The budget is not a `Budget`, a sink takes no events, or only one of
            `ledger` and `tenant` was given.
    """

    __slots__ = (
        *("__weakref__", "_binding", "_chain", "_counters", "_deciding", "_detector", "_early"),
        *("_enforced", "_expects", "_needs_price", "_occurrences", "_on_warning", "_output_bound"),
        *("_own_plugs", "_own_tools", "_plugs", "_records", "_reserving", "_stops", "budget"),
        *("cancellation", "completed_tool_calls", "earlier_usage", "is_housekeeping"),
        *("lineage", "mode", "outcome", "parent", "run_id", "tree", "window_nearly_full"),
    )

    def __init__(
        self,
        budget: Budget | None = None,
        *,
        mode: Mode | str = Mode.ENFORCE,
        run_id: str | None = None,
        sinks: _Sinks = (),
        on_warning: Callable[[Self, WarningEvent], object] | None = None,
        price_book: PriceBook | None = None,
        clock: Clock | None = None,
        log_arguments: bool = False,
        breakers: BreakerRegistry | None = None,
        ledger: Ledger | str | None = None,
        tenant: Tenant | None = None,
    ) -> None:
        if price_book is not None and not isinstance(price_book, PriceBook):
            raise ConfigurationError(
                f"price_book must be a PriceBook, got {type(price_book).__name__}. "
                "Build one with PriceBook(overrides={...})."
            )
        found = [as_sink(sink) for sink in followed(sinks)]
        self.tree = Tree(
            clock or SystemClock(), price_book or shared_prices(), found, log_arguments
        )
        self._set_up(
            None,
            (),
            budget,
            mode,
            run_id=run_id,
            on_warning=on_warning,
            breakers=breakers,
            ledger=ledger,
            tenant=tenant,
        )

    def _set_up(
        self,
        parent: Self | None,
        beside: Sequence[Self],
        budget: Budget | None,
        mode: Mode | str,
        run_id: str | None = None,
        on_warning: Callable[[Any, WarningEvent], object] | None = None,
        **plugged: Any,
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
        budget = budget or Budget()
        self.budget: Budget = budget if parent is None else budget.inheriting(parent.budget)
        self.mode = as_mode(mode)
        self.run_id = run_id or uuid.uuid4().hex
        self.parent: Self | None = parent
        self._on_warning = on_warning
        self.is_housekeeping = False
        above = () if parent is None else (parent, *beside)
        self.lineage: tuple[Self, ...] = tuple(
            dict.fromkeys((self, *(guard for one in above for guard in one.lineage)))
        )
        self._begin(above)
        self._early: list[str] | None = []
        self._own_plugs: tuple[Plug, ...] = plugs_of(self, **plugged)
        self._set_plugs()
        with self.tree.lock:
            if self.tree.sinks:
                self._record(
                    events.RunStarted,
                    self._now(),
                    budget=self.budget.to_json(),
                    mode=str(self.mode),
                    parent_run_id=None if parent is None else parent.run_id,
                    price_book=self.tree.price_book.version,
                    stop_conditions=len(self.budget.stop_when),
                    tenant=self._state_of("ledger") or (),
                    beside=tuple(one.run_id for one in beside),
                )
            early, self._early = self._early, None
        self.tree.deliver()
        for detail in early:
            self.abort(detail)

    def _begin(self, above: Sequence[Self]) -> None:
        """Set what is the guard's own to its beginning."""
        self.outcome: Outcome | None = None
        self.cancellation: CancellationToken = CancellationToken(
            above[0].cancellation if above else None
        )
        self._counters = Counters(self.budget)
        self._stops = StopState()
        detection = None if self.mode is Mode.OFF else self.budget.loop_detection
        self._detector = None if detection is None else LoopDetector(detection)
        self.earlier_usage = Usage()
        self._records: list[tuple[str | None, str, str]] = []
        self.completed_tool_calls = 0
        self._occurrences = Occurrences()
        self.window_nearly_full = False
        links = {} if self.mode is Mode.OFF else {self: Link(self, self._counters)}
        for one in above:
            for link in one._chain:
                links.setdefault(link.owner, link)
        self._set_chain(tuple(links.values()))

    def _set_chain(self, chain: Chain) -> None:
        self._chain = chain
        self._needs_price = any(link.counters.refuses_unpriced for link in chain)
        # An advisory envelope must not cut what the enforced ones allow.
        enforced = tuple(link for link in chain if link.owner.mode is Mode.ENFORCE)
        self._binding: Chain = enforced or chain
        self._enforced = bool(enforced)
        bounds = [one.counters.budget.max_output_tokens_per_call for one in self._binding]
        self._output_bound = min((one for one in bounds if one is not None), default=None)
        # Nothing else tells what calls at the same time may come to.
        self._expects = self._output_bound is None and any(
            link.limits[TOKENS] != INFINITY or link.limits[COST] != INFINITY for link in chain
        )

    def _set_plugs(self) -> None:
        plugs: dict[object, tuple[Guard, Plug]] = {}
        for link in reversed(self._chain):  # of those that are one, the outermost
            for plug in link.owner._own_plugs:
                plugs.setdefault(plug.identity, (link.owner, plug))
        self._plugs = tuple(reversed(plugs.values()))
        self._reserving = tuple(
            (owner, plug) for owner, plug in self._plugs if type(plug).reserve is not Plug.reserve
        )
        # Of a stopped run, a last answer has to pass the tenant's ledger alone.
        stopped = {link.owner for link in self._chain if link.answers}
        self._deciding = tuple(
            (owner, plug)
            for owner, plug in self._plugs
            if owner not in stopped and type(plug).before is not Plug.before
        )
        self._own_tools = {plug.own_tool for plug in self._own_plugs if plug.own_tool}

    # Relations

    def child(
        self,
        budget: Budget | None = None,
        *,
        mode: Mode | str | None = None,
        beside: Sequence[Self] = (),
        **options: Unpack[RunOptions],
    ) -> Self:
        """Make the guard of a sub-agent: its own caps, and at most what is left of every ancestor.

        It charges this guard and all above it under one lock. Its trip ends the sub-agent alone;
        an ancestor's trip ends everything below. An advisory envelope takes `mode=Mode.OBSERVE`.

        Args:
            budget: Its own caps; without, it has none but those above.
            mode: ENFORCE, OBSERVE or OFF; this guard's if left out.
            beside: Other guards of this tree that it charges too, each of their ancestors once.
            options: As in `Guard`: `run_id`, `on_warning` (at the warning shares of its own caps),
                `breakers` (what this tree of guards shares if left out), `ledger` and `tenant` (for
                a tenant beside those above; each tenant is charged once).
        """
        child = type(self).__new__(type(self))
        child.tree = self.tree
        child._set_up(self, beside, budget, mode or self.mode, **options)
        for one in beside:
            one.cancellation.adopt(child.cancellation)
        return child

    @contextmanager
    def activate(self) -> Generator[Self]:
        """Bound every run of every adapter in the block, beside what bounds them already.

        It holds in this thread or task, and in the tasks, threads and pools of threads that are
        used here; what other processes call is not counted. A block that ends by itself without a
        call admitted in it is warned of in the log: what ran was not bounded, unless nothing ran.
        """
        before = self._starts()
        token = FRAME.set(Frame(self, above=around()))
        block = THREADS.opened()
        try:
            yield self
        finally:
            THREADS.closed(block)
            FRAME.reset(token)
        # In a run that was stopped before, nothing is admitted because it is bounded.
        if self._starts() == before and self.trip is None and self.mode is not Mode.OFF:
            _LOG.warning(_NOTHING_ADMITTED)

    def housekeeping(self, *, seconds: float) -> Housekeeping[Self]:
        """Exempt work about the run, such as compaction, from its deadline: `with` or `async with`.

        What is called in the block costs the run tokens, dollars, model calls and tool calls. It is
        no iteration, and its time is not run time unless something else of the run is in flight.
        Its own end is no end of the run: when its time is over, it ends with `TimeoutError`.

        Args:
            seconds: How long the block may take, shorter than the run's own deadline.

        Raises:
            ConfigurationError: `seconds` is not a number > 0.
        """
        try:
            caps = Budget(max_seconds=seconds, loop_detection=None)
        except ConfigurationError:
            caps = None
        if caps is None or seconds is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise ConfigurationError(
                f"seconds must be a number of seconds > 0, got {seconds!r}. Use seconds=30."
            )
        return Housekeeping(lambda: self.child(caps), caps.max_seconds or seconds)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the guard itself: a copy would be a second allowance of the same budget."""
        return self

    # What a run may ask about itself

    @property
    def trip(self) -> Trip | None:
        """Why the run was stopped, or None while it may go on."""
        return self._stops.trip

    @property
    def observed_trip(self) -> Trip | None:
        """In OBSERVE: the trip that ENFORCE would have made, at the step where it would have."""
        return self._stops.observed

    @property
    def usage(self) -> Usage:
        """What the run has used so far, its sub-agents included."""
        with self.tree.lock:
            return self._counters.usage(self._now())

    @property
    def tool_counts(self) -> dict[str, int]:
        """How many bodies of each tool were started (the first 1,024 names)."""
        with self.tree.lock:
            return self._counters.tools_started()

    @property
    def tool_calls(self) -> tuple[ToolCallRecord, ...]:
        """What became of the last 256 tool calls; those in flight follow as interrupted."""
        with self.tree.lock:
            records = self._records[-RECORDS_KEPT:]
            for ticket in self.open_tool_calls():
                records.append((ticket.call.id, ticket.call.name[:_NAME_LENGTH], "interrupted"))
        return tuple(
            ToolCallRecord.model_validate({"id": id_, "name": name, "status": status})
            for id_, name, status in records
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """The dimensions that have reached their warning share, in the order they did."""
        return self._counters.warned

    @property
    def is_last_answer(self) -> bool:
        """Whether this is the guard of a stopped run's last answer."""
        return any(link.answers for link in self._chain)

    def keeps_house_for(self, guard: Guard) -> bool:
        """Return whether this is housekeeping of a run, whose deadline does not bind it then."""
        return any(link.owner is guard and TIME in link.exempt for link in self._chain)

    @property
    def paused(self) -> bool:
        """Whether a run on this guard waits for a person."""
        return self._counters.pauses > 0

    def open_calls(self) -> tuple[Admit, ...]:
        """Return every call of this run, of models and tools, that has not been settled."""
        with self.tree.lock:
            return tuple(t for t in self.tree.open.values() if t.guard is self)

    def open_tool_calls(self) -> tuple[Admit, ...]:
        """Return the tool calls that were started and have not been settled."""
        return tuple(t for t in self.open_calls() if isinstance(t.call, ToolCall))

    def time_left(self) -> float | None:
        """Seconds until the deadline of this run or of an ancestor; 0 when it has passed.

        None without a deadline. A deadline in OBSERVE cuts nothing and is not among them. It does
        not shrink while the time stands still (see `pause`).
        """
        left = INFINITY
        with self.tree.lock:
            now = self._now()
            for link in self._chain:
                if link.owner.mode is Mode.ENFORCE and link.limits[TIME] != INFINITY:
                    link.counters.tick(now)
                    left = min(left, link.limits[TIME] - link.counters.used[TIME])
        return None if left == INFINITY else max(left / 1_000_000_000, 0.0)

    # Admission

    def admit_model_call(self, call: ModelCall | None = None) -> ModelDecision:
        """Ask whether a model call may start; counts it when it may.

        Returns:
            `Admit` (or `Nudge`, an `Admit` with a message for the model), to be settled with
            `settle_model_call`; or `Stop`: the run ends.

        Raises:
            ConfigurationError: A figure of the call makes no sense; nothing was counted.
        """
        call = call or ModelCall()
        tree, chain = self.tree, self._chain
        if not chain:
            ticket = Admit().answers(self, call, 0)
            ticket.max_output_tokens = call.max_output_tokens
            return ticket
        # Outside the lock: the first price of a process is looked up in a large table.
        rates = self._rates_of(call.model, call.provider)
        check_projection(call)
        bound, own = self._output_bound, call.max_output_tokens
        if own is not None and (bound is None or own < bound or call.output_is_fixed):
            bound = own
        tokens = call.input_tokens + (bound or 0)
        cost = projected_cost(call, rates, bound)
        unpriced = rates is None and call.cost_usd is None
        ask = self._reserve(call, tokens, cost, unpriced=unpriced)
        decision: ModelDecision | None = None
        warnings: Sequence[_Notice] = ()
        with tree.lock:
            now = tree.now()
            counters.start_time(chain, now)
            kept_tokens, kept_cost, guess = tokens, cost, _NO_GUESS
            if bound is None and self._expects:
                expected = counters.largest_completion(chain)
                if expected:
                    kept_tokens = tokens + expected
                    kept_cost = projected_cost(call, rates, expected)
                    guess = expected, kept_cost - cost
                    # A guess refuses nothing but beside other calls.
                    if any(one.counters.reserved_tokens for one in chain):
                        tokens, cost = kept_tokens, kept_cost
            calm = counters.is_calm(chain, now, kept_tokens, kept_cost)
            found = () if calm else counters.violations(chain, now, (call.retry, tokens, cost))
            clamped_by = None
            if found and bound is not None and not call.output_is_fixed:
                bound, clamped_by = counters.clamp(self._binding, call, rates, bound)
                tokens = kept_tokens = call.input_tokens + bound
                cost = kept_cost = projected_cost(call, rates, bound)
                found = counters.violations(chain, now, (call.retry, tokens, cost))
            if found and not any(link.owner.trip for link in chain):
                warnings = self._warn(counters.foreseen_warnings(found), now)
            if not warnings:
                objections = self._objections(found) if found else {}
                if unpriced and self._needs_price:
                    unknown = unpriced_model(call.model)
                    for link in chain:
                        if link.counters.refuses_unpriced:
                            objections.setdefault(link.owner, []).append(unknown)
                trip = self._ask(ask, objections, now)
                if trip is not None:
                    decision = Stop(trip)
                    if tree.sinks:
                        facts = {"call": call.copied(), "reason": trip.reason}
                        self._record(events.ModelCallRefused, now, **facts)
                else:
                    if self._detector is not None:
                        self._detector.begin_reply()
                    message = self._take_message()
                    # A message would change the run, and OBSERVE only looks on.
                    if message is not None and self.mode is Mode.ENFORCE:
                        decision = ticket = Nudge()
                        ticket.message = message
                    else:
                        decision = ticket = Admit()
                    tree.call_id += 1
                    ticket.answers(self, call, tree.call_id)
                    ticket.max_output_tokens = bound if self._enforced else own
                    if clamped_by is not None:
                        ticket.clamped_by = clamped_by
                    ticket.rates = rates
                    ticket.reserved_tokens, ticket.reserved_cost = kept_tokens, kept_cost
                    if guess is not _NO_GUESS:
                        ticket.expected = guess
                    tree.open[ticket.call_id] = ticket
                    counters.reserve(chain, call.retry, kept_tokens, kept_cost)
                    if ask is not None:
                        ask.tokens, ask.cost = kept_tokens, kept_cost
                        self._book(ask, ticket)
                    if tree.sinks:
                        self._record(
                            events.ModelCallAdmitted,
                            now,
                            call=call.copied(),
                            call_id=ticket.call_id,
                            admitted_output_tokens=ticket.max_output_tokens,
                            nudge=message,
                            holds=tuple(hold.id for hold in ticket.holds if hold.id),
                        )
                        self._record_delay(ticket, now)
                    if not calm:
                        warnings = self._look(now)
                    if rates is not None and call.input_tokens:
                        warnings = self._watch_window(now, call, rates, call.input_tokens, warnings)
        if ask is not None and not isinstance(decision, Admit):
            for hold in ask.holds:
                hold.settle(_WITHDRAWN, None)
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
        tree, call, rates = guard.tree, ticket.call, ticket.rates
        counts, cost = None, None
        problems: list[ConfigurationError] = []
        try:
            counts = None if usage is None else check_token_usage(usage)
        except ConfigurationError as wrong:
            problems.append(wrong)
            usage = None
        try:
            if model is not None and model != call.model:
                # The provider's name may be a deployment's that no price is known for.
                rates = guard._rates_of(model, call.provider) or rates
        except ConfigurationError as wrong:
            problems.append(wrong)
            model = None
        try:
            cost = None if cost_usd is None else given_cost(cost_usd)
        except ConfigurationError as wrong:
            problems.append(wrong)
            cost_usd = None
        if cost_usd is None:
            if counts is not None and rates is not None:
                cost = rates.cost(counts)
            elif rates is not None or call.cost_usd is not None:
                cost = ticket.reserved_cost - ticket.expected[1]
        reserved = ticket.reserved_tokens, ticket.reserved_cost
        used = ticket.estimate() if counts is None else counts
        failed = error is not None
        ended = None
        if ticket.holds or usage is None or cost is None:
            # A guess at the completion is not a projection.
            metered = usage is not None or reserved != ticket.expected
            given = cost_usd is not None
            ended = Ended(False, failed, used[0] + used[1], cost, metered, given)
        with tree.lock:
            if tree.open.get(ticket.call_id) is not ticket:
                return False
            now = tree.now()
            facts: dict[str, Any] = {}
            if tree.sinks:
                facts = {"call_id": ticket.call_id, "model": model, "usage": usage}
                facts["cost_usd"] = None if cost is None else usd_text(cost)
                facts["given_cost_usd"] = None if cost_usd is None else str(cost_usd)
                facts["error"] = _error_name(error)
            try:
                guard._charge(ticket, used, cost, failed, now, facts)
            except BaseException:
                # An interrupt, which goes on its way once the call is charged and written in whole.
                guard._charge(ticket, used, cost, failed, now, facts)
                raise
            if ended is not None:
                guard._end_holds(ticket, ended, now)
                guard._hold_uncharged(ticket, ended)
            warnings = () if counters.is_calm(guard._chain, now) else guard._look(now)
            if usage is not None and rates is not None:
                warnings = guard._watch_window(now, call, rates, used[0], warnings)
        if ended is not None:
            for hold in ticket.holds:
                hold.settle(ended, ticket)
        if warnings or tree.outbox or tree.postponed:
            guard._finish(warnings)
        for problem in problems:
            raise problem
        return True

    def admit_tool_calls(self, calls: Sequence[ToolCall]) -> list[ToolDecision]:
        """Ask for a whole batch of tool calls, in the order in which the model wrote them.

        Returns:
            One answer for each call: `Admit`, to be settled with `settle_tool_call`; `Refuse`:
            this call may not start, the run goes on; `Stop`: this call may not start, and the run
            ends before its next model call.
        """
        tree, chain, detector = self.tree, self._chain, self._detector
        if not chain:
            return [Admit().answers(self, call, 0) for call in calls]
        ignored = _NOTHING if detector is None else detector.ignored
        for call in calls:
            if call.fingerprint is None:
                call.fingerprint = fingerprint_arguments(call.arguments, ignore=ignored)
            # A report is about the run, so it has no place among what the run may do.
            if call.name in self._own_tools and call.kind == "function":
                call.kind = "output"
        ask = self._reserve(None, calls=calls)
        with tree.lock:
            now = tree.now()
            counters.start_time(chain, now)
            calm = counters.is_calm(chain, now, tools=len(calls))
            found = () if calm else counters.violations(chain, now, counters.BATCH)
            self._ask(ask, self._objections(found) if found else {}, now)
            decisions = [
                self._decide_tool_call(call, now, calm, ask, index)
                for index, call in enumerate(calls)
            ]
            warnings = () if calm else self._look(now)
            if tree.sinks:
                requested = events.ToolCallRequested.of_batch(calls, decisions, tree.log_arguments)
                self._record(events.ToolCallsRequested, now, calls=requested)
                for decision in decisions:
                    if isinstance(decision, Admit):
                        self._record_delay(decision, now)
        if ask is not None:
            for index, holds in ask.call_holds.items():
                if not isinstance(decisions[index], Admit):
                    for hold in holds:
                        hold.settle(_WITHDRAWN, None)
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
        alike: str | None = None,
        outcomes: Sequence[str] | None = None,
        duration_ns: int | None = None,
    ) -> bool:
        """Report how a tool call ended. A call that is never settled counts as interrupted.

        Args:
            ticket: The answer of `admit_tool_calls`.
            result: What the tool returned; it is fingerprinted, not kept.
            error: What it raised, if it did.
            result_fingerprint: The fingerprint, where it is known already (replay).
            error_fingerprint: The `fingerprint_error` of the error's text, likewise.
            alike: The fingerprint of the result without times and ids, likewise.
            outcomes: What the call is to the circuit breakers that permitted it, likewise.
            duration_ns: How long its body took, likewise.

        Returns:
            False when the call was settled before.
        """
        guard: Guard = ticket.guard
        tree, detector = guard.tree, guard._detector
        call: ToolCall = ticket.call
        key, kind, text = result_fingerprint, None, ""
        if detector is None and not tree.sinks:
            key = ""  # nobody asks whether it was seen before
        else:
            if error is not None:
                text = text_of(error)
                kind = error_fingerprint or fingerprint_error(text)
            elif key is None:
                ignored = _NOTHING if detector is None else detector.ignored_results
                text = result_text(result, ignored)
            if key is None:
                key = digest(text)
                if detector is not None:
                    alike = detector.alike(call, text, failed=error is not None)
        # Outside the lock: the user's code says what a failure is.
        judged, ended = tuple(outcomes or ()), None
        if ticket.holds:
            judged = judged or tuple(
                one for hold in ticket.holds for one in hold.judge(ticket, result, error)
            )
            ended = Ended(failed=error is not None, outcomes=judged, duration_ns=duration_ns)
        with tree.lock:
            if tree.open.pop(ticket.call_id, None) is not ticket:
                return False
            now = tree.now()
            guard._keep_record(call, "completed" if error is None else "failed")
            guard._show(call, key, kind, alike)
            if ended is not None:
                guard._end_holds(ticket, ended, now)
            warnings = () if counters.is_calm(guard._chain, now) else guard._look(now)
            if tree.sinks:
                guard._record(
                    events.ToolCallSettled,
                    now,
                    call_id=ticket.call_id,
                    fingerprint=key,
                    error=_error_name(error),
                    error_fingerprint=kind,
                    alike=alike,
                    outcomes=judged,
                    duration_ns=next(
                        (h.duration_ns for h in ticket.holds if h.duration_ns is not None), None
                    ),
                )
        if ended is not None:
            for hold in ticket.holds:
                hold.settle(ended, ticket)
        if warnings or tree.outbox or tree.postponed:
            guard._finish(warnings)
        return True

    def _charge(
        self, ticket: Admit, used: Counts, cost: int | None, failed: bool, now: int, facts: Any
    ) -> None:
        counters.settle(self._chain, ticket, used, cost, failed)
        if ticket.call_id in self.tree.open:
            self._record(events.ModelCallSettled, now, **facts)
            del self.tree.open[ticket.call_id]

    def withdraw(self, ticket: Admit, *, waits: bool = False) -> bool:
        """Take back a call that was admitted and did not start; it counts as nothing.

        Args:
            ticket: What admitted the call.
            waits: A tool call is asked for again when a person has answered: nothing is said of it
                until then. Otherwise its record says `refused`, and it is seen as a repetition.

        Returns:
            False when the call was settled or withdrawn before.
        """
        guard: Guard = ticket.guard
        tree, call = guard.tree, ticket.call
        with tree.lock:
            if tree.open.pop(ticket.call_id, None) is not ticket:
                return False
            now = tree.now()
            guard._end_holds(ticket, _WITHDRAWN, now)
            if isinstance(call, ToolCall):
                if call.kind == "function":
                    guard._count_tool(call.name, -1)
                if call.id:
                    guard._occurrences.give_back(call, ticket.occurrence)
                if not waits:
                    guard._keep_record(call, "refused")
                    guard._show(call, _REFUSED, _REFUSED_KIND)
                guard._record(events.ToolCallWithdrawn, now, call_id=ticket.call_id, waits=waits)
            else:
                kept = ticket.reserved_tokens, ticket.reserved_cost
                counters.reserve(guard._chain, call.retry, *kept, by=-1)
                guard._record(events.ModelCallWithdrawn, now, call_id=ticket.call_id)
            guard._keep_time(now)
        for hold in ticket.holds:
            hold.settle(_WITHDRAWN, ticket)
        tree.deliver()
        return True

    def start_tool_call(self, ticket: Admit) -> None:
        """Say that the body of a tool call begins now, for how long it takes. Not needed."""
        if ticket.breakers is not None:
            ticket.breakers.put_off(ticket.guard.tree.clock.monotonic_ns())

    # Telling

    @contextmanager
    def _step(self) -> Generator[int]:
        """Hold the lock for what changes the run, give the time, and deliver what was recorded."""
        with self.tree.lock:
            yield self.tree.now()
        self.tree.deliver()

    def start(self) -> None:
        """Start the run's time now instead of with the first admission."""
        with self._step() as now:
            if self._counters.started_ns is None:
                self._counters.started_ns = now
                self._keep_time(now)
                self._record(events.TimeStarted, now)

    def user_turn(self) -> None:
        """Say that the user spoke: asking the same again is no repetition any more."""
        with self._step() as now:
            for one in (self._detector, *self._own_plugs):
                if one is not None:
                    one.user_turn()
            self._record(events.UserTurned, now)

    def report_reply(
        self, text: str, *, speaker: str | None = None, fingerprint: str | None = None
    ) -> None:
        """Report a reply without a tool call, to see whether replies repeat.

        Args:
            text: The whole reply. It is fingerprinted, not kept; one without text is not looked at.
            speaker: Who said it, where several speak: an agent's or a node's name.
            fingerprint: The text's fingerprint, where it is known already (replay).
        """
        detector = self._detector
        if detector is None or not (fingerprint or text.strip()):
            return
        fingerprint = fingerprint or fingerprint_reply(text)
        with self._step() as now:
            detector.observe_reply(speaker, "", fingerprint=fingerprint)
            name = None if speaker is None else speaker[:_NAME_LENGTH]
            facts = {"fingerprint": fingerprint, "speaker": name}
            self._record(events.ReplyReported, now, **facts)

    def report_progress(self, arguments: object) -> str:
        """Take in what the model says of its work: the body of the tool `report_progress`.

        Args:
            arguments: What the model passed: an object, or its JSON text; a report that was read
                already (replay). It is digested, not kept.

        Returns:
            The tool's result. Without `Budget.progress` nothing is done with it.
        """
        report = arguments if isinstance(arguments, ProgressReport) else read_report(arguments)
        if isinstance(report, str):
            return report
        with self._step() as now:
            if any(plug.note(report) for plug in self._own_plugs):
                self._record(events.ProgressReported, now, **report._asdict())
        return NOTED

    def note_warning(self, dimension: str, limit: float | str) -> None:
        """Take in a warning that was given at this very cap (replay)."""
        with self._step():
            if dimension in CAPS and _plain(getattr(self.budget, dimension)) == limit:
                self._counters.warn((dimension,))

    def warn(self, dimension: str, limit: Any, used: Any) -> None:
        """Warn of a limit that is not the run's own."""
        with self._step() as now:
            facts = {"dimension": dimension, "limit": _plain(limit), "used": _plain(used)}
            event = self._make(events.LimitNearlyReached, now, facts)
            self._counters.warn((dimension,))
        self._finish([(self, event)])

    def take_nudge(self) -> str | None:
        """Take the corrective message that is due, to deliver it in a tool's result.

        An adapter that can add a message before the model call gets it as `Nudge` and needs
        this not. None in OBSERVE: a message would change the run.
        """
        with self._step() as now:
            message = self._take_message()
            if message is not None:
                self._record(events.NudgeTaken, now, message=message)
        return message if self.mode is Mode.ENFORCE else None

    def abort(self, detail: str = "aborted from outside") -> None:
        """End the run from any thread: at its next admission, at once where work is async.

        Sub-agents end with it. A second abort, or one of a stopped run, changes nothing but that
        the stopped run's last answer is cut.
        """
        # Whatever it is given: an exception here would leave the work in flight running.
        detail = text_of(detail)
        if self.tree.postpone(lambda: self.abort(detail)):
            return
        with self.tree.lock:
            if self._early is not None:
                # A kill switch found while the plugs were set; the log begins with the run's start.
                self._early.append(detail)
                return
            going_on = self.trip is None or self._counters.housekeeping > 0
            self.tree.halted = True
            if self._stops.abort(detail):
                self._record(events.Aborted, self._now(), detail=detail)
        # Work in flight goes on where nothing is refused.
        if going_on and self.mode is Mode.ENFORCE:
            for error in self.cancellation.cancel():
                self.tree.report("on_cancel", error)
        self.tree.deliver()

    def hold(self, violation: Violation) -> None:
        """Report a limit that is not the engine's own; the next admission or `check` stops.

        For a framework's own cap (`framework_limit`) and whatever else an adapter can see.
        """
        with self._step() as now:
            self._hold(violation)
            self._record(events.StopHeld, now, violation=violation)

    def extend(
        self,
        *,
        max_iterations: int = _AS_IT_IS,
        max_model_calls: int = _AS_IT_IS,
        max_tool_calls: int = _AS_IT_IS,
        max_total_tokens: int = _AS_IT_IS,
        max_seconds: float = _AS_IT_IS,
        max_cost_usd: Decimal | float = _AS_IT_IS,
        **unknown: Never,
    ) -> None:
        """Raise caps of a run that goes on: `guard.extend(max_iterations=40)`.

        The new caps are absolute, not additional. What an ancestor allows stays the bound.

        Raises:
            ConfigurationError: A cap is not one of the run's, or would not be raised.
            AdapterError: The run was stopped already; resume it under a fresh budget instead.
        """
        caps: dict[str, Any] = {
            "max_iterations": max_iterations,
            "max_model_calls": max_model_calls,
            "max_tool_calls": max_tool_calls,
            "max_total_tokens": max_total_tokens,
            "max_seconds": max_seconds,
            "max_cost_usd": max_cost_usd,
        }
        caps = {name: cap for name, cap in caps.items() if cap is not _AS_IT_IS} | unknown
        with self._step() as now:
            if self.trip is not None:
                raise AdapterError(
                    f"a stopped run cannot be extended, got a run stopped by {self.trip.reason}. "
                    "Resume it under a fresh budget."
                )
            self.budget = self.budget.raised(caps)
            self._counters.set_budget(self.budget)
            self._record(events.BudgetExtended, now, budget=self.budget.to_json())

    def pause(self, waiting: Iterable[Admit] = ()) -> None:
        """Say that a run on this guard waits for a person, whose time is not run time.

        From here on, until as many `go_on` as `pause`, time counts only while a call is in flight
        that does not wait, here or in a sub-agent: several runs may share the guard, and the
        others work on. Ancestors are not paused with it: each is paused by whoever knows that its
        run waits as well. Nothing is refused meanwhile, and an admission does not end the pause.

        Args:
            waiting: The calls of this run, and of its sub-agents, that are open and wait too, such
                as a tool whose body asks. They leave their bulkheads and circuit breakers.
        """
        tickets = list(waiting)
        with self._step():
            self._counters.pauses += 1
            self._wait(events.RunPaused, tickets, wait=True)
            self._stand_by(tickets)

    def go_on(self, waiting: Iterable[Admit] = ()) -> None:
        """Say that the person has answered: the run's time counts again. Nothing without `pause`.

        Args:
            waiting: The calls that waited with the run and are in flight again.
        """
        with self._step():
            if not self.paused:
                return
            self._counters.pauses -= 1
            self._wait(events.RunResumed, waiting, wait=False)

    def begin_housekeeping(
        self, waiting: Iterable[Admit] = (), *, answers_for: str | None = None
    ) -> None:
        """Make the calls of this guard, a sub-agent's, housekeeping of everyone above it.

        `Guard.housekeeping` does it for a block of code.

        Args:
            waiting: The calls in whose bodies it is done: they wait for it.
            answers_for: The id of a stopped run above whose last answer it is: its
                `finalize_reserve` and the whole of its caps on tokens and dollars bind.
        """
        with self._step():
            self.is_housekeeping = True
            stopped = next((one for one in self.lineage[1:] if one.run_id == answers_for), None)
            self._set_chain(tuple(self._exempted(link, stopped) for link in self._chain))
            self._set_plugs()
            for link in self._chain:
                link.counters.housekeeping += TIME in link.exempt
            facts = {"answers_for": answers_for}
            self._wait(events.HousekeepingBegan, waiting, wait=True, **facts)

    def _exempted(self, link: Link, stopped: Guard | None) -> Link:
        """Return a link as housekeeping meets it; other housekeeping around it goes on to bind."""
        owner: Guard = link.owner
        if owner is self or owner.is_housekeeping:
            return link
        if stopped is not None and stopped in owner.lineage:
            return Link(owner, link.counters, _LAST_ANSWER, answers=True)
        return Link(owner, link.counters, _HOUSEKEEPING, answers=link.answers)

    def end_housekeeping(self, waiting: Iterable[Admit] = ()) -> None:
        """Let the time of the runs above count again: the housekeeping is over."""
        with self._step():
            for link in self._chain:
                left = link.counters.housekeeping - (TIME in link.exempt)
                link.counters.housekeeping = max(left, 0)
            self._wait(events.HousekeepingEnded, waiting, wait=False)

    def restart_iterations(self) -> None:
        """Begin the iterations anew for another leg of the same run; all else runs on."""
        with self._step() as now:
            self._counters.used[ITERATIONS] = 0
            self._record(events.IterationsRestarted, now)

    def check(self) -> Trip | None:
        """Ask whether the run has to end now, without starting anything; trips it if so.

        For a watchdog that found the deadline passed or the run aborted while a call hangs.
        """
        if not self._chain:
            return None
        ask = self._reserve(None)
        with self._step() as now:
            before = [(guard.trip, guard.observed_trip) for guard in self.lineage]
            found = counters.violations(self._chain, now, counters.BATCH)
            trip = self._ask(ask, self._objections(found), now)
            if before != [(guard.trip, guard.observed_trip) for guard in self.lineage]:
                self._record(events.Checked, now)
        return trip

    def conclude(self, outcome: Outcome) -> None:
        """Keep the outcome of a run, as `outcome`, and record its end, if it is one."""
        self.outcome = outcome
        with self.tree.lock:
            # Nobody may be left who would settle them: tasks that were cancelled, for example.
            self._stand_by(self.open_calls())
        if outcome.status == "paused":
            return
        for plug in self._own_plugs:
            plug.close()
        self.emit(
            events.RunEnded,
            status=outcome.status,
            stop_reason=outcome.stop_reason,
            error=None if outcome.error is None else outcome.error.partition(":")[0],
            finalized=outcome.finalized,
            profile=outcome.profile,
            usage=outcome.usage,
        )

    def emit(self, kind: type[events.EventBase], **facts: Any) -> None:
        """Record an event about this run, for the sinks; nothing is built when there are none."""
        with self.tree.lock:
            self._record(kind, self._now(), **facts)
        self.tree.deliver()

    # Snapshots

    def snapshot(self, messages: Sequence[Any] = ()) -> Snapshot:
        """Return everything that the guard knows, and the conversation it is given, as plain data.

        Args:
            messages: The conversation, in any form that JSON can hold.
        """
        # Not at import: most processes never take one.
        from budgetguard_core.snapshot import OpenCall, Snapshot

        with self.tree.lock:
            mine, stops = self._counters, self._stops
            mine.tick(self._now())
            return Snapshot(
                run_id=self.run_id,
                parent_run_id=None if self.parent is None else self.parent.run_id,
                mode=str(self.mode),
                budget=self.budget.to_json(),
                stop_conditions=len(self.budget.stop_when),
                tenant=self._state_of("ledger") or (),
                counters=mine.to_dict(),
                quotas=mine.quotas_used(),
                tool_counts=mine.tools_started(),
                records=tuple(self._records[-RECORDS_KEPT:]),
                completed_tool_calls=self.completed_tool_calls,
                elapsed_ns=None if mine.started_ns is None else mine.used[TIME],
                pauses=mine.pauses,
                trip=stops.trip,
                observed=stops.observed,
                aborted=stops.aborted,
                held=stops.held,
                warned=mine.warned,
                window_warned=self.window_nearly_full,
                detector=None if self._detector is None else self._detector.state(),
                breakers=self._state_of("breakers"),
                open_calls=tuple(OpenCall.of(ticket) for ticket in self.open_calls()),
                occurrences=self._occurrences.state(),
                largest_output=mine.largest_output,
                earlier=self.earlier_usage,
                seq=self.tree.seq,
                call_id=self.tree.call_id,
                price_book=self.tree.price_book.version,
                messages=tuple(messages),
            )

    @classmethod
    def restore(
        cls,
        snapshot: Snapshot,
        budget: Budget | None = None,
        *,
        stop_when: Sequence[Callable[..., str | bool | None]] = (),
        sinks: _Sinks = (),
        within: Sequence[Self] = (),
        price_book: PriceBook | None = None,
        clock: Clock | None = None,
        log_arguments: bool = False,
        **options: Unpack[RunOptions],
    ) -> Self:
        """Go on from a snapshot, in this process or another.

        Without a budget the guard is what it was: same caps, same counters, same trip. Under a
        fresh budget the caps count from zero, nothing is tripped, and what was used before is kept
        in `earlier_usage`. Calls that were in flight keep their reservation in either case. Where
        the snapshot is of a paused run, so is the guard, until `go_on`.

        Args:
            snapshot: What `snapshot` or a store returned, or `Snapshot.of_outcome`.
            budget: A fresh budget; the recorded one, with what was used of it, if left out.
            stop_when: The conditions of the recorded budget, which are code and not in a snapshot.
            sinks: As in `Guard`; so are the other arguments.
            within: Guards of one tree that the run is a part of: then it has their log, clock and
                prices, and what it had used before is not charged to them again.
            price_book: Where prices come from.
            clock: Where time comes from.
            log_arguments: Put the arguments of tool calls into events.
            options: `on_warning`, `breakers`, `ledger` and `tenant`.

        Raises:
            CheckpointError: The snapshot's run had stop conditions, and neither they nor a budget
                were given; or a tenant paid for it that does not pay for it now; or it does not
                fit together.
            ConfigurationError: Both `budget` and `stop_when` were given; or neither a budget was,
                nor does the snapshot know its caps.
        """
        snapshot.check_resumable(budget, stop_when)
        if options.get("ledger") is None:
            snapshot.check_paid(_paying(within))  # before anything is made
        shared: dict[str, Any] = {**options, "mode": snapshot.mode, "run_id": snapshot.run_id}
        try:
            caps = budget or snapshot.caps(stop_when)
            if within:
                guard = within[0].child(caps, beside=within[1:], **shared)
            else:
                shared |= {"price_book": price_book, "clock": clock, "sinks": None}
                guard = cls(caps, log_arguments=log_arguments, **shared)
            snapshot.check_paid(_paying((guard,)))
            with guard.tree.lock:
                guard._take_over(snapshot, fresh=budget is not None)
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise snapshot.misfit(error) from None
        if not within:
            guard.tree.sinks = tuple(as_sink(sink) for sink in followed(sinks))
        guard._emit_restored()
        return guard

    def adopt(self, snapshot: Snapshot) -> bool:
        """Take over what an earlier leg of a run had counted, under this guard's own caps.

        For a guard that is made anew for each request while the run that it bounds waits for a
        person: what was used before the answer counts after it.

        Returns:
            False when this guard has counted something itself; then nothing was changed.

        Raises:
            CheckpointError: A tenant paid for the run that does not pay for this guard; or the
                snapshot does not fit together.
        """
        with self.tree.lock:
            if self._starts():
                return False
            if self.mode is not Mode.OFF:
                snapshot.check_paid(_paying((self,)))
            try:
                self._take_over(snapshot, fresh=False)
            except (ArithmeticError, KeyError, TypeError, ValueError) as error:
                raise snapshot.misfit(error) from None
        self._emit_restored()
        return True

    def _starts(self) -> int:
        return self._counters.used[MODEL_CALLS] + self._counters.used[TOOL_CALLS]

    def _emit_restored(self) -> None:
        if self.tree.sinks:
            self.emit(events.RunRestored, snapshot=self.snapshot().model_dump(mode="json"))

    def _take_over(self, snapshot: Snapshot, *, fresh: bool) -> None:
        if snapshot.counters.keys() != set(counters.COUNTERS):
            raise ValueError("its counters are not those of a guard")
        self.earlier_usage = snapshot.earlier
        tree, mine = self.tree, self._counters
        # The guard of the earlier leg may still be in this tree: its open calls are these.
        for ticket in [one for one in tree.open.values() if one.guard.run_id == self.run_id]:
            del tree.open[ticket.call_id]
            self._set_aside_above(-ticket.reserved_tokens, -ticket.reserved_cost)
        # In a tree that goes on already, the numbers of the old one are taken.
        first = tree.call_id if self.parent is not None else 0
        tickets = [self._ticket_of(call, first) for call in snapshot.open_calls]
        seq = snapshot.seq if self.parent is None else tree.seq
        tree.go_on_from(seq, first + snapshot.call_id, tickets)
        for ticket in tickets:
            # Its settlement will take this off everyone in the chain.
            self._set_aside_above(ticket.reserved_tokens, ticket.reserved_cost)
        self._records.extend(snapshot.records)
        self.completed_tool_calls += snapshot.completed()
        mine.largest_output = snapshot.largest_output
        if snapshot.occurrences is not None:
            self._occurrences = Occurrences.from_state(snapshot.occurrences)
        for ticket in tickets:
            if isinstance(ticket.call, ToolCall) and ticket.call.id:
                # Made again after the restart, it is the same call.
                self._occurrences.give_back(ticket.call, ticket.occurrence)
        if fresh:
            self.earlier_usage = snapshot.earlier + snapshot.usage()
            for call in snapshot.open_calls:
                mine.reserved_tokens += call.reserved_tokens
                mine.reserved_cost += call.reserved_cost
            return
        now = self._now()
        mine.restore(snapshot.counters)
        mine.set_budget(self.budget, snapshot.quotas)
        for name, started in snapshot.tool_counts.items():
            mine.tool(name).started = started
        mine.warn(snapshot.warned)
        mine.pauses = snapshot.pauses
        if snapshot.elapsed_ns is not None:
            mine.started_ns = now - snapshot.elapsed_ns
        mine.keep_time(now, stands=snapshot.pauses > 0)
        detection = self.budget.loop_detection
        if detection is not None and snapshot.detector is not None:
            self._detector = LoopDetector.from_state(detection, snapshot.detector)
        for plug in self._own_plugs:
            if plug.name == "breakers" and snapshot.breakers is not None:
                plug.restore(snapshot.breakers, now)
        # Whoever has ended this leg before it began has ended the run.
        aborted = snapshot.aborted or self._stops.aborted
        self._stops = StopState(snapshot.trip, snapshot.observed, aborted, snapshot.held)
        mine.binds = snapshot.observed is None
        tree.halted = True
        if snapshot.aborted is not None and self.mode is Mode.ENFORCE:
            self.cancellation.cancel()
        self.window_nearly_full = snapshot.window_warned

    def _set_aside_above(self, tokens: int, cost: int) -> None:
        for guard in self.lineage[1:]:
            guard._counters.reserved_tokens += tokens
            guard._counters.reserved_cost += cost

    def _ticket_of(self, open_call: OpenCall, first: int) -> Admit:
        """Make a ticket again, so that its call can still be settled."""
        call = open_call.to_call()
        ticket = Admit().answers(self, call, first + open_call.call_id)
        if isinstance(call, ModelCall) and call.model is not None:
            ticket.rates = self.tree.price_book.rates_for(call.model, call.provider)
        ticket.reserved_tokens = open_call.reserved_tokens
        ticket.reserved_cost = open_call.reserved_cost
        ticket.expected = open_call.expected
        ticket.occurrence = open_call.occurrence
        return ticket

    def _state_of(self, plug: str) -> Any:
        found = (one.state(self._now()) for one in self._own_plugs if one.name == plug)
        return next(found, None)

    # Outside the lock

    def _rates_of(self, model: str | None, provider: str | None) -> Rates | None:
        if model is None:
            return None
        if not isinstance(model, str):
            raise ConfigurationError(wrong_model(model))
        return self.tree.price_book.rates_for(model, provider)

    def _reserve(
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
        if not self._plugs:
            return None
        ask = Ask(self, call, tokens, cost, unpriced=unpriced, calls=calls)
        for owner, plug in self._reserving:
            if not plug.reserve(owner, ask):
                break
        return ask

    def _finish(self, warnings: Sequence[_Notice]) -> None:
        tree = self.tree
        if tree.outbox or tree.postponed:
            tree.deliver()
        for guard, event in warnings:
            if guard._on_warning is not None:
                try:
                    guard._on_warning(guard, event)
                except Exception as error:
                    tree.report("on_warning", error)

    # Under the lock: stopping

    @staticmethod
    def _objections(found: Found) -> dict[Guard, list[Violation]]:
        return {
            link.owner: [link.describe(one, needed[one]) for one in over]
            for link, over, needed in found
        }

    def _ask(
        self, ask: Ask | None, objections: dict[Guard, list[Violation]], now: int
    ) -> Trip | None:
        """Ask the plugs about a step, and stop where they, the caps or anything else object."""
        if ask is not None:
            ask.now, ask.objections = now, objections
            for owner, plug in self._deciding:
                plug.before(owner, ask)
            if ask.records:
                self._write(ask)
        detector = self._detector
        looped = detector is not None and detector.tripped
        return self._stop(now, objections) if objections or looped or self.tree.halted else None

    def _stop(self, now: int, objections: dict[Guard, list[Violation]]) -> Trip | None:
        """Trip every guard of the chain whose limits hold; None when nothing stops this run."""
        if self.trip is not None:
            return self.trip
        for link in self._chain:
            guard = link.owner
            above: Trip | None = guard.trip
            if above is not None and (not link.answers or guard in objections):
                self._set_trip(above, now)
                return above
        every: list[Violation] = []
        owner = self
        for link in self._chain:
            guard = link.owner
            if guard.observed_trip is not None or link.answers:
                continue
            held = [*objections.get(guard, ()), *guard._stops.violations()]
            # A loop is a conversation's: that of an ancestor ends with the ancestor's own step.
            if guard is self and self._detector is not None and self._detector.tripped:
                held.append(self._detector.violation())
            if not held:
                continue
            held = in_order(held)
            own = Trip(reason=held[0].reason, violations=tuple(held), run_id=guard.run_id)
            if guard.mode is Mode.OBSERVE:
                guard._stops.observed = own
                guard._counters.binds = False
                guard._record(events.TripObserved, now, trip=own)
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

    def _set_trip(self, trip: Trip, now: int) -> None:
        self._stops.trip = trip
        self.tree.halted = True
        self._record(events.Tripped, now, trip=trip)

    def _hold_uncharged(self, ticket: Admit, ended: Ended) -> None:
        """Hold a call that cannot be charged against the next step, where that matters."""
        if ended.failed or (ended.metered and ended.cost is not None):
            return
        for link in self._chain:
            has = link.counters
            if ended.cost is None and has.refuses_unpriced:
                link.owner._hold(unpriced_model(ticket.call.model))
            capped = has.caps[TOKENS] != INFINITY
            if has.caps[COST] != INFINITY and not ended.cost_given:
                capped = True
            if capped and not ended.metered:
                link.owner._hold(unmetered_usage())

    def _hold(self, violation: Violation) -> None:
        self._stops.hold(violation)
        self.tree.halted = True

    # Under the lock: tool calls

    def _decide_tool_call(
        self, call: ToolCall, now: int, calm: bool, batch: Ask | None, index: int
    ) -> ToolDecision:
        trip = self.trip
        ask = None
        if call.kind == "function":
            if trip is not None:
                return self._refused(call, Stop(trip))
            if self._detector is not None and self._detector.due and self._counters.binds:
                # No model call came in between that could have brought the correction.
                message = self._detector.nudge()
                if message is not None and self.mode is Mode.ENFORCE:
                    return self._refused(call, Refuse(StopReason.NO_PROGRESS, message, message))
            found = () if calm else counters.violations(self._chain, now, counters.TOOL_CALL)
            objections = self._objections(found) if found else {}
            if batch is not None and index in batch.call_objections:
                owner, held = batch.call_objections[index]
                objections.setdefault(owner, []).extend(held)
            trip = self._stop(now, objections) if objections else None
            if trip is not None:
                return self._refused(call, Stop(trip))
            refusal: Refuse | Stop | None = self._quota_refusal(call.name)
            if refusal is None and self._deciding:
                ask = Ask(self, call)
                refusal = self._ask_about_tool(ask, now)
            if refusal is not None:
                if isinstance(refusal, Refuse):
                    # To ask on for what is refused is an error of a kind.
                    self._show(call, fingerprint_result(refusal.message), _REFUSED_KIND)
                return self._refused(call, refusal)
            self._count_tool(call.name, 1)
        elif call.kind == "hosted":
            self._count_tool(call.name, 1)
            for link in self._chain:
                for quota in link.counters.tool(call.name).quotas:
                    # Any other call past its quota is refused, or in OBSERVE would have been.
                    if quota.used > quota.limit:
                        passed = quota_passed(quota.pattern, quota.limit, quota.used)
                        link.owner._hold(passed)
        elif call.kind == "handoff" and trip is not None:
            return self._refused(call, Stop(trip))
        self.tree.call_id += 1
        ticket = Admit().answers(self, call, self.tree.call_id)
        if call.id:
            ticket.occurrence = self._occurrences.count(call)
        if call.kind != "hosted":
            self.tree.open[ticket.call_id] = ticket
        if ask is not None:
            self._book(ask, ticket)
        if batch is not None and index in batch.call_holds:
            ticket.holds += batch.call_holds[index]
        return ticket

    def _ask_about_tool(self, ask: Ask, now: int) -> Refuse | Stop | None:
        """Ask the plugs about a tool call; what they hold for one that is refused goes back."""
        trip = self._ask(ask, {}, now)
        refusal = ask.refusal if trip is None else Stop(trip)
        if refusal is not None:
            ticket = Admit().answers(self, ask.call, 0)
            ticket.holds = ask.holds
            self._end_holds(ticket, _WITHDRAWN, now)
        return refusal

    def _refused(self, call: ToolCall, decision: _Refusal) -> _Refusal:
        self._keep_record(call, "refused")
        return decision

    def _quota_refusal(self, name: str) -> Refuse | None:
        for link in self._chain:
            for quota in link.counters.tool(name).quotas:
                if quota.used >= quota.limit and link.owner.mode is Mode.ENFORCE:
                    detail = f"tool_quotas[{quota.pattern!r}]={quota.limit} reached"
                    return Refuse(StopReason.TOOL_QUOTA, detail)
        return None

    def _count_tool(self, name: str, by: int) -> None:
        for link in self._chain:
            link.counters.count_tool(name, by)

    def _show(
        self, call: ToolCall, result: str, error: str | None = None, alike: str | None = None
    ) -> None:
        """Show the loop detector a call that ended; a plug's own tool is repeated as it should."""
        if self._detector is not None and call.name not in self._own_tools:
            self._detector.observe(call.name, call.fingerprint or "", result, error, alike)

    def _keep_record(self, call: ToolCall, status: str) -> None:
        if status == "completed" and call.kind in ("function", "hosted"):
            self.completed_tool_calls += 1
        records = self._records
        records.append((call.id, call.name[:_NAME_LENGTH], status))
        if len(records) > _RECORDS_CUT:
            del records[:-RECORDS_KEPT]

    # Under the lock: plugs

    def _take_message(self) -> str | None:
        """Take what the model should be told before its next call: at most one sentence."""
        if not self._counters.binds:
            return None
        detector = self._detector
        message = detector.nudge() if detector is not None and detector.due else None
        for plug in self._own_plugs:
            message = message or plug.message()
        return message

    def _book(self, ask: Ask, ticket: Admit) -> None:
        for owner, plug in self._deciding:
            plug.admitted(owner, ask)
        ticket.holds = ask.holds
        if ask.records:
            self._write(ask)

    def _write(self, ask: Ask) -> None:
        for guard, kind, facts in ask.records:
            guard._record(kind, ask.now, **facts)
        ask.records = ()

    def _end_holds(self, ticket: Admit, ended: Ended, now: int) -> None:
        for hold in ticket.holds:
            for kind, facts in hold.ended(ended, ticket, now):
                self._record(kind, now, **facts)

    def _stand_by(self, tickets: Iterable[Admit]) -> None:
        """Let others have the places of open calls. Under the lock: one may be settled just now."""
        for ticket in tickets:
            if self.tree.open.get(ticket.call_id) is ticket:
                for hold in ticket.holds:
                    hold.stand_by()

    # Under the lock: time and warnings

    def _now(self) -> int:
        return self.tree.now()

    def _wait(
        self, kind: type[events.EventBase], tickets: Iterable[Admit], *, wait: bool, **facts: Any
    ) -> None:
        """Note calls that wait, or wait no longer, keep the time and record it."""
        tree, ids, now = self.tree, tuple(one.call_id for one in tickets), self._now()
        tree.waiting = tree.waiting.union(ids) & tree.open.keys() if wait else tree.waiting - {*ids}
        self._keep_time(now)
        self._record(kind, now, waiting=ids, **facts)

    def _keep_time(self, now: int) -> None:
        """Stop the time of runs that wait and have nothing in flight; let all others run on."""
        for link in self._chain:
            has = link.counters
            if has.may_stand or has.stood_ns is not None:
                stands = has.may_stand and not self._is_busy(link.owner)
                has.keep_time(now, stands=stands)

    def _is_busy(self, guard: Guard) -> bool:
        return any(
            call_id not in self.tree.waiting
            and any(link.owner is guard and TIME not in link.exempt for link in ticket.guard._chain)
            for call_id, ticket in self.tree.open.items()
        )

    def _look(self, now: int) -> Sequence[_Notice]:
        """Keep the time after a step, and warn of what has reached its share."""
        self._keep_time(now)
        due = counters.due_warnings(self._chain, now)
        return self._warn(due, now) if due else ()

    def _warn(self, due: Sequence[tuple[Link, int]], now: int) -> list[_Notice]:
        notices: list[_Notice] = []
        for link, dimension in due:
            reached = link.describe(dimension)
            limit, used = _plain(reached.limit), _plain(reached.used)
            facts = {"dimension": reached.reason.value, "limit": limit, "used": used}
            link.counters.warn((reached.reason.value,))
            event = link.owner._make(events.LimitNearlyReached, now, facts)
            notices.append((link.owner, event))
        return notices

    def _watch_window(
        self, now: int, call: ModelCall, rates: Rates, tokens: int, warnings: Sequence[_Notice]
    ) -> Sequence[_Notice]:
        """Warn of a prompt near its window; armed again once a pruning hook has cut it."""
        full = tokens >= rates.window * self.budget.warn_at
        if rates.context_window is None or full is self.window_nearly_full:
            return warnings
        self.window_nearly_full = full
        if not full:
            return warnings
        facts: dict[str, Any] = {"model": call.model or ""}
        facts |= {"context_window": rates.context_window, "input_tokens": tokens}
        return [*warnings, (self, self._make(events.ContextWindowNearlyFull, now, facts))]

    # Under the lock: events

    def _record(self, kind: type[events.EventBase], now: int, **facts: Any) -> None:
        if self.tree.sinks:
            self._make(kind, now, facts)

    def _make(self, kind: type[Any], now: int, facts: dict[str, Any]) -> Any:
        return self.tree.make(kind, self.run_id, now, facts)

    def _record_delay(self, ticket: Admit, now: int) -> None:
        held = ticket.breakers
        if held is not None and held.start_ns > now:
            delay = held.start_ns - now
            self._record(events.CallDelayed, now, call_id=ticket.call_id, delay_ns=delay)


def _paying(guards: Iterable[Guard]) -> set[str]:
    """Return the names of whoever pays for these guards."""
    every = [plug for guard in guards for _, plug in guard._plugs]  # pyright: ignore[reportPrivateUsage]
    plugs = [plug for plug in every if plug.name == "ledger"]
    return {name for plug in plugs for name in plug.state(0)}


def _plain(amount: float | Decimal | None) -> int | float | str:
    return str(amount) if isinstance(amount, Decimal) else amount or 0


def _error_name(error: BaseException | str | None) -> str | None:
    if error is None:
        return None
    return "error" if isinstance(error, str) else type(error).__name__
