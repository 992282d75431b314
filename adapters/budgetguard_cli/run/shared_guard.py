"""The guard of a process that is bounded from outside: nothing starts unless both agree."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import ClassVar

from pydantic import ValidationError

from budgetguard_cli.run.link import Link
from budgetguard_cli.run.messages import (
    Admitted,
    Answers,
    AskModel,
    AskTools,
    Check,
    Done,
    Refused,
    SettleModel,
    SettleTool,
    Stopped,
    StoppedHere,
    WantedTool,
    Withdraw,
)
from budgetguard_core import (
    Admit,
    ConfigurationError,
    Guard,
    ModelCall,
    ModelDecision,
    Refuse,
    Stop,
    StopReason,
    TokenUsage,
    ToolCall,
    ToolDecision,
    Trip,
)


class SharedGuard(Guard):
    """A guard whose calls the supervisor admits too, and so do those of its sub-agents.

    The supervisor's caps hold for all processes together. This one has the same caps, which it
    reaches last, and looks for loops: those are a conversation's, and no other process's.
    """

    __slots__ = ()

    link: ClassVar[Link]
    """The line of this process to its supervisor."""

    def admit_model_call(self, call: ModelCall | None = None) -> ModelDecision:
        """Ask the supervisor, and then this process's own limits."""
        call = ModelCall() if call is None else call
        try:
            wanted = AskModel.of(call)
        except ValidationError as error:
            raise ConfigurationError(
                f"a model call must be described by names and whole numbers, got {call!r:.200}. "
                "Leave out what is not known."
            ) from error
        answer = self.link.ask(wanted, Admitted)
        if isinstance(answer, Stopped):
            self._end_all(answer.trip)
            decision = super().admit_model_call(call)
            if isinstance(decision, Stop):
                return decision
            super().withdraw(decision)
            return Stop(answer.trip)
        try:
            decision = super().admit_model_call(call)
        except BaseException:
            self.link.tell(Withdraw(id=answer.id))
            raise
        if isinstance(decision, Stop):
            self.link.tell(Withdraw(id=answer.id))
            self._stopped_here(decision.trip)
            return decision
        self.link.places[decision.call_id] = answer.id
        bound, own = answer.max_output_tokens, decision.max_output_tokens
        if bound is not None:
            decision.max_output_tokens = bound if own is None else min(own, bound)
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
        """Charge a call, with the supervisor as well."""
        place = self.link.places.pop(ticket.call_id, None)
        try:
            return super().settle_model_call(
                ticket, usage, error=error, model=model, cost_usd=cost_usd
            )
        finally:
            if place is not None:
                self.link.tell(_settlement(place, usage, error, model, cost_usd))

    def admit_tool_calls(self, calls: Sequence[ToolCall]) -> list[ToolDecision]:
        """Ask the supervisor, and then this process's own limits."""
        if not calls:
            return []
        reply = self.link.ask(AskTools(calls=tuple(map(WantedTool.of, calls))), Answers)
        answers = [reply] * len(calls) if isinstance(reply, Stopped) else reply.answers
        asked = list(zip(calls, answers, strict=True))
        decided: dict[int, ToolDecision] = {}
        admitted = [(call, one.id) for call, one in asked if isinstance(one, Admitted)]
        own = super().admit_tool_calls([call for call, _ in admitted]) if admitted else []
        for (call, place), decision in zip(admitted, own, strict=True):
            decided[id(call)] = decision
            if isinstance(decision, Admit):
                self.link.places[decision.call_id] = place
                continue
            self.link.tell(Withdraw(id=place))
            if isinstance(decision, Stop):
                self._stopped_here(decision.trip)
        for call, one in asked:
            if not isinstance(one, Admitted):
                decided[id(call)] = self._turned_down(call, one)
        return [decided[id(call)] for call in calls]

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
        """Report how a tool call ended, to the supervisor as well."""
        place = self.link.places.pop(ticket.call_id, None)
        if place is not None:
            self.link.tell(SettleTool(id=place, failed=error is not None))
        return super().settle_tool_call(
            ticket,
            result,
            error=error,
            result_fingerprint=result_fingerprint,
            error_fingerprint=error_fingerprint,
            alike=alike,
        )

    def withdraw(self, ticket: Admit, *, waits: bool = False) -> bool:
        """Take a call back, with the supervisor as well."""
        self._take_back(ticket, waits=waits)
        return super().withdraw(ticket, waits=waits)

    def check(self) -> Trip | None:
        """Ask whether the run has to end, here or as a whole."""
        trip = super().check()
        if trip is not None:
            return trip
        answer = self.link.ask(Check(), Done)
        if isinstance(answer, Stopped):
            self._end_all(answer.trip)
            return super().check()
        return None

    def time_left(self) -> float | None:
        """Seconds until the nearest deadline, that of the whole run included."""
        left = [one for one in (super().time_left(), self.link.time_left()) if one is not None]
        return min(left, default=None)

    def _take_back(self, ticket: Admit, *, waits: bool = False) -> None:
        place = self.link.places.pop(ticket.call_id, None)
        if place is not None:
            self.link.tell(Withdraw(id=place, waits=waits))

    def _turned_down(self, call: ToolCall, answer: Refused | Stopped) -> ToolDecision:
        if isinstance(answer, Stopped):
            self._end_all(answer.trip)
        (decision,) = super().admit_tool_calls([call])
        if not isinstance(decision, Admit):
            return decision
        # Other processes have used up what this one has left.
        super().withdraw(decision)
        if isinstance(answer, Stopped):
            return Stop(answer.trip)
        return Refuse(answer.reason, answer.detail, answer.message)

    def _end_all(self, trip: Trip) -> None:
        """Refuse every further step of this process: the whole run has ended."""
        root = next(one for one in self.lineage if one.parent is None)
        for violation in trip.violations:
            if violation.reason is StopReason.ABORTED:
                root.abort(violation.detail)
            else:
                root.hold(violation)

    def _stopped_here(self, trip: Trip) -> None:
        self.link.tell(StoppedHere(trip=trip))


def _settlement(
    place: int,
    usage: TokenUsage | None,
    error: BaseException | str | None,
    model: str | None,
    cost_usd: Decimal | None,
) -> SettleModel:
    failed = error is not None
    try:
        name = model[:200] if isinstance(model, str) else None
        return SettleModel(id=place, usage=usage, failed=failed, model=name, cost_usd=cost_usd)
    except ValidationError:
        # Figures that make no sense: the reservation is charged.
        return SettleModel(id=place, usage=None, failed=failed, model=None, cost_usd=None)
