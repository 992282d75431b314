"""The trajectory log: what is in it, what is not, and reading it again."""

from __future__ import annotations

import json
import logging
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from budgetguard_core import (
    Budget,
    Guard,
    JsonLinesSink,
    LoggingSink,
    Price,
    PriceBook,
    StopReason,
    read_events,
    replay,
)
from budgetguard_core.kit import (
    CheckpointError,
    ModelCall,
    TokenUsage,
    ToolCall,
    Violation,
    end_run,
)
from budgetguard_core.testing import ManualClock
from budgetguard_core.tree import Tree

SECRET = "hunter2-s3cr3t"
BOOK = PriceBook({"m": Price(input=1, output=2, context_window=10)})


def full_run(**options):
    """Run through everything that leaves an event."""
    events = []
    sinks = [events.append, *options.pop("sinks", ())]
    guard = Guard(
        Budget(max_iterations=3, max_cost_usd=1, tool_quotas={"b": 1}, max_tool_calls=9),
        run_id="r",
        clock=ManualClock(),
        price_book=BOOK,
        sinks=sinks,
        **options,
    )
    guard.start()
    for _ in range(2):
        ticket = guard.admit_model_call(ModelCall(model="m", input_tokens=9, seconds=5))
        guard.settle_model_call(ticket, TokenUsage(9, 1, 2), model="m-2", cost_usd=Decimal("0.01"))
    child = guard.child(run_id="c")
    child.settle_model_call(child.admit_model_call(ModelCall(model="m")), error=OSError(SECRET))
    for _ in range(3):
        calls = [ToolCall(name=name, arguments={"password": SECRET}, id=name) for name in "ab"]
        for decision in guard.admit_tool_calls(calls):
            if hasattr(decision, "call_id"):
                guard.settle_tool_call(decision, SECRET, error=None)
    guard.take_nudge()
    guard.user_turn()
    guard.state.restart_iterations()
    guard.extend(max_iterations=5)
    guard.hold(Violation(reason=StopReason.FRAMEWORK_LIMIT, detail="recursion"))
    guard.abort("user")
    guard.check()
    stop = guard.admit_model_call(ModelCall(model="m"))
    end_run(guard, trip=stop.trip, next_step="call the model", store=Store())
    return guard, events


class Store:
    def save(self, snapshot):
        pass


def test_every_kind_of_event_survives_a_line_of_json():
    _, events = full_run()
    kinds = {event.event for event in events}
    assert kinds == {
        "run_started",
        "time_started",
        "model_call_admitted",
        "model_call_settled",
        "model_call_refused",
        "tool_calls_requested",
        "tool_call_settled",
        "limit_nearly_reached",
        "nudge_taken",
        "user_turned",
        "iterations_restarted",
        "budget_extended",
        "stop_held",
        "aborted",
        "tripped",
        "checked",
        "checkpoint_saved",
        "incident_recorded",
        "run_ended",
    }
    lines = [event.model_dump_json() + "\n" for event in events]
    assert list(read_events(lines)) == events
    assert list(read_events([line.encode() for line in lines])) == events


def test_events_are_numbered_without_gaps_from_1_and_frozen():
    _, events = full_run()
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert {event.run_id for event in events} == {"r", "c"}
    with pytest.raises(ValueError, match="frozen"):
        events[0].seq = 5


def test_a_trip_is_recorded_once_for_each_guard_that_it_ends():
    events = []
    guard = Guard(Budget(max_iterations=1), run_id="r", sinks=[events.append])
    child = guard.child(run_id="c")
    for _ in range(4):
        child.admit_model_call()
        guard.admit_model_call()
        guard.admit_tool_call(ToolCall(name="a"))
        child.check()
    trips = [event.run_id for event in events if event.event == "tripped"]
    assert sorted(trips) == ["c", "r"]


def test_neither_arguments_nor_results_nor_errors_are_logged(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "budgetguard")
    sink = JsonLinesSink(tmp_path / "log.jsonl")
    full_run(sinks=[sink, LoggingSink()])
    sink.close()
    text = (tmp_path / "log.jsonl").read_text()
    assert "tool_calls_requested" in text
    assert "tool_calls_requested" in caplog.text
    assert SECRET not in text + caplog.text


def test_arguments_are_logged_where_asked_for():
    _, events = full_run(log_arguments=True)
    (first, *_) = [event for event in events if event.event == "tool_calls_requested"]
    assert first.calls[0].arguments == {"password": SECRET}
    assert first.calls[0].fingerprint
    assert [call.decision for call in first.calls] == ["admit", "admit"]


def test_a_call_is_logged_with_its_answer():
    _, events = full_run()
    requested = [event for event in events if event.event == "tool_calls_requested"]
    assert [call.decision for call in requested[1].calls] == ["admit", "refuse"]
    assert requested[1].calls[1].call_id is None
    settled = next(event for event in events if event.event == "model_call_settled")
    assert (settled.model, settled.cost_usd, settled.given_cost_usd) == ("m-2", "0.01", "0.01")
    failed = next(event for event in events if getattr(event, "error", None))
    assert failed.error == "OSError"


