"""Why a run ends: conditions that compose, and the order of reasons."""

from __future__ import annotations

from decimal import Decimal

import pytest

from budgetguard_core import (
    Budget,
    ConfigurationError,
    Guard,
    StopReason,
    Trip,
    after_iterations,
    tool_called,
)
from budgetguard_core.kit import Admit, ModelCall, StopCondition, TokenUsage, ToolCall, Violation
from budgetguard_core.stop import as_condition
from budgetguard_core.stop_state import in_order
from budgetguard_core.testing import ManualClock


class Holds(StopCondition):
    def __init__(self, answer):
        self.answer = answer

    def __call__(self, guard):
        return self.answer


def reason_of(condition):
    guard = Guard(Budget(stop_when=[condition]), clock=ManualClock())
    stop = guard.admit_model_call()
    return (guard.trip.detail if guard.trip else None), guard.tree.errors, stop


@pytest.mark.parametrize(
    ("left", "right", "both", "either"),
    [
        (None, None, None, None),
        ("a", None, None, "a"),
        (None, "b", None, "b"),
        ("a", "b", "a and b", "a"),
    ],
)
def test_and_and_or(left, right, both, either):
    assert (Holds(left) & Holds(right))(None) == both
    assert (Holds(left) | Holds(right))(None) == either
    assert (Holds(left) & (lambda guard: right))(None) == both
    assert (Holds(left) | (lambda guard: right))(None) == either


def test_a_composition_composes():
    condition = (Holds("a") | Holds(None)) & (Holds("b") | Holds("c")) & Holds("d")
    assert condition(None) == "a and b and d"


def enough(guard):
    return guard.usage.iterations >= 0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (enough, "enough"),
        (lambda guard: "done", "done"),
        (lambda guard: 1, "<lambda>"),
        (lambda guard: [0], "<lambda>"),
        (Holds("seen"), "seen"),
        (lambda guard: None, None),
        (lambda guard: False, None),
        (lambda guard: "", None),
        (lambda guard: 0, None),
    ],
    ids=range(9),
)
def test_a_plain_callable_answers_with_a_reason_or_a_truth(answer, reason):
    detail, errors, _ = reason_of(answer)
    assert detail == reason
    assert errors == ()


def test_a_condition_that_fails_is_reported_and_stops_nothing():
    detail, errors, decision = reason_of(lambda guard: 1 / 0)
    assert detail is None
    assert len(errors) == 1
    assert errors[0].startswith("stop_when: ")
    assert decision.call_id == 1


def test_what_cannot_be_called_is_no_condition():
    with pytest.raises(ConfigurationError, match="must be callable, got 5"):
        Holds("a") & 5
    assert as_condition(enough)(Guard(clock=ManualClock())) == "enough"
    held = Holds("a")
    assert as_condition(held) is held


def test_the_named_conditions():
    guard = Guard(
        Budget(stop_when=[tool_called("submit_*") & after_iterations(2)]), clock=ManualClock()
    )
    guard.admit_model_call()
    guard.admit_tool_call(ToolCall(name="submit_answer"))
    assert guard.admit_model_call().call_id
    assert tool_called("other")(guard) is None
    stop = guard.admit_model_call()
    assert stop.trip.detail == "tool 'submit_*' was called and 2 iterations have started"
    assert stop.trip.reason is StopReason.STOP_CONDITION


def test_a_condition_is_asked_before_tools_too_and_can_look_at_the_guard():
    seen = []
    guard = Guard(Budget(stop_when=[lambda g: seen.append(g.usage) or None]), clock=ManualClock())
    guard.admit_tool_calls([ToolCall(name="a")])
    guard.check()
    assert len(seen) == 2


def test_a_parents_condition_ends_the_child():
    parent = Guard(Budget(stop_when=[lambda g: "enough"]), run_id="p", clock=ManualClock())
    child = parent.child()
    assert child.admit_model_call().trip.run_id == "p"
    assert parent.trip is not None


def test_reasons_are_the_names_of_the_caps_and_in_the_contracts_order():
    order = [
        "aborted",
        "max_iterations",
        "max_model_calls",
        "max_seconds",
        "max_cost_usd",
        "max_total_tokens",
        "max_input_tokens",
        "max_output_tokens",
        "max_output_tokens_per_call",
        "tenant_daily",
        "tenant_monthly",
        "max_tool_calls",
        "tool_quota",
        "no_progress",
        "oscillation",
        "stalled",
        "velocity",
        "circuit_open",
        "stop_condition",
    ]
    shuffled = [Violation(reason=StopReason(name)) for name in reversed(order)]
    assert [str(violation.reason) for violation in in_order(shuffled)] == order
    others = {"completed", "unpriced_model", "unmetered_usage", "framework_limit"}
    assert {str(reason) for reason in StopReason} == {*order, *others}


