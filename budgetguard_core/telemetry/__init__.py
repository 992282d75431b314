"""Observation of runs: OpenTelemetry, and a log of every run without code.

`OpenTelemetrySink` needs the extra `otel`; nothing else here does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from budgetguard_core.run_log import RunLog

if TYPE_CHECKING:
    from budgetguard_core.telemetry.opentelemetry_sink import OpenTelemetrySink

__all__ = ["OpenTelemetrySink", "RunLog"]


def __getattr__(name: str) -> Any:
    # Only when it is asked for: OpenTelemetry is an extra.
    if name != "OpenTelemetrySink":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from budgetguard_core.telemetry.opentelemetry_sink import OpenTelemetrySink
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise ModuleNotFoundError(
            "OpenTelemetry must be installed for OpenTelemetrySink, found none. "
            'Install BudgetGuard with its extra, from a checkout: pip install ".[otel]"',
            name=error.name,
        ) from None
    return OpenTelemetrySink
