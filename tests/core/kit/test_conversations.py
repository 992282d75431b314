"""Budgets of a conversation: their counters go on over its runs."""

from __future__ import annotations

import itertools

import pytest

from budgetguard_core import (
    Budget,
    BudgetGuardError,
    ConfigurationError,
    Guard,
    MemoryStore,
    SqliteStore,
    StopReason,
)
from budgetguard_core.kit import Envelope, ModelCall, Stop, TokenUsage
from budgetguard_core.testing import ManualClock

NAMES = (f"conversations-{number}" for number in itertools.count())


@pytest.fixture
def name():
    return next(NAMES)


def worked(envelope, thread, calls=1, **how):
    """Do a run of so many model calls of 20 tokens, and return its outcome."""
    run = envelope.open(thread=thread, **how)
    for _ in range(calls):
        opened = run.model_call(ModelCall())
        if isinstance(opened, Stop):
            break
        run.answered(opened, TokenUsage(10, 10))
    return run.end()


def envelope(conversation, budget=None, **options):
    budget = budget or Budget(max_iterations=9)
    return Envelope(budget=budget, conversation=conversation, **options)


def test_its_counters_go_on_and_those_of_a_run_begin_anew(name):
    caps = Budget(max_model_calls=5)
    outcomes = [
        worked(envelope(caps, Budget(max_iterations=2)), name, calls=calls)
        for calls in (2, 3, 1, 1)
    ]
    assert [one.usage.model_calls for one in outcomes] == [2, 2, 1, 0]
    assert [one.stop_reason for one in outcomes] == [
        StopReason.COMPLETED,
        StopReason.MAX_ITERATIONS,
        StopReason.COMPLETED,
        StopReason.MAX_MODEL_CALLS,
    ]
    assert "max_model_calls=5 reached: 5 used" in outcomes[-1].detail
    assert worked(envelope(caps), f"{name}-another").status == "completed"


def test_a_budget_per_conversation_is_the_same_without_caps_a_run(name):
    budget = Budget(max_model_calls=3, per="conversation")
    outcomes = [worked(Envelope(budget=budget), name, calls=2) for _ in range(2)]
    assert [one.usage.model_calls for one in outcomes] == [2, 1]
    assert outcomes[1].stop_reason is StopReason.MAX_MODEL_CALLS


def test_more_budget_lets_it_go_on(name):
    assert worked(envelope(Budget(max_model_calls=1)), name, 2).status == "terminated"
    more = envelope(Budget(max_model_calls=3))
    assert worked(more, name, 2).status == "completed"
    assert worked(more, name, 1).status == "terminated"


def test_other_processes_have_it_from_the_store(name, tmp_path):
    caps = Budget(max_total_tokens=60)
    for left in (40, 20):
        store = SqliteStore(tmp_path / "runs.sqlite3")
        outcome = worked(envelope(caps, store=store), name, calls=9 if left == 20 else 1)
        store.close()
    assert outcome.stop_reason is StopReason.MAX_TOTAL_TOKENS
    assert outcome.usage.total_tokens == 40


def test_a_killed_process_has_spent_what_it_had_in_flight(name):
    store = MemoryStore()
    caps = Budget(max_total_tokens=200)
    run = envelope(caps, store=store).open(thread=name)
    run.model_call(ModelCall(input_tokens=150, max_output_tokens=10))
    run.save()
    snapshot = store.load(f"conversation-{name}")
    assert snapshot.counters["reserved_tokens"] == 160

    copied = MemoryStore()
    copied.save(snapshot)
    again = envelope(caps, store=copied).open(thread=name)
    assert again.guard.parent.usage.total_tokens == 160
    assert not again.guard.parent.usage.reserved_tokens


def test_a_store_need_not_be_hashable(name):
    class Store(MemoryStore):
        __hash__ = None

    caps = envelope(Budget(max_model_calls=1), store=Store())
    worked(caps, name)
    assert worked(caps, name).status == "terminated"


