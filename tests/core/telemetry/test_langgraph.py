"""One trace: our spans beside those of OpenInference's instrumentation of LangGraph."""

from __future__ import annotations

import pytest

from budgetguard_core import Budget
from sticky_runs import langgraph

pytest.importorskip("langgraph")
openinference = pytest.importorskip("openinference.instrumentation.langchain")
# Its instrumentation comes with the dependency group `sdks`.
pytestmark = pytest.mark.slow


@pytest.fixture
def traced(telemetry):
    """A stopped LangGraph run within a request, and its spans."""
    seen = telemetry(current_span=openinference.get_current_span)
    instrumentor = openinference.LangChainInstrumentor()
    instrumentor.instrument(tracer_provider=seen.tracers)
    try:
        with seen.tracers.get_tracer("server").start_as_current_span("request"):
            outcome = langgraph(Budget(max_iterations=2), sinks=[seen.sink])
    finally:
        instrumentor.uninstrument()
    assert outcome.stop_reason == "max_iterations"
    return seen.exporter.get_finished_spans()


def test_all_spans_are_in_one_trace_below_the_request(traced):
    by_id = {span.context.span_id: span for span in traced}
    assert len({span.context.trace_id for span in traced}) == 1
    roots = [span for span in traced if span.parent is None]
    assert [span.name for span in roots] == ["request"]
    for span in traced:
        if span.parent is not None:
            parent = by_id[span.parent.span_id]
            assert parent.start_time <= span.start_time
            assert span.end_time <= parent.end_time


def test_both_write_what_they_know(traced):
    ours = [span.name for span in traced if span.instrumentation_scope.name == "budgetguard"]
    theirs = [span.name for span in traced if "openinference" in span.instrumentation_scope.name]
    assert ours.count("invoke_agent") == 1
    assert sum(name.startswith("chat") for name in ours) == 2
    assert ours.count("execute_tool read_page") == 2
    assert "LangGraph" in theirs


def test_the_stop_is_on_a_span_of_the_frameworks(traced):
    stopped = [span for span in traced if any(e.name == "budgetguard.trip" for e in span.events)]
    names = {span.instrumentation_scope.name for span in stopped}
    assert "budgetguard" in names
    assert any("openinference" in name for name in names), [span.name for span in stopped]
