"""Recorded runs against a budget: the rule, the figures, and whatever a file may hold."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest
from typer.testing import CliRunner

import layout
from budgetguard_cli.app import app
from budgetguard_cli.lines import LONGEST_LINE
from budgetguard_cli.money import in_dollars
from budgetguard_core import (
    Budget,
    Guard,
    JsonLinesSink,
    ModelCall,
    PriceBook,
    TokenUsage,
    ToolCall,
    end_run,
)
from budgetguard_core.pricing import to_usd
from budgetguard_core.testing import ManualClock

TRAJECTORIES = layout.ROOT.parent / "shared" / "trajectories"

# Recordings


def user():
    return {"role": "user", "content_len": 40}


def turn(number, *, args=None, result="same", name="read_file", usage=(1000, 50), cost=None):
    """A model call that asks for one tool call, and the call's result."""
    said = {
        "role": "assistant",
        "tool_calls": [{"name": name, "args": args or {"path": "a"}, "id": f"c{number}"}],
        "content_len": 12,
    }
    if usage is not None:
        said["usage"] = {"input": usage[0], "output": usage[1]}
    if cost is not None:
        said["cost"] = cost
    done = {
        "role": "tool",
        "name": name,
        "id": f"c{number}",
        "result_hash": result,
        "result_len": 300,
        "error": False,
    }
    return [said, done]


def turns(count, **fields):
    return [step for number in range(count) for step in turn(number, **fields)]


def trajectory(steps, **fields):
    recording = {"run_id": "r1", "model": "gpt-4o", "success": True, "termination": "done"}
    return json.dumps({**recording, **fields, "steps": [user(), *steps]})


@pytest.fixture
def write(tmp_path):
    def write(*lines, name="runs.jsonl", end="\n"):
        path = tmp_path / name
        data = ("\n".join(lines) + end).encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write


def replay(*arguments, code=0):
    done = CliRunner().invoke(app, ["replay", *map(str, arguments)])
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


@pytest.mark.parametrize("length", [64, 100])
def test_a_runaway_is_stopped_before_its_fifth_identical_call(write, length):
    path = write(trajectory(turns(length), success=False, termination="max_steps"))
    (run,) = stopped(path)
    assert run["reason"] == "no_progress"
    assert run["runaway"] is True
    assert run["recorded"]["tool_calls"] == length
    assert run["recorded"]["tool_calls"] - run["saved"]["tool_calls"] == 4
    assert run["recorded"]["model_calls"] - run["saved"]["model_calls"] == 4
    assert run["saved"]["tokens"] == (length - 4) * 1050
    assert in_all(path)["runaways_stopped"] == 1


def test_a_cycle_of_two_tools_is_an_oscillation(write):
    steps = [
        step
        for number in range(20)
        for step in turn(number, name=("search", "read_file")[number % 2])
    ]
    (run,) = stopped(write(trajectory(steps)))
    assert run["reason"] == "oscillation"


HONEST = {
    "paging with a hidden cursor": [s for n in range(30) for s in turn(n, result=f"page{n}")],
    "other arguments each time": [s for n in range(30) for s in turn(n, args={"path": f"{n}"})],
    "the user asks again": [s for n in range(30) for s in [*turn(n), user()]],
    "probe, change, probe again": [
        step
        for n in range(15)
        for step in [
            *turn(2 * n, name="run_tests", result=f"failed{n}"),
            *turn(2 * n + 1, name="edit", args={"line": n}, result="ok"),
        ]
    ],
    "three identical calls, then the answer": [
        *turns(3),
        {"role": "assistant", "tool_calls": [], "content_len": 90},
    ],
}


@pytest.mark.parametrize("shape", HONEST)
def test_an_honest_run_is_not_cut(write, shape):
    found = in_all(write(trajectory(HONEST[shape])))
    assert found["stopped"] == {}
    assert found["successful_runs_cut"] == 0
    assert found["succeeded"] == 1


def test_without_loop_detection_only_caps_stop(write):
    assert in_all(write(trajectory(turns(100))), "--no-loop-detection")["stopped"] == {}


