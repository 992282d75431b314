"""The tool calls of a run: admitted in batches, counted by name, kept as records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from budgetguard_core import counters, events
from budgetguard_core.canonical import digest, fingerprint_result, result_text
from budgetguard_core.canonical import fingerprint as fingerprint_arguments
from budgetguard_core.decision import (
    COUNTED,
    NOT_AVAILABLE,
    Admit,
    Occurrences,
    Refuse,
    Stop,
    ToolCall,
    ToolDecision,
)
from budgetguard_core.errors import text_of
from budgetguard_core.masking import fingerprint_error
from budgetguard_core.model_calls import error_name
from budgetguard_core.outcome import ToolCallRecord
from budgetguard_core.plugs import Ask, Ended
from budgetguard_core.questions import ask_person
from budgetguard_core.run_state import WITHDRAWN, Notice, RunState, objections_of
from budgetguard_core.stop import StopReason
from budgetguard_core.stop_state import Mode, quota_passed

RECORDS_KEPT = 256
_RECORDS_CUT = 2 * RECORDS_KEPT
NAME_LENGTH = 200
_NOTHING: frozenset[str] = frozenset()
_REFUSED = fingerprint_result(NOT_AVAILABLE)
# The kind of error of a call that was answered without its body.
_REFUSED_KIND = fingerprint_error(NOT_AVAILABLE)
_Refusal = TypeVar("_Refusal", bound=Refuse | Stop)


class ToolCalls:
    """The tool calls of one run."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self.records: list[tuple[str | None, str, str]] = []
        self.occurrences = Occurrences()

    def admit(self, calls: Sequence[ToolCall]) -> list[ToolDecision]:
        """Answer for a batch which of its calls may start, and count those."""
        state = self._state
        tree, chain, detector = state.tree, state.chain, state.detector
        if not chain:
            return [Admit(state.guard, call, 0) for call in calls]
        ignored = _NOTHING if detector is None else detector.ignored
        for call in calls:
            if call.fingerprint is None:
                call.fingerprint = fingerprint_arguments(call.arguments, ignore=ignored)
            # A report is about the run, so it has no place among what the run may do.
            if call.name in state.own_tools and call.kind == "function":
                call.kind = "output"
        if tree.asks:
            bodies = [one.name for one in calls if one.kind == "function"]
            needed = counters.BATCH._replace(tool_calls=len(bodies)) if bodies else counters.BATCH
            ask_person(state, needed, f"call the tools {', '.join(bodies)}"[:NAME_LENGTH])
        ask = state.reserve(None, calls=calls)
        with tree.lock:
            now = tree.now()
            calm = counters.is_calm(chain, now, tools=len(calls))
            if not calm:
                counters.start_time(chain, now)
            found = () if calm else counters.violations(chain, now, counters.BATCH)
            state.ask(ask, objections_of(found) if found else {}, now)
            decisions = [
                self._decide(call, now, calm, ask, index) for index, call in enumerate(calls)
            ]
            warnings: Sequence[Notice] = () if calm else state.look(now)
            if tree.sinks:
                requested = events.ToolCallRequested.of_batch(calls, decisions, tree.log_arguments)
                state.record(events.ToolCallsRequested, now, calls=requested)
                for decision in decisions:
                    if isinstance(decision, Admit):
                        state.record_delay(decision, now)
        if ask is not None:
            for index, holds in ask.call_holds.items():
                if not isinstance(decisions[index], Admit):
                    for hold in holds:
                        hold.settle(WITHDRAWN, None)
        if warnings or tree.outbox or tree.postponed:
            state.finish(warnings)
        return decisions

    def refuses(self, names: Sequence[str]) -> list[bool]:
        """Return which calls of these tools, in this order, a cap or a quota would refuse.

        Nothing is asked for and nothing trips: a person is not asked about what will be refused.
        """
        state = self._state
        refused: list[bool] = []
        with state.tree.lock:
            now = state.tree.now()
            over = state.stops.trip is not None or self._is_past(now, counters.BATCH)
            for name in names:
                refused.append(
                    over
                    or self._is_past(now, counters.TOOL_CALL)
                    or self._quota_refusal(name) is not None
                )
                if not refused[-1]:
                    self._count(name, 1)
            for name, is_refused in zip(names, refused, strict=True):
                if not is_refused:
                    self._count(name, -1)
        return refused

    def _is_past(self, now: int, request: counters.Request) -> bool:
        found = counters.violations(self._state.chain, now, request)
        return any(link.owner.mode is Mode.ENFORCE for link, _, _ in found)

    def _decide(
        self, call: ToolCall, now: int, calm: bool, batch: Ask | None, index: int
    ) -> ToolDecision:
        state = self._state
        trip = state.stops.trip
        ask = None
        if call.kind == "function":
            if trip is not None:
                return self._refused(call, Stop(trip))
            if state.detector is not None and state.detector.due and state.counters.binds:
                # No model call came in between that could have brought the correction.
                message = state.detector.nudge()
                if message is not None and state.mode is Mode.ENFORCE:
                    return self._refused(call, Refuse(StopReason.NO_PROGRESS, message, message))
            found = () if calm else counters.violations(state.chain, now, counters.TOOL_CALL)
            objections = objections_of(found) if found else {}
            if batch is not None and index in batch.call_objections:
                owner, held = batch.call_objections[index]
                objections.setdefault(owner, []).extend(held)
            trip = state.stop(now, objections) if objections else None
            if trip is not None:
                return self._refused(call, Stop(trip))
            refusal: Refuse | Stop | None = self._quota_refusal(call.name)
            if refusal is None and state.deciding:
                ask = Ask(state.guard, call)
                refusal = self._ask_plugs(ask, now)
            if refusal is not None:
                if isinstance(refusal, Refuse):
                    # To ask on for what is refused is an error of a kind.
                    self._show(call, fingerprint_result(refusal.message), _REFUSED_KIND)
                return self._refused(call, refusal)
            self._count(call.name, 1)
        elif call.kind in ("hosted", "reported"):
            self._count(call.name, 1)
            for link in state.chain:
                for quota in link.counters.tool(call.name).quotas:
                    # Any other call past its quota is refused, or in OBSERVE would have been.
                    if quota.used > quota.limit:
                        passed = quota_passed(quota.pattern, quota.limit, quota.used)
                        link.owner.state.hold(passed)
            if call.kind == "reported" and state.deciding:
                # A stop of theirs holds for the next model call; a refusal comes too late.
                ask = Ask(state.guard, call)
                ask = ask if self._ask_plugs(ask, now) is None else None
        elif call.kind == "handoff" and trip is not None:
            return self._refused(call, Stop(trip))
        state.tree.call_id += 1
        ticket = Admit(state.guard, call, state.tree.call_id)
        if call.id:
            ticket.occurrence = self.occurrences.count(call)
        if call.kind != "hosted":
            state.tree.open[ticket.call_id] = ticket
        if ask is not None:
            state.book(ask, ticket)
        if batch is not None and index in batch.call_holds:
            ticket.holds += batch.call_holds[index]
        return ticket

    def _ask_plugs(self, ask: Ask, now: int) -> Refuse | Stop | None:
        """Ask the plugs about a tool call; what they hold for one that is refused goes back."""
        trip = self._state.ask(ask, {}, now)
        refusal = ask.refusal if trip is None else Stop(trip)
        if refusal is not None:
            ticket = Admit(self._state.guard, ask.call, 0)
            ticket.holds = ask.holds
            self._state.end_holds(ticket, WITHDRAWN, now)
        return refusal

    def _quota_refusal(self, name: str) -> Refuse | None:
        for link in self._state.chain:
            for quota in link.counters.tool(name).quotas:
                if quota.used >= quota.limit and link.owner.mode is Mode.ENFORCE:
                    detail = f"tool_quotas[{quota.pattern!r}]={quota.limit} reached"
                    return Refuse(StopReason.TOOL_QUOTA, detail)
        return None

    def _refused(self, call: ToolCall, decision: _Refusal) -> _Refusal:
        self._keep(call, "refused")
        return decision

    def _count(self, name: str, by: int) -> None:
        for link in self._state.chain:
            link.counters.count_tool(name, by)

    def _show(
        self, call: ToolCall, result: str, error: str | None = None, alike: str | None = None
    ) -> None:
        """Show the loop detector a call that ended; a plug's own tool is repeated as it should."""
        state = self._state
        if state.detector is not None and call.name not in state.own_tools:
            state.detector.observe(call.name, call.fingerprint or "", result, error, alike)

    def _keep(self, call: ToolCall, status: str) -> None:
        if status == "completed" and call.kind in COUNTED:
            self._state.completed_tool_calls += 1
        records = self.records
        records.append((call.id, call.name[:NAME_LENGTH], status))
        if len(records) > _RECORDS_CUT:
            del records[:-RECORDS_KEPT]

    def settle(
        self,
        ticket: Admit,
        result: object,
        error: BaseException | str | None,
        result_fingerprint: str | None,
        error_fingerprint: str | None,
        alike: str | None,
    ) -> bool:
        """Take in how a call of this run ended."""
        state = self._state
        tree, detector = state.tree, state.detector
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
        ended = None
        if ticket.holds:
            # Outside the lock: the user's code says what a failure is.
            judged = tuple(
                one for hold in ticket.holds for one in hold.judge(ticket, result, error)
            )
            ended = Ended(failed=error is not None, outcomes=judged)
        with tree.lock:
            if tree.open.pop(ticket.call_id, None) is not ticket:
                return False
            now = tree.now()
            self._keep(call, "completed" if error is None else "failed")
            self._show(call, key, kind, alike)
            if ended is not None:
                state.end_holds(ticket, ended, now)
            warnings = () if counters.is_calm(state.chain, now) else state.look(now)
            if tree.sinks:
                facts: dict[str, Any] = {"call_id": ticket.call_id, "fingerprint": key}
                facts |= {"error": error_name(error), "error_fingerprint": kind, "alike": alike}
                state.record(events.ToolCallSettled, now, **facts)
        if ended is not None:
            for hold in ticket.holds:
                hold.settle(ended, ticket)
        if warnings or tree.outbox or tree.postponed:
            state.finish(warnings)
        return True

    def withdraw(self, ticket: Admit, now: int, *, waits: bool) -> None:
        """Take back a call that did not start. Under the lock."""
        call: ToolCall = ticket.call
        if call.kind == "function":
            self._count(call.name, -1)
        if call.id:
            self.occurrences.give_back(call, ticket.occurrence)
        if not waits:
            self._keep(call, "refused")
            self._show(call, _REFUSED, _REFUSED_KIND)
        facts: dict[str, Any] = {"call_id": ticket.call_id, "waits": waits}
        self._state.record(events.ToolCallWithdrawn, now, **facts)

    def described(self, in_flight: Sequence[Admit]) -> tuple[ToolCallRecord, ...]:
        """Describe the latest calls, those in flight last, as interrupted."""
        records = self.records[-RECORDS_KEPT:]
        for ticket in in_flight:
            records.append((ticket.call.id, ticket.call.name[:NAME_LENGTH], "interrupted"))
        return tuple(
            ToolCallRecord.model_validate({"id": id_, "name": name, "status": status})
            for id_, name, status in records
        )
