"""The breakers of one run, as its guard asks them. The guard's lock is their lock.

The functions below the class take the breakers of a whole line, the asking run's first, as those
of `meter` take its meters: all of them are asked, then all are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, cast

from budgetguard_core.breakers import (
    BreakerRegistry,
    Bulkhead,
    CircuitBreaker,
    ProgressSignal,
    RateLimiter,
    ToolMixAlarm,
    VelocityMeter,
)
from budgetguard_core.breakers.call import CallBreakers, TurnedAway, turned_away
from budgetguard_core.breakers.velocity import FARTHEST_NS
from budgetguard_core.budget import BREAKERS, Budget
from budgetguard_core.stop import StopReason, Violation

_NAMES_KEPT = 1024

_Tool: TypeAlias = tuple[
    CircuitBreaker | None,
    tuple[tuple[str, RateLimiter], ...],
    tuple[tuple[str, Bulkhead], ...],
]


class RunBreakers:
    """What one run's budget has breakers for, and what they know.

    Attributes:
        enforced: False in OBSERVE, where nothing is delayed or turned away.
        gates: Whether tools have circuit breakers, rate limits or bulkheads.
        progress: What the model says of its work. None in OBSERVE as well: to ask for it would
            change the run.
        open_rounds: Rounds in a row in which every tool call met an open circuit breaker.
        velocity: The pace of the last minute.
        mix: The tools of the run.
    """

    __slots__ = (
        "_budget",
        "_registry",
        "_tools",
        "enforced",
        "gates",
        "mix",
        "open_rounds",
        "progress",
        "velocity",
    )

    def __init__(self, budget: Budget, enforced: bool, registry: BreakerRegistry) -> None:
        self._budget = budget
        self._registry = registry
        self.enforced = enforced
        self.gates = bool(budget.circuit_breaker or budget.rate_limits or budget.bulkheads)
        self.begin()

    @classmethod
    def of(
        cls, budget: Budget, enforced: bool, registry: Callable[[], BreakerRegistry]
    ) -> RunBreakers | None:
        """Return the breakers of a run; None where its budget has none."""
        if any(getattr(budget, name) for name in BREAKERS):
            return cls(budget, enforced, registry())
        return None

    def begin(self) -> None:
        """Put what is this run's own to its beginning. What it shares with others goes on."""
        budget = self._budget
        asks = budget.progress is not None and self.enforced
        self.progress = ProgressSignal(budget.progress) if asks and budget.progress else None
        self.velocity = None if budget.velocity is None else VelocityMeter(budget.velocity)
        self.mix = None if budget.tool_mix is None else ToolMixAlarm(budget.tool_mix)
        self.open_rounds = 0
        self._tools: dict[str, _Tool] = {}

    @property
    def tripped(self) -> bool:
        """Whether the run is to be stopped for its want of progress."""
        return self.progress is not None and self.progress.tripped

    @property
    def due(self) -> bool:
        """Whether the model is to be asked for a report, or corrected after one."""
        return self.progress is not None and self.progress.due

    def round_ended(self, shut: bool) -> Violation | None:
        """Take in a round of tool calls.

        Args:
            shut: Every call in it met an open circuit breaker.

        Returns:
            Why the run is to be stopped, where that was one round too many.
        """
        config = self._budget.circuit_breaker
        if config is None:
            return None
        if not shut:
            self.open_rounds = 0
            return None
        self.open_rounds += 1
        most = config.stop_after_open_rounds
        if self.open_rounds < most:
            return None
        return Violation(
            reason=StopReason.CIRCUIT_OPEN,
            limit=most,
            used=self.open_rounds,
            detail=(
                f"every tool call of {self.open_rounds} rounds in a row met an open circuit "
                f"breaker, stop_after_open_rounds={most}"
            ),
        )

    def turn_away(self, held: CallBreakers, name: str, now: int, others: bool) -> TurnedAway | None:
        """Ask everything that one tool has to pass, and take a place in it.

        Args:
            held: What is taken for the call, and what asking changes.
            name: The tool's name.
            now: The time.
            others: Breakers of another run of the line were asked for this call: what both share
                is asked once.

        Returns:
            Why the call may not start, or None.
        """
        breaker, limiters, bulkheads = self._tools.get(name) or self._look_up(name, now)
        if breaker is not None and not (others and any(breaker is one for one, _ in held.circuits)):
            permitted, generation, _, changes = breaker.try_acquire_permission(now)
            if changes:
                held.changes += changes
            if not permitted:
                detail = f"the circuit breaker of {name[:200]!r} is {breaker.circuit_state(now)}"
                after = breaker.retry_after(now)
                held.shut = True
                return turned_away("tool_unavailable", name, detail, after)
            held.circuits += ((breaker, generation),)
        for pattern, limiter in limiters:
            if others and any(limiter is one for one in held.limiters):
                continue
            admitted, wait_ns = turn = limiter.acquire(now)
            if not admitted:
                rate = limiter.limit.rate
                detail = f"rate_limits[{pattern!r}]: {rate:g} calls a second are passed"
                return turned_away("rate_limited", name, detail, turn.seconds)
            held.limiters += (limiter,)
            if wait_ns and self.enforced:
                held.put_off(now + wait_ns)
        for pattern, bulkhead in bulkheads:
            if others and any(bulkhead is one for one, _, _ in held.places):
                continue
            place = bulkhead.acquire(now)
            if place is None:
                most = bulkhead.config.max_concurrent_calls
                detail = f"bulkheads[{pattern!r}]: {most} calls are running"
                return turned_away("busy", name, detail, None)
            held.places += ((bulkhead, place, self.enforced),)
        return None

    def _look_up(self, name: str, now: int) -> _Tool:
        """Find what a tool has to pass."""
        budget, registry = self._budget, self._registry
        classes = budget.tool_classes.items()
        tool_class = next((one for pattern, one in classes if fnmatchcase(name, pattern)), "")
        names = (name, f"{tool_class}/{name}")
        config = budget.circuit_breaker
        tool = (
            None if config is None else registry.circuit_breaker(name, config, now),
            tuple(
                (pattern, registry.rate_limiter(pattern, limit, now))
                for pattern, limit in budget.rate_limits.items()
                if any(fnmatchcase(one, pattern) for one in names)
            ),
            tuple(
                (pattern, registry.bulkhead(pattern, bulkhead))
                for pattern, bulkhead in budget.bulkheads.items()
                if any(fnmatchcase(one, pattern) for one in names)
            ),
        )
        # Names come from the model: what is kept must not grow with what it invents.
        if len(self._tools) < _NAMES_KEPT:
            self._tools[name] = tool
        return tool

    def state(self, now: int) -> dict[str, Any]:
        """Return what the breakers know, ready for JSON."""
        progress, velocity, mix = self.progress, self.velocity, self.mix
        return {
            "progress": None if progress is None else progress.state(),
            "velocity": None if velocity is None else velocity.state(now),
            "tool_mix": None if mix is None else mix.state(),
            "open_rounds": self.open_rounds,
            "shared": self._registry.state(now),
        }

    def go_on_from(self, state: object, now: int) -> None:
        """Go on where the breakers were whose `state` this is.

        Raises:
            ValueError: The state is damaged.
            KeyError: Likewise.
            TypeError: Likewise.
        """
        data = cast("dict[str, Any]", state)
        budget = self._budget
        if self.progress is not None and data["progress"] is not None:
            settings = self.progress.settings
            self.progress = ProgressSignal.from_state(settings, data["progress"])
        if self.velocity is not None and data["velocity"] is not None:
            limits = self.velocity.limits
            self.velocity = VelocityMeter.from_state(limits, data["velocity"], now)
        if self.mix is not None and data["tool_mix"] is not None:
            self.mix = ToolMixAlarm.from_state(self.mix.settings, data["tool_mix"])
        self.open_rounds = int(data["open_rounds"])
        self._registry.restore(
            data["shared"],
            now,
            circuit_breaker=budget.circuit_breaker,
            rate_limits=budget.rate_limits,
        )
        self._tools.clear()


