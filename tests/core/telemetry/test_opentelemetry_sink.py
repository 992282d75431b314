"""What is written as spans and metrics, read back from in-memory exporters."""

from __future__ import annotations

from decimal import Decimal

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace import StatusCode

import budgetguard_core.telemetry as telemetry_package
from budgetguard_core import Budget, Guard, Mode
from budgetguard_core.breakers import CircuitBreakerConfig
from budgetguard_core.kit import Admit, ModelCall, Refuse, Stop, TokenUsage, ToolCall, end_run
from budgetguard_core.ledger import Ledger
from budgetguard_core.profiles import ProfileId
from budgetguard_core.telemetry import conventions
from budgetguard_core.testing import ManualClock
from run_logs import finalized

CALL = ModelCall(model="gpt-4o", provider="azure", input_tokens=100, max_output_tokens=50)
USED = TokenUsage(input_tokens=900, output_tokens=100, cache_read_tokens=400)


def runaway(sink, *, mode=Mode.ENFORCE, **caps):
    """A run that calls a model and a tool until it is stopped, ten times at most."""
    clock = ManualClock()
    label = ProfileId(name="research", version="3", overlay="production")
    guard = Guard(
        Budget(profile=label, loop_detection=None, **caps),
        run_id="run",
        mode=mode,
        sinks=[sink],
        clock=clock,
    )
    for number in range(10):
        call = guard.admit_model_call(CALL)
        if isinstance(call, Stop):
            break
        clock.advance(2)
        guard.settle_model_call(call, USED, model="gpt-4o-2024")
        (tool,) = guard.admit_tool_calls([ToolCall(name="search", id=f"c{number}", arguments={})])
        if isinstance(tool, Admit):
            clock.advance(1)
            guard.settle_tool_call(tool, f"result {number}")
    end_run(guard, trip=guard.trip)
    return guard


def test_the_names_are_those_of_the_stated_version():
    stated = f"V{conventions.SEMANTIC_CONVENTIONS.replace('.', '_')}"
    assert hasattr(Schemas, stated)
    official = {
        value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")
    }
    ours = {
        value
        for value in vars(conventions).values()
        if isinstance(value, str) and value.startswith("gen_ai.")
    }
    assert ours <= official
    operations = {one.value for one in gen_ai_attributes.GenAiOperationNameValues}
    assert {conventions.CHAT, conventions.INVOKE_AGENT, conventions.EXECUTE_TOOL} <= operations
    providers = {one.value for one in gen_ai_attributes.GenAiProviderNameValues}
    for ours_, theirs in conventions._PROVIDERS.items():
        assert conventions.provider_name(ours_) == theirs
        assert theirs in providers


def test_a_run_is_a_span_with_its_calls_in_it(telemetry):
    seen = telemetry(task="triage")
    runaway(seen.sink, max_iterations=2)
    spans = seen.spans()
    run, chat, tool = (spans[n] for n in ("invoke_agent", "chat gpt-4o", "execute_tool search"))
    assert chat.parent.span_id == tool.parent.span_id == run.context.span_id
    assert run.parent is None
    assert len(seen.exporter.get_finished_spans()) == 5
    assert chat.attributes["gen_ai.operation.name"] == "chat"
    assert chat.attributes["gen_ai.request.model"] == "gpt-4o"
    assert chat.attributes["gen_ai.response.model"] == "gpt-4o-2024"
    assert chat.attributes["gen_ai.provider.name"] == "azure.ai.openai"
    assert chat.attributes["gen_ai.usage.input_tokens"] == 900
    assert chat.attributes["gen_ai.usage.cache_read.input_tokens"] == 400
    assert chat.attributes["gen_ai.request.max_tokens"] == 50
    assert tool.attributes["gen_ai.tool.name"] == "search"
    assert run.attributes["gen_ai.usage.output_tokens"] == 200
    assert run.attributes["budgetguard.profile"] == "research"
    assert run.attributes["budgetguard.profile.version"] == "3"
    assert run.attributes["budgetguard.profile.overlay"] == "production"
    assert run.attributes["budgetguard.task"] == "triage"
    assert run.attributes["budgetguard.run.id"] == "run"
    assert run.attributes["budgetguard.reason"] == "max_iterations"
    assert run.instrumentation_scope.schema_url.endswith("/1.44.0")


