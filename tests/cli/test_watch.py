"""`budgetguard watch`, on logs that are being written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from budgetguard_core import Budget, Guard, JsonLinesSink
from run_logs import CALL, USED, in_attempts, write


def test_every_run_has_a_bar_for_each_cap(budgetguard, tmp_path):
    write(tmp_path / "log.jsonl")
    text = budgetguard("watch", tmp_path, "--once").stdout.decode()
    assert "1 going on, 3 ended" in text
    assert "100%  5 of 5" in text
    assert " 90%  9 of 10" in text
    # Those that go on come first.
    assert text.index("killed") < text.index("stopped")


def test_the_figures_are_there_on_a_narrow_terminal(budgetguard, tmp_path):
    write(tmp_path / "log.jsonl")
    text = budgetguard("watch", tmp_path, "--once", COLUMNS="40").stdout.decode()
    assert "100%  5 of 5" in text


def test_a_run_that_waits_for_a_person_goes_on_as_one(budgetguard, tmp_path):
    in_attempts(tmp_path, ends=False)
    text = budgetguard("watch", tmp_path, "--once").stdout.decode()
    assert "1 going on, 0 ended, $0.00975 spent" in text
    assert "asks  paused" in text


def test_what_is_written_is_seen_also_while_a_line_is(tmp_path):
    from budgetguard_cli.watch import _Logs

    log = tmp_path / "log.jsonl"
    view = _Logs([tmp_path])
    view.look()
    assert view.shown() == []
    with JsonLinesSink(log) as sink:
        guard = Guard(Budget(max_iterations=4), sinks=[sink])
        for used in range(1, 4):
            guard.settle_model_call(guard.admit_model_call(CALL), USED)
            view.look()
            (run,) = view.shown()
            assert run.shares() == {"max_iterations": used / 4}
        whole = log.read_bytes()
        guard.settle_model_call(guard.admit_model_call(CALL), USED)
        line = log.read_bytes()[len(whole) :]
    log.write_bytes(whole + line[:30])
    view.look()
    assert view.shown()[0].shares() == {"max_iterations": 0.75}
    log.write_bytes(whole + line)
    view.look()
    assert view.shown()[0].shares() == {"max_iterations": 1.0}


def test_a_log_that_may_not_be_read_is_named(budgetguard, tmp_path):
    write(tmp_path / "log.jsonl")
    # A link to itself: unreadable for everybody, also for an administrator.
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    text = budgetguard("watch", tmp_path, "--once").stdout.decode()
    assert "1 going on, 3 ended" in text
    # A line that is too long is broken somewhere, for the path has any length.
    assert "loop.jsonl:Toomanylevelsofsymboliclinks" in "".join(text.split())


@pytest.mark.slow
def test_a_run_for_machines(budgetguard, tmp_path):
    write(tmp_path / "log.jsonl")
    done = budgetguard("watch", tmp_path / "log.jsonl", "--json")
    runs = {run["run_id"]: run for run in map(json.loads, done.stdout.splitlines())}
    assert runs["stopped"]["stop_reason"] == "max_iterations"
    assert runs["killed"]["status"] is None
    assert runs["killed"]["shares"]["max_iterations"] == 0.2


@pytest.mark.slow
def test_the_folder_is_that_of_the_variable(budgetguard, tmp_path):
    write(tmp_path / "log.jsonl")
    done = budgetguard("watch", "--once", BUDGETGUARD_LOG=str(tmp_path))
    assert b"4 runs" not in done.stderr
    assert b"3 ended" in done.stdout


@pytest.mark.slow
def test_errors_are_clear(budgetguard, tmp_path):
    cases = [
        (("watch", "--once"), b"nothing to watch"),
        (("watch", tmp_path / "none", "--once"), b"No such file or folder"),
    ]
    for arguments, said in cases:
        done = budgetguard(*arguments, BUDGETGUARD_LOG="")
        assert done.returncode == 2, arguments
        assert said in done.stderr


@pytest.mark.slow
def test_lines_that_cannot_be_read_are_counted(budgetguard, tmp_path):
    log = write(tmp_path / "log.jsonl")
    log.write_bytes(b"{broken}\n[1]\n" + log.read_bytes() + b'{"half')
    text = budgetguard("watch", log, "--once").stdout.decode()
    # Where the line is broken depends on how long the folder's name is.
    assert "log.jsonl:2linescouldnotberead" in "".join(text.split())
    assert "3 ended" in text


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_the_live_view_goes_on_until_it_is_interrupted(tmp_path):
    write(tmp_path / "log.jsonl")
    # Without a terminal there is nothing live.
    ours, theirs = os.openpty()
    program = [sys.executable, "-P", "-m", "budgetguard_cli", "watch", tmp_path]
    with subprocess.Popen(
        [*program, "--interval", "0.1"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        # Ignored in a shell's background, which the tests may run in.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as running:
        os.close(theirs)
        watchdog = threading.Timer(60, running.kill)
        watchdog.start()
        seen = b""
        while b"ended" not in seen:
            seen += os.read(ours, 1000)
        running.send_signal(signal.SIGINT)
        errors = running.stderr.read()
    watchdog.cancel()
    os.close(ours)
    assert running.returncode == 0, errors
    assert b"Traceback" not in errors
