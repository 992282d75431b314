"""Breakers: what sees that nothing moves, or moves too fast, while it happens.

All are deterministic state machines at constant memory. They wait for nothing, read no clock (the
time is passed in, as nanoseconds of a monotonic clock) and know no guard and no framework.
"""

from budgetguard_core.breakers.bulkhead import Bulkhead, Place
from budgetguard_core.breakers.circuit_breaker import (
    CircuitBreaker,
    CircuitBreakerState,
    Permission,
    StateTransition,
)
from budgetguard_core.breakers.progress import (
    REPORT_PROGRESS,
    REPORT_PROGRESS_DESCRIPTION,
    REPORT_PROGRESS_SCHEMA,
    ProgressSignal,
)
from budgetguard_core.breakers.rate_limit import RateLimiter, Turn
from budgetguard_core.breakers.refusal import refusal
from budgetguard_core.breakers.registry import BreakerRegistry
from budgetguard_core.breakers.tool_mix import ToolMixAlarm, UnusualMix
from budgetguard_core.breakers.velocity import VelocityMeter
from budgetguard_core.settings import (
    BulkheadConfig,
    CircuitBreakerConfig,
    ProgressReports,
    RateLimit,
    ToolMix,
    ToolMixBaseline,
    VelocityLimits,
)

__all__ = [
    "REPORT_PROGRESS",
    "REPORT_PROGRESS_DESCRIPTION",
    "REPORT_PROGRESS_SCHEMA",
    "BreakerRegistry",
    "Bulkhead",
    "BulkheadConfig",
    "CircuitBreaker",
    "CircuitBreakerConfig",
    "CircuitBreakerState",
    "Permission",
    "Place",
    "ProgressReports",
    "ProgressSignal",
    "RateLimit",
    "RateLimiter",
    "StateTransition",
    "ToolMix",
    "ToolMixAlarm",
    "ToolMixBaseline",
    "Turn",
    "UnusualMix",
    "VelocityLimits",
    "VelocityMeter",
    "refusal",
]
