"""What breakers hold for one call that was admitted."""

from __future__ import annotations

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
        start_ns: When the call may start; moved on when its body is seen to begin.
        booked_ns: The time under which it is entered in the velocity.
    """

    __slots__ = ("_circuits", "_limiters", "_places", "booked_ns", "start_ns")

    def __init__(self, start_ns: int) -> None:
        self.start_ns = start_ns
        self.booked_ns = start_ns
        self._circuits: list[tuple[CircuitBreaker, int]] = []
        self._limiters: list[RateLimiter] = []
        # The place, and whether the call waits for it: under an advisory run it does not.
        self._places: list[tuple[Bulkhead, Place, bool]] = []

    def put_off(self, start_ns: int) -> None:
        """Let the call start no sooner than this."""
        self.start_ns = max(self.start_ns, start_ns)

    def book(self, at_ns: int) -> None:
        """Note the time under which the call is entered in the velocity."""
        self.booked_ns = at_ns

    def ask_circuit(
        self, breaker: CircuitBreaker, now: int
    ) -> tuple[bool, tuple[StateTransition, ...]]:
        """Ask a circuit breaker, once; tell whether it permits the call."""
        if self._circuits and any(breaker is one for one, _ in self._circuits):
            return True, ()
        answer = breaker.try_acquire_permission(now)
        if answer.permitted:
            self._circuits.append((breaker, answer.generation))
        return answer.permitted, answer.transitions

    def ask_limiter(self, limiter: RateLimiter, now: int, waits: bool) -> float | None:
        """Take a token, once; None, or the seconds after which there is one."""
        if self._limiters and any(limiter is one for one in self._limiters):
            return None
        turn = limiter.acquire(now)
        if not turn.admitted:
            return turn.seconds
        self._limiters.append(limiter)
        if waits:
            self.put_off(now + turn.wait_ns)
        return None

    def ask_bulkhead(self, bulkhead: Bulkhead, now: int, waits: bool) -> bool:
        """Take a place, or one in the queue, once; tell whether there is one."""
        if self._places and any(bulkhead is one for one, _, _ in self._places):
            return True
        place = bulkhead.acquire(now)
        if place is not None:
            self._places.append((bulkhead, place, waits))
        return place is not None

    @property
    def queued(self) -> Place | None:
        """The first place that the call still waits for."""
        return next(
            (place for _, place, waits in self._places if waits and not place.granted), None
        )

    def outcomes(self, result: object, error: BaseException | str | None) -> list[CallOutcome]:
        """Say what the call is to each circuit breaker; the user's code runs in it."""
        return [breaker.config.outcome_of(result, error) for breaker, _ in self._circuits]

    def successes(self) -> list[CallOutcome]:
        """Say that the call is a success to each, where the user's code could not."""
        return ["success" for _ in self._circuits]

    def end(self, outcomes: list[CallOutcome], duration_ns: int, now: int) -> list[StateTransition]:
        """Tell the breakers how the call ended, and give its places back."""
        changes: list[StateTransition] = []
        for (breaker, generation), outcome in zip(self._circuits, outcomes, strict=False):
            if outcome == "ignored":
                breaker.release_permission(generation)
            else:
                record = breaker.on_error if outcome == "failure" else breaker.on_success
                changes += record(generation, duration_ns, now)
        self._leave()
        return changes

    def give_back(self) -> None:
        """Take everything back: the call did not start."""
        for breaker, generation in self._circuits:
            breaker.release_permission(generation)
        for limiter in self._limiters:
            limiter.release()
        self._leave()

    def _leave(self) -> None:
        for bulkhead, place, _ in self._places:
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
