"""Rules of loop detection for polls: results alike but for times and ids, and "not yet"."""

from __future__ import annotations

import json

import pytest

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.kit import Admit, Nudge, Stop, TokenUsage, ToolCall
from budgetguard_core.loop_detection import LoopDetection
from budgetguard_core.loops import LoopDetector
from budgetguard_core.masking import says_not_yet
from budgetguard_core.replay import Replay

MOST = 60


def clock(turn):
    return f"{turn // 3600 % 24:02}:{turn // 60 % 60:02}:{turn % 60:02}"


def polled(result, most=MOST, between=None, **options):
    """Poll once a turn until the run stops: the polls made, the turns with a nudge, the stop."""
    guard = Guard(Budget(), **options)
    nudges = []
    for turn in range(1, most + 1):
        for name, answer in (("poll", result), ("sleep", between)):
            if answer is None:
                continue
            decision = guard.admit_model_call()
            if isinstance(decision, Stop):
                return turn - (name == "poll"), nudges, decision.trip
            if isinstance(decision, Nudge):
                nudges.append((turn, decision.message))
            guard.settle_model_call(decision, TokenUsage(1, 1))
            call = guard.admit_tool_call(ToolCall(name=name, arguments={"job": 7}))
            assert isinstance(call, Admit)
            given = answer(turn)
            failed = given if isinstance(given, Exception) else None
            guard.settle_tool_call(call, None if failed else given, error=failed)
    return most, nudges, None


ALIKE = {
    "a time": lambda n: f"build failed, see the log [2026-11-25T10:{n:02}:07.{n:03}Z]",
    "a time of day": lambda n: f"{clock(n)} no new mail",
    "a time since 1970": lambda n: {"mail": 0, "at": 1_764_000_000 + n},
    "a duration": lambda n: f"0 passed, 1 failed in {n}.53s",
    "a duration by name": lambda n: json.dumps({"rows": [], "elapsed_ms": 31 * n}),
    "a uuid": lambda n: f"nothing found (5f0c52c8-0c53-4a5e-9d0e-{n:012x})",
    "an id by name": lambda n: json.dumps({"rows": [], "request_id": f"r{n * 7919}x"}),
    "an id of a mapping": lambda n: {"rows": [], "requestId": f"r{n * 7919}x"},
    "a line of the shell": lambda n: f"/bin/bash: line {62_000 + n}: javac: command not found",
    "a long log": lambda n: "x " * 9_000 + clock(n),
}


@pytest.mark.parametrize("kind", ALIKE)
def test_a_call_repeated_at_once_with_results_alike_is_nudged_then_stopped(kind):
    made, nudges, trip = polled(ALIKE[kind])
    assert [turn for turn, _ in nudges] == [9]
    assert nudges[0][1].startswith(
        "You have called poll with these arguments again and again, and the latest 7 results"
    )
    assert made == 14
    assert trip.reason is StopReason.NO_PROGRESS
    assert "stop_after_repeats=12" in trip.detail


CHANGING = {
    "a size": lambda n: f"{n * 10} lines",
    "a page": lambda n: {"page": n, "at": clock(n)},
    "a percentage": lambda n: f"running: {n} % after {n} s",
    "a queue": lambda n: f"pending, {MOST - n} before you",
    "a version": lambda n: f"edited: file of 3 lines, version {n}",
}


@pytest.mark.parametrize("kind", CHANGING)
def test_a_result_that_changes_in_more_is_progress(kind):
    made, nudges, trip = polled(CHANGING[kind])
    assert (made, nudges, trip) == (MOST, [], None)


def test_repeats_are_repeats_only_when_made_at_once():
    made, nudges, trip = polled(ALIKE["a time"], between=lambda n: f"slept until {n}")
    assert (made, nudges, trip) == (MOST, [], None)


NOT_YET = {
    "a word": lambda n: "pending",
    "a status and a time": lambda n: f"<status>running</status> <at>{clock(n)}</at>",
    "a mapping": lambda n: {"status": "IN_PROGRESS"},
    "json": lambda n: json.dumps({"state": "queued", "checked": clock(n)}),
    "a sentence": lambda n: f"The export is not ready yet ({n} s).",
}


