"""Every adapter: one WARNING for each stop, and the log of every run in a folder, without code."""

from __future__ import annotations

import logging

import pytest

import layout
from budgetguard_core import Budget, read_events
from budgetguard_core.events import RunEnded, RunStarted
from sticky_runs import EVERY, EVERY_NEEDS


@pytest.fixture(params=sorted(EVERY))
def run(request):
    pytest.importorskip(EVERY_NEEDS[request.param])
    return EVERY[request.param]


def test_there_is_a_run_for_every_adapter():
    assert sorted(EVERY) == layout.adapters()


def test_one_warning_for_each_stop(run, caplog):
    with caplog.at_level(logging.WARNING, logger="budgetguard"):
        outcome = run(Budget(max_iterations=3))
    # Of this project's loggers altogether: an adapter adds no line of its own.
    (stop,) = [one for one in caplog.records if one.name.partition(".")[0] == "budgetguard"]
    assert stop.levelno == logging.WARNING
    assert stop.name == "budgetguard"
    assert stop.message == (
        f'run stopped: reason=max_iterations limit=3 used=3 run="{outcome.run_id}"'
    )
    assert (stop.stop_reason, stop.limit, stop.used) == ("max_iterations", 3, 3)
    assert stop.run_id == outcome.run_id


@pytest.mark.sample(4)
def test_a_folder_gets_the_log_of_every_run(run, monkeypatch, tmp_path):
    folder = tmp_path / "made" / "logs"
    monkeypatch.setenv("BUDGETGUARD_LOG", str(folder))
    outcomes = [run(Budget(max_iterations=2)) for _ in range(2)]
    logs = {path.stem: path for path in folder.iterdir()}
    assert set(logs) == {outcome.run_id for outcome in outcomes}
    for path in logs.values():
        events = list(read_events(path.read_bytes().splitlines(keepends=True)))
        assert isinstance(events[0], RunStarted)
        (ended,) = [one for one in events if isinstance(one, RunEnded)]
        assert ended.stop_reason == "max_iterations"
