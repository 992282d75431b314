"""The end of a run: its order, and that nothing which fails changes it or hides."""

from __future__ import annotations

import errno
import logging
from decimal import Decimal

import pytest

from budgetguard_core import (
    Budget,
    ConfigurationError,
    Guard,
    JsonLinesSink,
    MemoryStore,
    Snapshot,
    SqliteStore,
    StopReason,
    Usage,
    read_events,
)
from budgetguard_core.events import IncidentRecorded
from budgetguard_core.kit import (
    CheckpointError,
    ModelCall,
    TokenUsage,
    ToolCall,
    end_run,
    synthetic_metadata,
    synthetic_text,
)
from budgetguard_core.testing import ManualClock


class Told:
    """A store and a sink that write down what happens to them, in order."""

    def __init__(self, *, fails=()):
        self.told = []
        self.fails = fails
        self.snapshot = None

    def save(self, snapshot):
        self._tell("saved")
        self.snapshot = snapshot

    def emit(self, event):
        self._tell(event.event)

    def flush(self):
        self._tell("flushed")

    def _tell(self, what):
        self.told.append(what)
        if what in self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")


def stopped(**options):
    guard = Guard(
        Budget(max_iterations=1, max_cost_usd=1),
        run_id="r",
        clock=ManualClock(),
        **options,
    )
    ticket = guard.admit_model_call(ModelCall(cost_usd=Decimal("0.1")))
    guard.settle_model_call(ticket, TokenUsage(5, 5), cost_usd=Decimal("0.1"))
    done, _ = guard.admit_tool_calls([ToolCall(name="a", id="1"), ToolCall(name="send", id="2")])
    guard.settle_tool_call(done, "x")
    return guard, guard.admit_model_call(ModelCall(cost_usd=Decimal("0.1"))).trip


def test_checkpoint_then_record_then_flush_then_return():
    seen = Told()
    guard, trip = stopped(sinks=[seen])
    seen.told.clear()
    outcome = end_run(
        guard,
        trip=trip,
        messages=["m"],
        saved_messages=[{"m": 1}],
        final="text",
        store=seen,
        next_step="call the model",
        resume="run it again",
    )
    assert seen.told == [
        "saved",
        "checkpoint_saved",
        "incident_recorded",
        "flushed",
        "run_ended",
    ]
    assert seen.snapshot.messages == ({"m": 1},)
    assert seen.snapshot.trip == trip
    assert guard.outcome is outcome
    assert outcome.model_dump(exclude={"usage", "earlier_usage", "violations", "tool_calls"}) == {
        "run_id": "r",
        "status": "terminated",
        "stop_reason": StopReason.MAX_ITERATIONS,
        "detail": "max_iterations=1 reached: 1 used",
        "error": None,
        "next_step": "call the model",
        "messages": ("m",),
        "final": "text",
        "finalized": False,
        "warnings": ("max_iterations",),
        "profile": None,
        "observed": (),
        "resume": "run it again",
        "errors": (),
    }
    assert outcome.violations == trip.violations
    assert outcome.usage == guard.usage
    assert [(record.id, record.status) for record in outcome.tool_calls] == [
        ("1", "completed"),
        ("2", "interrupted"),
    ]


def test_the_incident_record_has_what_is_needed_afterwards():
    events = []
    guard, trip = stopped(sinks=[events.append])
    end_run(guard, trip=trip, next_step="call the model")
    (incident,) = [event for event in events if isinstance(event, IncidentRecorded)]
    assert incident.trip == trip
    assert incident.usage.cost_usd == Decimal("0.1")
    assert incident.next_step == "call the model"
    assert incident.price_book == guard.tree.price_book.version
    assert incident.may_have_taken_effect == ("send 2",)


def test_a_run_that_ends_by_itself_has_no_incident():
    seen = Told()
    guard = Guard(clock=ManualClock(), sinks=[seen])
    outcome = end_run(guard, trip=None, messages=["m"], final="done", store=seen)
    assert (outcome.status, outcome.stop_reason, outcome.detail) == ("completed", "completed", "")
    assert seen.told == ["run_started", "saved", "checkpoint_saved", "flushed", "run_ended"]
    assert seen.snapshot.messages == ("m",)


