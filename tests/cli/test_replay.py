"""Recorded runs against a budget: the rule, the figures, and whatever a file may hold."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from budgetguard_cli.app import app
from budgetguard_cli.screen import in_dollars
from budgetguard_core import Budget, Guard, JsonLinesSink, PriceBook
from budgetguard_core.kit import ModelCall, Stop, TokenUsage, ToolCall, end_run
from budgetguard_core.pricing import to_usd
from budgetguard_core.testing import ManualClock

USED = TokenUsage(1000, 50)


def turn(guard, number, *, name="read_file", same=False, model="gpt-4o", used=USED, cost=None):
    """A model call that asks for one tool call, and the call's result; returns a trip."""
    ticket = guard.admit_model_call(ModelCall(model=model))
    if isinstance(ticket, Stop):
        return ticket.trip
    guard.settle_model_call(ticket, used, cost_usd=cost)
    at = 0 if same else number
    (call,) = guard.admit_tool_calls([ToolCall(name=name, arguments={"n": at}, id=f"c{number}")])
    guard.settle_tool_call(call, f"result {at}")
    return None


def live_run(guard, count, *, clock=None, **how):
    trip = None
    for number in range(count):
        trip = turn(guard, number, **how)
        if trip is not None:
            break
        if clock is not None:
            clock.advance(10)
    end_run(guard, trip=trip)


def unbounded(sink, run_id="r"):
    return Guard(Budget(loop_detection=None), run_id=run_id, sinks=[sink])


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl"
    sink = JsonLinesSink(path)
    yield path, sink
    sink.close()


@pytest.fixture
def lines(tmp_path):
    """The lines of a log of one run of two turns."""
    with JsonLinesSink(tmp_path / "made.jsonl") as sink:
        live_run(unbounded(sink), 2)
    text = (tmp_path / "made.jsonl").read_text()
    (tmp_path / "made.jsonl").unlink()
    return text


def replay(*arguments, code=0):
    done = CliRunner().invoke(app, ["replay", *map(str, arguments)], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done


def records(*arguments, code=0):
    lines = replay(*arguments, "--json", code=code).stdout.splitlines()
    return [json.loads(line) for line in lines]


def in_all(*arguments, code=0):
    return records(*arguments, code=code)[-1]


def in_words(text):
    return " ".join(text.split())


def stopped(*arguments):
    return [record for record in records(*arguments) if record["type"] == "stopped_run"]


# The rule


def test_a_runaway_is_stopped_before_its_fifth_identical_call(log):
    path, sink = log
    live_run(unbounded(sink), 64, same=True)
    (run,) = stopped(path)
    assert run["reason"] == "no_progress"
    assert run["recorded"]["tool_calls"] - run["saved"]["tool_calls"] == 4
    assert run["recorded"]["model_calls"] - run["saved"]["model_calls"] == 4
    assert run["saved"]["tokens"] == 60 * 1050
    assert in_all(path, "--no-loop-detection")["stopped"] == {}


@pytest.mark.parametrize("command", ["show", "replay", "calibrate"])
def test_reading_logs_writes_none(command, tmp_path, monkeypatch, budgetguard):
    monkeypatch.setenv("BUDGETGUARD_LOG", str(tmp_path))
    live_run(Guard(Budget(loop_detection=None)), 3)
    (log,) = tmp_path.iterdir()
    before = log.read_bytes()
    budgetguard(command, tmp_path, *(["--max-iterations", "2"] if command == "replay" else []))
    assert ([*tmp_path.iterdir()], log.read_bytes()) == ([log], before)


def test_an_honest_run_is_not_cut(log):
    path, sink = log
    live_run(unbounded(sink, "other arguments"), 30)
    asked = unbounded(sink, "the user asks again")
    for number in range(30):
        turn(asked, number, same=True)
        asked.user_turn()
    end_run(asked, trip=None)
    found = in_all(path)
    assert (found["stopped"], found["successful_runs_cut"], found["succeeded"]) == ({}, 0, 2)


# Caps


@pytest.mark.parametrize(
    ("option", "value", "model_calls"),
    [
        ("max_iterations", "3", 3),
        ("max_model_calls", "3", 3),
        ("max_tool_calls", "3", 4),
        ("max_total_tokens", "3150", 3),
        ("max_cost_usd", "0.009", 3),
    ],
)
def test_each_cap_stops_where_the_engine_does(log, option, value, model_calls):
    path, sink = log
    live_run(unbounded(sink), 10)
    (run,) = stopped(path, f"--{option.replace('_', '-')}", value)
    assert run["reason"] == option
    assert 10 - run["saved"]["model_calls"] == model_calls
    assert run["succeeded"] is True


def test_a_successful_run_that_would_be_cut_is_named(log):
    path, sink = log
    live_run(unbounded(sink, "the one"), 3)
    live_run(unbounded(sink, "the other"), 1)
    shown = replay(path, "--max-iterations", "2").stdout
    assert "successful runs cut 1 of 2" in in_words(shown)
    assert f"cut: {path}:1, run the one: max_iterations=2 reached: 2 used" in in_words(shown)
    assert "the other" not in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--max-iterations", "0"],
            "max_iterations must be a whole number >= 1, got 0. Use None for no cap.",
        ),
        (["--max-cost-usd", "nan"], "max_cost_usd must be "),
        (["--max-cost-usd", "-1"], "max_cost_usd must be "),
        (["--max-cost-usd", "1e999999999999"], "max_cost_usd must be "),
        (["--max-seconds", "inf"], "max_seconds must be "),
        (["--max-cost-usd", "ten"], "must be an amount of US dollars, got 'ten'."),
        (["--max-total-tokens", "2.5"], "a valid integer"),
        (["--max-turns", "2"], "No such option"),
    ],
)
def test_a_bad_cap_is_refused_in_one_sentence(log, arguments, sentence):
    done = replay(log[0], *arguments, code=2)
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


