"""A recorded log, lived through again."""

from __future__ import annotations

from decimal import Decimal

import pytest

from budgetguard_core import (
    Budget,
    Guard,
    Price,
    PriceBook,
    Snapshot,
    StopReason,
    read_events,
    replay,
)
from budgetguard_core.events import CheckpointSaved
from budgetguard_core.kit import (
    CheckpointError,
    ModelCall,
    TokenUsage,
    ToolCall,
    Violation,
    end_run,
)
from budgetguard_core.replay import Replay
from budgetguard_core.testing import ManualClock

BOOK = PriceBook({"m": Price(input=1, output=2, context_window=1000)})


class Run:
    """A guard with a log that goes through JSON Lines."""

    def __init__(self, budget=None, **options):
        self.clock = ManualClock()
        self.lines = []
        self.guard = Guard(
            budget,
            run_id="r",
            clock=self.clock,
            price_book=BOOK,
            sinks=[self.log],
            **options,
        )

    def log(self, event):
        self.lines.append(event.model_dump_json() + "\n")

    @property
    def events(self):
        return list(read_events(self.lines))

    def replayed(self, **options):
        # The log's last word on the time.
        self.guard.emit(CheckpointSaved)
        return replay(self.events, **({"clock": self.clock, "price_book": BOOK} | options))

    def step(self, tokens=10, tools=("a",), cost=None):
        guard = self.guard
        decision = guard.admit_model_call(ModelCall(model="m", input_tokens=tokens))
        if hasattr(decision, "call_id"):
            guard.settle_model_call(decision, TokenUsage(tokens, 1), cost_usd=cost)
        for answer in guard.admit_tool_calls([ToolCall(name=name) for name in tools]):
            if hasattr(answer, "call_id"):
                guard.settle_tool_call(answer, self.clock.monotonic_ns())
        self.clock.advance(1)


@pytest.fixture
def run():
    run = Run(Budget(max_iterations=5, max_total_tokens=100, max_seconds=60, tool_quotas={"b": 2}))
    for _ in range(3):
        run.step(tools=("a", "b"))
    return run


def same(left, right):
    return left.snapshot() == right.snapshot() and left.usage == right.usage


def test_the_run_can_go_on_from_its_replay(run):
    again = run.replayed()
    run.clock.advance(2)
    assert again.usage.seconds == run.guard.usage.seconds == 5
    assert again.snapshot().seq == run.events[-1].seq
    run.guard = again
    run.step()
    run.step()
    run.step()
    assert again.trip.reason is StopReason.MAX_ITERATIONS


def test_time_before_the_first_call_and_after_the_last_event(run):
    early = Run(Budget(max_seconds=10))
    early.guard.start()
    early.clock.advance(4)
    early.step()
    assert early.replayed().usage.seconds == 5
    assert replay(early.events).usage.seconds < 10


def test_repetition_is_found_across_the_replay():
    run = Run()
    for again in range(3):
        ticket = run.guard.admit_tool_call(ToolCall(name="read", arguments={"path": "a"}))
        run.guard.settle_tool_call(ticket, "the same")
        if again == 1:
            run.guard = run.replayed()
    assert "3 times" in run.guard.take_nudge()


def test_everything_the_outside_told_the_run_is_told_again():
    run = Run(Budget(max_iterations=3))
    for _ in range(3):
        run.guard.settle_tool_call(run.guard.admit_tool_call(ToolCall(name="x")), "same")
    assert run.guard.take_nudge()
    run.step()
    run.guard.extend(max_iterations=5)
    run.guard.state.restart_iterations()
    child = run.guard.child(Budget(max_iterations=1), run_id="c")
    child.settle_model_call(child.admit_model_call(ModelCall(model="m")), error=OSError("gone"))
    child.admit_model_call()
    run.guard.hold(Violation(reason=StopReason.FRAMEWORK_LIMIT, limit=25, used=25))
    assert same(run.replayed(), run.guard)
    run.guard.abort("user")
    run.step()
    assert same(run.replayed(), run.guard)
    end_run(run.guard, trip=run.guard.trip)
    assert same(run.replayed(), run.guard)


def test_a_trip_that_a_watchdog_found_is_in_the_log():
    for mode in ("enforce", "observe"):
        run = Run(Budget(max_seconds=5), mode=mode)
        run.step()
        run.guard.admit_model_call(ModelCall(model="m"))
        run.clock.advance(10)
        run.guard.check()
        run.guard.check()
        assert [event.event for event in run.events].count("checked") == 1
        assert run.guard.trip or run.guard.observed_trip
        replayed = run.replayed()
        assert same(replayed, run.guard)
        assert replayed.observed_trip == run.guard.observed_trip


def test_a_part_of_two_runs_spends_both():
    run = Run()
    one = run.guard.child(Budget(max_tool_calls=2), run_id="one")
    other = run.guard.child(Budget(tool_quotas={"a": 1}), run_id="other")
    part = one.child(run_id="part", linked=[other])
    part.admit_tool_calls([ToolCall(name="a"), ToolCall(name="a")])
    other.admit_tool_call(ToolCall(name="a"))
    assert run.guard.usage.tool_calls == 1
    assert run.replayed().usage.tool_calls == 1
    attempt = Guard.restore(Snapshot.from_json(part.snapshot().to_json()), within=[one, other])
    attempt.admit_tool_call(ToolCall(name="a"))
    attempt.admit_tool_call(ToolCall(name="b"))
    assert run.guard.usage.tool_calls == 2
    assert run.replayed().usage.tool_calls == 2


