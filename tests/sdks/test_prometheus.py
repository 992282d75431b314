"""A real scrape over HTTP, and whether dashboard and alerts name only what is in it."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from urllib.request import urlopen

import pytest

pytest.importorskip("prometheus_client")

import yaml
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from budgetguard_core import Budget, Guard, Mode
from budgetguard_core.breakers import CircuitBreakerConfig
from budgetguard_core.kit import ModelCall, TokenUsage, ToolCall, end_run
from budgetguard_core.ledger import Ledger
from budgetguard_core.profiles import ProfileId
from budgetguard_core.telemetry import OpenTelemetrySink
from budgetguard_core.testing import ManualClock

FOLDER = files("budgetguard_core.telemetry")
DASHBOARD = json.loads((FOLDER / "grafana_dashboard.json").read_text())
ALERTS = yaml.safe_load((FOLDER / "prometheus_alerts.yml").read_text())
LABEL = re.compile(r'\b(\w+)\s*(?:=~|!=|=)\s*"')
GROUPED = re.compile(r"\bby \(([^)]*)\)")


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """Every metric once, by name: the labels that it has."""
    reader = PrometheusMetricReader()
    meters = MeterProvider([reader])
    sink = OpenTelemetrySink(meter_provider=meters, task="nightly")
    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite3"
    ledger = Ledger(f"sqlite:///{path}", daily_model_calls=1000)
    for mode, model in ((Mode.ENFORCE, "gpt-4o"), (Mode.OBSERVE, "no-such-model")):
        guard = Guard(
            Budget(
                max_iterations=2,
                tool_quotas={"flaky": 2},
                loop_detection=None,
                profile=ProfileId(name="research", version="1"),
                circuit_breaker=CircuitBreakerConfig(
                    sliding_window_size=2, minimum_number_of_calls=2
                ),
            ),
            mode=mode,
            sinks=[sink],
            clock=ManualClock(),
            ledger=ledger,
            tenant="acme",
        )
        for number in range(2):
            call = guard.admit_model_call(ModelCall(model=model, input_tokens=10))
            guard.settle_model_call(call, TokenUsage(input_tokens=10, output_tokens=10))
            (tool,) = guard.admit_tool_calls([ToolCall(name="flaky", arguments={"n": number})])
            guard.settle_tool_call(tool, error=f"boom {number}")
        guard.admit_model_call(ModelCall(model=model, input_tokens=10))
        end_run(guard, trip=guard.trip)
    server, thread = start_http_server(0, "127.0.0.1", registry=REGISTRY)
    try:
        port = server.server_port
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            assert answer.status == 200
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        meters.shutdown()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions():
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield f"panel {panel['title']} {target['refId']}", target["expr"]
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


EXPRESSIONS = list(expressions())


def names_in(expression):
    # Labels stand in braces and in groupings.
    bare = GROUPED.sub("", re.sub(r"\{[^}]*\}", "", expression))
    return set(re.findall(r"\b(?:budgetguard|gen_ai)_\w+", bare))


def labels_in(expression):
    grouped = [one.strip() for group in GROUPED.findall(expression) for one in group.split(",")]
    return {*LABEL.findall(expression), *grouped}


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[one for one, _ in EXPRESSIONS])
def test_only_metrics_and_labels_that_exist_are_named(scraped, where, expression):
    names = names_in(expression)
    assert names
    assert names <= set(scraped)
    have = set().union(*(scraped[name] for name in names))
    assert labels_in(expression) <= have


def test_what_is_scraped_is_shown():
    """A metric that nobody can see is one that nobody needs."""
    shown = set().union(*(names_in(expression) for _, expression in EXPRESSIONS))
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in shown} == {
        "budgetguard_checks",
        "budgetguard_circuit_breaker_state",
        "budgetguard_refusals",
        "budgetguard_reservations",
        "budgetguard_runs",
        "budgetguard_spend_USD",
        "budgetguard_time_to_trip_seconds",
        "budgetguard_trips",
        "budgetguard_unpriced_calls",
        "budgetguard_warnings",
        "gen_ai_client_operation_duration_seconds",
        "gen_ai_client_token_usage",
    }


def test_the_scrape_is_in_dollars_and_seconds(scraped):
    assert "budgetguard_spend_USD_total" in scraped
    assert "budgetguard_tenant" in scraped["budgetguard_spend_USD_total"]
    assert "budgetguard_task" in scraped["budgetguard_trips_total"]


def test_the_dashboard_can_be_imported():
    """What Grafana asks of a dashboard: a title, panels with their own ids, and places for them."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    for panel in DASHBOARD["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables


def test_the_alerts_are_rules_of_prometheus():
    for group in ALERTS["groups"]:
        assert set(group) == {"name", "rules"}
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert rule["annotations"]["summary"]
            named = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
            assert named <= labels_in(rule["expr"])
