"""A run as plain data: its snapshot, and how a guard goes on from one."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from budgetguard_core.decision import Admit, ModelCall, Occurrences, ToolCall
from budgetguard_core.loops import LoopDetector
from budgetguard_core.meter import COUNTERS
from budgetguard_core.pricing import Rates
from budgetguard_core.standing import Mode
from budgetguard_core.state import RECORDS_KEPT, RunState

if TYPE_CHECKING:
    from budgetguard_core.snapshot import OpenCall, Snapshot


class RunSnapshots(RunState):
    """What of a run a checkpoint keeps, and how another guard takes it over."""

    __slots__ = ()

    def snapshot(self, messages: Sequence[Any] = ()) -> Snapshot:
        """Take everything that the guard knows, and the conversation it is given, as plain data.

        Args:
            messages: The conversation, in any form that JSON can hold.
        """
        # Not at import: most processes never take one.
        from budgetguard_core.snapshot import OpenCall, Snapshot

        with self._tree.lock:
            now = self._now()
            meter, standing = self._meter, self._standing
            return Snapshot(
                run_id=self.run_id,
                parent_run_id=None if self.parent is None else self.parent.run_id,
                mode=str(self.mode),
                budget=self.budget.to_json(),
                stop_conditions=len(self.budget.stop_when),
                tenant=() if self._tenant is None else self._tenant.names,
                counters=meter.counters(),
                quotas=meter.quotas_used(),
                tool_counts=meter.tools_started(),
                records=tuple(self._records[-RECORDS_KEPT:]),
                completed_tool_calls=self._completed,
                elapsed_ns=None if meter.started_ns is None else meter.elapsed(now),
                pauses=meter.pauses,
                trip=standing.trip,
                observed=standing.observed,
                aborted=standing.aborted,
                held=tuple(standing.held),
                warned=meter.warned,
                window_warned=self._window_warned,
                detector=None if standing.detector is None else standing.detector.state(),
                breakers=None if self._breakers is None else self._breakers.state(now),
                open_calls=tuple(OpenCall.of(ticket) for ticket in self.open_calls()),
                occurrences=self._occurrences.state(),
                largest_output=meter.largest_output,
                earlier=self._earlier,
                seq=self._tree.seq,
                call_id=self._tree.call_id,
                price_book=self._tree.price_book.version,
                messages=tuple(messages),
            )

    def _take_over(self, snapshot: Snapshot, *, fresh: bool) -> None:
        if snapshot.counters.keys() != set(COUNTERS):
            raise ValueError("its counters are not those of a guard")
        self._earlier = snapshot.earlier
        tree = self._tree
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
        self._completed += snapshot.completed()
        self._meter.saw_completion(snapshot.largest_output)
        if snapshot.occurrences is not None:
            self._occurrences = Occurrences.from_state(snapshot.occurrences)
        for ticket in tickets:
            if type(ticket.call) is ToolCall and ticket.call.id:
                # Made again after the restart, it is the same call.
                self._occurrences.give_back(ticket.call, ticket.occurrence)
        if fresh:
            self._earlier = snapshot.earlier + snapshot.usage()
            for call in snapshot.open_calls:
                self._meter.set_aside(call.reserved_tokens, call.reserved_cost)
            return
        self._meter.go_on_from(
            snapshot.counters,
            snapshot.quotas,
            snapshot.tool_counts,
            snapshot.warned,
            self._now(),
            snapshot.elapsed_ns,
            snapshot.pauses,
        )
        detector, detection = self._standing.detector, self.budget.loop_detection
        if detection is not None and snapshot.detector is not None:
            detector = LoopDetector.from_state(detection, snapshot.detector)
        if self._breakers is not None and snapshot.breakers is not None:
            self._breakers.go_on_from(snapshot.breakers, self._now())
        self._standing.go_on_from(
            snapshot.trip,
            snapshot.observed,
            # Whoever has ended this leg before it began has ended the run.
            snapshot.aborted or self._standing.aborted,
            snapshot.held,
            detector,
        )
        if snapshot.aborted is not None and self.mode is Mode.ENFORCE:
            self.cancellation.cancel()
        self._window_warned = snapshot.window_warned

    def _set_aside_above(self, tokens: int, cost: int) -> None:
        for guard in self.lineage[1:]:
            guard._meter.set_aside(tokens, cost)

    def _ticket_of(self, open_call: OpenCall, first: int) -> Admit:
        """Make a ticket again, so that its call can still be settled."""
        call: ModelCall | ToolCall
        rates: Rates | None = None
        if open_call.kind == "model":
            call = ModelCall(
                model=open_call.model,
                provider=open_call.provider,
                input_tokens=open_call.input_tokens,
                cost_usd=None if open_call.cost_usd is None else Decimal(open_call.cost_usd),
            )
            if open_call.model is not None:
                rates = self.price_book.rates_for(open_call.model, open_call.provider)
        else:
            call = ToolCall(
                name=open_call.name,
                id=open_call.id,
                kind=open_call.tool_kind,
                fingerprint=open_call.fingerprint,
            )
        ticket = Admit().answers(self, call, first + open_call.call_id)
        reserved = open_call.reserved_tokens, open_call.reserved_cost
        ticket.take_over(rates, reserved, open_call.expected, open_call.occurrence)
        return ticket
