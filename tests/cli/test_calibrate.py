"""`budgetguard calibrate`, also with `--check`, end to end on logs that all four adapters wrote."""

from __future__ import annotations

import json
import tomllib
from decimal import Decimal

import pytest

from budgetguard_core import Budget, FinalizeReserve, Guard, JsonLinesSink
from budgetguard_core.kit import ModelCall, TokenUsage, end_run
from budgetguard_core.profiles import ProfileId
from budgetguard_core.testing import ManualClock
from sticky_runs import NEEDS, RUNS


def record(path, lengths, *, profile=None, **caps):
    """Runs of so many calls each, or until a cap ends them."""
    with JsonLinesSink(path) as sink:
        for number, length in enumerate(lengths):
            label = None if profile is None else ProfileId(name=profile, version="1")
            budget = Budget(loop_detection=None, profile=label, **caps)
            clock = ManualClock()
            guard = Guard(budget, run_id=f"{profile}{number}", sinks=[sink], clock=clock)
            trip = None
            for _ in range(length):
                call = guard.admit_model_call(ModelCall(model="gpt-4o"))
                trip = guard.trip
                if trip is not None:
                    break
                clock.advance(2)
                guard.settle_model_call(call, TokenUsage(input_tokens=90, output_tokens=10))
            end_run(guard, trip=trip)
    return path