NASTY = 'x"}\n{"event":"aborted"}\r\n\x00\x1b[31m\u2028\u2029\x85\ud800'


def test_no_name_can_forge_a_line(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "budgetguard")
    path = tmp_path / "log.jsonl"
    sink = JsonLinesSink(path)
    guard = Guard(sinks=[sink, LoggingSink()], run_id=NASTY)
    guard.admit_model_call(ModelCall(model=NASTY, provider=NASTY))
    guard.settle_tool_call(guard.admit_tool_call(ToolCall(name=NASTY, id=NASTY)), NASTY)
    guard.abort(NASTY)
    sink.close()
    assert guard.tree.errors == ()
    with path.open("rb") as lines:
        events = list(read_events(lines))
    assert [event.event for event in events] == [
        "run_started",
        "model_call_admitted",
        "tool_calls_requested",
        "tool_call_settled",
        "aborted",
    ]
    # Half a surrogate pair is no text; all else is as the model wrote it.
    assert events[1].call.model == NASTY.replace("\ud800", "?")
    assert all("\n" not in r.getMessage() and "\x1b" not in r.getMessage() for r in caplog.records)


def test_levels_of_the_standard_log(caplog):
    logger = logging.getLogger("budgetguard.test")
    caplog.set_level(logging.DEBUG, "budgetguard.test")
    flushed = []
    handler = logging.NullHandler()
    handler.flush = lambda: flushed.append(1)
    logger.addHandler(handler)
    _, events = full_run(sinks=[LoggingSink(logger)])
    logger.removeHandler(handler)
    levels = {record.args[0]: record.levelname for record in caplog.records}
    warnings = {name for name, level in levels.items() if level == "WARNING"}
    assert warnings == {"aborted", "tripped", "limit_nearly_reached"}
    assert len(caplog.records) == len(events)
    assert flushed == [1]


def test_the_standard_log_builds_nothing_that_nobody_reads(caplog):
    caplog.set_level(logging.ERROR, "budgetguard")
    full_run(sinks=[LoggingSink()])
    assert caplog.records == []


def test_no_event_is_built_without_a_sink(monkeypatch):
    guard = Guard(Budget(max_iterations=100))
    monkeypatch.setattr(Tree, "make", lambda *a, **k: pytest.fail("built an event"))
    guard.start()
    guard.settle_model_call(guard.admit_model_call(), TokenUsage(1, 1))
    guard.settle_tool_call(guard.admit_tool_call(ToolCall(name="a")), "x")
    guard.user_turn()
    guard.abort()
    guard.check()


def test_a_listener_that_acts_on_its_guard_does_not_turn_the_order_round():
    seen = []

    def act(event):
        if event.event == "model_call_admitted":
            guard.abort("enough")
            guard.user_turn()

    guard = Guard(sinks=[act, lambda event: seen.append(event.seq)])
    guard.admit_model_call()
    assert seen == [1, 2, 3, 4]


def test_a_sink_that_fails_stops_neither_the_others_nor_the_run(caplog):
    seen = []
    guard = Guard(sinks=[lambda event: 1 / 0, lambda event: seen.append(event.seq)])
    assert guard.admit_model_call().call_id == 1
    assert seen == [1, 2]
    assert guard.tree.errors == ("sink Listener: ZeroDivisionError: division by zero",) * 2
    assert len(caplog.records) == 1


# --- reading --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines():
    return [event.model_dump_json() + "\n" for event in full_run()[1]]


def message(lines):
    with pytest.raises(CheckpointError) as caught:
        list(read_events(lines))
    return str(caught.value)


@pytest.mark.parametrize("cut", [1, 20, -2])
def test_half_a_line_at_the_end_is_left_out(lines, cut):
    assert len(list(read_events([*lines[:3], lines[3][:cut]]))) == 3


def test_a_last_line_that_only_lacks_its_end_is_read(lines):
    assert len(list(read_events([*lines[:3], lines[3][:-1]]))) == 4


def test_lines_without_ends_are_lines_too(lines):
    bare = [line[:-1] for line in lines]
    assert len(list(read_events(bare))) == len(lines)
    bare[2] = bare[2][:30]
    assert message(bare).startswith("line 3: not a JSON object.")


def test_a_damaged_line_is_named(lines):
    for number in (0, 2, len(lines) - 1):
        damaged = [*lines]
        damaged[number] = "{damaged\n"
        assert message(damaged).startswith(f"line {number + 1}: not a JSON object.")
    assert message([lines[0], "[1]\n", lines[1]]).startswith("line 2: not a JSON object.")
    assert message([lines[0], "{a\n", "{b\n"]).startswith("line 2: ")
    assert message([b"\xff\xfe\n", lines[0]]).startswith("line 1: not a JSON object.")


def test_only_a_run_that_starts_or_goes_on_can_follow_half_a_line(lines):
    (child,) = [line for line in lines[1:] if '"run_started"' in line]
    assert message([lines[0], "{ha\n", child]).startswith("line 2: not a JSON object.")
    assert message([lines[0], "{ha\n", lines[1]]).startswith("line 2: not a JSON object.")
    assert len(list(read_events([lines[0], "{ha\n", lines[0]]))) == 2