def test_the_stop_is_an_event_on_the_span_that_it_ended(telemetry):
    seen = telemetry()
    tracer = seen.tracers.get_tracer("framework")
    with tracer.start_as_current_span("request") as request:
        runaway(seen.sink, max_iterations=1)
    spans = seen.spans()
    assert spans["invoke_agent"].parent.span_id == request.get_span_context().span_id
    for name in ("request", "invoke_agent"):
        (trip,) = [one for one in spans[name].events if one.name == "budgetguard.trip"]
        assert trip.attributes["budgetguard.reason"] == "max_iterations"
        assert (trip.attributes["budgetguard.limit"], trip.attributes["budgetguard.used"]) == (1, 1)
        assert trip.attributes["budgetguard.run.id"] == "run"


def test_a_span_of_the_frameworks_around_a_call_is_its_parent(telemetry):
    seen = telemetry()
    tracer = seen.tracers.get_tracer("framework")
    guard = Guard(Budget(), sinks=[seen.sink])
    with tracer.start_as_current_span("node") as node:
        guard.settle_model_call(guard.admit_model_call(CALL), USED)
    end_run(guard, trip=None)
    assert seen.spans()["chat gpt-4o"].parent.span_id == node.get_span_context().span_id


def test_a_sub_agent_is_below_its_parent(telemetry):
    seen = telemetry()
    guard = Guard(Budget(), sinks=[seen.sink])
    child = guard.child(Budget(max_iterations=1))
    end_run(child, trip=None)
    end_run(guard, trip=None)
    inner, outer = seen.exporter.get_finished_spans()
    assert inner.parent.span_id == outer.context.span_id


def test_a_last_answer_is_below_the_run_and_ends(telemetry):
    seen = telemetry()
    finalized(seen.sink, run_id="run")
    spans = seen.exporter.get_finished_spans()
    by_id = {span.context.span_id: span for span in spans}
    (run,) = [span for span in spans if span.parent is None]
    assert run.attributes["budgetguard.finalized"] is True
    (answer,) = [one for one in spans if "budgetguard.housekeeping" in one.attributes]
    assert answer.attributes["budgetguard.housekeeping"] == "last_answer"
    assert by_id[answer.parent.span_id] is run
    chats = [one for one in spans if one.name.startswith("chat")]
    parent = [by_id[one.parent.span_id] for one in chats]
    assert [parent.count(run), parent.count(answer)] == [2, 1]
    ((_, reserved),) = seen.points("budgetguard.reservations")
    assert reserved.value == 0
    # One run, not two.
    assert sum(point.value for _, point in seen.points("budgetguard.runs")) == 1


def test_the_metrics_count_what_happened(telemetry):
    seen = telemetry(task="triage")
    runaway(seen.sink, max_iterations=2, tool_quotas={"search": 1})
    tags = {
        "budgetguard.policy": "enforce",
        "budgetguard.task": "triage",
        "budgetguard.profile": "research",
    }
    checks = {
        (a["budgetguard.call.kind"], a["budgetguard.decision"]): p.value
        for a, p in seen.points("budgetguard.checks")
    }
    assert checks == {
        ("model", "admit"): 2,
        ("model", "stop"): 1,
        ("tool", "admit"): 1,
        ("tool", "refuse"): 1,
    }
    refused = {
        (a["budgetguard.call.kind"], a["budgetguard.reason"]): p.value
        for a, p in seen.points("budgetguard.refusals")
    }
    assert refused == {("model", "max_iterations"): 1, ("tool", "tool_quota"): 1}
    assert {type(reason) for _, reason in refused} == {str}
    ((trip, point),) = seen.points("budgetguard.trips")
    assert trip == {**tags, "budgetguard.reason": "max_iterations"}
    assert point.value == 1
    ((_, took),) = seen.points("budgetguard.time_to_trip")
    assert took.sum == 5  # two model calls of two seconds, one tool of one second
    ((spent_for, spent),) = seen.points("budgetguard.spend")
    assert spent_for["gen_ai.request.model"] == "gpt-4o"
    assert Decimal(str(spent.value)) > 0
    tokens = {
        a["gen_ai.token.type"]: p.sum
        for a, p in seen.points(gen_ai_metrics.GEN_AI_CLIENT_TOKEN_USAGE)
    }
    assert tokens == {"input": 1800, "output": 200}
    ((_, duration),) = seen.points(gen_ai_metrics.GEN_AI_CLIENT_OPERATION_DURATION)
    assert (duration.count, duration.sum) == (2, 4)
    assert {a["budgetguard.dimension"] for a, _ in seen.points("budgetguard.warnings")} == {
        "max_iterations"
    }
    ((_, reserved),) = seen.points("budgetguard.reservations")
    assert reserved.value == 0
    ((ended, runs),) = seen.points("budgetguard.runs")
    assert (ended["budgetguard.status"], runs.value) == ("terminated", 1)


