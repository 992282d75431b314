"""A sink that writes OpenTelemetry spans and metrics."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from opentelemetry import metrics, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from budgetguard_core import events as past
from budgetguard_core.budget import ProfileId
from budgetguard_core.decision import ModelCall
from budgetguard_core.stop import Trip
from budgetguard_core.telemetry import conventions as names
from budgetguard_core.telemetry.instruments import Instruments
from budgetguard_core.usage import TokenUsage, Usage

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

_NAME = "budgetguard"
_MOST_RUNS = 4096
_NS = 1_000_000_000
_STATES = {"closed": 0, "half_open": 1, "half-open": 1, "open": 2}
_Tags: TypeAlias = dict[str, Any]
CurrentSpan: TypeAlias = Callable[[], Span | None]


@dataclass
class _Call:
    model: str | None
    provider: str | None
    reserved: int
    at_ns: int
    span: Span | None
    kind: str


@dataclass
class _Run:
    run_id: str
    parent: _Run | None
    tags: _Tags
    details: _Tags
    started_ns: int
    enclosing: Span
    span: Span | None = None
    calls: dict[int, _Call] = field(default_factory=lambda: dict[int, _Call]())
    turned_away: Counter[str] = field(default_factory=lambda: Counter[str]())


class OpenTelemetrySink:
    """Writes a span for each run, model call and tool call, and metrics of limits and spend.

    The spans join the trace that is current where the run begins. A stop is an event on the run's
    span and on the framework's current span, the one that it ended.

    Args:
        tracer_provider: Where spans go; the global provider if left out.
        meter_provider: Where metrics go; the global provider if left out.
        task: What is being done, as a tag on everything: a text, or a function that is asked when
            a run starts. Keep to few different ones: each is a time series.
        current_span: Finds the framework's current span, where its instrumentation does not make
            it OpenTelemetry's own: `get_current_span` of OpenInference's for LangChain.
        calls: Write spans of calls too. Without, where a framework's instrumentation does it.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        task: str | Callable[[], str | None] | None = None,
        current_span: CurrentSpan | None = None,
        calls: bool = True,
    ) -> None:
        self._tracer = trace.get_tracer(
            _NAME, tracer_provider=tracer_provider, schema_url=names.SCHEMA_URL
        )
        meter = metrics.get_meter(_NAME, meter_provider=meter_provider, schema_url=names.SCHEMA_URL)
        self._write = Instruments(meter)
        self._task = task
        self._current_span = current_span
        self._spans_of_calls = calls
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, _Run] = OrderedDict()

    def emit(self, event: past.Event) -> None:
        """Write one event."""
        if isinstance(event, past.RunStarted | past.RunRestored):
            self._start(event)
            return
        with self._lock:
            run = self._runs.get(event.run_id)
        if run is None:
            # Its start was not seen, or is long forgotten.
            run = self._keep(_Run(event.run_id, None, {}, {}, event.at_ns, self._framework_span()))
        if isinstance(event, past.ModelCallAdmitted):
            self._model_call_started(run, event)
        elif isinstance(event, past.ModelCallRefused):
            self._checked(run, "model", "stop")
            self._refused(run, "model", event.reason)
        elif isinstance(event, past.ModelCallSettled):
            self._model_call_ended(run, event)
        elif isinstance(event, past.ToolCallsRequested):
            self._tool_calls_requested(run, event)
        elif isinstance(event, past.ToolCallSettled):
            call = run.calls.pop(event.call_id, None)
            if call is not None:
                _end(call.span, event.wall_ns, event.error)
        elif isinstance(event, past.ModelCallWithdrawn | past.ToolCallWithdrawn):
            self._withdrawn(run, event)
        elif isinstance(event, past.ToolCallTurnedAway):
            run.turned_away[event.name] += 1
            self._refused(run, "tool", event.reason)
        elif isinstance(event, past.CircuitBreakerChanged):
            tags = {**run.tags, names.BREAKER: event.breaker}
            self._write.breakers.set(_STATES.get(event.to_state, 2), tags)
        elif isinstance(event, past.LimitNearlyReached):
            self._warned(run, event.wall_ns, event.dimension, event.limit, event.used)
        elif isinstance(event, past.Tripped | past.TripObserved):
            self._tripped(run, event)
        elif isinstance(event, past.RunPaused):
            self._paused(run, event)
        elif isinstance(event, past.RunResumed):
            if run.span is None:
                run.enclosing = self._framework_span()
                self._begin(run, event.wall_ns)
        elif isinstance(event, past.RunEnded):
            self._ended(run, event)
        elif isinstance(event, past.HousekeepingBegan) and run.span is not None:
            kind = "other" if event.answers_for is None else "last_answer"
            run.span.set_attribute(names.HOUSEKEEPING, kind)
        elif isinstance(event, past.HousekeepingEnded):
            # It is no run that ends: it has no outcome of its own.
            self._close(run, event.wall_ns)

    def flush(self) -> None:
        """Do nothing: the providers' own processors and readers export, and none of it here."""

    # Runs

    def _start(self, event: past.RunStarted | past.RunRestored) -> None:
        parent_id, budget, mode, tenant = _origin(event)
        with self._lock:
            parent = None if parent_id is None else self._runs.get(parent_id)
        tags: _Tags = {names.POLICY: mode}
        if parent is not None:
            tags = {**parent.tags, names.POLICY: mode}
        else:
            task = self._task() if callable(self._task) else self._task
            if task:
                tags[names.TASK] = task
        if tenant:
            tags[names.TENANT] = ",".join(tenant)
        details: _Tags = {names.RUN_ID: event.run_id}
        if budget.get("profile"):
            profile = ProfileId.model_validate(budget["profile"])
            tags[names.PROFILE] = profile.name
            details[names.PROFILE_VERSION] = profile.version
            if profile.overlay is not None:
                details[names.OVERLAY] = profile.overlay
        with self._lock:
            known = self._runs.get(event.run_id)
        if known is not None and known.span is not None:
            # The same run, which takes over what an earlier attempt had counted.
            known.tags, known.details = tags, details
            known.span.set_attributes({**tags, **details})
            return
        enclosing = self._framework_span()
        run = _Run(event.run_id, parent, tags, details, event.at_ns, enclosing)
        self._begin(run, event.wall_ns)
        self._keep(run)

    def _keep(self, run: _Run) -> _Run:
        with self._lock:
            self._runs[run.run_id] = run
            oldest = self._runs.popitem(last=False)[1] if len(self._runs) > _MOST_RUNS else None
        if oldest is not None:
            # Nobody has told its end.
            self._close(oldest)
        return run

    def _begin(self, run: _Run, wall_ns: int) -> Span:
        """Begin the run's span: below the framework's, else below that of the run around it."""
        parent_span = run.enclosing
        if (
            run.parent is not None
            and run.parent.span is not None
            and parent_span is run.parent.enclosing
        ):
            parent_span = run.parent.span
        run.span = self._tracer.start_span(
            names.INVOKE_AGENT,
            trace.set_span_in_context(parent_span),
            SpanKind.INTERNAL,
            {names.OPERATION: names.INVOKE_AGENT, **run.tags, **run.details},
            start_time=wall_ns,
        )
        return run.span

    def _paused(self, run: _Run, event: past.RunPaused) -> None:
        """End the spans of this attempt: the answer may come days later, and in another process."""
        for number in event.waiting:
            call = run.calls.get(number)
            if call is not None and call.kind == "tool":
                del run.calls[number]
                _end(call.span, event.wall_ns, None)
        # Of several runs on one guard others may be at work.
        if not run.calls and run.span is not None:
            run.span.set_attribute(names.STATUS, "paused")
            self._close(run, event.wall_ns)

    def _ended(self, run: _Run, event: past.RunEnded) -> None:
        tags = {**run.tags, names.STATUS: event.status}
        if event.stop_reason is not None:
            tags[names.REASON] = str(event.stop_reason)
        self._write.runs.add(1, tags)
        span, used = run.span, event.usage
        if span is not None:
            facts = {names.STATUS: event.status, names.COST: float(used.cost_usd)}
            span.set_attributes({**facts, **_tokens(used)})
            if event.finalized:
                span.set_attribute(names.FINALIZED, True)
            if event.stop_reason is not None:
                span.set_attribute(names.REASON, str(event.stop_reason))
        self._close(run, event.wall_ns, event.error)
        # A guard that several runs share goes on, under the same tags.

    def _close(self, run: _Run, wall_ns: int | None = None, error: str | None = None) -> None:
        calls, run.calls = run.calls, {}
        for call in calls.values():
            self._write.reservations.add(-call.reserved, run.tags)
            _end(call.span, wall_ns, "interrupted")
        span, run.span = run.span, None
        _end(span, wall_ns, error)

    # Calls

    def _checked(self, run: _Run, kind: str, decision: str) -> None:
        self._write.checks.add(1, {**run.tags, names.KIND: kind, names.DECISION: decision})

    def _refused(self, run: _Run, kind: str, reason: str) -> None:
        self._write.refusals.add(1, {**run.tags, names.REASON: str(reason), names.KIND: kind})

    def _model_call_started(self, run: _Run, event: past.ModelCallAdmitted) -> None:
        self._checked(run, "model", "admit")
        requested = event.call
        reserved = requested.input_tokens + (event.admitted_output_tokens or 0)
        self._write.reservations.add(reserved, run.tags)
        span = None
        if self._spans_of_calls:
            attributes = {names.OPERATION: names.CHAT, **_model(requested), **run.tags}
            if event.admitted_output_tokens is not None:
                attributes[names.MAX_TOKENS] = event.admitted_output_tokens
            span = self._call_span(
                run,
                f"{names.CHAT} {requested.model or ''}".strip(),
                SpanKind.CLIENT,
                attributes,
                event.wall_ns,
            )
        run.calls[event.call_id] = _Call(
            requested.model, requested.provider, reserved, event.at_ns, span, "model"
        )

    def _model_call_ended(self, run: _Run, event: past.ModelCallSettled) -> None:
        call = run.calls.pop(event.call_id, None)
        if call is None:
            return
        self._write.reservations.add(-call.reserved, run.tags)
        tags: _Tags = {names.OPERATION: names.CHAT, **run.tags}
        if call.model is not None:
            tags[names.REQUEST_MODEL] = call.model
        if event.model is not None:
            tags[names.RESPONSE_MODEL] = event.model
        if call.provider is not None:
            tags[names.PROVIDER] = names.provider_name(call.provider)
        seconds = max(event.at_ns - call.at_ns, 0) / _NS
        failed = {} if event.error is None else {names.ERROR_TYPE: event.error}
        self._write.duration.record(seconds, {**tags, **failed})
        used = event.usage
        if used is not None:
            for kind, count in (("input", used.input_tokens), ("output", used.output_tokens)):
                self._write.tokens.record(count, {**tags, names.TOKEN_TYPE: kind})
        if event.cost_usd is None:
            self._write.unpriced.add(1, tags)
        else:
            self._write.spend.add(float(event.cost_usd), tags)
        if call.span is not None:
            if event.model is not None:
                call.span.set_attribute(names.RESPONSE_MODEL, event.model)
            if event.cost_usd is not None:
                call.span.set_attribute(names.COST, float(event.cost_usd))
            if used is not None:
                call.span.set_attributes(_tokens(used))
                call.span.set_attribute(names.REASONING_TOKENS, used.reasoning_tokens)
                call.span.set_attribute(names.ESTIMATED, used.estimated)
            _end(call.span, event.wall_ns, event.error)

    def _tool_calls_requested(self, run: _Run, event: past.ToolCallsRequested) -> None:
        away, run.turned_away = run.turned_away, Counter()
        for call in event.calls:
            self._checked(run, "tool", call.decision)
            if call.call_id is None:
                if away[call.name] > 0:
                    # Counted when the breaker turned it away.
                    away[call.name] -= 1
                    continue
                self._refused(run, "tool", call.reason or call.decision)
                continue
            span = None
            if self._spans_of_calls:
                attributes = {
                    names.OPERATION: names.EXECUTE_TOOL,
                    names.TOOL_NAME: call.name,
                    names.TOOL_TYPE: "function",
                    **run.tags,
                }
                if call.id is not None:
                    attributes[names.TOOL_CALL_ID] = call.id
                span = self._call_span(
                    run,
                    f"{names.EXECUTE_TOOL} {call.name}",
                    SpanKind.INTERNAL,
                    attributes,
                    event.wall_ns,
                )
            run.calls[call.call_id] = _Call(None, None, 0, event.at_ns, span, "tool")

    def _withdrawn(
        self, run: _Run, event: past.ModelCallWithdrawn | past.ToolCallWithdrawn
    ) -> None:
        call = run.calls.pop(event.call_id, None)
        if call is not None:
            self._write.reservations.add(-call.reserved, run.tags)
            _end(call.span, event.wall_ns, "withdrawn")

    def _call_span(
        self, run: _Run, name: str, kind: SpanKind, attributes: _Tags, wall_ns: int
    ) -> Span:
        parent_span = self._framework_span()
        if parent_span is run.enclosing or not parent_span.get_span_context().is_valid:
            # The framework has no span of its own around the call.
            parent_span = run.span or self._begin(run, wall_ns)
        return self._tracer.start_span(
            name, trace.set_span_in_context(parent_span), kind, attributes, start_time=wall_ns
        )

    # What stood against it

    def _warned(self, run: _Run, wall_ns: int, dimension: str, limit: Any, used: Any) -> None:
        self._write.warnings.add(1, {**run.tags, names.DIMENSION: dimension})
        facts = {
            names.DIMENSION: dimension,
            names.LIMIT: _number(limit),
            names.USED: _number(used),
        }
        self._note(run, names.WARNING_EVENT, facts, wall_ns)

    def _tripped(self, run: _Run, event: past.Tripped | past.TripObserved) -> None:
        trip = event.trip
        if trip.run_id != event.run_id:
            # Its owner tells it; here it only ends what is inside.
            return
        policy = "observe" if isinstance(event, past.TripObserved) else "enforce"
        tags = {**run.tags, names.POLICY: policy, names.REASON: str(trip.reason)}
        self._write.trips.add(1, tags)
        self._write.time_to_trip.record(max(event.at_ns - run.started_ns, 0) / _NS, tags)
        self._note(run, names.TRIP_EVENT, {**tags, **run.details, **_facts(trip)}, event.wall_ns)

    def _note(self, run: _Run, name: str, facts: _Tags, wall_ns: int) -> None:
        for span in {id(one): one for one in (run.span, self._framework_span()) if one}.values():
            span.add_event(name, facts, timestamp=wall_ns)

    def _framework_span(self) -> Span:
        found = None if self._current_span is None else self._current_span()
        return trace.get_current_span() if found is None else found