BreakerLine: TypeAlias = Sequence[RunBreakers]
"""The breakers that a step is asked of: the asking run's first, then those above it."""


def pace_of_model_call(paced: BreakerLine, now: int) -> tuple[bool, int]:
    """Tell whether no ceiling holds against a model call, and when it may start."""
    fits, start = True, now
    for one in paced:
        velocity = one.velocity
        if velocity is not None and now >= velocity.calm_ns:
            begin = velocity.start_of_model_call(now)
            # Below the band no ceiling is reached.
            if begin > now:
                fits = fits and velocity.model_call_fits(now)
                if one.enforced and begin > start:
                    start = begin
    return fits, start


def pace_of_tool_call(paced: BreakerLine, now: int) -> tuple[bool, int]:
    """Tell whether no ceiling holds against a tool call, and when it may start."""
    fits, start = True, now
    for one in paced:
        velocity = one.velocity
        if velocity is not None and now >= velocity.calm_ns:
            begin = velocity.start_of_tool_call(now)
            if begin > now:
                fits = fits and velocity.tool_call_fits(now)
                if one.enforced and begin > start:
                    start = begin
    return fits, start


def hold_model_call(paced: BreakerLine, start: int, tokens: int, cost: int) -> CallBreakers:
    """Enter a model call that is admitted."""
    if tokens or cost:
        for one in paced:
            if one.velocity is not None:
                one.velocity.book_model_call(start, tokens, cost)
    return CallBreakers(start)


def correct_model_call(
    line: BreakerLine, held: CallBreakers, now: int, tokens: int, cost: int
) -> None:
    """Correct a model call that has ended, by what it used more or less than was set aside."""
    for one in line:
        if one.velocity is not None:
            one.velocity.correct_model_call(held.booked_ns, now, tokens, cost)


def hold_tool_call(line: BreakerLine, name: str, now: int, start: int) -> CallBreakers:
    """Ask for a tool call, and enter it where it is admitted.

    Args:
        line: The breakers.
        name: The tool's name.
        now: The time.
        start: When it may start, as far as the pace goes.

    Returns:
        What is held for it; nothing where it is turned away.
    """
    held = CallBreakers(now)
    others = False
    for one in line:
        if one.gates:
            away = one.turn_away(held, name, now, others)
            others = True
            if away is not None and one.enforced:
                held.give_back()
                held.away = away
                return held
    if held.start_ns > start:
        start = held.start_ns
    if start > now:
        # A rate limit may hold it longer than a meter is kept ahead.
        held.book(start, min(start, now + FARTHEST_NS))
    for one in line:
        if one.velocity is not None:
            one.velocity.book_tool_call(held.booked_ns)
    return held


def withdraw_tool_call(line: BreakerLine, held: CallBreakers, now: int) -> None:
    """Take back a tool call that did not start."""
    held.give_back()
    for one in line:
        if one.velocity is not None:
            one.velocity.withdraw_tool_call(held.booked_ns, now)
