"""`budgetguard export`: runs as labelled examples of an evaluation set."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from budgetguard_cli.app import app
from budgetguard_core import (
    Admit,
    Budget,
    FinalizeReserve,
    Guard,
    JsonLinesSink,
    ModelCall,
    TokenUsage,
    ToolCall,
    end_run,
)
from budgetguard_core.kit import Answer, Envelope, last_answer
from run_logs import in_legs, write
from sticky_runs import NEEDS, RUNS


def export(*arguments, code=0):
    done = CliRunner().invoke(app, ["export", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


PAGE = {"report": ["--json"], "show": ["--run", "stopped"]}


def examples(text):
    return {one["run_id"]: one for one in map(json.loads, text.splitlines())}


def test_runs_are_labelled_by_how_they_ended(tmp_path):
    log, out = write(tmp_path / "log.jsonl"), tmp_path / "set.jsonl"
    done = export(log, "-o", out)
    found = examples(out.read_text())
    assert f"{len(found)} examples written, 0 lines not read." in done.stderr
    stopped = found["stopped"]
    assert (stopped["label"], stopped["stop_reason"]) == ("terminated", "max_iterations")
    assert stopped["profile"]["name"] == "research"
    assert stopped["budget"]["max_iterations"] == 5
    assert stopped["stop"]["violations"][0]["limit"] == 5
    assert stopped["usage"]["model_calls"] == 5
    assert [one["kind"] for one in stopped["steps"][:2]] == ["model", "tool"]
    assert stopped["steps"][0]["tokens"] == [900, 100]
    assert stopped["steps"][-1]["refused"] == "max_iterations"
    assert found["helper"]["parent_run_id"] == "stopped"
    assert {one["label"] for one in found.values()} >= {"completed", "failed", "unfinished"}
    assert list(tmp_path.glob("*.part")) == []
    assert examples(export(log).stdout) == found


@pytest.mark.parametrize("logged", [True, False])
def test_arguments_are_there_only_if_they_were_logged(tmp_path, logged):
    log = tmp_path / "log.jsonl"
    with JsonLinesSink(log) as sink:
        guard = Guard(Budget(), run_id="r", sinks=[sink], log_arguments=logged)
        call = ToolCall(name="pay", id="1", arguments={"account": "secret"})
        (asked,) = guard.admit_tool_calls([call])
        assert isinstance(asked, Admit)
        guard.settle_tool_call(asked, error=ValueError("no"))
        end_run(guard, trip=None)
    text = export(log).stdout
    (step,) = examples(text)["r"]["steps"]
    assert ("secret" in text) is logged
    assert step.get("arguments") == ({"account": "secret"} if logged else None)
    assert (step["decision"], step["error"]) == ("admit", "ValueError")
    assert step["arguments_hash"]


def test_a_last_answer_is_no_example(tmp_path):
    log = tmp_path / "log.jsonl"
    with JsonLinesSink(log) as sink:
        budget = Budget(max_iterations=1, finalize_reserve=FinalizeReserve(tokens=900))
        run = Envelope(budget=budget, sinks=[sink]).open(run_id="r")
        run.answered(run.model_call(ModelCall()), TokenUsage(10, 1))
        run.model_call(ModelCall())
        last_answer(run).ask(ModelCall(input_tokens=9), lambda _: Answer(text="42."))
        run.end((), "42.")
    assert list(examples(export(log).stdout)) == ["r"]


def test_damaged_lines_and_missing_files_are_said(tmp_path):
    log = write(tmp_path / "log.jsonl")
    whole = log.read_bytes()
    log.write_bytes(b"not json\n" + whole + b'{"event": "run_st')
    done = export(log, code=1)
    assert f"{log}:1: " in done.stderr.replace("\n", "")
    assert "1 lines not read." in done.stderr
    assert "stopped" in examples(done.stdout)
    done = export(tmp_path / "none.jsonl", code=2)
    assert "No such file" in done.stderr
    done = export(log, "-o", tmp_path / "no folder" / "set.jsonl", code=2)
    assert "no folder" in done.stderr
    assert "Name a file that can be written." in done.stderr
    done = export(log, "-o", tmp_path, code=2)
    assert f"{tmp_path}: Is a directory. Name a file" in done.stderr.replace("\n", " ")
    assert not list(tmp_path.parent.glob("*.part"))
    assert "Example: budgetguard export" in export("--help").stdout


def test_events_of_a_run_that_never_began_are_said_and_not_dropped(tmp_path):
    log = write(tmp_path / "log.jsonl")
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"run_started"' not in line))
    done = export(log, code=1)
    assert "the run of this event has no start in this file." in done.stderr
    assert ", 0 lines not read." not in done.stderr


@pytest.mark.parametrize("command", ["show", "baseline", "export", "report"])
def test_of_many_damaged_lines_the_first_are_said_and_the_last(tmp_path, command):
    log = tmp_path / "log.jsonl"
    log.write_text(write(tmp_path / "whole.jsonl").read_text() + "{}\n" * 500)
    done = CliRunner().invoke(app, [command, str(log), *PAGE.get(command, ())])
    assert done.exit_code == 1, done.output
    assert done.stderr.count("it has no field `event`.") == 21
    assert "480 more lines cannot be read, the last of them:" in done.stderr


def test_an_event_of_another_release_is_named(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"event": "of_tomorrow"}\n')
    assert "this release knows no event 'of_tomorrow'." in export(log, code=1).stderr


def test_an_output_that_is_no_plain_file_stays_what_it_is(tmp_path):
    log = write(tmp_path / "log.jsonl")
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "set.jsonl"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        export(log, "-o", pipe)
        assert pipe.is_fifo()
        assert "stopped" in examples(os.read(reading, 2**16))
    finally:
        os.close(reading)
    target.touch()
    link.symlink_to(target)
    export(log, "-o", link)
    assert link.is_symlink()
    assert "stopped" in examples(target.read_text())


def test_a_reader_that_goes_away_is_no_file_of_a_wrong_name(tmp_path):
    log = write(tmp_path / "log.jsonl")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "budgetguard_cli", "export", log, log],
            stdout=out,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert b"Name a file" not in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("adapter", sorted(RUNS))
def test_the_log_of_every_adapter_is_exported(tmp_path, monkeypatch, adapter):
    pytest.importorskip(NEEDS[adapter])
    monkeypatch.setenv("BUDGETGUARD_LOG", str(tmp_path))
    outcome = RUNS[adapter](Budget(max_iterations=3))
    (run,) = [
        one
        for one in examples(export(*tmp_path.glob("*.jsonl")).stdout).values()
        if one["run_id"] == outcome.run_id
    ]
    assert (run["label"], run["stop_reason"]) == ("terminated", "max_iterations")
    tools = [one for one in run["steps"] if one["kind"] == "tool"]
    assert len(tools) == outcome.usage.tool_calls
    assert not any("arguments" in one for one in tools)


def test_a_run_of_several_legs_is_one_example(tmp_path):
    in_legs(tmp_path)
    (example,) = [json.loads(line) for line in export(tmp_path).stdout.splitlines()]
    assert (example["label"], example["usage"]["model_calls"]) == ("completed", 3)
    assert [step["kind"] for step in example["steps"]] == ["model", "tool"] * 3


def test_two_runs_of_one_name_are_two_examples(tmp_path):
    for name in ("a", "b"):
        with JsonLinesSink(tmp_path / f"{name}.jsonl") as sink:
            guard = Guard(Budget(), run_id="nightly", sinks=[sink])
            guard.settle_model_call(guard.admit_model_call(ModelCall()), TokenUsage(90, 10))
    labels = [json.loads(line)["label"] for line in export(tmp_path).stdout.splitlines()]
    assert labels == ["unfinished", "unfinished"]