# Tokens and dollars


def test_the_recorded_cost_is_used_where_there_is_one(log):
    path, sink = log
    live_run(unbounded(sink), 8, same=True, cost=Decimal("0.25"))
    (run,) = stopped(path)
    assert Decimal(run["recorded"]["cost_usd"]) == 2
    assert Decimal(run["saved"]["cost_usd"]) == Decimal("1")


def test_without_a_recorded_cost_the_models_price_counts(log):
    path, sink = log
    live_run(unbounded(sink), 8, same=True)
    (run,) = stopped(path)
    price = to_usd(PriceBook().rates_for("gpt-4o").cost(USED))
    assert Decimal(run["saved"]["cost_usd"]) == 4 * price > 0


def test_an_unknown_price_is_said_and_never_counted_as_nothing(log, tmp_path):
    path, sink = log
    live_run(unbounded(sink), 8, same=True, model="in-house-9")
    (run,) = stopped(path)
    assert run["saved"]["unpriced_calls"] == 4
    shown = in_words(replay(path).stdout)
    assert "dollars saved unknown of unknown" in shown
    assert "8 of 8 model calls have neither a recorded cost nor a known price" in shown
    assert "$" not in shown
    with JsonLinesSink(tmp_path / "priced.jsonl") as priced:
        live_run(unbounded(priced, "p"), 8, same=True, cost=Decimal("0.25"))
    both = in_words(replay(path, tmp_path / "priced.jsonl").stdout)
    assert "dollars saved at least $1.00 of at least $2.00" in both


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        ("0", "$0.00"),
        ("0.00135", "$0.00135"),
        ("0.0390549", "$0.03905"),
        ("2", "$2.00"),
        ("1.23456", "$1.235"),
        ("12345.6", "$12,345.60"),
        ("0.000000012345", "$0.00000001234"),
    ],
)
def test_dollars_have_four_significant_digits(amount, shown):
    assert in_dollars(Decimal(amount)) == shown


def test_quotas_refuse_calls_and_the_run_goes_on(log):
    path, sink = log
    live_run(unbounded(sink), 6)
    found = in_all(path, "--tool-quota", "read_*=2", "--tool-quota", "other=1")
    assert found["stopped"] == {}
    assert found["breakers"] == {"tool_call_refused": 4}
    shown = in_words(replay(path, "--tool-quota", "read_*=2").stdout)
    assert "Budget: read_*=2; loop detection on." in shown
    assert "tool call refused 4" in shown


@pytest.mark.sample(4)
@pytest.mark.parametrize("quota", ["read_file", "=3", "a=x", "a=-1", "a=²", "a=" + "9" * 30])
def test_a_bad_quota_is_refused_in_one_sentence(log, quota):
    done = replay(log[0], "--tool-quota", quota, code=2)
    assert "must be a tool and a whole number, such as search_web=3, got" in done.stderr
    assert "must be whole numbers >= 1" in replay("-", "--tool-quota", "a=0", code=2).stderr


