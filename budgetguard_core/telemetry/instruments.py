"""The metrics: what each counts, and its unit."""

from __future__ import annotations

from opentelemetry.metrics import Meter

from budgetguard_core.telemetry import conventions as names


class Instruments:
    """The instruments of one meter.

    Those of `gen_ai` are the conventions' own. Of the others, what is counted is in the unit.
    """

    def __init__(self, meter: Meter) -> None:
        self.tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Number of input and output tokens used.",
            explicit_bucket_boundaries_advisory=names.TOKEN_BUCKETS,
        )
        self.duration = meter.create_histogram(
            "gen_ai.client.operation.duration",
            unit="s",
            description="GenAI operation duration.",
            explicit_bucket_boundaries_advisory=names.DURATION_BUCKETS,
        )
        self.checks = meter.create_counter(
            "budgetguard.checks", unit="{check}", description="Calls that asked to start."
        )
        self.refusals = meter.create_counter(
            "budgetguard.refusals",
            unit="{call}",
            description="Calls that were refused, by the limit that stood against them.",
        )
        self.trips = meter.create_counter(
            "budgetguard.trips",
            unit="{trip}",
            description="Runs that a limit stopped, or would have stopped where it is observed.",
        )
        self.warnings = meter.create_counter(
            "budgetguard.warnings",
            unit="{warning}",
            description="Caps and context windows that reached their warning share.",
        )
        self.spend = meter.create_counter(
            "budgetguard.spend", unit="USD", description="What model calls cost."
        )
        self.unpriced = meter.create_counter(
            "budgetguard.unpriced_calls",
            unit="{call}",
            description="Model calls of unknown price; they are not in the spend.",
        )
        self.reservations = meter.create_up_down_counter(
            "budgetguard.reservations",
            unit="{token}",
            description="Tokens that are projected for model calls in flight.",
        )
        self.time_to_trip = meter.create_histogram(
            "budgetguard.time_to_trip",
            unit="s",
            description="Seconds from the start of a run to its stop.",
            explicit_bucket_boundaries_advisory=names.RUN_BUCKETS,
        )
        self.runs = meter.create_counter(
            "budgetguard.runs", unit="{run}", description="Runs that ended, by how they did."
        )
        self.breakers = meter.create_gauge(
            "budgetguard.circuit_breaker.state",
            unit="{state}",
            description="0: closed. 1: half-open. 2: open.",
        )
