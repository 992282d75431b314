from __future__ import annotations

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from budgetguard_core.telemetry import OpenTelemetrySink


class Telemetry:
    """A sink, and everything that it has written."""

    def __init__(self, **options):
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])
        self.sink = OpenTelemetrySink(
            tracer_provider=self.tracers, meter_provider=self.meters, **options
        )

    def spans(self):
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def points(self, name):
        """The points of a metric, by their attributes without the prefix of ours."""
        data = self.reader.get_metrics_data()
        found = []
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if metric.name == name:
                        found += [(dict(p.attributes), p) for p in metric.data.data_points]
        return found


@pytest.fixture
def telemetry():
    made = []

    def make(**options):
        made.append(Telemetry(**options))
        return made[-1]

    yield make
    for one in made:
        one.meters.shutdown()
        one.tracers.shutdown()
