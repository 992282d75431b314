"""The built-in predicates: does the next step fit, and if not, everything that holds against it."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

from budgetguard_core.budget import Budget
from budgetguard_core.pricing import from_usd, to_usd
from budgetguard_core.stop import PRECEDENCE, StopReason, Violation
from budgetguard_core.usage import Counters

INFINITY = math.inf
"""The cap of a dimension without a cap."""

_MATCHES_KEPT = 1024


class Caps:
    """A budget compiled for comparison: whole numbers, infinity where there is no cap."""

    __slots__ = (
        "_classes",
        "_matches",
        "budget",
        "cost",
        "iterations",
        "model_calls",
        "nanoseconds",
        "output_tokens",
        "quotas",
        "refuses_unpriced",
        "tokens",
        "tool_calls",
    )

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.iterations = _or_infinity(budget.max_iterations)
        self.model_calls = _or_infinity(budget.max_model_calls)
        self.tool_calls = _or_infinity(budget.max_tool_calls)
        self.tokens = _or_infinity(budget.max_total_tokens)
        self.output_tokens = budget.max_output_tokens_per_call
        self.nanoseconds = (
            INFINITY if budget.max_seconds is None else int(budget.max_seconds * 1_000_000_000)
        )
        self.cost = INFINITY if budget.max_cost_usd is None else from_usd(budget.max_cost_usd)
        self.refuses_unpriced = budget.max_cost_usd is not None and budget.on_unpriced == "stop"
        self.quotas = dict(budget.tool_quotas)
        self._classes = dict(budget.tool_classes)
        self._matches: dict[str, tuple[str, ...]] = {}

    def quotas_of(self, name: str) -> tuple[str, ...]:
        """Return the quota patterns that a tool has to pass."""
        if not self.quotas:
            return ()
        matches = self._matches.get(name)
        if matches is None:
            names = (name, f"{self.class_of(name)}/{name}")
            matches = tuple(
                pattern
                for pattern in self.quotas
                if any(fnmatchcase(candidate, pattern) for candidate in names)
            )
            # Names come from the model: the memo must not grow with what it invents.
            if len(self._matches) >= _MATCHES_KEPT:
                self._matches.clear()
            self._matches[name] = matches
        return matches

    def class_of(self, name: str) -> str:
        """Return the tool's class, or an empty string."""
        for pattern, tool_class in self._classes.items():
            if fnmatchcase(name, pattern):
                return tool_class
        return ""


class Alarms:
    """The use at which each dimension's warning is due; infinity once it was given."""

    __slots__ = ("cost", "iterations", "model_calls", "nanoseconds", "tokens", "tool_calls")

    def __init__(self, caps: Caps, given: frozenset[str]) -> None:
        share = caps.budget.warn_at

        def due(dimension: str, cap: float) -> float:
            return INFINITY if dimension in given or cap == INFINITY else cap * share

        self.iterations = due("max_iterations", caps.iterations)
        self.model_calls = due("max_model_calls", caps.model_calls)
        self.tool_calls = due("max_tool_calls", caps.tool_calls)
        self.tokens = due("max_total_tokens", caps.tokens)
        self.nanoseconds = due("max_seconds", caps.nanoseconds)
        self.cost = due("max_cost_usd", caps.cost)


def alarm_is_due(counters: Counters, alarms: Alarms, elapsed_ns: int) -> bool:
    """Tell whether any dimension has reached its warning; the hot path asks only this."""
    return (
        counters.iterations >= alarms.iterations
        or counters.model_calls >= alarms.model_calls
        or counters.tool_calls >= alarms.tool_calls
        or counters.tokens >= alarms.tokens
        or counters.cost >= alarms.cost
        or elapsed_ns >= alarms.nanoseconds
    )


def due_alarms(
    counters: Counters, alarms: Alarms, caps: Caps, elapsed_ns: int
) -> list[tuple[str, Violation]]:
    """List each dimension whose warning is due, with its limit and its use."""
    every = {
        "max_iterations": (counters.iterations, alarms.iterations),
        "max_model_calls": (counters.model_calls, alarms.model_calls),
        "max_tool_calls": (counters.tool_calls, alarms.tool_calls),
        "max_total_tokens": (counters.tokens, alarms.tokens),
        "max_seconds": (elapsed_ns, alarms.nanoseconds),
        "max_cost_usd": (counters.cost, alarms.cost),
    }
    return [
        (dimension, reached(StopReason(dimension), counters, caps, elapsed_ns))
        for dimension, (used, alarm) in every.items()
        if used >= alarm
    ]


