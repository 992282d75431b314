"""The breakers as the guard asks them: when a call waits, is turned away, and a run is stopped."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

from budgetguard_core import (
    Budget,
    ConfigurationError,
    Guard,
    Snapshot,
    StopReason,
    read_events,
    replay,
)
from budgetguard_core.breakers import (
    BreakerRegistry,
    BulkheadConfig,
    CircuitBreakerConfig,
    ProgressReports,
    RateLimit,
    ToolMix,
    ToolMixBaseline,
    VelocityLimits,
)
from budgetguard_core.events import (
    CallDelayed,
    CircuitBreakerChanged,
    ProgressReported,
    ToolCallTurnedAway,
    ToolMixUnusual,
    TripObserved,
)
from budgetguard_core.kit import (
    Admit,
    ModelCall,
    Nudge,
    Refuse,
    Stop,
    TokenUsage,
    ToolCall,
    end_run,
)
from budgetguard_core.records import line_of
from budgetguard_core.testing import ManualClock

CIRCUIT = CircuitBreakerConfig(
    sliding_window_size=4, minimum_number_of_calls=2, permitted_number_of_calls_in_half_open_state=1
)


class Bench:
    """A guard, its clock and its log."""

    def __init__(self, mode="enforce", breakers=None, **fields):
        self.clock = ManualClock()
        self.events = []
        self.budget = Budget(loop_detection=None, **fields)
        self.guard = Guard(
            self.budget,
            mode=mode,
            clock=self.clock,
            sinks=[self.events.append],
            breakers=breakers,
            run_id="run",
        )

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def tool(self, name="search", *, seconds=0, error=None, result="r"):
        decision = self.guard.admit_tool_call(ToolCall(name=name))
        if isinstance(decision, Admit):
            self.clock.advance(self.delay(decision) + seconds)
            self.guard.settle_tool_call(decision, result, error=error)
        return decision

    def model(self, used=10, **fields):
        decision = self.guard.admit_model_call(ModelCall(**fields))
        if isinstance(decision, Admit):
            self.clock.advance(self.delay(decision))
            self.guard.settle_model_call(decision, TokenUsage(used, 0))
        return decision

    def delay(self, ticket):
        return delay_of(ticket, self.clock) if ticket.breakers else 0

    def replayed(self):
        """Live the log again, through JSON."""
        lines = [line_of(event) for event in self.events]
        return replay(read_events(lines), clock=self.clock)


def delay_of(ticket, clock):
    return max(ticket.breakers.start_ns - clock.monotonic_ns(), 0) / 1e9


def test_they_are_off_by_default_and_leave_no_trace():
    assert not any(name in Budget().to_json() for name in ("progress", "velocity", "rate_limits"))
    guard = Guard(Budget())
    assert guard.admit_model_call().breakers is None
    assert guard.admit_tool_call(ToolCall(name="x")).breakers is None
    guard.admit_tool_call(ToolCall(name="x")).started()
    assert guard.report_progress({}).startswith("Not noted")
    off = Guard(Budget(velocity=VelocityLimits(max_tokens_per_minute=1)), mode="off")
    assert off.admit_model_call().breakers is None


def test_a_budget_with_breakers_can_be_written_as_json():
    budget = Budget(
        progress=ProgressReports(),
        velocity=VelocityLimits(max_cost_usd_per_minute=Decimal("0.1")),
        tool_mix=ToolMix(baseline=ToolMixBaseline(runs=1, tools={"a": 1})),
        rate_limits={"read/*": RateLimit(rate=2)},
        bulkheads={"*": BulkheadConfig()},
        circuit_breaker=CircuitBreakerConfig(record_exceptions=(OSError,)),
    )
    assert Budget.from_json(json.loads(json.dumps(budget.to_json()))) == budget
    assert (
        Budget.from_json(Budget(velocity=VelocityLimits()).to_json()).velocity == VelocityLimits()
    )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"velocity": 5}, "velocity must be a VelocityLimits or its fields, got 5."),
        ({"velocity": {"throttle_at": 2}}, "velocity throttle_at must be a share between 0 and 1"),
        ({"rate_limits": {"x": {"rate": 0}}}, "rate_limits.x rate must be a number of calls per"),
    ],
)
def test_breakers_are_validated_with_their_budget(fields, sentence):
    with pytest.raises(ConfigurationError) as caught:
        Budget(**fields)
    assert sentence in str(caught.value)


# Velocity


def test_a_burst_of_tool_calls_is_stopped_at_the_ceiling():
    bench = Bench(velocity=VelocityLimits(max_tool_calls_per_minute=10, throttle_at=0.99))
    decisions = bench.guard.admit_tool_calls([ToolCall(name="search") for _ in range(200)])
    assert [type(one) for one in decisions] == [Admit] * 10 + [Stop] * 190
    assert bench.guard.trip.reason is StopReason.VELOCITY
    assert bench.guard.usage.tool_calls == 10
    assert isinstance(bench.model(), Stop)
    assert bench.replayed().trip == bench.guard.trip


def test_tokens_in_the_band_delay_and_at_the_ceiling_stop():
    bench = Bench(velocity=VelocityLimits(max_tokens_per_minute=100))
    for _ in range(8):
        assert delay_of(bench.guard.admit_model_call(ModelCall()), bench.clock) == 0
        bench.model(used=10)
    decision = bench.guard.admit_model_call(ModelCall())
    assert delay_of(decision, bench.clock) == 61
    (delayed,) = bench.of(CallDelayed)
    assert (delayed.call_id, delayed.delay_ns) == (decision.call_id, 61_000_000_000)
    bench.guard.settle_model_call(decision, TokenUsage(20, 0))
    decision = bench.guard.admit_model_call(ModelCall())
    assert isinstance(decision, Stop)
    assert decision.trip.violations[0].detail == (
        "max_tokens_per_minute=100 is reached: 100 in the last minute"
    )


def test_reservations_count_and_are_given_back():
    bench = Bench(velocity=VelocityLimits(max_tokens_per_minute=100, throttle_at=0.99))
    ticket = bench.guard.admit_model_call(ModelCall(input_tokens=60, max_output_tokens=40))
    assert ticket.breakers is not None
    bench.guard.withdraw(ticket)
    ticket = bench.guard.admit_model_call(ModelCall(input_tokens=60, max_output_tokens=40))
    bench.guard.settle_model_call(ticket, TokenUsage(60, 1))
    assert isinstance(bench.model(used=39), Admit)
    assert isinstance(bench.guard.admit_model_call(), Stop)


def test_dollars_a_minute_are_charged_to_every_run_around():
    bench = Bench(velocity=VelocityLimits(max_cost_usd_per_minute=1, throttle_at=0.99))
    child = bench.guard.child(Budget(loop_detection=None))
    call = ModelCall(cost_usd=Decimal("0.5"))
    for _ in range(2):
        child.settle_model_call(child.admit_model_call(call), cost_usd=Decimal("0.5"))
    assert isinstance(child.admit_model_call(call), Stop)
    assert bench.guard.trip.reason is StopReason.VELOCITY
    assert child.trip.run_id == "run"


def test_a_withdrawn_tool_call_leaves_the_pace():
    bench = Bench(velocity=VelocityLimits(max_tool_calls_per_minute=1))
    ticket = bench.guard.admit_tool_call(ToolCall(name="x"))
    assert bench.guard.withdraw(ticket)
    assert isinstance(bench.guard.admit_tool_call(ToolCall(name="x")), Admit)


def test_observed_nothing_waits_or_stops_and_the_trip_is_recorded():
    bench = Bench("observe", velocity=VelocityLimits(max_tool_calls_per_minute=10))
    for _ in range(30):
        assert isinstance(bench.tool(), Admit)
    (observed,) = bench.of(TripObserved)
    assert observed.trip.reason is StopReason.VELOCITY
    assert bench.clock.monotonic_ns() == 0
    assert bench.of(CallDelayed) == []
    assert bench.guard.trip is None
    assert isinstance(bench.model(), Admit)


# Rate limits and bulkheads


def test_a_rate_limit_delays_then_refuses_and_the_run_goes_on():
    bench = Bench(
        rate_limits={"read/*": RateLimit(rate=1, max_wait_duration=1)},
        tool_classes={"read_*": "read"},
    )
    calls = [ToolCall(name="read_file") for _ in range(3)] + [ToolCall(name="search")]
    first, second, third, other = bench.guard.admit_tool_calls(calls)
    assert [delay_of(one, bench.clock) for one in (first, second, other)] == [0, 1, 0]
    assert isinstance(third, Refuse)
    assert third.detail == "rate_limits['read/*']: 1 calls a second are exceeded"
    assert json.loads(third.message) == {
        "error": "rate_limited",
        "tool": "read_file",
        "message": "Not executed: this tool is called too often at the moment. "
        "Go on without it, or try again in 1 s.",
        "retry_after_seconds": 1,
    }
    assert bench.guard.usage.tool_calls == 3
    assert [event.delay_ns for event in bench.of(CallDelayed)] == [1_000_000_000]
    assert [event.name for event in bench.of(ToolCallTurnedAway)] == ["read_file"]
    assert isinstance(bench.model(), Admit)


def test_a_call_that_does_not_start_gives_its_token_and_its_place_back():
    bench = Bench(
        rate_limits={"*": RateLimit(rate=0.001)},
        bulkheads={"*": BulkheadConfig(max_concurrent_calls=1)},
    )
    first = bench.guard.admit_tool_call(ToolCall(name="x"))
    assert isinstance(bench.guard.admit_tool_call(ToolCall(name="x")), Refuse)
    bench.guard.withdraw(first)
    assert isinstance(bench.guard.admit_tool_call(ToolCall(name="x")), Admit)


def test_a_full_bulkhead_refuses_and_what_was_taken_before_it_is_given_back():
    bench = Bench(
        circuit_breaker=CIRCUIT,
        rate_limits={"*": RateLimit(rate=0.001, burst=2)},
        bulkheads={"search": BulkheadConfig(max_concurrent_calls=1)},
    )
    first = bench.guard.admit_tool_call(ToolCall(name="search"))
    refused = bench.guard.admit_tool_call(ToolCall(name="search"))
    assert isinstance(refused, Refuse)
    assert json.loads(refused.message)["error"] == "busy"
    assert refused.detail == "bulkheads['search']: 1 calls are running"
    assert isinstance(bench.guard.admit_tool_call(ToolCall(name="other")), Admit)
    bench.guard.settle_tool_call(first)
    # The token that the refused one took is back: this is not turned away for its place.
    answer = bench.guard.admit_tool_call(ToolCall(name="search"))
    assert json.loads(answer.message)["error"] == "rate_limited"


def test_who_waits_for_a_place_is_in_the_queue_and_gets_it():
    bench = Bench(bulkheads={"*": BulkheadConfig(max_concurrent_calls=1, max_wait_duration=5)})
    first, second = bench.guard.admit_tool_calls([ToolCall(name="x"), ToolCall(name="x")])
    assert first.breakers.queued is None
    place = second.breakers.queued
    assert place is not None
    assert not place.granted
    bench.guard.settle_tool_call(first)
    assert second.breakers.queued is None
    assert place.granted


def test_runs_that_share_a_registry_share_its_limits():
    registry = BreakerRegistry()
    limits = {"rate_limits": {"*": RateLimit(rate=0.001)}}
    one, other = Bench(breakers=registry, **limits), Bench(breakers=registry, **limits)
    tenant = Bench(breakers=registry.scoped("acme"), **limits)
    assert isinstance(one.tool(), Admit)
    assert isinstance(other.tool(), Refuse)
    assert isinstance(tenant.tool(), Admit)


def test_a_limit_of_a_run_and_of_its_sub_agent_is_passed_once():
    limits = {
        "rate_limits": {"*": RateLimit(rate=0.001)},
        "bulkheads": {"*": BulkheadConfig(max_concurrent_calls=1)},
        "circuit_breaker": CIRCUIT,
    }
    bench = Bench(**limits)
    child = bench.guard.child(Budget(**limits))
    assert isinstance(child.admit_tool_call(ToolCall(name="x")), Admit)


def test_observed_nothing_is_turned_away():
    bench = Bench(
        "observe",
        rate_limits={"*": RateLimit(rate=1, max_wait_duration=1)},
        bulkheads={"*": BulkheadConfig(max_concurrent_calls=1, max_wait_duration=9)},
    )
    decisions = bench.guard.admit_tool_calls([ToolCall(name="x") for _ in range(5)])
    assert [type(one) for one in decisions] == [Admit] * 5
    assert all(delay_of(one, bench.clock) == 0 for one in decisions)
    assert all(one.breakers.queued is None for one in decisions)


# Circuit breaker


def test_a_tool_that_keeps_failing_is_left_alone_then_tried_again():
    bench = Bench(circuit_breaker=CIRCUIT)
    for _ in range(2):
        assert isinstance(bench.tool(error=TimeoutError()), Admit)
    bench.clock.advance(15)
    refused = bench.tool()
    assert isinstance(refused, Refuse)
    assert refused.reason is StopReason.CIRCUIT_OPEN
    assert refused.detail == "the circuit breaker of 'search' is open"
    assert json.loads(refused.message)["retry_after_seconds"] == 45
    assert isinstance(bench.tool("other"), Admit)
    bench.clock.advance(45)
    assert isinstance(bench.tool(), Admit)
    assert [(event.from_state, event.to_state) for event in bench.of(CircuitBreakerChanged)] == [
        ("closed", "open"),
        ("open", "half_open"),
        ("half_open", "closed"),
    ]
    # A call that was turned away is not counted, and costs no iteration.
    assert bench.guard.usage.tool_calls == 4
    assert bench.guard.usage.iterations == 0
    again = bench.replayed()
    assert again.usage.tool_calls == 4


def test_a_call_that_waits_for_a_person_holds_no_place_and_is_no_slow_call():
    registry = BreakerRegistry()
    fields = {
        "bulkheads": {"ask": BulkheadConfig(max_concurrent_calls=1)},
        "circuit_breaker": CIRCUIT.model_copy(update={"slow_call_duration_threshold": 30.0}),
    }
    waits = Bench(breakers=registry, **fields)
    for _ in range(2):
        waits.tool("ask", error=TimeoutError())
    waits.clock.advance(60)
    # The one trial that a half-open circuit breaker permits.
    asked = waits.guard.admit_tool_call(ToolCall(name="ask"))
    waits.guard.pause([asked])
    other = Bench(breakers=registry, **fields)
    other.clock = waits.clock
    other.guard = Guard(other.budget, clock=waits.clock, breakers=registry)
    assert isinstance(other.tool("ask"), Admit)
    waits.clock.advance(86_400)
    waits.guard.go_on([asked])
    assert waits.guard.settle_tool_call(asked, "yes")
    assert isinstance(other.tool("ask"), Admit)


def test_a_call_that_ended_before_its_run_waits_gives_its_trial_back_once():
    trials = {"permitted_number_of_calls_in_half_open_state": 3}
    bench = Bench(circuit_breaker=CIRCUIT.model_copy(update=trials))
    for _ in range(2):
        bench.tool(error=TimeoutError())
    bench.clock.advance(60)
    ended, _, asks = (bench.guard.admit_tool_call(ToolCall(name="search")) for _ in range(3))
    bench.guard.settle_tool_call(ended, "ok")
    # Listed as open by one thread while another one settled it.
    bench.guard.pause([ended, asks])
    assert isinstance(bench.guard.admit_tool_call(ToolCall(name="search")), Admit)
    assert isinstance(bench.guard.admit_tool_call(ToolCall(name="search")), Refuse)


def test_a_call_that_its_run_has_left_holds_no_place():
    registry = BreakerRegistry()
    fields = {"bulkheads": {"*": BulkheadConfig(max_concurrent_calls=1)}}
    left = Bench(breakers=registry, **fields)
    assert isinstance(left.guard.admit_tool_call(ToolCall(name="search")), Admit)
    assert isinstance(Bench(breakers=registry, **fields).tool(), Refuse)
    outcome = end_run(left.guard, trip=None, error=TimeoutError())
    assert outcome.tool_calls[0].status == "interrupted"
    assert isinstance(Bench(breakers=registry, **fields).tool(), Admit)


def test_a_run_whose_every_call_meets_an_open_breaker_is_stopped():
    bench = Bench(circuit_breaker=CIRCUIT)
    for _ in range(2):
        bench.tool(error="it failed")
    for _ in range(2):
        assert isinstance(bench.model(), Admit)
        bench.tool()
    bench.tool("other")
    for _ in range(3):
        assert isinstance(bench.model(), Admit)
        bench.tool()
    stop = bench.model()
    assert isinstance(stop, Stop)
    (violation,) = stop.trip.violations
    assert (violation.reason, violation.limit, violation.used) == (StopReason.CIRCUIT_OPEN, 3, 3)
    assert bench.replayed().trip == bench.guard.trip


def test_observed_an_open_breaker_lets_through_and_the_trip_is_recorded():
    bench = Bench("observe", circuit_breaker=CIRCUIT)
    for _ in range(5):
        assert isinstance(bench.tool(error="it failed"), Admit)
    assert isinstance(bench.model(), Admit)
    (observed,) = bench.of(TripObserved)
    assert observed.trip.reason is StopReason.CIRCUIT_OPEN


def test_a_call_is_as_slow_as_its_body():
    slow = CIRCUIT.model_copy(update={"slow_call_duration_threshold": 1})
    bench = Bench(circuit_breaker=slow)
    for _ in range(2):
        first, second = bench.guard.admit_tool_calls([ToolCall(name="a"), ToolCall(name="b")])
        bench.clock.advance(1.5)
        bench.guard.settle_tool_call(first)
        second.started()
        bench.clock.advance(0.5)
        bench.guard.settle_tool_call(second)
    assert [event.breaker for event in bench.of(CircuitBreakerChanged)] == ["a"]


def test_what_a_failure_is_can_be_chosen():
    chosen = CIRCUIT.model_copy(
        update={"record_result": lambda text: "error" in text, "ignore_exceptions": (OSError,)}
    )
    bench = Bench(circuit_breaker=chosen)
    for _ in range(5):
        bench.tool(error=TimeoutError())
    assert bench.of(CircuitBreakerChanged) == []
    for _ in range(2):
        bench.tool(result="an error")
    assert len(bench.of(CircuitBreakerChanged)) == 1


def test_a_predicate_that_throws_is_reported_and_nothing_else():
    def broken(_):
        raise ValueError("broken")

    bench = Bench(circuit_breaker=CIRCUIT.model_copy(update={"record_result": broken}))
    for _ in range(3):
        bench.tool()
    assert bench.of(CircuitBreakerChanged) == []
    assert bench.guard.tree.errors == ("record_result: ValueError: broken",) * 3


# Tool mix


def test_an_unusual_mix_is_told_once_and_stops_nothing():
    baseline = ToolMixBaseline(runs=9, tools={"search": 500, "read": 500})
    bench = Bench(tool_mix=ToolMix(baseline=baseline))
    for number in range(200):
        assert isinstance(bench.tool("read", result=number), Admit)
    (told,) = bench.of(ToolMixUnusual)
    assert told.calls == 20
    assert told.p_value < 0.001
    assert bench.guard.trip is None
    silent = Guard(bench.budget)
    for _ in range(30):
        assert isinstance(silent.admit_tool_call(ToolCall(name="read")), Admit)


# Progress


def report(subgoal="a", left=5):
    return {"claims_so_far": [], "next_subgoal": subgoal, "estimated_remaining_steps": left}


PROGRESS = ProgressReports(every_iterations=1)


def test_a_model_that_does_not_move_is_corrected_then_stopped():
    bench = Bench(progress=PROGRESS)
    said = []
    for _ in range(30):
        decision = bench.model()
        if isinstance(decision, Stop):
            break
        if isinstance(decision, Nudge):
            said.append(decision.message)
        asked = isinstance(decision, Nudge) and "report_progress" in decision.message
        if asked:
            assert bench.guard.report_progress(report()) == "Noted. Go on."
    assert decision.trip.reason is StopReason.STALLED
    assert len(bench.of(ProgressReported)) == 4
    assert "You have named the same next subgoal 3 times." in said[3]
    assert bench.guard.usage.iterations < 12
    assert bench.replayed().trip == bench.guard.trip


def test_a_model_that_never_reports_is_stopped_and_a_retry_is_no_turn():
    bench = Bench(progress=PROGRESS)
    decisions = [bench.model() for _ in range(5)]
    assert [type(one) for one in decisions] == [Admit, Nudge, Nudge, Nudge, Stop]
    other = Bench(progress=PROGRESS)
    assert all(type(other.model(retry=number > 0)) is Admit for number in range(9))


def test_the_tool_costs_no_place_and_is_no_repetition():
    bench = Bench(progress=PROGRESS, max_tool_calls=1, tool_quotas={"*": 1})
    guard = Guard(bench.budget.model_copy(update={"loop_detection": None}))
    noisy = Guard(Budget(progress=PROGRESS, max_tool_calls=1))
    for one in (guard, noisy):
        for _ in range(10):
            ticket = one.admit_tool_call(ToolCall(name="report_progress", arguments=report()))
            assert isinstance(ticket, Admit)
            one.settle_tool_call(ticket, one.report_progress(report()))
        ticket = one.admit_tool_call(ToolCall(name="report_progress"))
        assert one.withdraw(ticket)
        assert one.usage.tool_calls == 0
        assert isinstance(one.admit_tool_call(ToolCall(name="search")), Admit)
    assert noisy.take_nudge() is None
    plain = Guard(Budget(max_tool_calls=1))
    plain.admit_tool_call(ToolCall(name="report_progress"))
    assert plain.usage.tool_calls == 1


def test_the_request_can_travel_in_a_tool_result():
    bench = Bench(progress=PROGRESS)
    bench.model()
    bench.guard.state.own_plugs[0].progress.iteration()
    assert "report_progress" in bench.guard.take_nudge()
    assert bench.guard.take_nudge() is None


def test_after_a_user_turn_the_reports_begin_anew():
    bench = Bench(progress=PROGRESS)
    for _ in range(4):
        bench.model()
    bench.guard.user_turn()
    assert type(bench.model()) is Admit


def test_a_report_that_cannot_be_read_says_so():
    bench = Bench(progress=PROGRESS)
    assert bench.guard.report_progress("{").startswith("Not noted: the arguments must be")
    assert bench.of(ProgressReported) == []


def test_observed_nobody_is_asked():
    bench = Bench("observe", progress=PROGRESS)
    assert all(type(bench.model()) is Admit for _ in range(20))
    assert bench.guard.report_progress(report()) == "Noted. Go on."
    assert bench.guard.observed_trip is None


def test_it_is_the_planner_who_reports():
    bench = Bench(progress=PROGRESS)
    child = bench.guard.child(Budget(loop_detection=None))
    for _ in range(20):
        decision = child.admit_model_call(ModelCall())
        assert type(decision) is Admit  # not asked: it may lack the tool
        child.settle_model_call(decision, TokenUsage(1, 1))
    assert type(bench.model()) is Admit  # and its turns are none of the planner's
    assert isinstance(bench.model(), Nudge)


# Snapshots and replay


def test_breakers_begin_anew_after_a_restore():
    bench = Bench(progress=PROGRESS, circuit_breaker=CIRCUIT)
    for _ in range(3):
        bench.model()
        bench.tool(error="it failed")
    assert isinstance(bench.tool(), Refuse)
    state = Snapshot.from_json(bench.guard.snapshot().to_json())
    restored = Guard.restore(state, clock=bench.clock)
    assert isinstance(restored.admit_tool_call(ToolCall(name="search")), Admit)


def test_a_replay_under_another_budget_shows_what_it_would_have_done():
    bench = Bench()
    for _ in range(3):
        bench.model(used=50)
        bench.tool(error=TimeoutError())
    candidate = Budget(loop_detection=None, circuit_breaker=CIRCUIT)
    found = replay(bench.events, budget=candidate, clock=bench.clock)
    assert found.usage.tool_calls == 2
    candidate = Budget(loop_detection=None, velocity=VelocityLimits(max_tokens_per_minute=100))
    assert replay(bench.events, budget=candidate).trip.reason is StopReason.VELOCITY


def test_names_that_a_model_invents_take_no_memory_and_are_limited_all_the_same():
    bench = Bench(rate_limits={"*": RateLimit(rate=0.001, burst=1100)})
    for number in range(1100):
        assert isinstance(bench.tool(f"invented_{number}"), Admit)
    assert isinstance(bench.tool("one_more"), Refuse)
    assert len(bench.guard.state.own_plugs[0]._tools) == 1024
