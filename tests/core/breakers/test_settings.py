"""What every breaker's settings have in common."""

from __future__ import annotations

import inspect
from decimal import Decimal

import pytest

from budgetguard_core.breakers import (
    BulkheadConfig,
    CircuitBreakerConfig,
    ProgressReports,
    RateLimit,
    ToolMix,
    ToolMixBaseline,
    VelocityLimits,
)
from budgetguard_core.errors import ConfigurationError

BASELINE = ToolMixBaseline(runs=1, tools={"search": 1})
ALL = [
    (ProgressReports, {"every_iterations": 4, "same_subgoal": 5, "flat_estimate": 6}),
    (
        VelocityLimits,
        {"max_cost_usd_per_minute": 0.3, "max_tool_calls_per_minute": 7, "throttle_at": 0.5},
    ),
    (VelocityLimits, {"max_cost_usd_per_minute": None, "max_tokens_per_minute": None}),
    (ToolMix, {"baseline": BASELINE, "alpha": 0.01}),
    (RateLimit, {"rate": 2, "burst": 3, "max_wait_duration": 0}),
    (BulkheadConfig, {"max_concurrent_calls": 2, "max_wait_duration": 1.5}),
    (
        CircuitBreakerConfig,
        {
            "sliding_window_size": 5,
            "record_exceptions": (TimeoutError, "*Limit*"),
        },
    ),
]


@pytest.mark.parametrize(("kind", "fields"), ALL, ids=range(len(ALL)))
def test_settings_can_be_written_as_json_and_read_again(kind, fields):
    one = kind(**fields)
    data = one.model_dump(mode="json", exclude={"record_result"})
    if data.get("max_cost_usd_per_minute") is not None:
        data["max_cost_usd_per_minute"] = Decimal(data["max_cost_usd_per_minute"])
    assert kind(**data) == one


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, _ in ALL))
def test_settings_are_given_by_name(kind):
    parameters = inspect.signature(kind).parameters.values()
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    assert {parameter.name for parameter in parameters} == set(kind.model_fields)


def test_exceptions_are_kept_as_names_and_dollars_are_what_they_look_like():
    assert CircuitBreakerConfig(record_exceptions=(TimeoutError,)).record_exceptions == (
        "TimeoutError",
    )
    assert VelocityLimits(max_cost_usd_per_minute=0.3).max_cost_usd_per_minute == Decimal("0.3")


def test_a_long_value_is_shown_short_and_every_problem_has_a_sentence():
    with pytest.raises(ConfigurationError) as caught:
        RateLimit(rate="x" * 1000, burst=0)
    first, second = str(caught.value).splitlines()
    assert len(first) < 250
    assert second.startswith("burst must be a whole number >= 1, got 0.")
