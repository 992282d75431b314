"""The tool `report_progress` as adapters and plain loops have it."""

from __future__ import annotations

import inspect
import json

from budgetguard_core import Budget, Guard
from budgetguard_core.breakers import ProgressReports
from budgetguard_core.events import ProgressReported
from budgetguard_core.kit import PROGRESS_TOOL, Envelope, ToolCall, report_progress

REPORT = {"claims_so_far": ["one"], "next_subgoal": "two", "estimated_remaining_steps": 3}


def opened():
    events = []
    budget = Budget(progress=ProgressReports(), max_tool_calls=1)
    return Envelope(budget=budget, sinks=[events.append]).open(), events


def reports(events):
    return [event.estimate for event in events if isinstance(event, ProgressReported)]


def test_a_report_reaches_the_run_around_the_code():
    run, events = opened()
    call = run.tool_call(ToolCall(name=PROGRESS_TOOL.name, arguments=REPORT))
    assert run.start(run.wait(call)) is None
    with run.entered(call):
        assert report_progress(**REPORT) == "Noted. Go on."
        assert PROGRESS_TOOL.report(json.dumps(REPORT)) == "Noted. Go on."
        assert PROGRESS_TOOL.report("{").startswith("Not noted: ")
    assert reports(events) == [3, 3]
    assert run.guard.usage.tool_calls == 0


def test_it_is_heard_in_an_activate_block_and_harmless_outside_of_any_run():
    _, events = opened()
    guard = Guard(Budget(progress=ProgressReports()), sinks=[events.append])
    with guard.activate():
        report_progress(**REPORT)
    assert reports(events) == [3]
    assert report_progress(**REPORT) == "Noted. Go on."
    assert report_progress([], "", 3).startswith("Not noted: next_subgoal")


def test_the_function_takes_what_the_schema_describes():
    names = list(inspect.signature(report_progress).parameters)
    assert names == list(PROGRESS_TOOL.parameters["properties"])
    assert report_progress.__name__ == PROGRESS_TOOL.name
