"""The progress signal: when the model is asked, what is a standstill, and what ends one."""

from __future__ import annotations

import json

import pytest

from budgetguard_core.breakers import REPORT_PROGRESS, ProgressReports
from budgetguard_core.breakers.progress import ProgressSignal, read_report
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.stop import StopReason


def report(subgoal="fix the parser", left=5):
    return {
        "claims_so_far": ["it builds"],
        "next_subgoal": subgoal,
        "estimated_remaining_steps": left,
    }


class Run:
    """Turns of a loop, as a guard tells them."""

    def __init__(self, **settings):
        self.signal = ProgressSignal(ProgressReports(every_iterations=2, **settings))
        self.said = []

    def turn(self, *reports):
        """Begin a turn: True when it may begin. The model makes these reports in it."""
        self.signal.iteration()
        if self.signal.tripped:
            return False
        message = self.signal.nudge()
        if message is not None:
            self.said.append(message)
        for one in reports:
            self.signal.note(read_report(one))
        return True

    def answer(self, one):
        """Go on until the model is asked, and report then; True when it was asked."""
        for _ in range(3):
            before = len(self.said)
            self.signal.iteration()
            if self.signal.tripped:
                return False
            message = self.signal.nudge()
            if message is not None:
                self.said.append(message)
            if len(self.said) > before and REPORT_PROGRESS in self.said[-1]:
                self.signal.note(read_report(one))
                return True
        return False


def test_the_model_is_asked_after_so_many_turns_without_a_report():
    run = Run()
    assert [run.turn() for _ in range(2)] == [True, True]
    assert run.said == []
    run.turn(report())
    (said,) = run.said
    assert said.startswith("Before you go on, call report_progress: say what is done")
    run.turn()
    assert len(run.said) == 1
    run.turn(report("write the tests", 4))
    assert len(run.said) == 2


def test_the_same_subgoal_three_times_is_corrected_then_stopped():
    run = Run()
    assert run.answer(report("Fix the parser.", 9))
    assert run.answer(report("fix  the PARSER", 8))
    assert run.answer(report("fix the parser!", 7))
    assert not run.signal.tripped
    run.turn()
    assert run.said[-1] == (
        "You have named the same next subgoal 3 times. "
        "Take another approach, or report what blocks you."
    )
    assert run.answer(report("fix the parser", 6))
    assert not run.turn()
    violation = run.signal.violation()
    assert (violation.reason, violation.limit, violation.used) == (StopReason.STALLED, 3, 4)
    assert violation.detail == (
        "4 reports in a row had the same next subgoal, same_subgoal=3; "
        "the model was corrected in between"
    )


def test_an_estimate_that_does_not_fall_is_corrected_then_stopped():
    run = Run()
    for subgoal, left in [("a", 5), ("b", 5), ("c", 7)]:
        assert run.answer(report(subgoal, left))
    run.turn()
    assert run.said[-1].startswith("By your last 3 reports there is no less work to do. Take")
    assert run.answer(report("d", 7))
    assert not run.turn()
    assert run.signal.violation().detail.startswith("4 reports in a row had an estimate that did")


def test_work_that_gets_less_is_progress():
    run = Run()
    for left in range(30, 0, -1):
        assert run.answer(report(f"part {left}", left))
    assert not any("Take another approach" in said for said in run.said)


def test_a_plan_that_grew_is_progress_while_it_is_worked_off():
    run = Run()
    for number, left in enumerate([5, 4, 20, 18, 25, 16, 9]):
        assert run.answer(report(f"part {number}", left))
    assert not any("Take another approach" in said for said in run.said)


@pytest.mark.parametrize(
    ("stuck", "change"),
    [
        ([("a", 9), ("a", 8), ("a", 7)], ("b", 30)),
        ([("a", 5), ("b", 5), ("c", 5)], ("c", 4)),
    ],
)
def test_who_changes_what_it_was_corrected_for_begins_anew(stuck, change):
    run = Run()
    for one in stuck:
        assert run.answer(report(*one))
    run.turn()
    assert "Take another approach" in run.said[-1]
    assert run.answer(report(*change))
    assert run.answer(report(*change))
    assert run.turn()
    assert "Take another approach" not in run.said[-1]
    # And may come to a standstill again, which is corrected again.
    assert run.answer(report(*change))
    assert run.turn()
    assert "Take another approach" in run.said[-1]


