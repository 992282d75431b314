"""The metrics: what each counts, and its unit."""

from __future__ import annotations

from opentelemetry.metrics import Counter, Meter

from budgetguard_core.telemetry import conventions as names


class Instruments:
    """The instruments of one meter.

    Those of `gen_ai` are the conventions' own. Of the others, what is counted is in the unit.
    """

    def __init__(self, meter: Meter) -> None:
        self.tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Number of input and output tokens used.",
            explicit_bucket_boundaries_advisory=names.TOKEN_BUCKETS,
        )
        self.duration = meter.create_histogram(
            "gen_ai.client.operation.duration",
            "s",
            "GenAI operation duration.",
            explicit_bucket_boundaries_advisory=names.DURATION_BUCKETS,
        )
        self.time_to_trip = meter.create_histogram(
            "budgetguard.time_to_trip",
            "s",
            "Seconds from the start of a run to its stop.",
            explicit_bucket_boundaries_advisory=names.RUN_BUCKETS,
        )

        def counter(name: str, unit: str, description: str) -> Counter:
            return meter.create_counter(f"budgetguard.{name}", unit, description)

        self.checks = counter("checks", "{check}", "Calls that asked to start.")
        text = "Calls that were refused, by the limit that stood against them."
        self.refusals = counter("refusals", "{call}", text)
        text = "Runs that a limit stopped, or would have stopped where it is observed."
        self.trips = counter("trips", "{trip}", text)
        text = "Caps and context windows that reached their warning share."
        self.warnings = counter("warnings", "{warning}", text)
        self.spend = counter("spend", "USD", "What model calls cost.")
        text = "Model calls of unknown price; they are not in the spend."
        self.unpriced = counter("unpriced_calls", "{call}", text)
        self.runs = counter("runs", "{run}", "Runs that ended, by how they did.")
        self.reservations = meter.create_up_down_counter(
            "budgetguard.reservations",
            "{token}",
            "Tokens that are projected for model calls in flight.",
        )
        self.breakers = meter.create_gauge(
            "budgetguard.circuit_breaker.state", "{state}", "0: closed. 1: half-open. 2: open."
        )
