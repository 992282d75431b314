"""What a store keeps of a run: numbered checkpoints, each message once, one leg at a time."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading

import pytest

from budgetguard_core import (
    Budget,
    CheckpointError,
    CheckpointStore,
    ConfigurationError,
    Guard,
    MemoryStore,
    ModelCall,
    RunFencedError,
    SqliteStore,
    TokenUsage,
    ToolCall,
    checkpoint_tables,
    sqlite_checkpoints,
)
from budgetguard_core.file_lock import FileLock
from budgetguard_core.stores import is_numbered
from budgetguard_core.testing import ManualClock


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    store = MemoryStore(keep=4) if request.param == "memory" else sqlite_store(tmp_path, keep=4)
    yield store
    store.close()


def sqlite_store(folder, **options):
    return SqliteStore(folder / "c.sqlite3", **options)


def rows(store, kind="message"):
    return store._connection.execute(
        "SELECT place, since, until, item FROM budgetguard_items WHERE kind = ? "
        "ORDER BY place, since",
        (kind,),
    ).fetchall()


def numbers(store, run_id="r"):
    return [one.number for one in store.history(run_id)]


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


def test_checkpoints_are_numbered_listed_and_loaded_by_their_number(tmp_path):
    clock = ManualClock()
    store, guard = sqlite_store(tmp_path, clock=clock), guard_after(1)
    for count in range(1, 4):
        store.save(guard.snapshot(range(count)))
        clock.advance(5)
    start = ManualClock().wall_ns() / 1e9
    assert [(one.number, one.messages, one.saved_at - start) for one in store.history("r")] == [
        (1, 1, 0),
        (2, 2, 5),
        (3, 3, 10),
    ]
    assert [store.load("r", number=n).messages for n in (1, 2, 3)] == [(0,), (0, 1), (0, 1, 2)]
    assert store.load("r", number=2) == guard.snapshot(range(2))
    assert store.load("r", number=4) is None
    assert store.history("other") == ()
    store.close()


def test_old_checkpoints_are_pruned_with_what_only_they_had(store):
    guard = guard_after(1)
    for step in range(10):
        store.save(guard.snapshot(["same", f"changes {step}"]))
    assert numbers(store) == [7, 8, 9, 10]
    assert [row[3] for row in rows(store)] == ['"same"'] + [f'"changes {n}"' for n in range(6, 10)]
    assert store.load("r", number=7).messages == ("same", "changes 6")
    store.prune("r", keep=2)
    assert numbers(store) == [9, 10]
    assert len(rows(store)) == 3
    store.prune("r")
    assert numbers(store) == [10]
    assert store.load("r").messages == ("same", "changes 9")
    store.prune("never seen")
    with pytest.raises(ConfigurationError, match=r"keep must be a number >= 1, got 0\."):
        store.prune("r", keep=0)
    store.delete("r")
    assert rows(store) == []


@pytest.mark.parametrize("keep", [0, -1, "5"])
def test_at_least_one_checkpoint_is_kept(keep):
    with pytest.raises(ConfigurationError, match="keep must be a number >= 1"):
        MemoryStore(keep=keep)


def test_messages_are_written_once(store):
    guard, leg = guard_after(1), store.claim("r")
    number = store.append(guard.snapshot(["a", "b"]), leg=leg)
    number = store.append(guard.snapshot(["c"]), leg=leg, start=2, after=number)
    number = store.append(guard.snapshot(), leg=leg, start=3, after=number)
    store.save(guard.snapshot(["a", "b", "c", "d"]))
    assert [row[:2] for row in rows(store)] == [(0, 1), (1, 1), (2, 2), (3, 4)]
    assert store.load("r").messages == ("a", "b", "c", "d")
    assert store.load("r", number=2).messages == ("a", "b", "c")


def test_a_conversation_that_was_cut_and_went_on_is_kept_in_each_form(store):
    guard = guard_after(1)
    forms = [("a", "b", "c"), ("a",), ("a", "x", "c"), ("s", "x", "c", "d")]
    for form in forms:
        store.save(guard.snapshot(form))
    assert [store.load("r", number=n).messages for n in range(1, 5)] == forms
    store.save(guard.snapshot())
    assert store.load("r").messages == ()
    assert store.load("r", number=4).messages == forms[3]


def test_what_is_new_has_to_follow_what_the_caller_saved(store):
    guard, leg = guard_after(1), store.claim("r")
    number = store.append(guard.snapshot(["a"]), leg=leg)
    store.save(guard.snapshot(["other"]))
    assert store.append(guard.snapshot(["b"]), leg=leg, start=1, after=number) is None
    assert store.load("r").messages == ("other",)
    assert store.append(guard.snapshot(["a", "b"]), leg=leg) == 3
    assert store.load("r").messages == ("a", "b")


def test_records_are_written_once_and_the_window_slides(store):
    guard = Guard(run_id="r")
    for turn in range(3000):
        guard.settle_tool_call(guard.admit_tool_call(ToolCall(name="a", id=str(turn % 2000))), turn)
        if turn % 100 == 99:
            store.save(guard.snapshot())
            assert store.load("r") == guard.snapshot().model_copy(
                update={"elapsed_ns": store.load("r").elapsed_ns}
            )
    written = [row[3] for row in rows(store, "record")]
    assert len(written) < 256 + 1024 + 100
    assert len(set(written)) == len(written)
    # Another guard under the same name knows nothing of them.
    store.save(Guard(run_id="r").snapshot())
    assert store.load("r").records == ()
    assert len(store.load("r", number=30).records) == 256


def test_a_row_that_is_missing_is_damage(store):
    store.save(guard_after(2).snapshot(["a", "b"]))
    store._connection.execute("DELETE FROM budgetguard_items WHERE place = 1")
    with pytest.raises(CheckpointError, match=r"damaged \(2 messages and 2 records were saved, 1 "):
        store.load("r")


# --- going back -----------------------------------------------------------------------------


def test_rolled_back_is_the_conversation_and_not_the_spend(store):
    guard = guard_after(2)
    store.save(guard.snapshot(["a", "b"]))
    guard.settle_model_call(guard.admit_model_call(ModelCall()), TokenUsage(500, 0))
    guard.settle_tool_call(guard.admit_tool_call(ToolCall(name="send", id="late")), "x")
    store.save(guard.snapshot(["a", "b", "c"]))
    leg = store.claim("r")
    rolled_back = store.roll_back("r", 1)
    assert rolled_back == store.load("r")
    assert rolled_back.messages == ("a", "b")
    assert rolled_back.counters == guard.snapshot().counters
    assert rolled_back.detector == store.load("r", number=1).detector
    # It may have taken effect, so a resume tells the model so and does not run it again.
    assert [(one.id, one.name) for one in rolled_back.open_calls] == [("late", "send")]
    again = Guard.restore(rolled_back, clock=ManualClock())
    assert again.usage.tool_calls == 3
    assert again.admit_model_call().call_id == rolled_back.call_id + 1
    with pytest.raises(RunFencedError):
        store.append(guard.snapshot(), leg=leg)
    assert numbers(store) == [1, 2, 3]


@pytest.mark.parametrize(("run_id", "number"), [("r", 7), ("unknown", 1)])
def test_there_is_no_way_back_to_what_is_not_kept(store, run_id, number):
    store.save(guard_after(1).snapshot())
    leg = store.claim("r")
    with pytest.raises(CheckpointError, match=rf"run '{run_id}' has no checkpoint {number}\."):
        store.roll_back(run_id, number)
    assert store.append(guard_after(1).snapshot(), leg=leg) == 2


# --- the fence ------------------------------------------------------------------------------


def test_the_later_leg_goes_on_and_the_earlier_is_told(store):
    guard = guard_after(1)
    first = store.claim("r")
    number = store.append(guard.snapshot(["a"]), leg=first)
    second = store.claim("r")
    assert (first, second) == (1, 2)
    assert store.claim("other") == 1
    for arguments in ({"start": 1, "after": number}, {}):
        with pytest.raises(
            RunFencedError, match=r"run 'r' was resumed elsewhere, so this leg of it is fenced\. "
        ):
            store.append(guard.snapshot(["late"]), leg=first, **arguments)
    assert store.load("r").messages == ("a",)
    assert store.append(guard.snapshot(["a", "b"]), leg=second) == 2


def test_two_stores_on_one_file_are_fenced_like_two_processes(tmp_path):
    one, other, guard = sqlite_store(tmp_path), sqlite_store(tmp_path), guard_after(1)
    leg = one.claim("r")
    one.append(guard.snapshot(["a"]), leg=leg)
    other.append(guard.snapshot(["a", "b"]), leg=other.claim("r"))
    with pytest.raises(RunFencedError):
        one.append(guard.snapshot(["c"]), leg=leg, start=1, after=1)
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


def test_a_fork_before_the_first_access_opens_the_file(tmp_path, monkeypatch):
    store = sqlite_store(tmp_path)
    store.close()
    monkeypatch.setattr("os.getpid", lambda: -1)
    store.save(guard_after(1).snapshot())
    store.close()
    assert (store._inherited, store._process) == ([], -1)


def test_what_fails_in_memory_loses_nothing():
    store = MemoryStore()
    store.save(guard_after(1).snapshot(["a"]))
    with pytest.raises(CheckpointError, match="cannot be used"):
        store.load(b"\xff" * 3, number=object())
    assert store.load("r").messages == ("a",)


def test_a_write_that_fails_half_way_leaves_nothing(store, monkeypatch):
    guard = guard_after(1)
    store.save(guard.snapshot(["a"]))

    def fails(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_tables, "prune", fails)
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
    store = sqlite_store(tmp_path)
    lock = FileLock(tmp_path / "c.sqlite3.lock", 0.0)
    monkeypatch.setattr(sqlite_checkpoints, "_BUSY_SECONDS", 0.01)
    # The one that is open waits for as long as it was opened with.
    store.close()
    with lock, pytest.raises(CheckpointError, match="got a process that held it"):
        store.save(guard_after(1).snapshot())
    done = threading.Event()
    with lock:
        monkeypatch.setattr(sqlite_checkpoints, "_BUSY_SECONDS", 20.0)
        writer = threading.Thread(
            target=lambda: (store.save(guard_after(1).snapshot()), done.set())
        )
        writer.start()
        assert not done.wait(0.05)
    writer.join()
    assert done.is_set()
    store.close()
    lock.close()


def test_a_lock_that_nobody_frees_does_not_keep_a_store_open(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_checkpoints, "_BUSY_SECONDS", 0.01)
    store = sqlite_store(tmp_path)
    lock = FileLock(tmp_path / "c.sqlite3.lock", 0.0)
    connection = store._connection
    with lock:
        store.close()
    assert store._connection is None
    connection.close()
    lock.close()


EARLIER = "CREATE TABLE checkpoints (run_id TEXT PRIMARY KEY, snapshot TEXT)"


def earlier_file(path, *snapshots):
    db = sqlite3.connect(path)
    db.execute(EARLIER)
    db.executemany("INSERT INTO checkpoints VALUES (?, ?)", snapshots)
    db.commit()
    db.close()


def test_a_file_of_an_earlier_release_is_taken_over(tmp_path):
    snapshot = guard_after(2).snapshot(["a", "b"])
    earlier_file(tmp_path / "c.sqlite3", ("r", snapshot.to_json()), ("damaged", "{"))
    store = sqlite_store(tmp_path)
    assert store.load("r") == snapshot
    (only,) = store.history("r")
    assert (only.number, only.saved_at, only.messages) == (1, None, None)
    with pytest.raises(CheckpointError, match="snapshot is damaged"):
        store.load("damaged")
    tables = store._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    assert {name.partition("_")[0] for (name,) in tables} == {"budgetguard"}
    store.save(guard_after(3).snapshot(["a", "b", "c"]))
    assert store.load("r").messages == ("a", "b", "c")
    assert store.load("r", number=1) == snapshot
    store.close()
    # A process of that release, which was still there, has begun its table anew.
    earlier_file(tmp_path / "c.sqlite3", ("r", snapshot.to_json()))
    store = sqlite_store(tmp_path)
    assert store.load("r", number=3) == store.load("r") == snapshot
    store.close()


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


@pytest.mark.parametrize("number", [2**63, 2**70, -(2**70)])
def test_a_number_that_no_checkpoint_can_have_is_none_of_the_runs(store, number):
    guard = Guard(Budget())
    store.save(guard.snapshot())
    assert store.load(guard.run_id, number=number) is None
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        store.roll_back(guard.run_id, number)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE budgetguard_items SET item = CAST(item AS BLOB)",
        "UPDATE budgetguard_checkpoints SET state = CAST(state AS BLOB)",
        "UPDATE budgetguard_checkpoints SET state = 5",
        "UPDATE budgetguard_checkpoints SET records = 'x'",
        "UPDATE budgetguard_checkpoints SET messages = 'x'",
        "UPDATE budgetguard_checkpoints SET messages = NULL, state = 5",
        "UPDATE budgetguard_items SET kind = 'x'",
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