def test_tool_calls_are_refused_by_what_stopped_the_run(telemetry):
    seen = telemetry()
    guard = Guard(Budget(max_iterations=9), sinks=[seen.sink])
    inner = guard.child(Budget(max_tool_calls=9))
    guard.abort("stop")
    inner.admit_tool_calls([ToolCall(name="search", arguments={})])
    ((refused, _),) = seen.points("budgetguard.refusals")
    assert refused["budgetguard.reason"] == "aborted"


def test_a_call_that_a_correction_answers_is_refused_for_the_loop(telemetry):
    seen = telemetry()
    guard = Guard(Budget(tool_quotas={"search": 9}), sinks=[seen.sink])
    for _ in range(4):
        (answer,) = guard.admit_tool_calls([ToolCall(name="search", arguments={})])
        if isinstance(answer, Refuse):
            break
        guard.settle_tool_call(answer, result="nothing")
    ((refused, _),) = seen.points("budgetguard.refusals")
    assert refused["budgetguard.reason"] == "no_progress"


def test_what_is_in_flight_is_reserved(telemetry):
    seen = telemetry()
    guard = Guard(Budget(), sinks=[seen.sink])
    guard.admit_model_call(CALL)
    ((_, reserved),) = seen.points("budgetguard.reservations")
    assert reserved.value == 150


def test_an_observed_stop_is_told_apart(telemetry):
    seen = telemetry()
    runaway(seen.sink, mode=Mode.OBSERVE, max_iterations=2)
    ((trip, _),) = seen.points("budgetguard.trips")
    assert trip["budgetguard.policy"] == "observe"


def test_a_stop_that_ends_several_runs_counts_once(telemetry):
    seen = telemetry()
    guard = Guard(Budget(max_iterations=1), sinks=[seen.sink])
    child = guard.child()
    child.admit_model_call(CALL)
    assert isinstance(child.admit_model_call(CALL), Stop)
    ((_, trips),) = seen.points("budgetguard.trips")
    assert trips.value == 1


def test_a_circuit_breaker_shows_its_state(telemetry):
    seen = telemetry()
    budget = Budget(
        loop_detection=None,
        circuit_breaker=CircuitBreakerConfig(sliding_window_size=2, minimum_number_of_calls=2),
    )
    guard = Guard(budget, sinks=[seen.sink], clock=ManualClock())
    for number in range(2):
        (call,) = guard.admit_tool_calls([ToolCall(name="flaky", arguments={"n": number})])
        guard.settle_tool_call(call, error=f"boom {number}")
    ((tags, state),) = seen.points("budgetguard.circuit_breaker.state")
    assert (tags["budgetguard.circuit_breaker.name"], state.value) == ("flaky", 2)


def test_an_error_is_on_the_span_of_its_call(telemetry):
    seen = telemetry()
    guard = Guard(Budget(), sinks=[seen.sink])
    guard.settle_model_call(guard.admit_model_call(CALL), error=TimeoutError("slow"))
    chat = seen.spans()["chat gpt-4o"]
    assert chat.status.status_code is StatusCode.ERROR
    assert chat.attributes["error.type"] == "TimeoutError"


def test_spans_of_calls_can_be_left_to_the_framework(telemetry):
    seen = telemetry(calls=False)
    runaway(seen.sink, max_iterations=1)
    assert set(seen.spans()) == {"invoke_agent"}


def test_a_tenant_is_a_tag(telemetry, tmp_path):
    seen = telemetry()
    guard = Guard(
        Budget(max_iterations=1),
        sinks=[seen.sink],
        ledger=Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}", daily_model_calls=1000),
        tenant="acme",
    )
    guard.settle_model_call(guard.admit_model_call(CALL), USED)
    end_run(guard, trip=None)
    ((tags, _),) = seen.points("budgetguard.spend")
    assert tags["budgetguard.tenant"] == "acme"