@pytest.mark.skipif(not TRAJECTORIES.is_dir(), reason="the recorded trajectories are not here")
def test_on_real_trajectories_every_runaway_is_stopped_and_no_successful_run_is_cut():
    files = sorted(TRAJECTORIES.glob("*.jsonl.gz"))
    *runs, whole = records(*files)
    assert (whole["runs"], whole["succeeded"], whole["runaways"]) == (706, 441, 5)
    assert whole["runaways_stopped"] == 5
    assert whole["successful_runs_cut"] == 0
    assert whole["lines_not_read"] == 0
    recordings = {str(file): gzip.decompress(file.read_bytes()).splitlines() for file in files}
    runaways = [run for run in runs if run["type"] == "stopped_run" and run["runaway"]]
    for run in runaways:
        recording = json.loads(recordings[run["file"]][run["line"] - 1])
        assert recording["termination"] == "max_steps"
        calls, user_turns = [], 0
        for step in recording["steps"]:
            user_turns += step["role"] == "user"
            for call in step.get("tool_calls", ()):
                # A loop is within one turn of the user: asked again, a call is another one.
                calls.append((user_turns, call["name"], json.dumps(call["args"], sort_keys=True)))
        assert max(Counter(calls).values()) >= 64
        started = run["recorded"]["tool_calls"] - run["saved"]["tool_calls"]
        assert max(Counter(calls[:started]).values()) <= 5


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
def test_each_cap_stops_where_the_engine_does(write, option, value, model_calls):
    steps = [step for n in range(10) for step in turn(n, result=f"{n}")]
    (run,) = stopped(write(trajectory(steps)), f"--{option.replace('_', '-')}", value)
    assert run["reason"] == option
    assert 10 - run["saved"]["model_calls"] == model_calls
    assert run["succeeded"] is True


def test_a_successful_run_that_would_be_cut_is_named(write):
    path = write(trajectory(turns(3), run_id="the one"), trajectory([], run_id="the other"))
    shown = replay(path, "--max-iterations", "2").stdout
    assert "successful runs cut 1 of 2" in shown
    assert "line 1, run the one: max_iterations=2 reached: 2 used" in in_words(shown)
    assert "the other" not in shown


def test_what_has_no_times_is_not_judged_by_seconds(write):
    found = in_all(write(trajectory(turns(3))), "--max-seconds", "0.001")
    assert found["stopped"] == {}
    assert "max_seconds was not judged for 1 runs" in found["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--max-iterations", "0"], "max_iterations must be >= 1, got 0. Use None for no cap."),
        (["--max-cost-usd", "nan"], "max_cost_usd must be "),
        (["--max-cost-usd", "-1"], "max_cost_usd must be "),
        (["--max-cost-usd", "1e999999999999"], "max_cost_usd must be "),
        (["--max-seconds", "inf"], "max_seconds must be "),
        (["--max-cost-usd", "ten"], "must be an amount of US dollars, got 'ten'."),
        (["--max-total-tokens", "2.5"], "a valid integer"),
        (["--max-turns", "2"], "No such option"),
    ],
)
def test_a_bad_cap_is_refused_in_one_sentence(write, arguments, sentence):
    done = replay(write(trajectory([])), *arguments, code=2)
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


# Tokens and dollars


def test_the_recorded_cost_is_used_where_there_is_one(write):
    path = write(trajectory(turns(8, cost=0.25)))
    (run,) = stopped(path)
    assert Decimal(run["recorded"]["cost_usd"]) == 2
    assert Decimal(run["saved"]["cost_usd"]) == Decimal("1")


def test_without_a_recorded_cost_the_models_price_counts(write):
    (run,) = stopped(write(trajectory(turns(8))))
    price = to_usd(PriceBook().rates_for("gpt-4o").cost(TokenUsage(1000, 50)))
    assert Decimal(run["saved"]["cost_usd"]) == 4 * price
    assert price > 0


def test_an_unknown_price_is_said_and_never_counted_as_nothing(write):
    path = write(trajectory(turns(8), model="in-house-9"))
    (run,) = stopped(path)
    assert run["saved"]["unpriced_calls"] == 4
    shown = replay(path).stdout
    assert "dollars saved       unknown of unknown" in shown
    assert "price unknown       4 of 8 calls" in shown
    assert "$" not in shown
    priced = write(trajectory(turns(8, cost=0.25)), name="priced.jsonl")
    both = in_words(replay(path, priced).stdout)
    assert "dollars saved at least $1.00 of at least $2.00 price unknown 4 of 8 calls" in both
    assert "8 model calls have neither a recorded cost nor a known price" in both


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


def test_a_small_amount_is_not_shown_as_nothing(write):
    shown = in_words(replay(write(trajectory(turns(8, cost=0.00012345)))).stdout)
    assert "dollars saved $0.0004938 of $0.0009876" in shown


