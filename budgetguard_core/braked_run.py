"""What a run asks its breakers before a step, and what it makes of their answers."""

from __future__ import annotations

from collections.abc import Iterable

from budgetguard_core.breakers import StateTransition
from budgetguard_core.breakers.call import CallBreakers
from budgetguard_core.breakers.circuit_breaker import CallOutcome
from budgetguard_core.decision import ModelCall, Refuse, Stop, ToolCall
from budgetguard_core.events import CircuitBreakerChanged, ToolCallTurnedAway, ToolMixUnusual
from budgetguard_core.notices import RunNotices
from budgetguard_core.run_breakers import (
    hold_tool_call,
    pace_of_model_call,
    pace_of_tool_call,
)
from budgetguard_core.state import NAME_LENGTH
from budgetguard_core.stop import Trip


class BrakedRun(RunNotices):
    """A run that asks its breakers, and those of the runs above it."""

    __slots__ = ()

    def _pace_of(self, call: ModelCall, now: int) -> tuple[bool, int]:
        """Ask the breakers whether a model call may start, and when.

        A new turn ends the one before.
        """
        own = self._breakers
        progress = None if own is None else own.progress
        if progress is not None and not call.retry:
            progress.iteration()
            if progress.tripped:
                self._standing.weigh()
        return pace_of_model_call(self._paced, now) if self._paced else (True, now)

    def _ask_breakers(
        self, call: ToolCall, now: int, shut: list[bool]
    ) -> CallBreakers | Refuse | Stop:
        """Ask the breakers whether a tool call may start."""
        start = now
        if self._paced:
            fits, start = pace_of_tool_call(self._paced, now)
            trip = None if fits else self._stop_for_pace(now)
            if trip is not None:
                return Stop(trip)
        held = hold_tool_call(self._watched, call.name, now, start)
        shut.append(held.shut)
        if held.changes:
            self._record_changes(held.changes, now)
        away = held.away
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
        for guard, one in self._mixed:
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

    def _stop_for_pace(self, now: int) -> Trip | None:
        return self._stop(
            now,
            [
                (guard, guard._breakers.velocity.tool_call_violations(now))
                for guard in self._braked
                if guard._breakers is not None and guard._breakers.velocity is not None
            ],
        )

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
        for guard in self._braked:
            one = guard._breakers
            if one is not None and (shut or one.open_rounds):
                violation = one.round_ended(shut)
                if violation is not None:
                    guard._standing.hold(violation)

    def _judge(
        self, held: CallBreakers, result: object, error: BaseException | str | None
    ) -> tuple[CallOutcome, ...]:
        if not held.circuits:
            return ()
        try:
            return tuple([breaker.config.outcome_of(result, error) for breaker, _ in held.circuits])
        except Exception as raised:
            self._tree.report("record_result", raised)
            success: CallOutcome = "success"
            return (success,) * len(held.circuits)