def test_no_report_when_asked_twice_is_corrected_then_stopped():
    run = Run()
    assert [run.turn() for _ in range(6)] == [True, True, True, True, True, False]
    asked, again, corrected = run.said
    assert asked == again
    assert corrected.startswith("You were asked how far the work is and did not say. Take another")
    assert corrected.endswith(asked)
    violation = run.signal.violation()
    assert (violation.limit, violation.used) == (2, 3)
    assert violation.detail.startswith("3 requests in a row for a report were not answered")


@pytest.mark.parametrize("silent", [1, 2])
def test_a_report_that_comes_at_last_is_enough(silent):
    run = Run()
    for _ in range(2 + silent):
        assert run.turn()
    assert run.turn(report())
    assert [run.turn() for _ in range(2)] == [True] * 2
    assert run.signal._cause == ""


def test_no_report_after_a_correction_is_a_stop():
    run = Run()
    for left in (9, 8, 7):
        assert run.answer(report("a", left))
    assert [run.turn() for _ in range(5)] == [True, True, True, False, False]
    assert run.signal.violation().detail.startswith("1 requests in a row")


def test_who_reports_more_often_than_asked_is_not_nearer_to_a_standstill():
    run = Run()
    for _ in range(4):
        run.turn(report("a", 5), report("a", 5), report("a", 5))
    assert not any("Take another approach" in said for said in run.said)
    # But asked it is all the same, and what it says then counts.
    for _ in range(6):
        run.turn(report("a", 5))
    assert any("Take another approach" in said for said in run.said)


def test_a_report_between_shows_progress():
    run = Run()
    assert run.answer(report("a", 9))
    assert run.answer(report("a", 9))
    run.signal.note(read_report(report("b", 8)))
    assert run.answer(report("b", 7))
    assert run.answer(report("b", 6))
    assert run.signal._same == 3


def test_after_a_user_turn_everything_begins_anew():
    run = Run()
    for left in (9, 8, 7):
        assert run.answer(report("a", left))
    assert run.signal.due
    run.signal.user_turn()
    assert run.turn()
    assert run.said[-1].startswith("Before you go on")


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        (None, "Not noted: the arguments must be an object. Call report_progress again."),
        ("{", "Not noted: the arguments must be an object. Call report_progress again."),
        ("[" * 100_000, "Not noted: the arguments must be an object. Call report_progress again."),
        ({}, "Not noted: next_subgoal must be a sentence. Call report_progress again."),
        (report(" "), "Not noted: next_subgoal must be a sentence. Call report_progress again."),
        (
            report("a", -1),
            "Not noted: estimated_remaining_steps must be a whole number >= 0. "
            "Call report_progress again.",
        ),
    ],
    ids=range(6),
)
def test_a_report_that_cannot_be_read_is_none(arguments, result):
    assert read_report(arguments) == result


@pytest.mark.parametrize(
    ("left", "read"),
    [
        (0, 0), (7.0, 7), ("7", 7), (" 12 ", 12), (10**30, 10**9), (1.5, None), (True, None),
        ("many", None), ("٤", None), ("9" * 5000, None), (float("inf"), None), (None, None),
    ],
    ids=range(12),
)  # fmt: skip
def test_an_estimate_is_read_as_models_write_it(left, read):
    found = read_report(report("a", left))
    assert (found if isinstance(found, str) else found.estimate) == (
        "Not noted: estimated_remaining_steps must be a whole number >= 0. "
        "Call report_progress again."
        if read is None
        else read
    )


def test_a_report_may_be_json_text_and_its_words_are_what_counts():
    one = read_report(json.dumps(report("Fix -- the parser.")))
    assert one == read_report(report("fix the PARSER"))
    assert one.subgoal != read_report(report("fix the lexer")).subgoal
    assert read_report(report("!!")).subgoal != read_report(report("??")).subgoal
    assert len(read_report(report("\ud800" * 10**6)).subgoal) == 16


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"every_iterations": 0}, "every_iterations must be a whole number >= 1, got 0. Leave it"),
        ({"same_subgoal": 1}, "same_subgoal must be a whole number >= 2, got 1. Leave it out for"),
        ({"flat_estimate": "3"}, "flat_estimate must be a whole number >= 2, got '3'."),
        ({"every": 3}, "every is not a field of ProgressReports, got 3. Use one of: every_itera"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, sentence):
    with pytest.raises(ConfigurationError) as caught:
        ProgressReports(**fields)
    assert sentence in str(caught.value)
