"""A reader of several logs in one file tells each of them event by event."""

from __future__ import annotations

from decimal import Decimal

import pytest

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.kit import CheckpointError, ModelCall, TokenUsage
from budgetguard_core.replay import Replay


def log_of(run_id, calls, cost=None):
    events = []
    guard = Guard(run_id=run_id, sinks=[events.append])
    for _ in range(calls):
        ticket = guard.admit_model_call(ModelCall(model="gpt-4o"))
        guard.settle_model_call(ticket, TokenUsage(input_tokens=10), cost_usd=cost)
    return guard, events


def test_two_logs_that_share_numbers_are_told_side_by_side():
    first, first_events = log_of("a", 3)
    second, second_events = log_of("b", 5)
    replays = {"a": Replay(), "b": Replay(Budget(max_iterations=4))}
    for pair in zip(first_events, second_events[: len(first_events)], strict=True):
        for event in pair:
            replays[event.run_id].apply(event)
    for event in second_events[len(first_events) :]:
        replays["b"].apply(event)
    assert replays["a"].end().usage.model_copy(update={"seconds": 0.0}) == (
        first.usage.model_copy(update={"seconds": 0.0})
    )
    assert replays["b"].end().trip.reason is StopReason.MAX_ITERATIONS
    assert second.usage.model_calls == 5
    assert replays["b"].end().usage.model_calls == 4


def test_the_guard_can_be_looked_at_on_the_way():
    _, events = log_of("a", 2)
    replay = Replay()
    assert replay.root is None
    seen = []
    for event in events:
        replay.apply(event)
        seen.append(replay.root.usage.model_calls)
    assert seen == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    "text",
    ["1E+999999999999", "-1", "NaN", "Infinity", "ten"],
)
def test_a_cost_that_no_run_can_have_is_refused_at_once(text):
    _, events = log_of("a", 1, cost=Decimal("0.10"))
    replay = Replay()
    for event in events[:-1]:
        replay.apply(event)
    with pytest.raises(CheckpointError, match="event 3 does not fit"):
        replay.apply(events[-1].model_copy(update={"given_cost_usd": text}))
    replay = Replay()
    replay.apply(events[0])
    if text != "ten":
        call = ModelCall(cost_usd=Decimal(text))
        with pytest.raises(CheckpointError, match="event 2 does not fit"):
            replay.apply(events[1].model_copy(update={"call": call}))


def test_a_replay_of_nothing_has_no_guard():
    with pytest.raises(CheckpointError, match="holds no run"):
        Replay().end()