@pytest.mark.parametrize("where", ["same guard", "new guard", "new process"])
def test_a_run_that_pauses_ends_its_spans_and_keeps_its_tags(telemetry, tmp_path, where):
    first = telemetry()
    seen = telemetry() if where == "new process" else first
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}", daily_model_calls=1000)
    paid = {"ledger": ledger, "tenant": "acme"}
    guard = Guard(Budget(), sinks=[first.sink], **paid)
    guard.settle_model_call(guard.admit_model_call(CALL), USED)
    (tool,) = guard.admit_tool_calls([ToolCall(name="ask", id="c1")])
    guard.pause([tool])
    spans = {span.name: span for span in first.exporter.get_finished_spans()}
    assert set(spans) == {"chat gpt-4o", "execute_tool ask", "invoke_agent"}
    assert spans["invoke_agent"].attributes["budgetguard.status"] == "paused"
    assert all(span.status.is_ok or span.status.is_unset for span in spans.values())
    if where != "same guard":
        guard = Guard.restore(guard.snapshot(), sinks=[seen.sink], **paid)
    guard.go_on(guard.open_calls())
    guard.settle_model_call(guard.admit_model_call(CALL), USED)
    end_run(guard, trip=None)
    *_, chat, run = seen.exporter.get_finished_spans()
    assert (run.attributes["budgetguard.status"], chat.parent) == ("completed", run.context)
    ((tags, _),) = seen.points("budgetguard.spend")
    assert tags["budgetguard.tenant"] == "acme"


def test_a_guard_that_takes_over_a_run_has_one_span(telemetry):
    seen = telemetry()
    earlier = Guard(Budget())
    earlier.settle_model_call(earlier.admit_model_call(CALL), USED)
    guard = Guard(Budget(), sinks=[seen.sink])
    Guard.restore(earlier.snapshot(), onto=guard)
    end_run(guard, trip=None)
    assert [span.name for span in seen.exporter.get_finished_spans()] == ["invoke_agent"]


def test_a_guard_that_several_runs_share_keeps_its_tags(telemetry):
    seen = telemetry(task="shared")
    guard = Guard(Budget(), sinks=[seen.sink])
    for _ in range(2):
        guard.settle_model_call(guard.admit_model_call(CALL), USED)
        end_run(guard, trip=None)
    ((tags, runs),) = seen.points("budgetguard.runs")
    assert (tags["budgetguard.task"], runs.value) == ("shared", 2)
    assert [span.name for span in seen.exporter.get_finished_spans()].count("invoke_agent") == 2


def test_runs_that_never_end_are_forgotten(telemetry, monkeypatch):
    monkeypatch.setattr("budgetguard_core.telemetry.opentelemetry_sink._MOST_RUNS", 8)
    seen = telemetry()
    guards = [Guard(Budget(), sinks=[seen.sink]) for _ in range(20)]
    assert len(seen.sink._runs) == 8
    assert not any(guard.tree.errors for guard in guards)
    assert len(seen.exporter.get_finished_spans()) == 12


@pytest.mark.parametrize("missing", ["opentelemetry"])
def test_without_the_extra_the_error_names_it(missing):
    import subprocess
    import sys

    program = (
        f"import sys\nsys.modules[{missing!r}] = None\n"
        "import budgetguard_core.telemetry as telemetry\n"
        "try:\n    telemetry.OpenTelemetrySink\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True)
    assert 'pip install ".[otel]"' in done.stdout


def test_calls_that_are_withdrawn_end_their_spans_and_free_what_was_reserved(telemetry):
    made = telemetry()
    guard = Guard(run_id="run", sinks=[made.sink])
    guard.withdraw(guard.admit_model_call(CALL))
    (tool,) = guard.admit_tool_calls([ToolCall(name="search", id="c1")])
    guard.withdraw(tool)
    end_run(guard, trip=None)
    spans = made.spans()
    for name in ("chat gpt-4o", "execute_tool search"):
        assert spans[name].attributes["error.type"] == "withdrawn"
    assert {point.value for _, point in made.points("budgetguard.reservations")} == {0}


def test_a_sink_that_comes_late_takes_what_follows(telemetry):
    made = telemetry()
    events = []
    guard = Guard(run_id="run", sinks=[events.append])
    call = guard.admit_model_call(CALL)
    guard.settle_model_call(call, USED)
    guard.settle_tool_call(*guard.admit_tool_calls([ToolCall(name="search", id="c1")]), "x")
    end_run(guard, trip=None)
    for event in events[2:]:
        made.sink.emit(event)
    assert "execute_tool search" in made.spans()


def test_the_package_has_nothing_else_to_ask_for():
    with pytest.raises(AttributeError, match="no attribute 'Sink'"):
        _ = telemetry_package.Sink