def test_a_dollar_cap_refuses_an_unknown_price_unless_the_user_says_otherwise(log):
    path, sink = log
    live_run(unbounded(sink), 2, model="in-house-9")
    assert in_all(path, "--max-cost-usd", "1")["stopped"] == {"unpriced_model": 1}
    assert in_all(path, "--max-cost-usd", "1", "--count-unpriced-as-zero")["stopped"] == {}


def test_estimated_usage_is_said(log):
    path, sink = log
    live_run(unbounded(sink), 8, used=TokenUsage(1000, 50, estimated=True))
    assert in_all(path)["recorded"]["estimated_calls"] == 8
    assert "8 of 8 model calls have no recorded usage" in in_words(replay(path).stdout)


def test_runs_of_several_files_are_summed_up(tmp_path):
    for name, count in (("one", 8), ("two", 9)):
        with JsonLinesSink(tmp_path / f"{name}.jsonl") as sink:
            live_run(unbounded(sink, name), count, same=True)
    whole = in_all(tmp_path)
    assert (whole["runs"], whole["succeeded"], whole["successful_runs_cut"]) == (2, 2, 2)
    assert whole["saved"]["model_calls"] == 4 + 5
    assert [Path(run["file"]).name for run in stopped(tmp_path)] == ["one.jsonl", "two.jsonl"]


# Runs


def test_interleaved_runs_do_not_mix(log):
    path, sink = log
    guards = [Guard(run_id=f"g{number}", sinks=[sink]) for number in range(3)]
    for step in range(4):
        for number, guard in enumerate(guards):
            if step <= number + 1:
                ticket = guard.admit_model_call()
                guard.settle_model_call(ticket, TokenUsage(10 * (number + 1), 0))
    found = records(path, "--max-iterations", "2")
    assert [run["run_id"] for run in found[:-1]] == ["g1", "g2"]
    assert found[-1]["recorded"]["tokens"] == 2 * 10 + 3 * 20 + 4 * 30


def test_a_run_that_was_stopped_is_a_runaway_and_its_refusal_is_no_call(log):
    path, sink = log
    live_run(Guard(Budget(max_iterations=5), run_id="r", sinks=[sink]), 99)
    same = in_all(path, "--max-iterations", "5")
    assert same["recorded"]["model_calls"] == 5
    assert same["stopped"] == {"max_iterations": 1}
    assert same["saved"]["model_calls"] == 0
    assert (same["runaways"], same["runaways_stopped"], same["succeeded"]) == (1, 1, 0)
    looser = in_all(path, "--max-iterations", "50")
    assert looser["stopped"] == {}
    assert looser["recorded"]["model_calls"] == 5
    assert in_all(path, "--max-iterations", "2")["saved"]["model_calls"] == 3


def test_a_run_that_was_only_observed_is_judged_as_one_that_is_bounded(log):
    path, sink = log
    live_run(Guard(Budget(max_iterations=5), mode="observe", sinks=[sink]), 9)
    assert in_all(path, "--max-iterations", "4")["saved"]["model_calls"] == 5


def test_a_log_has_times_to_judge_seconds_by(log):
    path, sink = log
    clock = ManualClock()
    live_run(Guard(sinks=[sink], clock=clock), 6, clock=clock)
    found = in_all(path, "--max-seconds", "30")
    assert found["stopped"] == {"max_seconds": 1}
    assert found["saved"]["model_calls"] == 3
    assert found["notes"] == []


def test_sub_agents_belong_to_the_run_above_them(log):
    path, sink = log
    parent = Guard(run_id="parent", sinks=[sink])
    live_run(parent.child(run_id="child"), 3)
    live_run(parent, 1)
    found = in_all(path, "--max-model-calls", "2")
    assert (found["runs"], found["recorded"]["model_calls"]) == (1, 4)
    assert found["saved"]["model_calls"] == 2


@pytest.mark.parametrize(("cap", "saved"), [("2", 5), ("4", 0), ("50", 0)])
def test_a_resumed_run_is_one_run_and_nothing_counts_twice(log, cap, saved):
    path, sink = log
    first = Guard(Budget(max_iterations=3), run_id="r", sinks=[sink])
    live_run(first, 9)
    live_run(Guard.restore(first.snapshot(), Budget(max_iterations=9), sinks=[sink]), 4)
    found = in_all(path, "--max-model-calls", cap)
    assert found["runs"] == found["succeeded"] == 1
    assert found["recorded"]["model_calls"] == 3 + 4
    assert (found["saved"]["model_calls"], found["lines_not_read"]) == (saved, 0)


