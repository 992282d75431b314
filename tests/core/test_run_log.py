"""`BUDGETGUARD_LOG`: one file for each run, whatever its name, and none of a replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from budgetguard_core import Budget, Guard, read_events, replay
from budgetguard_core.events import RunRestored, RunStarted
from budgetguard_core.kit import ModelCall, end_run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BUDGETGUARD_LOG", str(tmp_path / "logs"))
    return tmp_path / "logs"


def events_of(path):
    return list(read_events(path.read_bytes().splitlines(keepends=True)))


def test_sub_agents_are_in_the_log_of_their_run(folder):
    guard = Guard(run_id="one")
    guard.child(run_id="two").admit_model_call()
    end_run(guard, trip=None)
    (path,) = folder.iterdir()
    assert {event.run_id for event in events_of(path)} == {"one", "two"}


@pytest.mark.parametrize("name", ["../../etc/passwd", ".hidden", "a b/ü", "x" * 500])
def test_a_name_that_is_no_file_name_stays_in_the_folder(folder, name):
    Guard(run_id=name)
    (path,) = folder.iterdir()
    assert path.parent == folder
    assert events_of(path)[0].run_id == name


def test_a_replay_writes_none(folder):
    guard = Guard(Budget(max_iterations=1), run_id="one")
    guard.admit_model_call(ModelCall())
    (path,) = folder.iterdir()
    before = path.read_bytes()
    replay(events_of(path)).admit_model_call()
    assert [*folder.iterdir()] == [path]
    assert path.read_bytes() == before


def test_a_run_that_goes_on_has_a_file_of_its_own(folder):
    guard = Guard(run_id="one")
    guard.admit_model_call()
    Guard.restore(guard.snapshot()).admit_model_call()
    first, second = sorted(folder.iterdir(), key=lambda path: len(path.name))
    assert isinstance(events_of(first)[0], RunStarted)
    assert isinstance(events_of(second)[0], RunRestored)


def test_the_users_own_sinks_still_get_the_events(folder):
    seen = []
    Guard(sinks=[seen.append])
    assert len(seen) == 1
    assert len([*folder.iterdir()]) == 1


def test_a_folder_that_cannot_be_written_changes_no_run(folder, tmp_path):
    folder.parent.joinpath("logs").write_text("a file")
    guard = Guard()
    guard.admit_model_call()
    assert any("RunLog" in error for error in guard.tree.errors)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_no_file_stays_open(folder):
    def open_files():
        return len([*Path("/proc/self/fd").iterdir()])

    before = open_files()
    guards = [Guard() for _ in range(50)]
    assert open_files() == before
    assert len(guards) == 50
