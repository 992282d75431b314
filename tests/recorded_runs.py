"""Breakers at their README's starting values, on recorded runs that are lived through again."""

from __future__ import annotations

from collections import Counter

from budgetguard_core.breakers import (
    BulkheadConfig,
    CircuitBreakerConfig,
    RateLimit,
    VelocityLimits,
)
from budgetguard_core.replay import Replay
from budgetguard_core.tree import as_sink

VELOCITY = VelocityLimits(
    max_tokens_per_minute=1_000_000, max_cost_usd_per_minute=10, max_tool_calls_per_minute=120
)
CIRCUIT = CircuitBreakerConfig(
    sliding_window_size=10,
    minimum_number_of_calls=5,
    permitted_number_of_calls_in_half_open_state=2,
    slow_call_duration_threshold=30,
)
STARTING_VALUES = {
    "velocity": {"velocity": VELOCITY},
    "rate limits": {"rate_limits": {"*": RateLimit(rate=2, burst=10, max_wait_duration=10)}},
    "bulkheads": {"bulkheads": {"*": BulkheadConfig(max_concurrent_calls=10)}},
    "circuit breaker": {"circuit_breaker": CIRCUIT},
}
# The recordings have no times. A model that answers in a second is faster than any of theirs.
SECONDS_PER_MODEL_CALL = 1


def tools(run):
    return Counter(
        call.name for step in run.steps if step.role == "assistant" for call in step.tool_calls
    )


def judged(run, budget, prices):
    """Live a run again under a budget: its trip, and the kinds of events that this made."""
    told = Counter()
    replay = Replay(budget, price_book=prices)
    now = 0
    for event in run.events(budget, prices):
        if event.event == "model_call_settled":
            now += SECONDS_PER_MODEL_CALL * 1_000_000_000
        replay.apply(event.model_copy(update={"at_ns": now}))
        # A replay has no sinks of its own.
        replay.root.tree.sinks = (as_sink(lambda made: told.update([type(made)])),)
    return replay.end().trip, told
