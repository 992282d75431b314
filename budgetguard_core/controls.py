"""What the outside tells a run, and what it does to it: all but the calls themselves."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any, Final, Never

from budgetguard_core.braked_run import BrakedRun
from budgetguard_core.breakers.progress import NOTED, ProgressReport, read_report
from budgetguard_core.budget import DIMENSIONS
from budgetguard_core.cancellation import CancellationToken
from budgetguard_core.canonical import fingerprint_reply
from budgetguard_core.decision import Admit
from budgetguard_core.errors import AdapterError, text_of
from budgetguard_core.events import (
    Aborted,
    BudgetExtended,
    Checked,
    GuardReset,
    HousekeepingBegan,
    HousekeepingEnded,
    IterationsRestarted,
    NudgeTaken,
    ProgressReported,
    ReplyReported,
    RunEnded,
    RunPaused,
    RunResumed,
    StopHeld,
    TimeStarted,
    UserTurned,
)
from budgetguard_core.frame import FRAME, Frame, around
from budgetguard_core.notices import plain
from budgetguard_core.outcome import Outcome
from budgetguard_core.standing import Mode
from budgetguard_core.state import NAME_LENGTH
from budgetguard_core.stop import StopReason, Trip, Violation, reason_of

# None is a value that a caller may give, and is refused.
_AS_IT_IS: Final[Any] = ...


class RunControls(BrakedRun):
    """A run that is told what happens around it, and can be paused, extended and ended."""

    __slots__ = ()

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
        fingerprint = fingerprint or fingerprint_reply(text)
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

    def note_warning(self, dimension: str, limit: float | str) -> None:
        """Take in a warning that was given at this very cap (replay)."""
        with self._tree.lock:
            if dimension in DIMENSIONS and plain(getattr(self.budget, dimension)) == limit:
                self._meter.warn(dimension)

    def take_nudge(self) -> str | None:
        """Take the corrective message that is due, to deliver it in a tool's result.

        An adapter that can add a message before the model call gets it as `Nudge` and needs
        this not. None in OBSERVE: a message would change the run.
        """
        with self._tree.lock:
            message = self._standing.take_message()
            if message is not None and self._tree.sinks:
                self._record(NudgeTaken, self._now(), message=message)
        self._tree.deliver()
        return message if self.mode is Mode.ENFORCE else None

    def abort(self, detail: str = "aborted from outside") -> None:
        """End the run from any thread: at its next admission, at once where work is async.

        Sub-agents end with it. A second abort, or one of a stopped run, changes nothing but that
        the stopped run's last answer is cut.
        """
        # Whatever it is given: an exception here would leave the work in flight running.
        detail = text_of(detail)
        if self._tree.postpone(lambda: self.abort(detail)):
            return
        with self._tree.lock:
            going_on = self.trip is None or self._meter.housekeeping > 0
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

        Args:
            max_iterations: Turns of the loop, of the whole run.
            max_model_calls: Model calls, retries and failed ones included.
            max_tool_calls: Tool bodies that start.
            max_total_tokens: Tokens, prompt plus completion.
            max_seconds: Seconds since the run's first admission.
            max_cost_usd: US dollars.
            unknown: Nothing else is a cap of a run; what is given is refused by its name.

        Raises:
            ConfigurationError: A cap is not one of the run's, or would not be raised.
            AdapterError: The run was stopped already; resume it under a fresh budget instead.
        """
        given: dict[str, Any] = {
            "max_iterations": max_iterations,
            "max_model_calls": max_model_calls,
            "max_tool_calls": max_tool_calls,
            "max_total_tokens": max_total_tokens,
            "max_seconds": max_seconds,
            "max_cost_usd": max_cost_usd,
            **unknown,
        }
        caps = {name: cap for name, cap in given.items() if cap is not _AS_IT_IS}
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
                as a tool whose body asks. They leave their bulkheads and circuit breakers.
        """
        tickets = list(waiting)
        with self._tree.lock:
            now, ids = self._now(), [ticket.call_id for ticket in tickets]
            self._meter.pause()
            self._tree.wait_for(ids)
            self._keep_time(now)
            if self._tree.sinks:
                self._record(RunPaused, now, waiting=tuple(ids))
            self._stand_by(tickets)
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
            self._tree.go_on_with(ids)
            self._keep_time(now)
            if self._tree.sinks:
                self._record(RunResumed, now, waiting=tuple(ids))
        self._tree.deliver()

    def begin_housekeeping(
        self, waiting: Iterable[Admit] = (), *, answers_for: str | None = None
    ) -> None:
        """Let the calls of this guard, a sub-agent's, be housekeeping of everyone above it.

        `Guard.housekeeping` does it for a block of code.

        Args:
            waiting: The calls in whose bodies it is done: they wait for it.
            answers_for: The id of a stopped run above whose last answer it is: its
                `finalize_reserve` and the whole of its caps on tokens and dollars bind.
        """
        with self._tree.lock:
            now, ids = self._now(), tuple(ticket.call_id for ticket in waiting)
            self._be_housekeeping()
            stopped = next((one for one in self.lineage[1:] if one.run_id == answers_for), None)
            if stopped is not None:
                self._be_last_answer(stopped)
            for guard in self._exempt:
                guard._meter.begin_housekeeping()
            self._tree.wait_for(ids)
            self._keep_time(now)
            if self._tree.sinks:
                self._record(HousekeepingBegan, now, waiting=ids, answers_for=answers_for)
        self._tree.deliver()

    def end_housekeeping(self, waiting: Iterable[Admit] = ()) -> None:
        """Let the time of the runs above count again: the housekeeping is over."""
        with self._tree.lock:
            now, ids = self._now(), tuple(ticket.call_id for ticket in waiting)
            for guard in self._exempt:
                guard._meter.end_housekeeping()
            self._tree.go_on_with(ids)
            self._keep_time(now)
            if self._tree.sinks:
                self._record(HousekeepingEnded, now, waiting=ids)
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
            self._meter.begin(self.budget)
            if self._breakers is not None:
                self._breakers.begin()
            self._standing.begin(self.budget, self.mode)
            self._begin()
            self._tree.errors.clear()
            self.outcome = None
            self.cancellation = CancellationToken()
            if self._tree.sinks:
                self._record(GuardReset, self._now())
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
            before = [(guard.trip, guard.observed_trip) for guard in self.lineage]
            trip = self._stop(now)
            changed = before != [(guard.trip, guard.observed_trip) for guard in self.lineage]
            if changed and self._tree.sinks:
                self._record(Checked, now)
        self._tree.deliver()
        return trip

    def _ask_conditions(self) -> None:
        for guard in self._line:
            if guard._meter.looks_on or not guard._standing.conditions or _is_asked(guard):
                continue
            # A run that a condition does (a judge's) is a part of this one.
            token = FRAME.set(_Asked(guard, above=around()))
            try:
                for condition in guard._standing.conditions:
                    try:
                        reason = reason_of(condition, condition(guard))
                        if reason is not None and guard.trip is None:
                            guard.hold(Violation(reason=StopReason.STOP_CONDITION, detail=reason))
                    except Exception as error:
                        self._tree.report("stop_when", error)
            finally:
                FRAME.reset(token)

    def conclude(self, outcome: Outcome) -> None:
        """Keep the outcome of a run, as `outcome`, and record its end, if it is one."""
        self.outcome = outcome
        with self._tree.lock:
            # Nobody may be left who would settle them: tasks that were cancelled, for example.
            self._stand_by(self.open_calls())
        if outcome.status == "paused":
            return
        if self._tenant is not None:
            self._tenant.close()
        self.emit(
            RunEnded,
            status=outcome.status,
            stop_reason=outcome.stop_reason,
            error=None if outcome.error is None else outcome.error.partition(":")[0],
            finalized=outcome.finalized,
            profile=outcome.profile,
            usage=outcome.usage,
        )

    def _stand_by(self, tickets: Iterable[Admit]) -> None:
        """Let others have the places of open calls. Under the lock: one may be settled just now."""
        for ticket in tickets:
            if ticket.breakers is not None and self._tree.open.get(ticket.call_id) is ticket:
                ticket.breakers.stand_by()


class _Asked(Frame):
    """The code of a guard's stop conditions."""

    __slots__ = ()


def _is_asked(guard: object) -> bool:
    """Tell whether this code is a part of what a guard's condition does."""
    frame = FRAME.get()
    while frame is not None:
        if type(frame) is _Asked and frame.guard is guard:
            return True
        frame = frame.above
    return False
