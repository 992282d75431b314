"""What breakers would have made of recorded runs."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from budgetguard_cli.app import app
from budgetguard_core import Budget, Guard, JsonLinesSink
from budgetguard_core.kit import Admit, TokenUsage, ToolCall, end_run
from budgetguard_core.testing import ManualClock

CIRCUIT = "{ sliding_window_size = 4, minimum_number_of_calls = 2, stop_after_open_rounds = 9 }"


@pytest.fixture
def log(tmp_path):
    """A run in which a tool keeps failing, four times a second."""
    path = tmp_path / "run.jsonl"
    clock = ManualClock()
    sink = JsonLinesSink(path)
    guard = Guard(Budget(loop_detection=None), sinks=[sink], clock=clock)
    for number in range(30):
        guard.settle_model_call(guard.admit_model_call(), TokenUsage(100, 10))
        call = guard.admit_tool_call(ToolCall(name="fetch", arguments=number))
        assert isinstance(call, Admit)
        clock.advance(0.25)
        guard.settle_tool_call(call, error=TimeoutError(f"no answer to {number}"))
    end_run(guard, trip=None, final="Done.")
    sink.close()
    return path


def run(tmp_path, log, breakers, *options):
    path = tmp_path / "profiles.toml"
    path.write_text(f"[profiles.mine]\nversion = 1\n{breakers}\n")
    arguments = ["replay", str(log), "--no-loop-detection", "--profile", "mine", *options]
    return CliRunner().invoke(app, arguments, env={"BUDGETGUARD_PROFILES": str(path)})


def figures(tmp_path, log, breakers):
    done = run(tmp_path, log, breakers, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


def test_what_the_breakers_of_a_profile_would_have_done_is_reported(tmp_path, log):
    found = figures(tmp_path, log, f"circuit_breaker = {CIRCUIT}")
    # Two failures open it, and the nine rounds after that end the run.
    assert found["breakers"] == {"circuit_breaker_changed": 1, "tool_call_turned_away": 9}
    assert found["stopped"] == {"circuit_open": 1}
    found = figures(tmp_path, log, "velocity = { max_tool_calls_per_minute = 20 }")
    assert found["stopped"] == {"velocity": 1}
    assert found["breakers"] == {"call_delayed": 4}
    found = figures(tmp_path, log, 'rate_limits = { "*" = { rate = 2, burst = 3 } }')
    assert found["breakers"]["tool_call_turned_away"] > 5
    text = run(tmp_path, log, f"circuit_breaker = {CIRCUIT}").stdout
    assert "tool call turned away" in text
    assert "circuit breaker changed" in text


def test_options_win_over_the_profile_and_a_wrong_one_is_refused(tmp_path, log):
    cut = run(tmp_path, log, "max_iterations = 5", "--max-iterations", "8", "--json")
    assert json.loads(cut.stdout.splitlines()[-1])["saved"]["model_calls"] == 22
    for cap in ("max_input_tokens = 800", "max_output_tokens = 80"):  # of a profile alone
        assert figures(tmp_path, log, cap)["saved"]["model_calls"] == 22
    quotas = "[profiles.mine.tool_quotas]\nfetch = 2"
    assert figures(tmp_path, log, quotas)["breakers"] == {"tool_call_refused": 28}
    done = run(tmp_path, log, "velocity = { max_tool_calls_per_minute = 0 }")
    assert done.exit_code == 2
    assert "must be a whole number >= 1, got 0" in done.stderr


def test_a_report_of_progress_is_not_asked_of_a_recorded_model(tmp_path, log):
    assert figures(tmp_path, log, "progress = {}")["stopped"] == {}