@pytest.mark.parametrize("kind", NOT_YET)
def test_a_result_that_says_not_yet_is_nudged_then_stopped_with_patience(kind):
    made, nudges, trip = polled(NOT_YET[kind])
    assert [turn for turn, _ in nudges] == [8]
    assert nudges[0][1].startswith(
        "You have asked poll again 6 times, and it answers that it is not ready"
    )
    assert made == 25
    assert trip.reason is StopReason.NO_PROGRESS
    assert "stop_after_waits=24" in trip.detail


@pytest.mark.parametrize("kind", NOT_YET)
def test_a_wait_between_polls_does_not_end_their_row(kind):
    made, nudges, trip = polled(NOT_YET[kind], between=lambda n: "slept")
    assert len(nudges) == 1
    assert made == 26  # the first sleep is new
    assert "stop_after_waits=24" in trip.detail


@pytest.mark.parametrize("between", [None, lambda n: "slept"])
def test_a_job_that_is_done_after_ten_polls_is_nudged_and_not_cut(between):
    made, nudges, trip = polled(
        lambda n: "pending" if n <= 10 else f"done: row {n}", 30, between=between
    )
    assert (made, len(nudges), trip) == (30, 1, None)


def test_progress_ends_a_row_of_waits():
    made, nudges, trip = polled(lambda n: f"running step {n // 5}" if n % 5 else f"result {n}", 60)
    assert (made, nudges, trip) == (60, [], None)


def test_a_turn_of_the_user_ends_rows_of_waits_and_repeats():
    for mark in "#~":
        detector = LoopDetector(LoopDetection())
        for turn in range(60):
            detector.observe("poll", "a", f"{turn}", None, f"{mark}alike")
            if turn % 5 == 4:
                detector.user_turn()
            assert detector.nudge() is None
        assert not detector.tripped


def test_waits_for_two_jobs_are_one_row():
    detector = LoopDetector(LoopDetection())
    polls = 0
    while not detector.tripped:
        detector.nudge()
        detector.observe("poll", f"job {polls % 2}", "pending", None, "~pending")
        polls += 1
    assert polls == 26


def test_a_call_that_fails_is_no_wait():
    made, _, trip = polled(lambda n: RuntimeError("still pending"))
    assert made == 4
    assert "stop_after=3" in trip.detail


@pytest.mark.parametrize("kind", [*ALIKE, *NOT_YET])
def test_a_poll_is_replayed_and_restored_exactly(kind):
    events, answers = [], {**ALIKE, **NOT_YET}
    _, _, trip = polled(answers[kind], sinks=[events.append])
    replay = Replay()
    for event in events:
        replay.apply(event)
    assert replay.end().trip.detail == trip.detail


@pytest.mark.parametrize("mark", "#~")
def test_the_state_goes_on(mark):
    detector = LoopDetector(LoopDetection())
    for turn in range(30):
        detector.nudge()
        assert detector.tripped is (turn >= (13 if mark == "#" else 25))
        detector.observe("poll", "a", f"{turn}", None, f"{mark}alike")
        stored = json.loads(json.dumps(detector.state()))
        detector = LoopDetector.from_state(LoopDetection(), stored)
        assert detector.state() == stored


@pytest.mark.parametrize(
    "text",
    [
        "running", "Status: PENDING", "queued", "in progress", "in_progress", "in-progress",
        "not ready", "Not yet.", "not yet finished", "still processing", "waiting for a worker",
    ],
)  # fmt: skip
def test_texts_that_say_not_yet(text):
    assert says_not_yet(text)


@pytest.mark.parametrize(
    "text",
    [
        "done", "not running", "no longer running", "no pending tasks", "0 pending",
        '{"running": false}', '{"queued": 0, "rows": []}', "rerunning", "is_running", "",
        "running " + "x" * 600,
    ],
)  # fmt: skip
def test_texts_that_do_not_say_not_yet(text):
    assert not says_not_yet(text)