def _origin(
    event: past.RunStarted | past.RunRestored,
) -> tuple[str | None, dict[str, Any], str, tuple[str, ...]]:
    if isinstance(event, past.RunStarted):
        return event.parent_run_id, event.budget, event.mode, event.tenant
    snapshot = event.snapshot
    parent: str | None = snapshot.get("parent_run_id")
    budget: dict[str, Any] = snapshot.get("budget") or {}
    tenant: tuple[str, ...] = tuple(snapshot.get("tenant") or ())
    return parent, budget, str(snapshot.get("mode", "enforce")), tenant


def _model(call: ModelCall) -> _Tags:
    found: _Tags = {}
    if call.model is not None:
        found[names.REQUEST_MODEL] = call.model
    if call.provider is not None:
        found[names.PROVIDER] = names.provider_name(call.provider)
    return found


def _tokens(used: Usage | TokenUsage) -> _Tags:
    return {
        names.INPUT_TOKENS: used.input_tokens,
        names.OUTPUT_TOKENS: used.output_tokens,
        names.CACHE_READ_TOKENS: used.cache_read_tokens,
        names.CACHE_WRITE_TOKENS: used.cache_write_tokens,
    }


def _facts(trip: Trip) -> _Tags:
    first = trip.violations[0] if trip.violations else None
    facts: _Tags = {names.DETAIL: trip.detail}
    if first is not None and first.limit is not None:
        facts[names.LIMIT] = _number(first.limit)
    if first is not None and first.used is not None:
        facts[names.USED] = _number(first.used)
    return facts


def _number(value: Any) -> int | float:
    return value if isinstance(value, int | float) else float(value)


def _end(span: Span | None, wall_ns: int | None, error: str | None) -> None:
    if span is None:
        return
    if error is not None:
        span.set_attribute(names.ERROR_TYPE, error)
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(wall_ns)