def model_call_fits(
    counters: Counters, caps: Caps, elapsed_ns: int, retry: bool, tokens: int, cost: int
) -> bool:
    """Tell whether one more model call is within every cap.

    Equal to `not model_call_violations(...)`; kept beside it because each step pays for it.
    """
    return (
        (retry or counters.iterations < caps.iterations)
        and counters.model_calls < caps.model_calls
        and elapsed_ns < caps.nanoseconds
        and counters.cost < caps.cost
        and counters.cost + counters.reserved_cost + cost <= caps.cost
        and counters.tokens < caps.tokens
        and counters.tokens + counters.reserved_tokens + tokens <= caps.tokens
        and counters.tool_calls <= caps.tool_calls
    )


def model_call_violations(
    counters: Counters, caps: Caps, elapsed_ns: int, retry: bool, tokens: int, cost: int
) -> list[Violation]:
    """List every cap that holds against one more model call."""
    found = tool_call_violations(counters, caps, elapsed_ns)
    held = {violation.reason for violation in found}
    if not retry and counters.iterations >= caps.iterations:
        found.append(reached(StopReason.MAX_ITERATIONS, counters, caps, elapsed_ns))
    if counters.model_calls >= caps.model_calls:
        found.append(reached(StopReason.MAX_MODEL_CALLS, counters, caps, elapsed_ns))
    if (
        StopReason.MAX_COST_USD not in held
        and counters.cost + counters.reserved_cost + cost > caps.cost
    ):
        projected = to_usd(counters.reserved_cost + cost)
        found.append(_projected(StopReason.MAX_COST_USD, counters, caps, elapsed_ns, projected))
    if (
        StopReason.MAX_TOTAL_TOKENS not in held
        and counters.tokens + counters.reserved_tokens + tokens > caps.tokens
    ):
        projected = counters.reserved_tokens + tokens
        found.append(_projected(StopReason.MAX_TOTAL_TOKENS, counters, caps, elapsed_ns, projected))
    if counters.tool_calls > caps.tool_calls:
        # Hosted tools are counted when the provider reports them, so they can pass the cap.
        found.append(reached(StopReason.MAX_TOOL_CALLS, counters, caps, elapsed_ns))
    return in_order(found)


def tool_calls_fit(counters: Counters, caps: Caps, elapsed_ns: int) -> bool:
    """Tell whether a batch of tool calls may start at all; each call's place is asked for later."""
    return (
        elapsed_ns < caps.nanoseconds
        and counters.cost < caps.cost
        and counters.tokens < caps.tokens
    )


def tool_call_violations(counters: Counters, caps: Caps, elapsed_ns: int) -> list[Violation]:
    """List every cap that holds against any tool call, but for the number of calls."""
    found: list[Violation] = []
    if elapsed_ns >= caps.nanoseconds:
        found.append(reached(StopReason.MAX_SECONDS, counters, caps, elapsed_ns))
    if counters.cost >= caps.cost:
        found.append(reached(StopReason.MAX_COST_USD, counters, caps, elapsed_ns))
    if counters.tokens >= caps.tokens:
        found.append(reached(StopReason.MAX_TOTAL_TOKENS, counters, caps, elapsed_ns))
    return found


def reached(reason: StopReason, counters: Counters, caps: Caps, elapsed_ns: int) -> Violation:
    """Describe a cap with what was used of it."""
    used = _used(reason, counters, elapsed_ns)
    limit = getattr(caps.budget, reason.value)
    return Violation(
        reason=reason, limit=limit, used=used, detail=f"{reason}={limit} reached: {used} used"
    )


def in_order(violations: list[Violation]) -> list[Violation]:
    """Sort violations as the contract orders reasons; equal ones keep their order."""
    return sorted(violations, key=lambda violation: PRECEDENCE[violation.reason])


def _projected(
    reason: StopReason, counters: Counters, caps: Caps, elapsed_ns: int, projected: object
) -> Violation:
    used = _used(reason, counters, elapsed_ns)
    limit = getattr(caps.budget, reason.value)
    return Violation(
        reason=reason,
        limit=limit,
        used=used,
        detail=f"{reason}={limit} would be passed: {used} used, {projected} projected",
    )


def _used(reason: StopReason, counters: Counters, elapsed_ns: int) -> object:
    if reason is StopReason.MAX_SECONDS:
        return elapsed_ns / 1_000_000_000
    if reason is StopReason.MAX_COST_USD:
        return to_usd(counters.cost)
    if reason is StopReason.MAX_TOTAL_TOKENS:
        return counters.tokens
    if reason is StopReason.MAX_ITERATIONS:
        return counters.iterations
    if reason is StopReason.MAX_MODEL_CALLS:
        return counters.model_calls
    return counters.tool_calls


def _or_infinity(cap: int | None) -> float:
    return INFINITY if cap is None else cap
