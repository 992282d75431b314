"""Stores keep each message of a run once, and one attempt at it at a time."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading

import pytest
from filelock import FileLock

from budgetguard_core import (
    Budget,
    Guard,
    MemoryStore,
    RunFencedError,
    SqliteStore,
    sqlite_checkpoints,
)
from budgetguard_core.kit import CheckpointError, CheckpointStore, ModelCall, TokenUsage, ToolCall
from budgetguard_core.stores import is_numbered
from budgetguard_core.testing import ManualClock


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    store = MemoryStore() if request.param == "memory" else sqlite_store(tmp_path)
    yield store
    store.close()


def sqlite_store(folder):
    return SqliteStore(folder / "c.sqlite3")


def rows(store):
    with store._transaction() as db:
        return db.execute("SELECT place, message FROM budgetguard_messages").fetchall()


def guard_after(turns, run_id="r"):
    guard = Guard(Budget(max_iterations=9999), run_id=run_id, clock=ManualClock())
    for turn in range(turns):
        guard.settle_model_call(guard.admit_model_call(ModelCall()), TokenUsage(10, 1))
        guard.settle_tool_call(guard.admit_tool_call(ToolCall(name="a", id=str(turn))), turn)
    return guard


def test_a_store_without_more_verbs_is_a_store():
    class Plain:
        def save(self, snapshot): ...
        def load(self, run_id): ...
        def delete(self, run_id): ...

    class Replaced(MemoryStore):
        def save(self, snapshot):
            super().save(snapshot)

    class Appends:
        def append(self): ...

    class Slotted:
        __slots__ = ()

    assert isinstance(Plain(), CheckpointStore)
    assert not is_numbered(Plain())
    assert not is_numbered(Replaced())
    assert not is_numbered(Appends())
    assert not is_numbered(Slotted())
    assert is_numbered(MemoryStore())


def test_messages_are_written_once(store):
    guard, attempt, statements = guard_after(1), store.claim("r"), []
    number = store.append(guard.snapshot(["a", "b"]), attempt=attempt)
    number = store.append(guard.snapshot(["c"]), attempt=attempt, start=2, after=number)
    number = store.append(guard.snapshot(), attempt=attempt, start=3, after=number)
    connect = sqlite_checkpoints._connect

    def traced(path):
        db = connect(path)
        db.set_trace_callback(statements.append)
        return db

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sqlite_checkpoints, "_connect", traced)
        if store._memory is not None:
            store._memory.set_trace_callback(statements.append)
        store.save(guard.snapshot(["a", "b", "c", "d"]))
    written = [one for one in statements if one.startswith("INSERT INTO budgetguard_messages")]
    assert len(written) == 1
    assert rows(store) == [(0, '"a"'), (1, '"b"'), (2, '"c"'), (3, '"d"')]
    assert store.load("r").messages == ("a", "b", "c", "d")


def test_a_conversation_that_was_cut_and_went_on_is_kept_in_each_form(store):
    guard = guard_after(1)
    for form in [("a", "b", "c"), ("a",), ("a", "x", "c"), ("s", "x", "c", "d"), ()]:
        store.save(guard.snapshot(form))
        assert store.load("r").messages == form


def test_what_is_new_has_to_follow_what_the_caller_saved(store):
    guard, attempt = guard_after(1), store.claim("r")
    number = store.append(guard.snapshot(["a"]), attempt=attempt)
    store.save(guard.snapshot(["other"]))
    assert store.append(guard.snapshot(["b"]), attempt=attempt, start=1, after=number) is None
    assert store.load("r").messages == ("other",)
    assert store.append(guard.snapshot(["a", "b"]), attempt=attempt) == 3
    assert store.load("r").messages == ("a", "b")


def test_a_row_that_is_missing_is_damage(store):
    store.save(guard_after(2).snapshot(["a", "b"]))
    with store._transaction() as db:
        db.execute("DELETE FROM budgetguard_messages WHERE place = 1")
    with pytest.raises(CheckpointError, match=r"damaged \(2 messages were saved, 1 found"):
        store.load("r")


# --- the fence ------------------------------------------------------------------------------


def test_the_later_leg_goes_on_and_the_earlier_is_told(store):
    guard = guard_after(1)
    first = store.claim("r")
    number = store.append(guard.snapshot(["a"]), attempt=first)
    second = store.claim("r")
    assert (first, second) == (1, 2)
    assert store.claim("other") == 1
    for arguments in ({"start": 1, "after": number}, {}):
        with pytest.raises(
            RunFencedError,
            match=r"run 'r' was resumed elsewhere, so this attempt of it is fenced\. ",
        ):
            store.append(guard.snapshot(["late"]), attempt=first, **arguments)
    assert store.load("r").messages == ("a",)
    assert store.append(guard.snapshot(["a", "b"]), attempt=second) == 2


def test_two_stores_on_one_file_are_fenced_like_two_processes(tmp_path):
    one, other, guard = sqlite_store(tmp_path), sqlite_store(tmp_path), guard_after(1)
    attempt = one.claim("r")
    one.append(guard.snapshot(["a"]), attempt=attempt)
    other.append(guard.snapshot(["a", "b"]), attempt=other.claim("r"))
    with pytest.raises(RunFencedError):
        one.append(guard.snapshot(["c"]), attempt=attempt, start=1, after=1)
    assert one.load("r").messages == ("a", "b")
    one.close()
    other.close()


# --- the file -------------------------------------------------------------------------------


def test_memory_is_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = SqliteStore(":memory:")
    store.save(guard_after(1).snapshot(["a"]))
    assert store.load("r").messages == ("a",)
    assert list(tmp_path.iterdir()) == []
    store.close()
    assert store.load("r") is None
    store.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_has_what_was_in_memory():
    store = MemoryStore()
    store.save(guard_after(1).snapshot(["a"]))
    pid = os.fork()
    if pid == 0:  # pragma: no cover - runs in the child
        os._exit(0 if store.load("r").messages == ("a",) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    store.close()


def test_what_fails_in_memory_loses_nothing():
    store = MemoryStore()
    store.save(guard_after(1).snapshot(["a"]))
    with pytest.raises(CheckpointError, match="cannot be used"):
        store.load(object())
    assert store.load("r").messages == ("a",)


def test_a_write_that_fails_half_way_leaves_nothing(store, monkeypatch):
    guard = guard_after(1)
    store.save(guard.snapshot(["a"]))

    def fails(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sqlite_checkpoints, "_shared", fails)
        with pytest.raises(KeyboardInterrupt):
            store.save(guard.snapshot(["a", "b"]))
    assert store.load("r").messages == ("a",)
    store.save(guard.snapshot(["a", "c"]))
    assert store.load("r").messages == ("a", "c")


def test_every_file_is_for_its_owner(tmp_path):
    path = tmp_path / "c.sqlite3"
    saver = sqlite3.connect(path)
    saver.execute("PRAGMA journal_mode = WAL")
    saver.execute("CREATE TABLE writes(x)")
    path.chmod(0o644)
    store = SqliteStore(path)
    store.save(guard_after(1).snapshot())
    names = {"c.sqlite3", "c.sqlite3-wal", "c.sqlite3-shm", "c.sqlite3.lock"}
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == dict.fromkeys(names, 0o600)
    store.close()
    saver.close()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be used: .* Make it writable, or move it"):
        SqliteStore(tmp_path / "file" / "c.sqlite3")


def test_every_access_holds_the_lock(tmp_path, monkeypatch):
    store, lock = sqlite_store(tmp_path), FileLock(tmp_path / "c.sqlite3.lock")
    monkeypatch.setattr(sqlite_checkpoints, "_BUSY_SECONDS", 0.01)
    with lock, pytest.raises(CheckpointError, match="got a process that held it"):
        store.save(guard_after(1).snapshot())
    monkeypatch.setattr(sqlite_checkpoints, "_BUSY_SECONDS", 20.0)
    writer = threading.Thread(target=store.save, args=[guard_after(1).snapshot()])
    with lock:
        writer.start()
    writer.join()
    assert store.load("r") is not None


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_and_its_parent_both_save(tmp_path):
    store, guard = sqlite_store(tmp_path), guard_after(1)
    store.save(guard.snapshot(["a"]))
    pid = os.fork()
    if pid == 0:  # pragma: no cover - runs in the child
        store.save(guard_after(1, "child").snapshot(["b"]))
        os._exit(0)
    store.save(guard.snapshot(["a", "c"]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.load("r").messages == ("a", "c")
    assert store.load("child").messages == ("b",)


def test_one_file_serves_langgraphs_saver_too(tmp_path):
    from langgraph.checkpoint.base import empty_checkpoint
    from langgraph.checkpoint.sqlite import SqliteSaver

    path = tmp_path / "c.sqlite3"
    config = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    for saver_first in (True, False):
        with SqliteSaver.from_conn_string(str(path)) as saver:
            if saver_first:
                saver.put(config, empty_checkpoint(), {}, {})
            store = SqliteStore(path)
            store.save(guard_after(1).snapshot(["a"]))
            saver.put(config, empty_checkpoint(), {}, {})
            assert store.load("r").messages == ("a",)
            assert len(list(saver.list(config))) == 1 + saver_first
            store.close()
        path.unlink()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE budgetguard_messages SET message = CAST(message AS BLOB)",
        "UPDATE budgetguard_runs SET state = CAST(state AS BLOB)",
        "UPDATE budgetguard_runs SET state = 5",
        "UPDATE budgetguard_runs SET messages = 'x'",
        "DELETE FROM budgetguard_messages",
    ],
)
def test_a_part_of_another_type_is_damage(tmp_path, damage):
    store, guard = sqlite_store(tmp_path), Guard(Budget())
    store.save(guard.snapshot([{"role": "user", "content": "go"}]))
    store.close()
    with sqlite3.connect(tmp_path / "c.sqlite3") as db:
        db.execute(damage)
    db.close()
    with pytest.raises(CheckpointError, match="snapshot is damaged"):
        store.load(guard.run_id)
    store.close()