def test_a_watchdog_in_a_part_that_does_nothing_by_itself():
    run = Run(Budget(max_iterations=1))
    run.step()
    run.guard.admit_model_call()
    part = run.guard.child(run_id="off", mode="off")
    told = Replay(price_book=BOOK, clock=run.clock, sinks=[(seen := []).append])
    assert part.check().run_id == "r"
    for event in run.events:
        told.apply(event)
    assert [(event.run_id, event.event) for event in seen][-2:] == [
        ("off", "tripped"),
        ("off", "checked"),
    ]


def test_figures_that_were_refused_are_refused_in_the_same_way():
    run = Run(Budget(max_total_tokens=100))
    ticket = run.guard.admit_model_call(ModelCall(model="m", input_tokens=10))
    with pytest.raises(ValueError, match="whole number"):
        run.guard.settle_model_call(ticket, TokenUsage(-1, 0), cost_usd=Decimal("-1"))
    assert same(run.replayed(), run.guard)


def test_another_budget_shows_what_it_would_have_made_of_the_run(run):
    candidate = run.replayed(budget=Budget(max_iterations=2))
    assert candidate.trip.reason is StopReason.MAX_ITERATIONS
    assert (candidate.usage.iterations, candidate.usage.tool_calls) == (2, 4)
    assert candidate.open_calls() == ()
    wider = run.replayed(budget=Budget(max_iterations=50))
    assert (wider.trip, wider.usage.iterations) == (None, 3)
    tools = run.replayed(budget=Budget(max_tool_calls=3))
    assert tools.usage.tool_calls == 3


def test_an_extension_raises_the_candidate_only_where_it_has_the_cap():
    run = Run(Budget(max_iterations=2, max_tool_calls=9))
    run.step()
    run.guard.extend(max_iterations=4)
    for _ in range(4):
        run.step()
    assert run.replayed(budget=Budget(max_iterations=2)).usage.iterations == 4
    assert run.replayed(budget=Budget(max_iterations=3)).usage.iterations == 4
    # Here the call that was refused is admitted; nobody made it, so it stays in flight.
    assert run.replayed(budget=Budget(max_iterations=9)).usage.iterations == 5
    assert run.replayed(budget=Budget(max_model_calls=1)).usage.iterations == 1
    assert run.replayed(budget=Budget(max_tool_calls=50)).budget.caps() == {"max_tool_calls": 50}


def test_a_run_that_went_on_from_a_snapshot(run):
    run.guard.admit_model_call(ModelCall(model="m", input_tokens=10))
    snapshot = Snapshot.from_json(run.guard.snapshot().to_json())
    for budget in (None, Budget(max_iterations=2)):
        again = Run()
        again.lines = [*run.lines]
        again.guard = Guard.restore(
            snapshot, budget, clock=again.clock, price_book=BOOK, sinks=[again.log]
        )
        (ticket,) = again.guard.open_calls()
        again.guard.settle_model_call(ticket, TokenUsage(5, 5))
        for _ in range(3):
            again.step()
        assert same(again.replayed(), again.guard)
        again.lines = again.lines[len(run.lines) :]
        assert same(again.replayed(), again.guard)
    assert again.replayed(budget=Budget(max_iterations=1)).trip is not None


def test_two_runs_that_share_a_sink_are_told_apart():
    first, second = Run(), Run()
    second.guard = Guard(run_id="other", clock=first.clock, price_book=BOOK, sinks=[first.log])
    tickets = [
        run.guard.admit_model_call(ModelCall(model="m", input_tokens=size))
        for run, size in [(first, 100), (second, 7)]
    ]
    assert tickets[0].call_id == tickets[1].call_id
    second.guard.settle_model_call(tickets[1])
    assert same(first.replayed(), first.guard)
    first.guard.settle_model_call(tickets[0])
    assert same(first.replayed(), first.guard)
    assert first.replayed().usage.total_tokens == 100
    snapshot = second.guard.snapshot()
    Guard.restore(snapshot, clock=first.clock, sinks=[first.log])
    assert same(first.replayed(), first.guard)


# --- logs that cannot be used ---------------------------------------------------------------


def refused(events, **options):
    with pytest.raises(CheckpointError) as caught:
        replay(events, **options)
    return str(caught.value)


def test_a_log_of_nothing():
    assert refused([]) == "the log holds no run. Replay the log from its beginning."


def test_a_log_without_its_beginning(run):
    assert refused(run.events[1:]) == (
        "event 2: run 'r' has no start in this log. Replay the log from its beginning."
    )


def test_a_log_that_has_lost_an_event_is_not_counted_wrong(run):
    child = run.guard.child(run_id="c")
    child.admit_model_call(ModelCall(model="m"))
    events = run.events
    for number in range(1, len(events) - 1):
        lost = events[number].seq
        sentence = refused([*events[:number], *events[number + 1 :]])
        if events[number].event == "run_started":
            assert sentence.startswith(f"event {lost + 1}: run 'c' has no start in this log.")
        else:
            assert sentence == (
                f"event {lost + 1}: event {lost} of run 'r' is missing. "
                "Restore the log from its source."
            )
    assert "is missing" in refused([*events[:3], events[2], *events[3:]])


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": {"max_iterations": 0}},
        {"budget": {"nonsense": 1}},
        {"budget": {"max_cost_usd": "ten"}},
        {"mode": "watch"},
    ],
    ids=range(4),
)
def test_a_start_that_no_run_can_have(run, changes):
    events = run.events
    events[0] = events[0].model_copy(update=changes)
    assert refused(events).startswith("event 1 does not fit: ")


def test_a_snapshot_in_a_log_that_no_guard_can_have(run):
    again = Run()
    Guard.restore(run.guard.snapshot(), sinks=[again.log])
    event = again.events[-1]
    for damage in ({"counters": {}}, {"budget": {"x": 1}}, {"elapsed_ns": -1}, {"nonsense": 1}):
        event = event.model_copy(update={"snapshot": event.snapshot | damage})
        assert refused([event])