def test_a_line_that_is_no_event_is_named_with_its_field(lines):
    other = json.loads(lines[0]) | {"seq": "first"}
    assert message([json.dumps(other) + "\n"]).startswith("line 1: not an event (run_started.seq: ")
    unknown = json.dumps(json.loads(lines[0]) | {"event": "exploded"})
    assert message([lines[0], unknown]).startswith("line 2: not an event (the whole: ")
    assert SECRET not in message([json.dumps({"event": "aborted", "x": SECRET})])


def test_a_newer_format_is_named(lines):
    newer = json.dumps(json.loads(lines[0]) | {"format_version": 2, "new_field": 1}) + "\n"
    assert message([newer]) == "line 1: format 2 is newer than 1. Upgrade BudgetGuard."


@pytest.mark.parametrize("place", [[], ["call"]])
def test_a_field_of_a_newer_version_is_named_with_the_way_out(lines, place):
    event = json.loads(next(one for one in lines if '"model_call_admitted"' in one))
    (event["call"] if place else event)["new_field"] = SECRET
    field = ".".join(["model_call_admitted", *place, "new_field"])
    assert message([json.dumps(event) + "\n"]) == (
        f"line 1: not an event ({field}: not known to this version). Upgrade BudgetGuard."
    )


def test_an_event_keeps_the_call_as_it_was_asked():
    events = []
    guard = Guard(sinks=[events.append])
    call = ModelCall(model="m", input_tokens=5)
    guard.admit_model_call(call)
    call.model = "changed by its owner"
    assert events[-1].call == ModelCall(model="m", input_tokens=5)


def test_nesting_without_end_is_a_damaged_line():
    assert message(["[" * 200_000 + "\n"]).startswith("line 1: not a JSON object.")


def test_a_log_goes_on_after_a_killed_process(tmp_path):
    path = tmp_path / "log.jsonl"
    first = JsonLinesSink(path)
    guard = Guard(run_id="r", sinks=[first], clock=ManualClock())
    guard.settle_model_call(guard.admit_model_call(), TokenUsage(1, 1))
    snapshot = guard.snapshot()
    guard.admit_model_call()
    first.close()
    path.write_bytes(path.read_bytes()[:-30])
    second = JsonLinesSink(path)
    again = Guard.restore(snapshot, sinks=[second], clock=ManualClock())
    again.admit_model_call()
    again.tree.flush()
    second.close()
    JsonLinesSink(path).close()
    with path.open() as log:
        replayed = replay(read_events(log), clock=ManualClock())
    assert replayed.usage.model_calls == again.usage.model_calls == 2


def test_the_log_is_for_its_owner_and_appends(tmp_path):
    path = tmp_path / "log.jsonl"
    for _ in range(2):
        sink = JsonLinesSink(path)
        Guard(sinks=[sink])
        sink.close()
    assert len(path.read_text().splitlines()) == 2


def test_a_line_that_a_full_disk_cut_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    class FullOnce:
        def __init__(self, file: Any) -> None:
            self.file = file
            self.full = True

        def write(self, data: bytes) -> int:
            if self.full and len(data) > 10:
                self.file.write(data[:10])
                self.full = False
                raise OSError("no space left on device")
            return self.file.write(data[:50])  # a short write, as a raw file may make

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    path = tmp_path / "log.jsonl"
    with JsonLinesSink(path) as sink:
        sink._file = FullOnce(sink._file)
        guard = Guard(Budget(), sinks=[sink])
        guard.start()
        guard.user_turn()
    lines = path.read_bytes().splitlines()
    assert len(lines) == 3
    assert [json.loads(line)["event"] for line in lines[1:]] == ["time_started", "user_turned"]
    assert "no space left" in guard.tree.errors[0]


CONTROLS = (
    "\x00\x1b\x7f\x80\x85\x9b\x9f\xad\u061c\u200b\u200f\u2028\u2029\u202e\u2066\ufeff\U000e0041"
)


def test_no_control_character_of_any_kind_reaches_a_log(tmp_path, caplog):
    name = f"r\u00e9sum\u00e9{CONTROLS}\U0001f600"
    path = tmp_path / "log.jsonl"
    with JsonLinesSink(path) as log, caplog.at_level(logging.DEBUG):
        guard = Guard(run_id=name, sinks=[log, LoggingSink()], clock=ManualClock())
        guard.admit_tool_call(ToolCall(name=name, id=name, arguments={name: name}))
        guard.admit_model_call(ModelCall(model=name, provider=name))
        guard.abort(name)
        guard.check()
    written = path.read_text(encoding="utf-8").replace("\n", "")
    for text in [written, *(record.getMessage() for record in caplog.records)]:
        assert not set(text) & set(CONTROLS)
    assert "r\u00e9sum\u00e9" in written
    assert "\U0001f600" in written
    events = list(read_events(path.read_bytes().splitlines(keepends=True)))
    assert {event.run_id for event in events} == {name}