def test_everything_that_holds_at_once_is_listed_in_order():
    clock = ManualClock()
    guard = Guard(
        Budget(
            max_iterations=1,
            max_model_calls=1,
            max_seconds=1,
            max_cost_usd=Decimal("0.1"),
            max_total_tokens=10,
            max_tool_calls=1,
            stop_when=[lambda guard: guard.usage.total_tokens > 10],
        ),
        clock=clock,
        run_id="r",
    )
    ticket = guard.admit_model_call(ModelCall(cost_usd=Decimal("0.1")))
    for _ in range(2):
        guard.admit_tool_call(ToolCall(name="search", kind="hosted"))
    guard.settle_model_call(ticket, TokenUsage(6, 6), cost_usd=Decimal("0.2"))
    clock.advance(2)
    guard.hold(Violation(reason=StopReason.FRAMEWORK_LIMIT, limit=25, used=25))
    guard.abort("user pressed stop")
    trip = guard.admit_model_call(ModelCall(cost_usd=Decimal("0.1"))).trip
    assert [(str(v.reason), v.limit, v.used) for v in trip.violations] == [
        ("aborted", None, None),
        ("max_iterations", 1, 1),
        ("max_model_calls", 1, 1),
        ("max_seconds", 1.0, 2.0),
        ("max_cost_usd", Decimal("0.1"), Decimal("0.2")),
        ("max_total_tokens", 10, 12),
        ("max_tool_calls", 1, 2),
        ("stop_condition", None, None),
        ("framework_limit", 25, 25),
    ]
    assert trip.reason is StopReason.ABORTED
    assert trip.detail == "user pressed stop"
    assert trip.run_id == "r"
    assert guard.trip == trip
    assert trip.violations[1].detail == "max_iterations=1 reached: 1 used"


def test_a_trip_keeps_its_numbers_in_json():
    trip = Trip(
        reason="max_cost_usd",
        run_id="r",
        violations=(
            Violation(reason="max_cost_usd", limit=Decimal("0.30"), used=Decimal("1")),
            Violation(reason="max_seconds", limit=1.0, used=1.25),
            Violation(reason="max_iterations", limit=3, used=3),
        ),
    )
    again = Trip.model_validate_json(trip.model_dump_json())
    assert again == trip
    assert type(again.violations[0].limit) is Decimal


def test_a_function_composes_with_a_condition_from_the_left():
    assert ((lambda guard: "a") & Holds("b"))(None) == "a and b"
    assert ((lambda guard: None) & Holds("b"))(None) is None
    assert ((lambda guard: "a") | Holds("b"))(None) == "a"
    assert ((lambda guard: False) | Holds("b"))(None) == "b"


class Hold(StopCondition):
    async def __call__(self, guard):
        return "never asked"


async def is_done(guard):
    return "never asked"


@pytest.mark.parametrize("condition", [is_done, Hold()])
def test_an_async_condition_is_refused(condition):
    with pytest.raises(ConfigurationError, match="a stop condition must not be async"):
        Guard(Budget(stop_when=[condition]), clock=ManualClock())
    with pytest.raises(ConfigurationError, match="must not be async"):
        Holds("a") & condition


class Awaitable:
    def __await__(self):
        yield


@pytest.mark.parametrize(
    "condition", [lambda guard: is_done(guard), lambda guard: Awaitable()], ids=["coroutine", "any"]
)
def test_a_condition_that_turns_out_to_be_async_is_reported_and_stops_nothing(condition):
    detail, errors, answer = reason_of(condition)
    assert (detail, errors) == (None, ("stop_when: TypeError: a stop condition must not be async",))
    assert isinstance(answer, Admit)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(True, "the condition holds"), (False, None), (5, "the condition holds"), ("a", "a")],
)
def test_a_condition_of_ones_own_may_answer_as_a_function_does(answer, reason):
    assert reason_of(Holds(answer))[:2] == (reason, ())
    assert (Holds(answer) | Holds(None))(None) == reason
    assert (Holds(answer) & Holds("b"))(None) == (reason and f"{reason} and b")


def test_a_trip_without_violations_has_no_detail():
    assert Trip(reason="aborted", violations=(), run_id="r").detail == ""


@pytest.mark.parametrize("count", ["5", 0, -1, True, 2.5, None])
def test_a_number_of_iterations_that_is_none_is_refused_when_built(count):
    with pytest.raises(ConfigurationError, match="whole number >= 1"):
        after_iterations(count)
