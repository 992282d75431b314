"""The guard of one run: it admits model calls and tool calls, settles them, and trips once."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Never, Self, TypeAlias, TypedDict, Unpack

from budgetguard_core import events
from budgetguard_core.assembly import plugs_of
from budgetguard_core.breakers.progress import NOTED, ProgressReport, read_report
from budgetguard_core.budget import Budget, Caps
from budgetguard_core.cancellation import CancellationToken
from budgetguard_core.clock import Clock, SystemClock
from budgetguard_core.decision import Admit, ModelCall, ModelDecision, ToolCall, ToolDecision
from budgetguard_core.errors import AdapterError, text_of
from budgetguard_core.housekeeping import Housekeeping, activated
from budgetguard_core.masking import fingerprint_reply
from budgetguard_core.model_calls import ModelCalls
from budgetguard_core.outcome import Outcome, ToolCallRecord
from budgetguard_core.pricing import PriceBook
from budgetguard_core.restoring import restored, snapshot_of
from budgetguard_core.run_clock import RunClock
from budgetguard_core.run_log import followed
from budgetguard_core.run_state import WITHDRAWN, RunState, check_options, refuse_unknown
from budgetguard_core.sinks import Sink
from budgetguard_core.snapshot import Snapshot
from budgetguard_core.stop import Trip, Violation
from budgetguard_core.stop_state import Mode as Mode
from budgetguard_core.stop_state import ModeName, as_mode
from budgetguard_core.tool_calls import NAME_LENGTH, ToolCalls
from budgetguard_core.tree import Tree, as_price_book, as_sink
from budgetguard_core.usage import TokenUsage, Usage

if TYPE_CHECKING:
    from budgetguard_core.breakers import BreakerRegistry
    from budgetguard_core.ledger import Ledger, Tenant

WarningEvent: TypeAlias = events.LimitNearlyReached
"""The argument of `on_warning`."""
WarningHandler: TypeAlias = Callable[["Guard", WarningEvent], object]
_OF_OUTCOME = ("status", "stop_reason", "finalized", "profile", "usage")
_Sinks: TypeAlias = Iterable[Sink | Callable[[events.Event], object]] | None


class RunOptions(TypedDict, total=False):
    """Arguments of every run's guard; `Guard` describes them."""

    run_id: str | None
    on_warning: Callable[[Any, WarningEvent], object] | None
    breakers: BreakerRegistry | None
    ledger: Ledger | str | None
    tenant: Tenant | None


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
        on_warning: Called with the guard and a `LimitNearlyReached` event; it may call `extend` or
            `abort`. Runs in the thread whose step reached it.
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
        ancestry: The guard and everyone that its calls are charged to, the guard first.
        tree: What it shares with its sub-agents: lock, log, clock, prices, failures.
        cancellation: Cancelled by `abort`, with that of every sub-agent.
        outcome: The outcome of the latest run that was ended on it.
        earlier_usage: What earlier runs used that this one goes on from under a fresh budget.
        clock: The run's time, and the housekeeping in it; for the kit and for replay.
        state: What its parts share, likewise.

    Raises:
        ConfigurationError: The budget is not a `Budget`, a sink takes no events, only one of
            `ledger` and `tenant` was given, or a cap was given beside the budget.
    """

    def __init__(
        self,
        budget: Budget | None = None,
        *,
        mode: Mode | ModeName = Mode.ENFORCE,
        run_id: str | None = None,
        sinks: _Sinks = (),
        on_warning: Callable[[Self, WarningEvent], object] | None = None,
        price_book: PriceBook | None = None,
        clock: Clock | None = None,
        log_arguments: bool = False,
        breakers: BreakerRegistry | None = None,
        ledger: Ledger | str | None = None,
        tenant: Tenant | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(unknown)
        found = [as_sink(sink) for sink in followed(sinks)]
        self.tree = Tree(clock or SystemClock(), as_price_book(price_book), found, log_arguments)
        plugged = {"breakers": breakers, "ledger": ledger, "tenant": tenant}
        self._set_up(None, (), budget, mode, run_id, on_warning, **plugged)

    def _set_up(
        self,
        parent: Self | None,
        linked: Sequence[Self],
        budget: Budget | None,
        mode: Mode | ModeName,
        run_id: str | None = None,
        on_warning: Callable[[Any, WarningEvent], object] | None = None,
        **plugged: Any,
    ) -> None:
        check_options(budget, run_id, on_warning)
        budget = budget or Budget()
        self.budget: Budget = budget if parent is None else budget.inheriting(parent.budget)
        self.mode = as_mode(mode)
        self.run_id = run_id or secrets.token_hex(16)
        self.parent: Self | None = parent
        parents = () if parent is None else (parent, *linked)
        self.ancestry: tuple[Self, ...] = tuple(
            dict.fromkeys((self, *(guard for one in parents for guard in one.ancestry)))
        )
        self.outcome: Outcome | None = None
        self.earlier_usage = Usage()
        self.cancellation: CancellationToken = CancellationToken(
            parents[0].cancellation if parents else None
        )
        self.state: RunState = RunState(self, (one.state for one in parents), on_warning)
        self.clock: RunClock = RunClock(self.state)
        self._model_calls = ModelCalls(self.state)
        self._tool_calls = ToolCalls(self.state)
        self.state.begin(plugs_of(self, **plugged), [one.run_id for one in linked])

    # Relations

    def child(
        self,
        budget: Budget | None = None,
        *,
        mode: Mode | ModeName | None = None,
        linked: Sequence[Self] = (),
        **options: Unpack[RunOptions],
    ) -> Self:
        """Make the guard of a sub-agent: its own caps, and at most what is left of every ancestor.

        It charges this guard and all above it under one lock. Its trip ends the sub-agent alone;
        an ancestor's trip ends everything below. An advisory envelope takes `mode=Mode.OBSERVE`.

        Args:
            budget: Its own caps; without, it has none but those above.
            mode: ENFORCE, OBSERVE or OFF; this guard's if left out.
            linked: Other guards of this tree that it charges too, each of their ancestors once.
            options: As in `Guard`: `run_id`, `on_warning` (at the warning shares of its own caps),
                `breakers` (what this tree of guards shares if left out), `ledger` and `tenant` (for
                a tenant beside those above; each tenant is charged once).
        """
        child = type(self).__new__(type(self))
        child.tree = self.tree
        child._set_up(self, linked, budget, mode or self.mode, **options)
        for one in linked:
            one.cancellation.adopt(child.cancellation)
        return child

    def activate(self) -> AbstractContextManager[Self]:
        """Bound every run of every adapter in the block, beside what bounds them already.

        It holds in this thread or task, and in the tasks, threads and pools of threads that are
        used here; what other processes call is not counted. A block that ends by itself without a
        call admitted in it is warned of in the log: what ran was not bounded, unless nothing ran.
        """
        return activated(self)

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
        return Housekeeping.of(self, seconds)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the guard itself: a copy would be a second allowance of the same budget."""
        return self

    # What a run may ask about itself

    @property
    def trip(self) -> Trip | None:
        """Why the run was stopped, or None while it may go on."""
        return self.state.stops.trip

    @property
    def observed_trip(self) -> Trip | None:
        """In OBSERVE: the trip that ENFORCE would have made, at the step where it would have."""
        return self.state.stops.observed

    @property
    def usage(self) -> Usage:
        """The usage of the run so far, its sub-agents included."""
        with self.tree.lock:
            return self.state.counters.usage(self.tree.now())

    @property
    def tool_counts(self) -> dict[str, int]:
        """The number of bodies of each tool that were started (the first 1,024 names)."""
        with self.tree.lock:
            return self.state.counters.tools_started()

    @property
    def tool_calls(self) -> tuple[ToolCallRecord, ...]:
        """The results of the last 256 tool calls; those in flight follow as interrupted."""
        with self.tree.lock:
            return self._tool_calls.described(self.open_tool_calls())

    @property
    def warnings(self) -> tuple[str, ...]:
        """The dimensions that have reached their warning share, in the order they did."""
        return self.state.counters.warned

    @property
    def paused(self) -> bool:
        """True if a run on this guard waits for a person."""
        return self.state.counters.pauses > 0

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
        return self.clock.time_left()

    # Admission

    def admit_model_call(self, call: ModelCall | None = None) -> ModelDecision:
        """Ask whether a model call may start; counts it when it may.

        Returns:
            `Admit` (or `Nudge`, an `Admit` with a message for the model), to be settled with
            `settle_model_call`; or `Stop`: the run ends.

        Raises:
            ConfigurationError: A figure of the call makes no sense; nothing was counted.
        """
        return self._model_calls.admit(call or ModelCall())

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
        return guard._model_calls.settle(ticket, usage, error, model, cost_usd)

    def admit_tool_calls(self, calls: Sequence[ToolCall]) -> list[ToolDecision]:
        """Ask for a whole batch of tool calls, in the order in which the model wrote them.

        Returns:
            One answer for each call: `Admit`, to be settled with `settle_tool_call`; `Refuse`:
            this call may not start, the run goes on; `Stop`: this call may not start, and the run
            ends before its next model call.
        """
        return self._tool_calls.admit(calls)

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
    ) -> bool:
        """Report how a tool call ended. A call that is never settled counts as interrupted.

        Args:
            ticket: The answer of `admit_tool_calls`.
            result: What the tool returned; it is fingerprinted, not kept.
            error: What it raised, if it did.
            result_fingerprint: The fingerprint, where it is known already (replay).
            error_fingerprint: The `fingerprint_error` of the error's text, likewise.
            alike: The fingerprint of the result without times and ids, likewise.

        Returns:
            False when the call was settled before.
        """
        guard: Guard = ticket.guard
        return guard._tool_calls.settle(
            ticket, result, error, result_fingerprint, error_fingerprint, alike
        )

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
        tree, state = guard.tree, guard.state
        with tree.lock:
            if tree.open.pop(ticket.call_id, None) is not ticket:
                return False
            now = tree.now()
            state.end_holds(ticket, WITHDRAWN, now)
            if isinstance(ticket.call, ToolCall):
                guard._tool_calls.withdraw(ticket, now, waits=waits)
            else:
                guard._model_calls.withdraw(ticket, now)
            tree.keep_time(state.chain, now)
        for hold in ticket.holds:
            hold.settle(WITHDRAWN, ticket)
        tree.deliver()
        return True

    # Telling

    def start(self) -> None:
        """Start the run's time now instead of with the first admission."""
        self.clock.start()

    def user_turn(self) -> None:
        """Begin a user's turn: the same call again is no repetition any more."""
        with self.tree.step() as now:
            for one in (self.state.detector, *self.state.own_plugs):
                if one is not None:
                    one.user_turn()
            self.state.record(events.UserTurned, now)

    def report_reply(
        self, text: str, *, speaker: str | None = None, fingerprint: str | None = None
    ) -> None:
        """Report a reply without a tool call, to see whether replies repeat.

        Args:
            text: The whole reply. It is fingerprinted, not kept; one without text is not looked at.
            speaker: Who said it, where several speak: an agent's or a node's name.
            fingerprint: The text's fingerprint, where it is known already (replay).
        """
        detector = self.state.detector
        if detector is None or not (fingerprint or text.strip()):
            return
        fingerprint = fingerprint or fingerprint_reply(text)
        with self.tree.step() as now:
            detector.observe_reply(speaker, "", fingerprint=fingerprint)
            name = None if speaker is None else speaker[:NAME_LENGTH]
            self.state.record(events.ReplyReported, now, fingerprint=fingerprint, speaker=name)

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
        with self.tree.step() as now:
            if any(plug.note(report) for plug in self.state.own_plugs):
                self.state.record(events.ProgressReported, now, **report._asdict())
        return NOTED

    def take_nudge(self) -> str | None:
        """Take the corrective message that is due, to deliver it in a tool's result.

        An adapter that can add a message before the model call gets it as `Nudge` and needs
        this not. None in OBSERVE: a message would change the run.
        """
        with self.tree.step() as now:
            message = self.state.take_message()
            if message is not None:
                self.state.record(events.NudgeTaken, now, message=message)
        return message if self.mode is Mode.ENFORCE else None

    def abort(self, detail: str = "aborted from outside") -> None:
        """End the run from any thread: at its next admission, at once where work is async.

        Sub-agents end with it. A second abort, or one of a stopped run, changes nothing but that
        the stopped run's last answer is cut.
        """
        self.state.abort(text_of(detail))

    def hold(self, violation: Violation) -> None:
        """Report a limit that is not the engine's own; the next admission or `check` stops.

        For a framework's own cap (`framework_limit`) and whatever else an adapter can see.
        """
        with self.tree.step() as now:
            self.state.hold(violation)
            self.state.record(events.StopHeld, now, violation=violation)

    def extend(self, **caps: Unpack[Caps]) -> None:
        """Raise caps of a run that goes on: `guard.extend(max_iterations=40)`.

        The new caps are absolute, not additional. What an ancestor allows stays the bound.

        Args:
            caps: Any of the run's: `max_iterations`, `max_model_calls`, `max_tool_calls`,
                `max_total_tokens`, `max_input_tokens`, `max_output_tokens`, `max_seconds`,
                `max_cost_usd`.

        Raises:
            ConfigurationError: A cap is not one of the run's, or would not be raised.
            AdapterError: The run was stopped already; resume it under a fresh budget instead.
        """
        with self.tree.step() as now:
            if self.trip is not None:
                raise AdapterError(
                    f"a stopped run cannot be extended, got a run stopped by {self.trip.reason}. "
                    "Resume it under a fresh budget."
                )
            self.budget = self.budget.raised(caps)
            self.state.counters.set_budget(self.budget)
            self.state.record(events.BudgetExtended, now, budget=self.budget.to_json())

    def pause(self, waiting: Iterable[Admit] = ()) -> None:
        """Pause the run's time while it waits for a person.

        From here on, until as many `go_on` as `pause`, time counts only while a call is in flight
        that does not wait, here or in a sub-agent: several runs may share the guard, and the
        others work on. Ancestors are not paused with it: each is paused by whoever knows that its
        run waits as well. Nothing is refused meanwhile, and an admission does not end the pause.

        Args:
            waiting: The calls of this run, and of its sub-agents, that are open and wait too, such
                as a tool whose body asks. They leave their bulkheads and circuit breakers.
        """
        self.clock.pause(waiting)

    def go_on(self, waiting: Iterable[Admit] = ()) -> None:
        """End a pause: the run's time counts again. Does nothing without `pause`.

        Args:
            waiting: The calls that waited with the run and are in flight again.
        """
        self.clock.go_on(waiting)

    def check(self) -> Trip | None:
        """Ask whether the run has to end now, without starting anything; trips it if so.

        For a watchdog that found the deadline passed or the run aborted while a call hangs.
        """
        return self.state.check()

    def conclude(self, outcome: Outcome) -> None:
        """Keep the outcome of a run, as `outcome`, and record its end, if it is one."""
        self.outcome = outcome
        self.clock.stand_by()
        if outcome.status == "paused":
            return
        for plug in self.state.own_plugs:
            plug.close()
        facts = {name: getattr(outcome, name) for name in _OF_OUTCOME}
        error = None if outcome.error is None else outcome.error.partition(":")[0]
        self.emit(events.RunEnded, error=error, **facts)

    def emit(self, kind: type[events.EventBase], **facts: Any) -> None:
        """Record an event about this run, for the sinks; nothing is built when there are none."""
        with self.tree.lock:
            self.state.record(kind, self.tree.now(), **facts)
        self.tree.deliver()

    # Snapshots

    def snapshot(self, messages: Sequence[Any] = ()) -> Snapshot:
        """Return everything that the guard knows, and the conversation it is given, as plain data.

        Args:
            messages: The conversation, in any form that JSON can hold.
        """
        with self.tree.lock:
            return snapshot_of(self.state, self._tool_calls, messages)

    @classmethod
    def restore(
        cls,
        snapshot: Snapshot,
        budget: Budget | None = None,
        *,
        stop_when: Sequence[Callable[..., str | bool | None]] = (),
        sinks: _Sinks = (),
        within: Sequence[Self] = (),
        onto: Self | None = None,
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
            onto: A guard that was made anew for a run that goes on, with its own caps: it takes
                over what was counted, and is returned; one that has counted already stays as it is.
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
        if onto is not None:
            return restored(snapshot, onto, onto._tool_calls, fresh=False)
        snapshot.check_resumable(budget, stop_when)
        if options.get("ledger") is None:  # before anything is made
            snapshot.check_paid({name for one in within for name in one.state.payers()})
        shared: dict[str, Any] = {**options, "mode": snapshot.mode, "run_id": snapshot.run_id}
        caps = budget or snapshot.caps(stop_when)
        if within:
            guard = within[0].child(caps, linked=within[1:], **shared)
        else:
            shared |= {"price_book": price_book, "clock": clock, "sinks": None}
            guard = cls(caps, log_arguments=log_arguments, **shared)
        taking = () if within else followed(sinks)
        return restored(snapshot, guard, guard._tool_calls, fresh=budget is not None, sinks=taking)
