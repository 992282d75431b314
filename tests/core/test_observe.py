"""OBSERVE beside two others in the same steps: where ENFORCE trips, and what no caps count."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetguard_core import Budget, Guard, Price, PriceBook, StopReason, after_iterations
from budgetguard_core.kit import Admit, ModelCall, TokenUsage, ToolCall, Violation
from budgetguard_core.testing import ManualClock

BOOK = PriceBook({"m": Price(input=1, output=2)})
CENT = Decimal("0.01")
fixed = settings(derandomize=True, deadline=None, max_examples=150, database=None)

budgets = st.fixed_dictionaries(
    {"loop_detection": st.none()},
    optional={
        "max_iterations": st.integers(1, 6),
        "max_model_calls": st.integers(1, 8),
        "max_tool_calls": st.integers(1, 6),
        "max_total_tokens": st.integers(1, 60),
        "max_seconds": st.integers(1, 8),
        "max_cost_usd": st.sampled_from([CENT, 4 * CENT]),
        "stop_when": st.just((after_iterations(4),)),
    },
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("model"), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("tool"), st.sampled_from("ab"), st.sampled_from(["function", "hosted"])),
        st.just(("unknown model",)),
        st.just(("unmetered",)),
        st.just(("time",)),
        st.just(("abort",)),
        st.just(("hold",)),
        st.just(("check",)),
    ),
    min_size=1,
    max_size=25,
)


def take(guard, step):
    """Take one step; return whether all of it was admitted."""
    if step[0] == "tool":
        ticket = guard.admit_tool_call(ToolCall(name=step[1], kind=step[2]))
        if isinstance(ticket, Admit):
            guard.settle_tool_call(ticket, "x")
    elif step[0] == "time":
        guard.tree.clock.advance(1)
        return True
    elif step[0] == "abort":
        guard.abort("enough")
        return True
    elif step[0] == "hold":
        guard.hold(Violation(reason=StopReason.FRAMEWORK_LIMIT, detail="limit"))
        return True
    elif step[0] == "check":
        return guard.check() is None
    else:
        call = ModelCall(model="m")
        usage = TokenUsage(5, 5)
        if step[0] == "model":
            call = ModelCall(model="m", input_tokens=step[1], retry=step[2])
        elif step[0] == "unknown model":
            call = ModelCall(model="a model without a price")
        else:
            usage = None
        ticket = guard.admit_model_call(call)
        if isinstance(ticket, Admit):
            guard.settle_model_call(ticket, usage)
    return isinstance(ticket, Admit)


def made(budget, mode, events=None):
    return Guard(
        Budget(**budget),
        mode=mode,
        run_id="r",
        clock=ManualClock(),
        price_book=BOOK,
        sinks=[] if events is None else [events.append],
    )


def counted(guard):
    snapshot = guard.snapshot()
    return snapshot.counters, snapshot.tool_counts, snapshot.records


@given(budgets, steps)
@fixed
def test_it_trips_where_enforce_does_and_counts_as_without_caps(budget, steps):
    events = []
    observing, enforcing = made(budget, "observe", events), made(budget, "enforce")
    free = made({"loop_detection": None}, "enforce")
    for step in steps:
        assert take(observing, step)
        if step[0] not in ("abort", "hold"):
            assert take(free, step)
        if enforcing.trip is None:
            take(enforcing, step)
            assert observing.observed_trip == enforcing.trip
            assert enforcing.trip is not None or counted(observing) == counted(enforcing)
        assert counted(observing) == counted(free)
        assert observing.trip is None
    kinds = [event.event for event in events]
    assert kinds.count("trip_observed") == (observing.observed_trip is not None)
    assert "tripped" not in kinds
    assert not observing.cancellation.cancelled


@pytest.mark.slow
@given(budgets, budgets, steps, st.booleans())
@fixed
def test_it_bounds_neither_its_parent_nor_its_child(outer, inner, steps, advises):
    parent = made(outer, "observe" if advises else "enforce")
    child = parent.child(Budget(**inner), mode="enforce" if advises else "observe", run_id="c")
    # The same in a tree whose advisory guard has no caps at all.
    free = made({"loop_detection": None} if advises else outer, "observe" if advises else "enforce")
    free_child = free.child(
        Budget(**(inner if advises else {"loop_detection": None})), mode=child.mode, run_id="c"
    )
    for step in steps:
        if step[0] in ("abort", "hold"):
            continue
        if step[0] == "time":
            parent.tree.clock.advance(1)
            free.tree.clock.advance(1)
            continue
        assert take(child, step) is take(free_child, step)
        assert counted(parent) == counted(free)
        assert counted(child) == counted(free_child)
    enforced, advisory = (child, parent) if advises else (parent, child)
    assert advisory.trip is None or enforced.trip is not None


def test_looking_on_destroys_nothing():
    asked = []
    guard = Guard(
        Budget(max_iterations=1, tool_quotas={"a": 5}, stop_when=[asked.append]), mode="observe"
    )
    guard.abort("enough")
    for number in range(4):
        guard.settle_model_call(guard.admit_model_call(), TokenUsage(1, 1))
        guard.settle_tool_call(guard.admit_tool_call(ToolCall(name="a", arguments=number)), number)
    snapshot = guard.snapshot()
    assert guard.observed_trip.reason is StopReason.ABORTED
    assert snapshot.quotas == {"a": 4}
    assert snapshot.aborted == "enough"
    assert len(snapshot.detector["seen"]) == 4
    guard.extend(max_iterations=9)
    assert guard.budget.max_iterations == 9
    assert len(asked) == 1


def test_after_the_trip_no_call_is_cut():
    # With a dollar cap a model of unknown price is always looked at closely.
    guard = Guard(Budget(max_total_tokens=20, max_cost_usd=9), mode="observe")
    priced = ModelCall(input_tokens=5, max_output_tokens=40, cost_usd=CENT)
    first = guard.admit_model_call(priced)
    assert (first.max_output_tokens, first.reserved_tokens) == (40, 20)
    guard.settle_model_call(first, TokenUsage(5, 40))
    second = guard.admit_model_call(priced)
    assert guard.observed_trip is not None
    third = guard.admit_model_call(ModelCall(model="?", input_tokens=5, max_output_tokens=40))
    # The second call is cut as ENFORCE would cut it to see whether it fits.
    assert (second.reserved_tokens, third.reserved_tokens) == (6, 45)


def test_a_correction_that_nobody_gets_is_not_recorded_after_the_trip():
    events = []
    guard = Guard(Budget(max_iterations=1), mode="observe", sinks=[events.append])
    for _ in range(6):
        guard.settle_model_call(guard.admit_model_call(), TokenUsage(1, 1))
        guard.settle_tool_call(guard.admit_tool_call(ToolCall(name="a")), "same")
    assert guard.take_nudge() is None
    assert {getattr(event, "nudge", None) for event in events} == {None}
    assert "nudge_taken" not in [event.event for event in events]


@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_time_begins_with_a_call_of_unknown_price_too(mode):
    clock = ManualClock()
    guard = Guard(Budget(max_cost_usd=1), mode=mode, clock=clock)
    guard.admit_model_call(ModelCall(model="a model without a price"))
    clock.advance(3)
    assert guard.usage.seconds == 3


def test_the_end_of_an_observed_run_does_not_cancel_what_goes_on_after_it():
    guard = Guard(mode="observe")
    guard.abort("enough")
    assert not Guard.restore(guard.snapshot()).cancellation.cancelled