def test_quotas_refuse_calls_and_the_run_goes_on(write):
    path = write(trajectory([s for n in range(6) for s in turn(n, result=f"{n}")]))
    found = in_all(path, "--tool-quota", "read_*=2", "--tool-quota", "other=1")
    assert found["stopped"] == {}
    assert found["breakers"] == {"tool_call_refused": 4}
    shown = in_words(replay(path, "--tool-quota", "read_*=2").stdout)
    assert "Budget: read_*=2; loop detection on." in shown
    assert "tool calls refused 4" in shown


@pytest.mark.sample(4)
@pytest.mark.parametrize("quota", ["read_file", "=3", "a=x", "a=-1", "a=²", "a=" + "9" * 30])
def test_a_bad_quota_is_refused_in_one_sentence(write, quota):
    done = replay(write(trajectory([])), "--tool-quota", quota, code=2)
    assert "must be a tool and a whole number, such as search_web=3, got" in done.stderr
    assert "must be whole numbers >= 1" in replay("-", "--tool-quota", "a=0", code=2).stderr


def test_the_format_in_the_readme_is_the_one_that_is_read(write):
    text = (layout.ROOT / "adapters" / "budgetguard_cli" / "README.md").read_text()
    (block,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    path = write(json.dumps(json.loads(block)))
    found = in_all(path)
    assert found["lines_not_read"] == 0
    assert found["recorded"]["model_calls"] == 2
    assert found["recorded"]["tool_calls"] == 1
    assert found["succeeded"] == 1


def test_a_dollar_cap_refuses_an_unknown_price_unless_the_user_says_otherwise(write):
    path = write(trajectory(turns(2), model="in-house-9"))
    assert in_all(path, "--max-cost-usd", "1")["stopped"] == {"unpriced_model": 1}
    free = in_all(path, "--max-cost-usd", "1", "--on-unpriced", "count_zero")
    assert free["stopped"] == {}


def test_a_recorded_cost_stands_in_for_an_unknown_price_under_a_dollar_cap(write):
    path = write(trajectory(turns(3, cost=0.25), model="in-house-9"))
    assert in_all(path, "--max-cost-usd", "1")["stopped"] == {}
    assert in_all(path, "--max-cost-usd", "0.50")["stopped"] == {"max_cost_usd": 1}


def test_missing_usage_is_estimated_from_the_texts_and_said(write):
    path = write(trajectory(turns(8, usage=None)))
    (run,) = stopped(path)
    assert run["recorded"]["estimated_calls"] == 8
    assert run["saved"]["estimated_calls"] == 4
    # 40 characters of the user, then 12 + 9 + 13 of the call and 300 of its result each turn.
    expected = sum((40 + n * 334) // 3 + 1 + 34 // 3 + 1 for n in range(8))
    assert run["recorded"]["tokens"] == expected
    shown = in_words(replay(path).stdout)
    assert "usage estimated 4 of 8 calls" in shown
    assert "8 of 8 model calls have no recorded usage" in shown
    found = in_all(path, "--max-total-tokens", "500")
    assert found["stopped"] == {"max_total_tokens": 1}


def test_files_are_summed_up(write):
    one = write(trajectory(turns(8)), name="one.jsonl")
    two = write(trajectory(turns(9), success=False), name="two.jsonl.gz")
    files = [record for record in records(one, two) if record["type"] == "file"]
    whole = in_all(one, two)
    assert [record["file"] for record in files] == [str(one), str(two)]
    assert (whole["runs"], whole["succeeded"], whole["successful_runs_cut"]) == (2, 1, 1)
    assert whole["saved"]["model_calls"] == 4 + 5
    assert sum(record["saved"]["tokens"] for record in files) == whole["saved"]["tokens"]
    assert "All 2 files" in replay(one, two).stdout
    assert "All" not in replay(one).stdout


# BudgetGuard's own logs


def live_run(guard, count, *, seconds=0, clock=None):
    trip = None
    for number in range(count):
        ticket = guard.admit_model_call(ModelCall(model="gpt-4o"))
        if not hasattr(ticket, "call_id"):
            trip = ticket.trip
            break
        guard.settle_model_call(ticket, TokenUsage(1000, 50))
        (call,) = guard.admit_tool_calls([ToolCall(name="t", arguments={"n": number}, id="c")])
        guard.settle_tool_call(call, "x")
        if clock is not None:
            clock.advance(seconds)
    end_run(guard, trip=trip)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl"
    sink = JsonLinesSink(path)
    yield path, sink
    sink.close()


def test_a_log_of_several_runs_is_judged_run_by_run(log):
    path, sink = log
    live_run(Guard(run_id="short", sinks=[sink]), 2)
    live_run(Guard(run_id="long", sinks=[sink]), 6)
    *_, run, file, whole = records(path, "--max-iterations", "3")
    assert (run["run_id"], run["reason"]) == ("long", "max_iterations")
    assert run["saved"]["model_calls"] == 3
    assert (file["runs"], file["succeeded"], file["successful_runs_cut"]) == (2, 2, 1)
    assert whole["recorded"]["model_calls"] == 8
    assert in_all(path)["stopped"] == {}


def test_interleaved_runs_do_not_mix(log):
    path, sink = log
    guards = [Guard(run_id=f"g{number}", sinks=[sink]) for number in range(3)]
    for step in range(4):
        for number, guard in enumerate(guards):
            if step <= number + 1:
                ticket = guard.admit_model_call()
                guard.settle_model_call(ticket, TokenUsage(10 * (number + 1), 0))
    found = records(path, "--max-iterations", "2")
    assert [run["run_id"] for run in found if run["type"] == "stopped_run"] == ["g1", "g2"]
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
    live_run(Guard(sinks=[sink], clock=clock), 6, seconds=10, clock=clock)
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


def test_a_resumed_run_counts_as_one_more_and_nothing_twice(log):
    path, sink = log
    first = Guard(Budget(max_iterations=3), run_id="r", sinks=[sink])
    live_run(first, 9)
    fresh = Guard.restore(first.snapshot(), Budget(max_iterations=9), sinks=[sink])
    live_run(fresh, 4)
    found = in_all(path)
    assert found["runs"] == 2
    assert found["recorded"]["model_calls"] == 3 + 4
    assert found["lines_not_read"] == 0


def test_a_killed_run_loses_its_last_line_and_nothing_else(log):
    path, sink = log
    guard = Guard(run_id="r", sinks=[sink])
    for _ in range(3):
        guard.settle_model_call(guard.admit_model_call(), TokenUsage(10, 0))
    guard.admit_model_call()
    with path.open("ab") as file:
        file.write(b'{"event":"model_call_set')
    found = in_all(path)
    assert (found["runs"], found["succeeded"], found["unreported_calls"]) == (1, 0, 1)
    assert found["recorded"]["tokens"] == 30
    assert "1 model calls never reported back" in found["notes"][-1]


def test_a_log_with_a_hole_leaves_out_that_run_alone(log):
    path, sink = log
    live_run(Guard(run_id="holed", sinks=[sink]), 3)
    live_run(Guard(run_id="whole", sinks=[sink]), 2)
    lines = path.read_text().splitlines()
    del lines[4]
    path.write_text("\n".join([*lines, '{"event": "user_turned", "seq": "x"}', "", ""]))
    done = replay(path, code=1)
    assert f"{path}:5: event 5 of the run must be next, got event 6; the run is left out." in (
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
    assert "a cost must be an amount from 0" in replay(path, code=1).stderr


# Whatever a file may hold

BAD = {
    "not JSON": ("{nonsense", "Invalid JSON"),
    "cut short": ('{"run_id": "r", "steps": [', "Invalid JSON"),
    "a list": ("[]", "Input should be an object"),
    "no steps": ('{"run_id": "r"}', "steps: Field required"),
    "steps of nothing": ('{"run_id": "r", "steps": [5]}', "steps.0"),
    "an unknown role": ('{"run_id": "r", "steps": [{"role": "system"}]}', "steps.0"),
    "a number as run_id": ('{"run_id": 5, "steps": []}', "run_id: Input should be a valid string"),
    "too deep": ('{"run_id": "r", "steps": ' + "[" * 5000 + "]" * 5000 + "}", "recursion limit"),
    "a lone surrogate": ('{"run_id": "\\ud800", "steps": []}', "Invalid JSON"),
    "a result of no call": (
        '{"run_id": "r", "steps": [{"role": "tool", "id": "x", "result_hash": "h"}]}',
        "steps.0: a result must belong to a call before it, got none.",
    ),
    **{
        f"usage {value}": (
            '{"run_id": "r", "steps": [{"role": "assistant", '
            f'"usage": {{"input": {value}, "output": 1}}}}]}}',
            reason,
        )
        for value, reason in {
            "NaN": "usage.input: Input should be a valid integer",
            "-5": "usage.input: Input should be greater than or equal to 0",
            "true": "usage.input: Input should be a valid integer",
            '"5"': "usage.input: Input should be a valid integer",
            "1e999": "usage.input",
            "9" * 5000: "number out of range",
        }.items()
    },
    **{
        f"cost {value}": (
            f'{{"run_id": "r", "steps": [{{"role": "assistant", "cost": {value}}}]}}',
            "cost: Input should be",
        )
        for value in ("NaN", "Infinity", "1e999", "-1", '"1E+999999999"', "true")
    },
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("what", BAD)
def test_a_malformed_line_is_named_and_the_rest_goes_on(write, what):
    line, reason = BAD[what]
    path = write(trajectory([]), "", line, trajectory(turns(8)))
    done = replay(path, code=1)
    (complaint,) = done.stderr.splitlines()
    assert complaint.startswith(f"{path}:3: ")
    assert reason in complaint
    assert len(complaint) < len(str(path)) + 320
    found = in_all(path, code=1)
    assert (found["runs"], found["lines_not_read"], found["saved"]["model_calls"]) == (2, 1, 4)


def test_arguments_may_be_anything(write):
    nested = '{"run_id": "r", "steps": [{"role": "assistant", "tool_calls": [{"name": "t", "args": '
    path = write(
        *(
            f"{nested}{args}}}]}}]}}"
            for args in ("[" * 90 + "]" * 90, '{"a": NaN, "b": -Infinity}', '"text"', "1e308")
        )
    )
    assert in_all(path)["recorded"]["tool_calls"] == 4


@pytest.mark.slow
def test_a_line_of_100_megabytes_is_not_held_in_memory(tmp_path):
    long = b'{"run_id": "' + b"x" * (100 * 2**20) + b'"}\n'
    good = trajectory([]).encode() + b"\n"
    plain, packed, small = (tmp_path / name for name in ("plain", "packed.gz", "small"))
    plain.write_bytes(good + long + good)
    with gzip.open(packed, "wb", compresslevel=1) as file:
        file.write(good + long + good)
    small.write_bytes(good)
    assert peak_memory(small, code=0) + 60 * 2**20 > peak_memory(plain, code=1)
    assert peak_memory(small, code=0) + 60 * 2**20 > peak_memory(packed, code=1)
    for path in (plain, packed):
        done = replay(path, code=1)
        assert f"{path}:2: a line must have at most {LONGEST_LINE} bytes" in done.stderr
        assert in_all(path, code=1)["runs"] == 2


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_runs(tmp_path):
    few, many = tmp_path / "few", tmp_path / "many"
    line = trajectory(turns(2)) + "\n"
    few.write_text(line * 50)
    many.write_text(line * 2000)
    assert peak_memory(many, code=0) < peak_memory(few, code=0) + 6 * 2**20


def peak_memory(path, *, code):
    """Bytes that a replay took at most, in a process of its own."""
    program = (
        "import resource, sys\n"
        f"sys.argv = ['budgetguard', 'replay', {str(path)!r}]\n"
        "from budgetguard_cli.__main__ import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    code = end.code\n"
        "sys.stderr.write(f'\\n{code} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
    )
    ended, kibibytes = done.stderr.splitlines()[-1].split()
    assert int(ended or 0) == code
    return int(kibibytes) * 1024


@pytest.mark.sample(3)
@pytest.mark.parametrize("damage", ["cut", "flipped", "header only"])
def test_a_damaged_gzip_is_read_as_far_as_it_goes(tmp_path, damage):
    path = tmp_path / "runs.jsonl.gz"
    generator = random.Random(7)
    lines = [trajectory([], run_id=f"{generator.random()}") for _ in range(2000)]
    data = bytearray(gzip.compress("\n".join(lines).encode(), mtime=0))
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
    assert runs == 0 if damage == "header only" else 0 < runs < 2000


def test_a_binary_file_does_not_flood_the_screen(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(random.Random(0).randbytes(200_000))
    done = replay(path, code=1)
    assert len(done.stderr.splitlines()) == 22
    assert "more lines cannot be read" in done.stderr
    assert control_characters(done.output) == []


def test_an_empty_file_has_no_runs(write):
    assert in_all(write("", end=""))["runs"] == 0
    assert in_all(write("", "  ", ""))["runs"] == 0


def test_gzip_is_known_by_its_content_and_not_by_its_name(tmp_path):
    odd = tmp_path / "runs.txt"
    odd.write_bytes(gzip.compress(trajectory([]).encode()))
    plain = tmp_path / "runs.gz"
    plain.write_bytes(trajectory([]).encode())
    assert in_all(odd, plain)["runs"] == 2


def test_a_file_from_windows_is_read(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + trajectory([]).encode() + b"\r\n\r\n")
    assert in_all(path)["runs"] == 1


def test_a_folder_stands_for_its_logs(tmp_path):
    (tmp_path / "a.jsonl").write_text(trajectory([]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(trajectory([]).encode()))
    (tmp_path / "notes.txt").write_text("no log")
    assert in_all(tmp_path)["runs"] == 2


def test_a_file_that_is_named_twice_is_read_once(write, tmp_path):
    log = write(trajectory(turns(8)))
    (tmp_path / "same.jsonl").symlink_to(log)
    whole = in_all(log, tmp_path, log.parent / "." / ".." / log.parent.name / log.name)
    assert (whole["files"], whole["runs"]) == (1, 1)


@pytest.mark.parametrize("kind", ["missing", "folder", "forbidden"])
def test_a_file_that_cannot_be_read_ends_with_2_before_anything_is_read(write, tmp_path, kind):
    good = write(trajectory([]))
    path = tmp_path / "other"
    if kind == "folder":
        path.mkdir()
    elif kind == "forbidden":
        path.touch(mode=0)
        if os.access(path, os.R_OK):
            pytest.skip("this user may read everything")
    done = replay(good, path, code=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"budgetguard: {path}")
    assert done.stdout == ""


def control_characters(text):
    return sorted({char for char in text if not char.isprintable() and char != "\n"})


def test_nothing_from_a_file_controls_the_terminal(write, tmp_path):
    evil = "\x1b[31m\x07\r\n[bold]x[/bold]\u202e"
    path = write(
        trajectory(turns(8), run_id=evil),
        json.dumps({"run_id": "r", "steps": [{"role": evil}]}),
        name="ev\x1bil.jsonl",
    )
    done = replay(path, code=1)
    assert control_characters(done.output) == []
    assert "[bold]x[/bold]" in done.stdout.replace("\n", "")
    assert "\u202e" not in done.output
    missing = replay(tmp_path / "no\x1b[2Jne", code=2)
    assert control_characters(missing.output) == []


# The process


@pytest.mark.slow
def test_standard_input_and_a_pipe(budgetguard, write):
    data = (trajectory(turns(8)) + "\n").encode()
    done = budgetguard("replay", "-", "--json", stdin=gzip.compress(data))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["runs"] == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_opened_once(write, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(
        [sys.executable, "-I", "-m", "budgetguard_cli", "replay", pipe, "--json"],
        stdout=subprocess.PIPE,
    ) as process:
        pipe.write_text(trajectory(turns(8)) + "\n")
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert json.loads(out.splitlines()[-1])["runs"] == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("columns", ["40", "80"])
def test_without_a_terminal_the_output_is_plain_and_folded(budgetguard, write, columns):
    path = write(trajectory(turns(8, usage=None)), name="a.jsonl")
    environment = {"COLUMNS": columns, "PYTHONIOENCODING": "ascii", "TERM": "xterm-256color"}
    done = budgetguard("replay", path, **environment)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("ascii")
    assert control_characters(text) == []
    assert max(map(len, text.splitlines())) <= int(columns)
    assert done.stderr == b""


@pytest.mark.slow
def test_a_name_that_the_terminal_cannot_show_is_escaped(budgetguard, write):
    path = write(trajectory([]), name="läufe.jsonl")
    done = budgetguard("replay", path, COLUMNS="300", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr


@pytest.mark.sample(2)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_full_disk_is_one_line_and_exit_code_1(write, arguments):
    path = write(*[trajectory(turns(8))] * 300)
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-I", "-m", "budgetguard_cli", "replay", path, *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "budgetguard: the output cannot be written: No space left on device.\n"


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error_to_talk_about(write):
    path = write(*[trajectory(turns(8))] * 300)
    with subprocess.Popen(
        [sys.executable, "-I", "-m", "budgetguard_cli", "replay", path, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode != 0