def test_runs_at_the_same_time_share_it(name):
    caps = envelope(Budget(max_model_calls=3))
    one, other = caps.open(thread=name), caps.open(thread=name)
    assert one.guard.parent is other.guard.parent
    calls = [run.model_call(ModelCall()) for run in (one, other, one, other)]
    assert [isinstance(call, Stop) for call in calls] == [False, False, False, True]
    one.end()
    other.end()
    assert worked(caps, name).status == "terminated"


def test_a_part_of_a_run_of_it_is_counted_once(name):
    caps = envelope(Budget(max_model_calls=3))
    run = caps.open(thread=name)
    with run.entered():
        assert worked(caps, name, 2).status == "completed"
        inner = worked(caps, f"{name}-another", 2)
        assert worked(caps, None, 1).status == "terminated"  # a sub-agent has no id of its own
    assert inner.usage.model_calls == 1  # the third of this conversation
    assert run.guard.parent.usage.model_calls == 3
    run.end()


def test_its_time_is_that_of_its_runs(name):
    clock = ManualClock()
    caps = envelope(Budget(max_seconds=10), clock=clock)
    for seconds in (4, 5):
        run = caps.open(thread=name)
        run.guard.start()
        clock.advance(seconds)
        run.end()
        clock.advance(100)
    run = caps.open(thread=name)
    run.guard.start()
    clock.advance(1)
    assert run.check().reason is StopReason.MAX_SECONDS
    run.end()


def test_a_paused_run_goes_on_in_it(name):
    caps = envelope(Budget(max_model_calls=3))
    run = caps.open(thread=name)
    run.answered(run.model_call(ModelCall()), TokenUsage(10, 10))
    run.pause()
    run = caps.open(thread=name, resume=run.guard.snapshot())
    assert (run.guard.usage.model_calls, run.guard.parent.usage.model_calls) == (1, 1)
    run.end()


def test_the_log_has_the_conversation_around_its_runs(name):
    events = []
    for _ in range(2):
        worked(envelope(Budget(max_model_calls=3), sinks=[events.append]), name)
    roots = [one for one in events if one.run_id == f"conversation-{name}"]
    kinds = ["run_started", "time_started", "run_ended", "run_restored", "run_ended"]
    assert [one.event for one in roots] == kinds
    starts = [one for one in events if one.event == "run_started" and one not in roots]
    assert {one.parent_run_id for one in starts} == {f"conversation-{name}"}
    assert roots[-1].usage.model_calls == 2


def test_an_id_can_be_given_and_has_to_be_there(name):
    caps = Budget(max_model_calls=1)
    for _ in range(2):
        last = worked(
            envelope(caps, conversation_id=lambda config: config["user"]),
            None,
            config={"user": name},
        )
    assert last.status == "terminated"
    assert worked(envelope(caps, conversation_id=name), None).status == "terminated"
    with pytest.raises(ConfigurationError, match="needs its id, got none"):
        envelope(caps).open()
    assert worked(envelope(caps), "x" * 5000 + name).status == "completed"


def test_bad_input_is_refused(name):
    with pytest.raises(ConfigurationError, match="conversation must be a Budget, got int"):
        envelope(5)
    with pytest.raises(ConfigurationError, match="conversation must be left out with a Guard"):
        envelope(Budget(), Guard(Budget()))
    for caps in ({"conversation": Budget()}, {"budget": Budget(per="conversation")}):
        with pytest.raises(ConfigurationError, match="needs runs with an end, got single calls"):
            Envelope(**{"budget": Budget(), **caps}).open(loose=True, thread=name)
    with pytest.raises(ConfigurationError, match="per must be"):
        Budget(per="session")
    store = MemoryStore()
    caps = Budget(max_model_calls=1)
    worked(envelope(caps, store=store), name)
    snapshot = store.load(f"conversation-{name}")
    store.save(snapshot.model_copy(update={"counters": {}}))
    with pytest.raises(BudgetGuardError):
        envelope(caps, store=store).open(thread=name)