def test_a_killed_run_loses_its_last_line_and_nothing_else(log):
    path, sink = log
    guard = Guard(run_id="r", sinks=[sink])
    for _ in range(3):
        guard.settle_model_call(guard.admit_model_call(), TokenUsage(10, 0))
    guard.admit_model_call()
    with path.open("ab") as file:
        file.write(b'{"event":"model_call_set')
    found = in_all(path)
    assert (found["runs"], found["succeeded"]) == (1, 0)
    assert found["recorded"]["tokens"] == 30
    assert "1 model call never reported back" in found["notes"][-1]


def test_a_log_with_a_hole_leaves_out_that_run_alone(log):
    path, sink = log
    live_run(Guard(run_id="holed", sinks=[sink]), 3)
    live_run(Guard(run_id="whole", sinks=[sink]), 2)
    lines = path.read_text().splitlines()
    del lines[4]
    path.write_text("\n".join([*lines, '{"event": "user_turned", "seq": "x"}', "", ""]))
    done = replay(path, code=1)
    assert f"{path}:5: event 5 of the run must be next, got 6; the figures of its run end" in (
        done.stderr
    )
    assert f"{path}:{len(lines) + 1}: user_turned.seq" in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert in_all(path, code=1)["recorded"]["model_calls"] == 2


def test_a_log_without_its_beginning_says_so(log):
    path, sink = log
    live_run(Guard(run_id="r", sinks=[sink]), 1)
    path.write_text("\n".join(path.read_text().splitlines()[1:]) + "\n")
    assert "has no start in this file" in replay(path, code=1).stderr


def test_a_forged_log_cannot_take_all_memory(log):
    path, sink = log
    guard = Guard(run_id="r", sinks=[sink])
    guard.settle_model_call(guard.admit_model_call(), TokenUsage(1, 1), cost_usd=Decimal("0.5"))
    log = path.read_text()
    forged = log.replace('"given_cost_usd":"0.5"', '"given_cost_usd":"1E+9999999999"')
    assert forged != log
    path.write_text(forged)
    assert "does not fit: cost_usd must be a Decimal" in replay(path, code=1).stderr


# Whatever a file may hold

