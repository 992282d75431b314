"""Breakers: what sees that nothing moves, or moves too fast, while it happens.

All are deterministic state machines at constant memory. They wait for nothing, read no clock (the
time is passed in, as nanoseconds of a monotonic clock) and know no guard and no framework.
"""

from budgetguard_core.breakers.progress import (
    REPORT_PROGRESS,
    REPORT_PROGRESS_DESCRIPTION,
    REPORT_PROGRESS_SCHEMA,
)
from budgetguard_core.breakers.registry import BreakerRegistry
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
    "BulkheadConfig",
    "CircuitBreakerConfig",
    "ProgressReports",
    "RateLimit",
    "ToolMix",
    "ToolMixBaseline",
    "VelocityLimits",
]