def lines(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_what_it_proposes_can_be_pasted(budgetguard, tmp_path):
    log = record(tmp_path / "log.jsonl", range(1, 41), profile="research")
    done = budgetguard("calibrate", log, "--labelled")
    assert done.returncode == 0, done.stderr
    (tmp_path / "budgetguard.toml").write_bytes(done.stdout)
    caps = tomllib.loads(done.stdout.decode())["profiles"]["research"]
    assert caps == {
        "version": "calibrated-40",
        "max_iterations": 80,
        "max_model_calls": 80,
        "max_total_tokens": 8000,
        "max_seconds": 160,
        "max_cost_usd": "0.026",
    }
    assert b"40 runs, 40 used" in done.stderr
    again = budgetguard(
        "calibrate", "--check", log, "--config", tmp_path / "budgetguard.toml", "--labelled"
    )
    assert b"truncates" not in again.stdout


def test_a_profile_of_any_name_can_be_pasted(budgetguard, tmp_path):
    log = record(tmp_path / "log.jsonl", [3] * 10, profile='né "\\ 😀')
    done = budgetguard("calibrate", log, PYTHONIOENCODING="ascii")
    assert [*tomllib.loads(done.stdout.decode())["profiles"]] == ['né "\\ 😀']


def test_no_figure_is_cut_on_a_terminal(budgetguard, tmp_path):
    log = record(tmp_path / "log.jsonl", [12] * 10)
    done = budgetguard("calibrate", log, FORCE_COLOR="1", NO_COLOR="1", COLUMNS="80")
    assert "1,200" in done.stderr.decode()
    assert "…" not in done.stderr.decode()


@pytest.mark.slow
def test_runs_that_a_cap_ended_are_left_out(budgetguard, tmp_path):
    log = record(tmp_path / "log.jsonl", [*range(1, 31), *[100] * 30], max_iterations=31)
    done = budgetguard("calibrate", log, "--json", "--labelled")
    (iterations,) = [one for one in lines(done) if one.get("dimension") == "max_iterations"]
    assert iterations["measured"] == {"runs": 30, "p50": 15, "p95": 29, "p99": 30, "maximum": 30}
    assert iterations["cap"] == 60
    (profile,) = [one for one in lines(done) if one["type"] == "profile"]
    assert profile["stopped"] == {"max_iterations": 30}


def test_runs_whose_log_breaks_off_are_left_out(budgetguard, tmp_path):
    # Processes that were killed after one call of many: with them the caps would cut real work.
    log = record(tmp_path / "log.jsonl", [30] * 12)
    killed = record(tmp_path / "killed.jsonl", [1] * 300)
    events = [line for line in killed.read_text().splitlines() if '"run_ended"' not in line]
    killed.write_text("".join(f"{line}\n" for line in events))
    done = budgetguard("calibrate", log, killed, "--json")
    (profile,) = [one for one in lines(done) if one["type"] == "profile"]
    assert (profile["runs"], profile["used"], profile["unfinished"]) == (312, 12, 300)
    (iterations,) = [one for one in lines(done) if one.get("dimension") == "max_iterations"]
    assert iterations["measured"]["maximum"] == iterations["measured"]["p50"] == 30
    told = budgetguard("calibrate", killed)
    assert told.returncode == 2
    assert b"300 unfinished and 0 that failed or were aborted left out" in told.stderr


@pytest.mark.slow
def test_logs_are_unlabelled_until_somebody_says_otherwise(budgetguard, tmp_path):
    log = record(tmp_path / "log.jsonl", range(1, 41))
    one = lines(budgetguard("calibrate", log, "--json"))[0]
    assert (one["labelled"], one["basis"], one["cap"]) == (False, "p95", 95)


def test_with_fewer_than_ten_runs_nothing_is_proposed(budgetguard, tmp_path):
    done = budgetguard("calibrate", record(tmp_path / "log.jsonl", [1] * 9))
    assert done.returncode == 2
    assert done.stdout == b""
    assert b"10 runs of one profile that ended by themselves are needed, got 9" in done.stderr


@pytest.mark.sample(4)
@pytest.mark.parametrize("adapter", sorted(RUNS))
def test_the_log_of_every_adapter_is_read(budgetguard, tmp_path, adapter):
    pytest.importorskip(NEEDS[adapter])
    log = tmp_path / "log.jsonl"
    with JsonLinesSink(log) as sink:
        RUNS[adapter](Budget(max_iterations=2), sinks=[sink])
    (profile,) = lines(budgetguard("calibrate", log, "--json"))
    assert (profile["runs"], profile["stopped"]) == (1, {"max_iterations": 1})


@pytest.mark.slow
def test_the_audit_names_caps_that_cut_and_caps_that_never_fire(budgetguard, tmp_path):
    log = record(
        tmp_path / "log.jsonl",
        [*range(1, 21), 30],
        profile="research",
        max_iterations=25,
        max_total_tokens=1_000_000,
    )
    config = tmp_path / "budgetguard.toml"
    config.write_text("[profiles.research]\nversion = 2\nmax_iterations = 12\n")
    found = lines(budgetguard("calibrate", "--check", log, "--json"))
    assert [(one["problem"], one["dimension"]) for one in found[:-1]] == [
        ("never_fires", "max_total_tokens")
    ]
    done = budgetguard("calibrate", "--check", log, "--config", config)
    assert done.returncode == 1
    assert b"max_iterations 12 truncates real work: p99 of healthy runs is 20" in done.stdout


@pytest.mark.slow
def test_the_audit_says_when_limits_always_fire(budgetguard, tmp_path):
    log = record(tmp_path / "log.jsonl", [9] * 12, max_iterations=3)
    done = budgetguard("calibrate", "--check", log)
    assert done.returncode == 1
    assert b"of 12 runs every one was stopped by a limit" in done.stdout


def test_what_somebody_aborted_was_stopped_by_no_limit(budgetguard, tmp_path):
    with JsonLinesSink(tmp_path / "log.jsonl") as sink:
        for _ in range(12):
            guard = Guard(Budget(max_iterations=9), sinks=[sink])
            guard.abort("somebody was in a hurry")
            guard.admit_model_call(ModelCall(model="gpt-4o"))
            end_run(guard, trip=guard.trip)
    done = budgetguard("calibrate", "--check", tmp_path)
    assert b"12 runs, 0 used (unlabelled), 0 ended by a limit, 0 unfinished" in done.stdout
    assert b"12 that failed or were aborted left out" in done.stdout
    assert b"of 12 runs none was stopped by a limit" in done.stdout


@pytest.mark.slow
def test_what_is_held_back_for_a_last_answer_is_no_room_for_work(budgetguard, tmp_path):
    reserve = FinalizeReserve(tokens=4000, cost_usd=Decimal("0.05"))
    # Runs of up to 2,000 tokens; work ends at 5,500 - 4,000 of them.
    log = record(tmp_path / "log.jsonl", range(1, 21), profile="research")
    config = tmp_path / "budgetguard.toml"
    config.write_text(
        "[profiles.research]\nversion = 2\nmax_total_tokens = 5500\n"
        "finalize_reserve = { tokens = 4000 }\n"
    )
    done = budgetguard("calibrate", "--check", log, "--config", config)
    assert b"max_total_tokens 1,500 truncates real work" in done.stdout
    config.write_text(config.read_text().replace("tokens = 4000", 'cost_usd = "0.05"'))
    assert b"truncates" not in budgetguard("calibrate", "--check", log, "--config", config).stdout

    plain = proposed(budgetguard("calibrate", log, "--labelled"))
    held = record(
        tmp_path / "held.jsonl",
        range(1, 21),
        profile="research",
        max_total_tokens=100_000,
        max_cost_usd=5,
        finalize_reserve=reserve,
    )
    more = proposed(budgetguard("calibrate", held, "--labelled"))
    assert more.max_total_tokens == plain.max_total_tokens + 4000
    assert more.max_cost_usd == plain.max_cost_usd + Decimal("0.05")
    assert more.max_iterations == plain.max_iterations
    assert more.finalize_reserve == reserve
    by_name = {one.get("dimension"): one for one in lines(budgetguard("calibrate", held, "--json"))}
    assert by_name["max_total_tokens"]["cap"] > 4000


def proposed(done):
    return Budget.from_json(
        {
            name: value
            for name, value in tomllib.loads(done.stdout.decode())["profiles"]["research"].items()
            if name != "version"
        }
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [[], ["--check"]])
def test_a_missing_file_is_said(budgetguard, tmp_path, options):
    done = budgetguard("calibrate", *options, tmp_path / "none.jsonl")
    assert done.returncode == 2
    assert b"No such file" in done.stderr


@pytest.mark.slow
def test_a_damaged_line_is_said_and_the_rest_is_used(budgetguard, tmp_path):
    log = record(tmp_path / "log.jsonl", range(1, 41))
    log.write_bytes(b"{broken\n" + log.read_bytes())
    done = budgetguard("calibrate", log)
    assert done.returncode == 1
    assert f"{log}:1: ".encode() in done.stderr
    assert b"max_iterations = 95" in done.stdout


def test_an_unknown_profile_is_said(budgetguard, tmp_path):
    log = record(tmp_path / "log.jsonl", range(1, 12), profile="reserch")
    config = tmp_path / "budgetguard.toml"
    config.write_text("[profiles.research]\nversion = 2\n")
    done = budgetguard("calibrate", "--check", log, "--config", config)
    assert done.returncode == 2
    assert b"did you mean 'research'?" in done.stderr


def test_a_run_that_had_paused_counts_with_all_its_attempts(budgetguard, tmp_path):
    for number in range(10):
        clock = ManualClock()
        guard = None
        for attempt in range(3):
            with JsonLinesSink(tmp_path / f"{number}-{attempt}.jsonl") as sink:
                if guard is None:
                    guard = Guard(Budget(), run_id=f"run{number}", sinks=[sink], clock=clock)
                else:
                    guard = Guard.restore(guard.snapshot(), sinks=[sink], clock=clock)
                    guard.go_on()
                call = guard.admit_model_call(ModelCall(model="gpt-4o"))
                clock.advance(2)
                guard.settle_model_call(call, TokenUsage(input_tokens=90, output_tokens=10))
                if attempt < 2:
                    guard.pause()
                    clock.advance(1000)
                else:
                    end_run(guard, trip=None)
    done = budgetguard("calibrate", tmp_path, "--labelled")
    assert b"10 runs, 10 used, 0 ended by a limit, 0 unfinished" in done.stderr
    found = tomllib.loads(done.stdout.decode())["profiles"]["default"]
    assert (found["max_iterations"], found["max_total_tokens"]) == (9, 900)
    assert found["max_seconds"] == 18