BAD = {
    "not JSON": ("{nonsense", "Invalid JSON"),
    "cut short": ('{"event": "user_turned", "seq": ', "Invalid JSON"),
    "a list": ("[]", "Input should be"),
    "no event": ('{"run_id": "r", "steps": []}', "it has no field `event`"),
    "another event": ('{"event": "made_up"}', "this release knows no event 'made_up'"),
    "too deep": ('{"event": ' + "[" * 5000 + "]" * 5000 + "}", "recursion limit"),
    "a lone surrogate": ('{"event": "user_turned", "run_id": "\\ud800"}', "Invalid JSON"),
    "no budget": (
        '{"event": "run_started", "seq": 1, "run_id": "x", "at_ns": 0, "wall_ns": 0, '
        '"budget": {"max_iterations": -1}, "mode": "enforce", "parent_run_id": null, '
        '"price_book": "", "stop_conditions": 0}',
        "max_iterations must be a whole number >= 1",
    ),
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("what", BAD)
def test_a_malformed_line_is_named_and_the_rest_goes_on(tmp_path, lines, what):
    line, reason = BAD[what]
    path = tmp_path / "log.jsonl"
    first, _, rest = lines.partition("\n")
    path.write_text(f"{first}\n\n{line}\n{rest}")
    done = replay(path, code=1)
    (complaint,) = done.stderr.splitlines()
    assert complaint.startswith(f"{path}:3: ")
    assert reason in complaint
    assert len(complaint) < len(str(path)) + 320
    found = in_all(path, code=1)
    assert (found["runs"], found["lines_not_read"]) == (1, 1)
    assert found["recorded"]["model_calls"] == 2


@pytest.mark.sample(3)
@pytest.mark.parametrize("damage", ["cut", "flipped", "header only"])
def test_a_damaged_gzip_is_read_as_far_as_it_goes(tmp_path, lines, damage):
    path = tmp_path / "runs.jsonl.gz"
    generator = random.Random(7)
    many = [lines.replace('"r"', f'"{generator.random()}"') for _ in range(200)]
    data = bytearray(gzip.compress("".join(many).encode(), mtime=0))
    if damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "flipped":
        data[len(data) // 2 : len(data) // 2 + 50] = bytes(50)
    else:
        del data[2:]
    path.write_bytes(data)
    done = replay(path, code=1)
    assert "damaged gzip" in done.stderr.splitlines()[-1]
    runs = in_all(path, code=1)["runs"]
    assert runs == 0 if damage == "header only" else 0 < runs < 200


def test_a_binary_file_does_not_flood_the_screen(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(random.Random(0).randbytes(200_000))
    done = replay(path, code=1)
    assert len(done.stderr.splitlines()) == 22
    assert "more lines cannot be read" in done.stderr
    assert control_characters(done.output) == []


def test_an_empty_file_has_no_runs(tmp_path):
    (tmp_path / "empty").write_text("\n  \n\n")
    assert in_all(tmp_path / "empty")["runs"] == 0


def test_gzip_is_known_by_its_content_and_lines_may_end_as_in_windows(tmp_path, lines):
    odd = tmp_path / "runs.txt"
    odd.write_bytes(gzip.compress(lines.encode()))
    plain = tmp_path / "runs.gz"
    other = lines.replace('"r"', '"s"').encode()
    plain.write_bytes(other.replace(b"\n", b"\r\n") + b"\r\n")
    assert in_all(odd, plain)["runs"] == 2


def test_a_folder_stands_for_its_logs_and_a_file_is_read_once(tmp_path, lines):
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.replace('"r"', '"s"').encode()))
    (tmp_path / "notes.txt").write_text("no log")
    (tmp_path / "same.jsonl").symlink_to(tmp_path / "a.jsonl")
    assert in_all(tmp_path, tmp_path / "a.jsonl", tmp_path / "." / "a.jsonl")["runs"] == 2


@pytest.mark.parametrize("kind", ["missing", "folder", "forbidden"])
def test_a_file_that_cannot_be_read_ends_with_2_before_anything_is_read(log, tmp_path, kind):
    path = tmp_path / "other"
    if kind == "folder":
        path.mkdir()
    elif kind == "forbidden":
        path.touch(mode=0)
        if os.access(path, os.R_OK):
            pytest.skip("this user may read everything")
    done = replay(log[0], path, code=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"budgetguard: {path}")
    assert done.stdout == ""


def control_characters(text):
    return sorted({char for char in text if not char.isprintable() and char != "\n"})


def test_nothing_from_a_file_controls_the_terminal(tmp_path):
    evil = "\x1b[31m\x07\r\n[bold]x[/bold]\u202e"
    path = tmp_path / "ev\x1bil.jsonl"
    with JsonLinesSink(path) as sink:
        live_run(unbounded(sink, evil), 8, same=True)
    path.write_text(path.read_text() + json.dumps({"event": evil}) + "\n")
    done = replay(path, code=1)
    assert control_characters(done.output) == []
    assert "[bold]x[/bold]" in done.stdout
    assert "\u202e" not in done.output
    missing = replay(tmp_path / "no\x1b[2Jne", code=2)
    assert control_characters(missing.output) == []


# The process


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_opened_once(lines, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(
        [sys.executable, "-I", "-m", "budgetguard_cli", "replay", pipe, "--json"],
        stdout=subprocess.PIPE,
    ) as process:
        pipe.write_text(lines)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert json.loads(out.splitlines()[-1])["runs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["60", "80"])
def test_without_a_terminal_the_output_is_plain(budgetguard_process, lines, tmp_path, columns):
    (tmp_path / "läufe.jsonl").write_text(lines)
    environment = {"COLUMNS": columns, "PYTHONIOENCODING": "ascii", "TERM": "xterm-256color"}
    done = budgetguard_process("replay", tmp_path, "--max-iterations", "1", **environment)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("ascii")
    assert control_characters(text) == []
    assert r"l\xe4ufe.jsonl" in text
    assert done.stderr == b""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_full_disk_is_one_line_and_exit_code_1(lines, tmp_path, arguments):
    (tmp_path / "log.jsonl").write_text(lines)
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-I", "-m", "budgetguard_cli", "replay", tmp_path, *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "budgetguard: the output cannot be written: No space left on device.\n"
