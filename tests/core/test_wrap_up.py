"""`wrap_up_at`: one request to finish, once a run, from a share of a cap on."""

from __future__ import annotations

import pytest

from budgetguard_core import Budget, ConfigurationError, Guard, Price, PriceBook, Snapshot
from budgetguard_core.kit import Admit, ModelCall, Nudge, TokenUsage, ToolCall
from budgetguard_core.replay import replay
from budgetguard_core.testing import ManualClock

WORDS = "Round it off."


def budget(**caps):
    return Budget(wrap_up_at=0.8, wrap_up_message=WORDS, loop_detection=None, **caps)


def asked(guard: Guard, *, seconds: float = 0, clock: ManualClock | None = None) -> bool:
    """Make one model call with a tool call, and say whether the model was asked to finish."""
    decision = guard.admit_model_call(ModelCall(model="m"))
    if clock is not None:
        clock.advance(seconds)
    guard.settle_model_call(decision, TokenUsage(10, 10))
    tool = guard.admit_tool_call(ToolCall(name="search"))
    if isinstance(tool, Admit):
        guard.settle_tool_call(tool, "found")
    return isinstance(decision, Nudge) and decision.message == WORDS


@pytest.mark.parametrize(
    "caps",
    [
        {"max_iterations": 5},
        {"max_model_calls": 5},
        {"max_tool_calls": 5},
        {"max_total_tokens": 100},
        {"max_input_tokens": 50},
        {"max_output_tokens": 50},
        {"max_seconds": 5.0},
        {"max_cost_usd": 1.0},
    ],
)
def test_each_cap_has_its_share(caps):
    clock = ManualClock()
    book = PriceBook({"m": Price(input=10_000, output=10_000)})
    guard = Guard(budget(**caps), clock=clock, price_book=book)
    assert [asked(guard, seconds=1, clock=clock) for _ in range(5)] == [False] * 4 + [True]


def test_it_comes_once_also_over_a_restart():
    guard = Guard(budget(max_iterations=10))
    assert [asked(guard) for _ in range(9)] == [False] * 8 + [True]
    again = Guard.restore(Snapshot.from_json(guard.snapshot().to_json()))
    assert not asked(again)


def test_a_restart_before_it_takes_nothing_away():
    guard = Guard(budget(max_iterations=5))
    assert not any(asked(guard) for _ in range(4))
    assert asked(Guard.restore(Snapshot.from_json(guard.snapshot().to_json())))


def test_a_replay_asks_where_the_run_was_asked():
    events = []
    guard = Guard(budget(max_iterations=6), sinks=[events.append])
    assert [asked(guard) for _ in range(6)] == [False] * 5 + [True]
    assert [one.nudge for one in events if one.event == "model_call_admitted"][-1] == WORDS
    assert not replay(events).snapshot().wraps_up
    assert replay(events[:-4]).snapshot().wraps_up


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_no_other_mode_asks(mode):
    guard = Guard(budget(max_iterations=5), mode=mode)
    assert not any(asked(guard) for _ in range(6))


def test_a_childs_model_is_asked_by_its_own_budget_alone():
    parent = Guard(budget(max_iterations=5))
    child = parent.child(Budget(max_iterations=5, loop_detection=None))
    assert not any(asked(child) for _ in range(4))
    assert asked(parent)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("wrap_up_at", 1, "between 0 and 1"),
        ("wrap_up_at", "soon", "between 0 and 1"),
        ("wrap_up_message", " ", "a text of 1 to 2000 characters"),
    ],
)
def test_bad_input_is_refused(field, value, rule):
    with pytest.raises(ConfigurationError, match=rule):
        Budget(**{field: value})
