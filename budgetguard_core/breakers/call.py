"""What breakers hold for one call that was admitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from budgetguard_core.breakers.bulkhead import Bulkhead, Place
from budgetguard_core.breakers.circuit_breaker import CallOutcome, CircuitBreaker, StateTransition
from budgetguard_core.breakers.rate_limit import RateLimiter
from budgetguard_core.breakers.refusal import RefusalKind, refusal
from budgetguard_core.stop import StopReason


class TurnedAway(NamedTuple):
    """A tool call that a breaker does not let start. The run goes on."""

    kind: RefusalKind
    reason: StopReason
    detail: str
    """One sentence for people."""
    message: str
    """The call's result, for the model."""


class CallBreakers:
    """What the breakers of a run, and of those around it, hold for one call.

    Attributes:
        away: Why it may not start; None where it may.
        changes: What asking for it has changed in circuit breakers.
        shut: It met an open circuit breaker, also where only an advisory run has it.
        start_ns: When the call may start; moved on when its body is seen to begin.
        booked_ns: The time under which it is entered in the velocity.
        circuits: The circuit breakers that permitted it, each with the generation of its answer.
        limiters: The rate limits that it has a token of.
        places: The bulkheads, its place in each, and whether it waits for that: under an advisory
            run it does not.
    """

    __slots__ = (
        "away",
        "booked_ns",
        "changes",
        "circuits",
        "limiters",
        "places",
        "shut",
        "start_ns",
    )

    def __init__(self, start_ns: int) -> None:
        self.away: TurnedAway | None = None
        self.booked_ns = start_ns
        self.changes: tuple[StateTransition, ...] = ()
        self.circuits: tuple[tuple[CircuitBreaker, int], ...] = ()
        self.limiters: tuple[RateLimiter, ...] = ()
        self.places: tuple[tuple[Bulkhead, Place, bool], ...] = ()
        self.shut = False
        self.start_ns = start_ns

    def put_off(self, start_ns: int) -> None:
        """Let the call start no sooner than this."""
        self.start_ns = max(self.start_ns, start_ns)

    def book(self, start_ns: int, booked_ns: int) -> None:
        """Say when the call may start, and under which time it is entered in the velocity."""
        self.start_ns, self.booked_ns = start_ns, booked_ns

    @property
    def queued(self) -> Place | None:
        """The first place that the call still waits for."""
        return next((place for _, place, waits in self.places if waits and not place.granted), None)

    def end(
        self, outcomes: Sequence[CallOutcome], duration_ns: int, now: int
    ) -> tuple[StateTransition, ...]:
        """Tell the breakers how the call ended, and give its places back."""
        changes: tuple[StateTransition, ...] = ()
        # Without `strict`, which would cost more than all the rest of it.
        for (breaker, generation), outcome in zip(self.circuits, outcomes):  # noqa: B905
            if outcome == "ignored":
                breaker.release_permission(generation)
            else:
                changes += breaker.record(generation, outcome == "failure", duration_ns, now)
        for bulkhead, place, _ in self.places:
            bulkhead.release(place)
        return changes

    def stand_by(self) -> None:
        """Let others have its places: it waits for a person, or its run was left.

        How long that takes tells nothing of the tool.
        """
        circuits, self.circuits = self.circuits, ()
        places, self.places = self.places, ()
        for breaker, generation in circuits:
            breaker.release_permission(generation)
        for bulkhead, place, _ in places:
            bulkhead.release(place)

    def give_back(self) -> None:
        """Take everything back: the call did not start."""
        for breaker, generation in self.circuits:
            breaker.release_permission(generation)
        for limiter in self.limiters:
            limiter.release()
        for bulkhead, place, _ in self.places:
            bulkhead.release(place)


def turned_away(kind: RefusalKind, tool: str, detail: str, after: float | None) -> TurnedAway:
    """Say that a call may not start.

    Args:
        kind: Why.
        tool: The tool's name, as the model wrote it.
        detail: One sentence for people.
        after: Seconds after which it can be made again; None if that is not known.
    """
    reason = StopReason.CIRCUIT_OPEN if kind == "tool_unavailable" else StopReason.VELOCITY
    return TurnedAway(kind, reason, detail, refusal(kind, tool, after))
