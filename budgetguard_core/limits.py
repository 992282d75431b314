"""Violations in words: everything that holds against the next step of a run."""

from __future__ import annotations

from decimal import Decimal

from budgetguard_core.caps import Quota
from budgetguard_core.meter import Meter
from budgetguard_core.pricing import to_usd
from budgetguard_core.stop import PRECEDENCE, StopReason, Violation


def due_warnings(meter: Meter, now: int) -> list[Violation]:
    """List the dimensions that have reached their warning share and have not been warned of."""
    caps = meter.caps
    use = (
        (StopReason.MAX_ITERATIONS, meter.iterations, caps.iterations),
        (StopReason.MAX_MODEL_CALLS, meter.model_calls, caps.model_calls),
        (StopReason.MAX_TOOL_CALLS, meter.tool_calls, caps.tool_calls),
        (StopReason.MAX_TOTAL_TOKENS, meter.tokens, caps.tokens),
        (StopReason.MAX_SECONDS, meter.elapsed(now), caps.nanoseconds),
        (StopReason.MAX_COST_USD, meter.cost, caps.cost),
    )
    share = caps.budget.warn_at
    return [
        reached(dimension, meter, now)
        for dimension, used, cap in use
        if dimension not in meter.warned and used >= cap * share
    ]


def foreseen_warnings(meter: Meter, now: int, tokens: int, cost: int) -> list[Violation]:
    """List the caps that only the projection of a call would pass, and nobody was warned of."""
    caps = meter.caps
    use = (
        (StopReason.MAX_TOTAL_TOKENS, meter.tokens, meter.reserved_tokens + tokens, caps.tokens),
        (StopReason.MAX_COST_USD, meter.cost, meter.reserved_cost + cost, caps.cost),
    )
    return [
        reached(dimension, meter, now)
        for dimension, used, projected, cap in use
        if dimension not in meter.warned and used < cap < used + projected
    ]


def model_call_violations(
    meter: Meter, now: int, retry: bool, tokens: int, cost: int
) -> list[Violation]:
    """List every cap that holds against one more model call."""
    caps = meter.caps
    found = tool_call_violations(meter, now)
    held = {violation.reason for violation in found}
    if not retry and meter.iterations >= caps.iterations:
        found.append(reached(StopReason.MAX_ITERATIONS, meter, now))
    if meter.model_calls >= caps.model_calls:
        found.append(reached(StopReason.MAX_MODEL_CALLS, meter, now))
    if StopReason.MAX_COST_USD not in held and meter.cost + meter.reserved_cost + cost > caps.cost:
        dollars = to_usd(meter.reserved_cost + cost)
        found.append(_projected(StopReason.MAX_COST_USD, meter, now, dollars))
    if (
        StopReason.MAX_TOTAL_TOKENS not in held
        and meter.tokens + meter.reserved_tokens + tokens > caps.tokens
    ):
        projected = meter.reserved_tokens + tokens
        found.append(_projected(StopReason.MAX_TOTAL_TOKENS, meter, now, projected))
    if meter.tool_calls > caps.tool_calls:
        # Hosted tools are counted when the provider reports them, so they can pass the cap.
        found.append(reached(StopReason.MAX_TOOL_CALLS, meter, now))
    return in_order(found)


def tool_call_violations(meter: Meter, now: int) -> list[Violation]:
    """List every cap that holds against any tool call, but for the number of calls."""
    caps = meter.caps
    found: list[Violation] = []
    if meter.elapsed(now) >= caps.nanoseconds:
        found.append(reached(StopReason.MAX_SECONDS, meter, now))
    if meter.cost >= caps.cost:
        found.append(reached(StopReason.MAX_COST_USD, meter, now))
    if meter.tokens >= caps.tokens:
        found.append(reached(StopReason.MAX_TOTAL_TOKENS, meter, now))
    return found


def reached(reason: StopReason, meter: Meter, now: int) -> Violation:
    """Describe a cap with what was used of it."""
    used = _used(reason, meter, now)
    limit = getattr(meter.caps.budget, reason.value)
    detail = f"{reason}={limit} reached: {used} used{_held_back(reason, meter)}"
    return Violation(reason=reason, limit=limit, used=used, detail=detail)


def quota_passed(quota: Quota) -> Violation:
    """Describe a quota that a hosted tool has passed."""
    return Violation(
        reason=StopReason.TOOL_QUOTA,
        limit=quota.limit,
        used=quota.used,
        detail=f"tool_quotas[{quota.pattern!r}]={quota.limit} passed: {quota.used} used",
    )


def unpriced_model(model: str | None, cap: str = "max_cost_usd") -> Violation:
    """Describe a model without a known price, where dollars are capped."""
    return Violation(
        reason=StopReason.UNPRICED_MODEL,
        detail=f"no price is known for model {model!r} and {cap} is set",
    )


def unmetered_usage() -> Violation:
    """Describe a call that nothing can be charged for, where tokens or dollars are capped."""
    return Violation(
        reason=StopReason.UNMETERED_USAGE,
        detail="a model call reported no usage and had no estimate; it cannot be charged",
    )


def cut_answer(reason: StopReason, bound: int) -> Violation:
    """Describe an answer that the run's completion bound has cut short."""
    return Violation(
        reason=reason,
        limit=bound if reason is StopReason.MAX_OUTPUT_TOKENS_PER_CALL else None,
        used=bound if reason is StopReason.MAX_OUTPUT_TOKENS_PER_CALL else None,
        detail=f"an answer was cut short at its bound of {bound} tokens, set for {reason}",
    )


def in_order(violations: list[Violation]) -> list[Violation]:
    """Sort violations as the contract orders reasons; equal ones keep their order."""
    return sorted(violations, key=lambda violation: PRECEDENCE[violation.reason])


def _projected(reason: StopReason, meter: Meter, now: int, projected: object) -> Violation:
    used = _used(reason, meter, now)
    limit = getattr(meter.caps.budget, reason.value)
    return Violation(
        reason=reason,
        limit=limit,
        used=used,
        detail=f"{reason}={limit} would be passed: {used} used, {projected} projected"
        f"{_held_back(reason, meter)}",
    )


def _held_back(reason: StopReason, meter: Meter) -> str:
    reserve = meter.caps.budget.finalize_reserve
    amount = None if reserve is None else reserve.of_caps().get(reason.value)
    return "" if amount is None else f", {amount} kept back for a last answer"


def _used(reason: StopReason, meter: Meter, now: int) -> float | Decimal:
    if reason is StopReason.MAX_SECONDS:
        return meter.elapsed(now) / 1_000_000_000
    if reason is StopReason.MAX_COST_USD:
        return to_usd(meter.cost)
    if reason is StopReason.MAX_TOTAL_TOKENS:
        return meter.tokens
    if reason is StopReason.MAX_ITERATIONS:
        return meter.iterations
    if reason is StopReason.MAX_MODEL_CALLS:
        return meter.model_calls
    return meter.tool_calls
