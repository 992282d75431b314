"""The built-in predicates: does the next step fit, and if not, everything that holds against it."""

from __future__ import annotations

import math
from collections.abc import Container
from decimal import Decimal
from fnmatch import fnmatchcase

from budgetguard_core.budget import Budget
from budgetguard_core.pricing import from_usd, to_usd
from budgetguard_core.stop import PRECEDENCE, StopReason, Violation
from budgetguard_core.usage import Counters

INFINITY = math.inf
"""The cap of a dimension without a cap."""


class Quota:
    """How many bodies of some tools may start, and how many did. Only `guard.py` writes it."""

    __slots__ = ("limit", "pattern", "used")

    def __init__(self, pattern: str, limit: int) -> None:
        self.pattern = pattern
        self.limit = limit
        self.used = 0


class Tool:
    """What a guard knows of one tool: its quotas, and how many of its bodies were started."""

    __slots__ = ("quotas", "started")

    def __init__(self, quotas: tuple[Quota, ...]) -> None:
        self.quotas = quotas
        self.started = 0


class Caps:
    """A budget compiled for comparison: whole numbers, infinity where there is no cap."""

    __slots__ = (
        "_classes",
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
        self.quotas = tuple(Quota(pattern, cap) for pattern, cap in budget.tool_quotas.items())
        self._classes = dict(budget.tool_classes)

    def quotas_of(self, name: str) -> tuple[Quota, ...]:
        """Return the quotas that a tool has to pass."""
        if not self.quotas:
            return ()
        names = (name, f"{self.class_of(name)}/{name}")
        return tuple(
            quota
            for quota in self.quotas
            if any(fnmatchcase(candidate, quota.pattern) for candidate in names)
        )

    def class_of(self, name: str) -> str:
        """Return the tool's class, or an empty string."""
        for pattern, tool_class in self._classes.items():
            if fnmatchcase(name, pattern):
                return tool_class
        return ""


class Marks:
    """The use from which a dimension is looked at closely: its warning share, then its cap.

    Below every mark a step needs no other check, so a step far from its caps pays for one.
    """

    __slots__ = ("cost", "iterations", "model_calls", "nanoseconds", "tokens", "tool_calls")

    def __init__(self, caps: Caps, warned: Container[str]) -> None:
        share = caps.budget.warn_at

        def mark(dimension: str, cap: float) -> float:
            return cap if dimension in warned else cap * share

        self.iterations = mark("max_iterations", caps.iterations)
        self.model_calls = mark("max_model_calls", caps.model_calls)
        self.tool_calls = mark("max_tool_calls", caps.tool_calls)
        self.tokens = mark("max_total_tokens", caps.tokens)
        self.nanoseconds = mark("max_seconds", caps.nanoseconds)
        self.cost = mark("max_cost_usd", caps.cost)


def due_warnings(
    counters: Counters, caps: Caps, warned: Container[str], elapsed_ns: int
) -> list[Violation]:
    """List the dimensions that have reached their warning share and have not been warned of."""
    use = (
        (StopReason.MAX_ITERATIONS, counters.iterations, caps.iterations),
        (StopReason.MAX_MODEL_CALLS, counters.model_calls, caps.model_calls),
        (StopReason.MAX_TOOL_CALLS, counters.tool_calls, caps.tool_calls),
        (StopReason.MAX_TOTAL_TOKENS, counters.tokens, caps.tokens),
        (StopReason.MAX_SECONDS, elapsed_ns, caps.nanoseconds),
        (StopReason.MAX_COST_USD, counters.cost, caps.cost),
    )
    share = caps.budget.warn_at
    return [
        reached(dimension, counters, caps, elapsed_ns)
        for dimension, used, cap in use
        if dimension not in warned and used >= cap * share
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
        dollars = to_usd(counters.reserved_cost + cost)
        found.append(_projected(StopReason.MAX_COST_USD, counters, caps, elapsed_ns, dollars))
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


def quota_passed(quota: Quota) -> Violation:
    """Describe a quota that a hosted tool has passed."""
    return Violation(
        reason=StopReason.TOOL_QUOTA,
        limit=quota.limit,
        used=quota.used,
        detail=f"tool_quotas[{quota.pattern!r}]={quota.limit} passed: {quota.used} used",
    )


def unpriced_model(model: str | None) -> Violation:
    """Describe a model without a known price, where dollars are capped."""
    return Violation(
        reason=StopReason.UNPRICED_MODEL,
        detail=f"no price is known for model {model!r} and max_cost_usd is set",
    )


def unmetered_usage() -> Violation:
    """Describe a call that nothing can be charged for, where tokens or dollars are capped."""
    return Violation(
        reason=StopReason.UNMETERED_USAGE,
        detail="a model call reported no usage and had no estimate; it cannot be charged",
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


def _used(reason: StopReason, counters: Counters, elapsed_ns: int) -> float | Decimal:
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