@pytest.mark.parametrize("fails", ["saved", "incident_recorded", "flushed", "run_ended"])
def test_what_fails_changes_nothing_and_is_reported(fails, caplog):
    caplog.set_level(logging.WARNING, "budgetguard")
    good_guard, good_trip = stopped()
    good = end_run(good_guard, trip=good_trip, messages=["m"], final="text", store=Told())
    seen = Told(fails=[fails])
    guard, trip = stopped(sinks=[seen])
    outcome = end_run(guard, trip=trip, messages=["m"], final="text", store=seen)
    assert outcome.model_copy(update={"errors": ()}) == good
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space" not in caplog.text
    what = "checkpoint" if fails == "saved" else "sink Told"
    assert guard.tree.errors == (f"{what}: OSError: [Errno 28] No space left on device",)
    # What fails after the outcome was built can only be in the guard's own list.
    assert outcome.errors == (() if fails == "run_ended" else guard.tree.errors)
    assert ("checkpoint_saved" in seen.told) is (fails != "saved")


def test_a_listener_that_fails_at_every_event_is_logged_once(caplog):
    guard, trip = stopped(sinks=[lambda event: 1 / 0])
    outcome = end_run(guard, trip=trip)
    assert outcome.stop_reason is StopReason.MAX_ITERATIONS
    assert set(outcome.errors) == {"sink Listener: ZeroDivisionError: division by zero"}
    assert len(caplog.records) == 1
    assert len(guard.tree.errors) <= 20


def test_a_full_disk_at_the_trip():
    sink = JsonLinesSink("/dev/full")
    guard, trip = stopped(sinks=[sink])
    outcome = end_run(guard, trip=trip, messages=["m"], final="text")
    sink.close()
    assert outcome.stop_reason is StopReason.MAX_ITERATIONS
    assert outcome.messages == ("m",)
    assert any("No space left" in error for error in outcome.errors)


def test_a_conversation_that_json_cannot_hold_costs_the_checkpoint_only(tmp_path):
    store = SqliteStore(tmp_path / "c.sqlite3")
    guard, trip = stopped()
    outcome = end_run(guard, trip=trip, messages=[object()], store=store)
    store.close()
    assert outcome.status == "terminated"
    assert outcome.errors[0].startswith("checkpoint: CheckpointError: messages must be what JSON")


def test_the_record_is_on_the_disk_before_the_result_is_returned(tmp_path, monkeypatch):
    path, synced = tmp_path / "log.jsonl", []
    sink = JsonLinesSink(path)
    guard, trip = stopped(sinks=[sink])
    monkeypatch.setattr("os.fsync", lambda fd: synced.append(path.read_text()))
    end_run(guard, trip=trip)
    sink.close()
    assert len(synced) == 1
    assert [event.event for event in read_events(synced[0].splitlines(keepends=True))][-1] == (
        "incident_recorded"
    )


def test_the_marker_of_the_last_message():
    guard, trip = stopped()
    assert synthetic_metadata(guard, trip) == {
        "synthetic": True,
        "stop_reason": "max_iterations",
        "run_id": "r",
    }


@pytest.mark.parametrize(
    ("calls", "phrase"),
    [(0, "So far no tool call was completed."), (1, "1 tool call was completed; see the results")],
)
def test_the_text_of_the_last_message_is_neutral(calls, phrase):
    guard = Guard(Budget(max_cost_usd=1), clock=ManualClock())
    for _ in range(calls):
        guard.settle_tool_call(guard.admit_tool_call(ToolCall(name="a")), "x")
    guard.settle_tool_call(guard.admit_tool_call(ToolCall(name="b")), error=OSError())
    text = synthetic_text(guard)
    assert phrase in text
    assert not any(word in text.lower() for word in ("budget", "cap", "limit", "cost", "token"))


