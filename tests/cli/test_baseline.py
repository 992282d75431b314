"""`budgetguard baseline`: which tools recorded runs call."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from budgetguard_cli.app import app
from budgetguard_core import Budget, Guard, JsonLinesSink, ToolCall, end_run
from budgetguard_core.breakers import ToolMixBaseline


def baseline(*arguments, code=0):
    done = CliRunner().invoke(app, ["baseline", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


def trajectory(*tools, success=True):
    steps = [
        {
            "role": "assistant",
            "tool_calls": [{"name": name, "args": {}, "id": str(number)}],
        }
        for number, name in enumerate(tools)
    ]
    return json.dumps({"run_id": "r", "success": success, "steps": steps})


@pytest.fixture
def write(tmp_path):
    def write(*lines, name="runs.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


def test_runs_that_succeeded_are_recorded_and_the_model_reads_what_is_written(write):
    one = write(trajectory("search", "search", "read"), trajectory("write", success=False))
    two = write(trajectory("read"), name="two.jsonl")
    done = baseline(one, two)
    assert ToolMixBaseline.model_validate_json(done.stdout) == ToolMixBaseline(
        runs=2, tools={"search": 2, "read": 2}
    )
    assert done.stderr == "2 runs recorded, 1 left out, 0 lines not read.\n"
    found = json.loads(baseline(one, "--all").stdout)
    assert found == {
        "format_version": 1,
        "runs": 2,
        "tools": {"search": 2, "read": 1, "write": 1},
    }


@pytest.mark.parametrize("way", [[], ["--all"]])
def test_an_event_log_is_read_as_well_and_a_run_of_two_legs_is_one(tmp_path, way):
    with JsonLinesSink(tmp_path / "run.jsonl") as sink:
        guard = Guard(Budget(), run_id="run", sinks=[sink])
        for name in ("search", "read"):
            guard.settle_tool_call(guard.admit_tool_call(ToolCall(name=name)))
    with JsonLinesSink(tmp_path / "run-2.jsonl") as sink:
        again = Guard.restore(guard.snapshot(), sinks=[sink])
        again.settle_tool_call(again.admit_tool_call(ToolCall(name="read")))
        end_run(again, trip=None)
    done = baseline(tmp_path, *way)
    assert json.loads(done.stdout) == {
        "format_version": 1,
        "runs": 1,
        "tools": {"search": 1, "read": 2},
    }
    assert done.stderr == "1 runs recorded, 0 left out, 0 lines not read.\n"


def test_a_line_that_cannot_be_read_is_named_and_the_rest_is_recorded(write):
    done = baseline(write(trajectory("search"), "{", trajectory("read")), code=1)
    assert json.loads(done.stdout)["runs"] == 2
    assert ":2: " in done.stderr
    assert "1 lines not read" in done.stderr


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [([trajectory()], "got none among 1 runs"), ([], "got none among 0 runs")],
)
def test_without_a_tool_call_there_is_nothing_to_record(write, lines, sentence):
    assert sentence in baseline(write(*lines), code=2).stderr


def test_a_file_that_is_not_there_is_refused(tmp_path):
    assert "No such file" in baseline(tmp_path / "none", code=2).stderr