def test_a_resumed_leg_tells_what_the_earlier_ones_used():
    store = MemoryStore()
    guard, trip = stopped()
    end_run(guard, trip=trip, store=store)
    again = Guard.restore(store.load("r"), Budget(max_iterations=5), clock=ManualClock())
    outcome = end_run(again, trip=None)
    assert outcome.earlier_usage.iterations == 1
    assert outcome.usage.iterations == 0
    with pytest.raises(CheckpointError):
        store.load("r").model_copy(update={"messages": (object(),)}).to_json()


# --- paused and failed ----------------------------------------------------------------------


class Unprintable(Exception):
    def __str__(self):
        raise OSError


def test_a_run_that_waits_for_a_person_is_paused():
    seen = Told()
    guard = Guard(run_id="r", clock=ManualClock(), sinks=[seen])
    guard.pause()
    outcome = end_run(guard, trip=None, paused=True, store=seen, next_step="approve send")
    assert (outcome.status, outcome.stop_reason, outcome.detail) == ("paused", None, "")
    assert (outcome.next_step, outcome.error) == ("approve send", None)
    assert seen.told == [
        "run_started",
        "run_paused",
        "saved",
        "checkpoint_saved",
        "flushed",
    ]
    assert seen.snapshot.pauses == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError("disk"), "OSError: disk"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError("x" * 900), "ValueError: " + "x" * 488),
        (Unprintable(), "Unprintable"),
    ],
)
def test_a_run_that_an_exception_left_has_failed(error, text):
    events = []
    guard = Guard(Budget(max_iterations=5), clock=ManualClock(), sinks=[events.append])
    guard.settle_model_call(guard.admit_model_call(), error=error)
    outcome = end_run(guard, trip=None, error=error, paused=True)
    assert (outcome.status, outcome.stop_reason, outcome.error) == ("failed", None, text)
    assert outcome.usage.model_calls == 1
    (ended,) = [event for event in events if event.event == "run_ended"]
    assert (ended.status, ended.stop_reason) == ("failed", None)
    assert ended.error == type(error).__name__
    assert guard.outcome is outcome


def test_a_limit_comes_before_what_else_happened():
    guard, trip = stopped()
    outcome = end_run(guard, trip=trip, error=OSError("late"), paused=True)
    assert (outcome.status, outcome.stop_reason) == ("terminated", "max_iterations")
    assert outcome.error == "OSError: late"


def test_a_run_goes_on_from_its_outcome_under_a_fresh_budget():
    guard, trip = stopped()
    outcome = end_run(guard, trip=trip, messages=["m"])
    snapshot = Snapshot.from_json(Snapshot.of_outcome(outcome).to_json())
    assert snapshot.messages == ("m",)
    again = Guard.restore(snapshot, Budget(max_iterations=1), clock=ManualClock())
    assert again.run_id == "r"
    assert again.usage == Usage()
    # What was in flight may have cost something, but an outcome does not know what.
    assert again.earlier_usage == guard.usage.model_copy(
        update={"reserved_tokens": 0, "reserved_usd": Decimal(0)}
    )
    assert [record.status for record in again.tool_calls] == ["completed", "interrupted"]
    assert Guard.restore(Snapshot.of_outcome(outcome), Budget()).trip is None
    with pytest.raises(ConfigurationError, match="whose caps are not known needs a budget"):
        Guard.restore(snapshot)


def test_a_guard_that_an_earlier_run_has_used_up_says_so():
    guard = Guard(Budget(max_iterations=1))
    guard.settle_model_call(guard.admit_model_call(), TokenUsage(1, 1))
    end_run(guard, trip=None)
    stop = guard.admit_model_call()
    outcome = end_run(guard, trip=stop.trip)
    assert outcome.detail == (
        "max_iterations=1 reached: 1 used; "
        "an earlier run on this guard has used it up: give each run a Budget of its own"
    )
    fresh = Guard(Budget(max_iterations=1))
    fresh.settle_model_call(fresh.admit_model_call(), TokenUsage(1, 1))
    assert "earlier" not in end_run(fresh, trip=fresh.admit_model_call().trip).detail
