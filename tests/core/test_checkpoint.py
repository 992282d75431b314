"""Snapshots and the stores that keep them."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
from decimal import Decimal
from pathlib import Path

import pytest

from budgetguard_core import (
    Budget,
    ConfigurationError,
    Guard,
    LoopDetection,
    MemoryStore,
    Price,
    PriceBook,
    Snapshot,
    SqliteStore,
)
from budgetguard_core.kit import Admit, CheckpointError, ModelCall, Stop, TokenUsage, ToolCall
from budgetguard_core.testing import ManualClock

BOOK = PriceBook({"m": Price(input=1, output=2)})


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def guard(clock):
    guard = Guard(
        Budget(max_iterations=5, max_cost_usd=1, max_seconds=60, tool_quotas={"a": 2}),
        run_id="r",
        clock=clock,
        price_book=BOOK,
    )
    guard.settle_model_call(
        guard.admit_model_call(ModelCall(model="m")), TokenUsage(100_000, 50_000)
    )
    guard.settle_tool_call(guard.admit_tool_call(ToolCall(name="a", id="1")), "x")
    guard.admit_model_call(ModelCall(model="m", input_tokens=1000, cost_usd=Decimal("0.1")))
    guard.admit_tool_call(ToolCall(name="a", id="2", arguments={"n": 1}))
    clock.advance(10)
    return guard


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    if request.param == "memory":
        yield MemoryStore()
    else:
        store = SqliteStore(tmp_path / "c.sqlite3")
        yield store
        store.close()


def test_a_snapshot_survives_json(guard):
    snapshot = guard.snapshot([{"role": "user", "content": "hé"}])
    assert Snapshot.from_json(snapshot.to_json()) == snapshot
    assert Snapshot.from_json(snapshot.to_json().encode()) == snapshot


def test_the_last_one_is_kept(store, guard):
    assert store.load("r") is None
    store.save(guard.snapshot([1]))
    store.save(guard.snapshot([1, 2]))
    assert store.load("r") == guard.snapshot([1, 2])
    assert store.load("R") is None
    store.delete("r")
    store.delete("r")
    assert store.load("r") is None


@pytest.mark.parametrize(
    "run_id", ["'; DROP TABLE budgetguard_checkpoints; --", "../../x", "ü", "%", ""]
)
def test_a_run_may_have_any_name(store, run_id):
    store.save(Guard().snapshot().model_copy(update={"run_id": run_id}))
    assert store.load(run_id).run_id == run_id
    assert store.load("r") is None


def test_names_that_are_no_text_cost_no_checkpoint(store):
    guard = Guard(run_id="r")
    guard.admit_tool_call(ToolCall(name="a\ud800", id="\ud800"))
    store.save(guard.snapshot([{"content": ["x\udfff", {"\ud800": ("y",)}]}]))
    loaded = store.load("r")
    assert loaded.tool_counts == {"a?": 1}
    assert loaded.messages == ({"content": ["x?", {"?": ["y"]}]},)


def test_what_json_cannot_hold_is_refused(guard):
    with pytest.raises(CheckpointError, match=r"messages must be what JSON can hold, got .*object"):
        guard.snapshot([object()]).to_json()


# --- damage ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "snapshot is damaged (the whole: "),
        ("{", "snapshot is damaged (the whole: "),
        ("[]", "snapshot is damaged (the whole: "),
        ("{}", "snapshot is damaged (format_version: "),
        ('{"format_version": 2}', "snapshot format must be <= 1, got 2. Upgrade BudgetGuard, or"),
        ('{"format_version": 1}', "snapshot is damaged (run_id: "),
    ],
)
def test_damage_is_one_sentence(text, sentence):
    with pytest.raises(CheckpointError) as caught:
        Snapshot.from_json(text)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    "changes",
    [
        {"counters": {}},
        {"counters": {"tokens": 1}},
        {"counters": {"nonsense": 1}},
        {"budget": {"max_iterations": 0}},
        {"budget": {"nonsense": 1}},
        {"budget": {"max_cost_usd": "ten"}},
        {"mode": "watch"},
        {"detector": {"seen": 5}},
    ],
    ids=range(8),
)
@pytest.mark.parametrize("fresh", [False, True])
def test_what_does_not_fit_together_is_one_sentence(guard, changes, fresh):
    snapshot = guard.snapshot().model_copy(update=changes)
    if fresh and not {"counters", "mode"} & changes.keys():
        # Under a fresh budget nobody looks at the old one.
        assert Guard.restore(snapshot, Budget()).usage.iterations == 0
        return
    with pytest.raises(CheckpointError) as caught:
        Guard.restore(snapshot, Budget() if fresh else None)
    assert str(caught.value).startswith("snapshot of run 'r' does not fit together: ")


def test_a_damaged_file_is_one_sentence(tmp_path):
    path, content = tmp_path / "c.sqlite3", b"not a database, but long enough to be looked at" * 50
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        SqliteStore(path)
    assert str(caught.value).startswith(f"checkpoint file {str(path)!r} cannot be used: ")
    assert str(caught.value).endswith("Make it writable, or move it away to begin a new one.")
    assert path.read_bytes() == content


def test_a_relative_path_is_that_of_the_folder_it_was_given_in(tmp_path, guard, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    store = SqliteStore("c.sqlite3")
    store.save(guard.snapshot())
    monkeypatch.chdir(tmp_path / "other")
    assert store.load(guard.run_id) is not None
    store.save(guard.snapshot())
    store.close()
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize("removed", ["c.sqlite3", "c.sqlite3*"])
def test_a_file_that_is_removed_is_made_anew(tmp_path, guard, removed):
    path = tmp_path / "c.sqlite3"
    store = SqliteStore(path)
    store.save(guard.snapshot(["a"]))
    for file in tmp_path.glob(removed):
        file.unlink()
    store.save(guard.snapshot(["b"]))
    other = SqliteStore(path)
    assert other.load("r").messages == ("b",)
    other.close()
    store.close()


# --- the file -------------------------------------------------------------------------------


def test_the_file_is_for_its_owner(tmp_path):
    path = tmp_path / "new" / "deep" / "c.sqlite3"
    store = SqliteStore(path)
    store.close()
    store.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_default_file_is_in_the_home_directory(tmp_path, monkeypatch, guard):
    monkeypatch.setenv("HOME", str(tmp_path))
    store = SqliteStore()
    store.save(guard.snapshot())
    store.close()
    assert (tmp_path / ".budgetguard" / "checkpoints.sqlite3").exists()


def test_a_closed_store_opens_again(tmp_path, guard):
    store = SqliteStore(tmp_path / "c.sqlite3")
    store.save(guard.snapshot())
    store.close()
    assert store.load("r") == guard.snapshot()
    store.close()


def test_threads_share_a_store(tmp_path, guard):
    store, failed = SqliteStore(tmp_path / "c.sqlite3"), []
    base = guard.snapshot()

    def work(number):
        try:
            for step in range(5):
                mine = base.model_copy(update={"run_id": f"r{number}", "messages": (step,)})
                store.save(mine)
                assert store.load(f"r{number}") == mine
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert failed == []


WRITER = """
import sys
from budgetguard_core import Guard, SqliteStore
store = SqliteStore(sys.argv[1])
base = Guard(run_id=sys.argv[2]).snapshot()
for step in range(25):
    for run_id in (sys.argv[2], "shared"):
        store.save(base.model_copy(update={"run_id": run_id, "messages": (sys.argv[2], step)}))
        assert store.load(run_id) is not None
store.close()
"""


@pytest.mark.slow
def test_several_processes_write_to_one_file(tmp_path):
    path = tmp_path / "c.sqlite3"
    writers = [
        subprocess.Popen([sys.executable, "-I", "-c", WRITER, path, f"p{number}"])
        for number in range(4)
    ]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    store = SqliteStore(path)
    for number in range(4):
        assert store.load(f"p{number}").messages == (f"p{number}", 24)
    assert store.load("shared").messages[1] == 24
    store.close()


def test_a_killed_run_goes_on_and_no_counter_is_lower_than_what_was_started(tmp_path):
    path = tmp_path / "c.sqlite3"
    started = tmp_path / "started"
    program = f"""
import os, signal
from pathlib import Path
from budgetguard_core import Guard, Budget, SqliteStore
from budgetguard_core.kit import ToolCall
guard = Guard(Budget(max_tool_calls=10), run_id="r")
store = SqliteStore({str(path)!r})
for number in range(5):
    ticket = guard.admit_tool_call(ToolCall(name="send", id=str(number), arguments=number))
    store.save(guard.snapshot())
    Path({str(started)!r}).write_text(str(number + 1))
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    guard.settle_tool_call(ticket, number)
"""
    assert subprocess.run([sys.executable, "-I", "-c", program], check=False).returncode == -9
    store = SqliteStore(path)
    guard = Guard.restore(store.load("r"))
    store.close()
    assert guard.usage.tool_calls == int(started.read_text()) == 4
    assert [(record.id, record.status) for record in guard.tool_calls] == [
        ("0", "completed"),
        ("1", "completed"),
        ("2", "completed"),
        ("3", "interrupted"),
    ]
    assert (
        sum(isinstance(guard.admit_tool_call(ToolCall(name="send")), Admit) for _ in range(3)) == 3
    )
    assert Path(path).stat().st_size > 0


# --- restoring ------------------------------------------------------------------------------


def test_under_the_same_budget_it_is_what_it_was(guard, clock):
    other = ManualClock()
    other.advance(1000)
    again = Guard.restore(guard.snapshot(), clock=other, price_book=BOOK)
    assert again.snapshot() == guard.snapshot()
    assert again.time_left() == guard.time_left() == 50
    other.advance(50)
    assert again.admit_model_call(ModelCall(model="m")).trip.reason == "max_seconds"


def test_calls_in_flight_can_still_be_settled(guard, clock):
    again = Guard.restore(guard.snapshot(), clock=clock, price_book=BOOK)
    model, tool = again.open_calls()
    assert again.settle_model_call(model, TokenUsage(1000, 0))
    assert again.settle_tool_call(tool, "x")
    assert again.usage.reserved_tokens == 0
    assert again.usage.cost_usd == Decimal("0.201")
    assert [record.status for record in again.tool_calls] == ["completed"] * 2


def test_a_call_in_flight_needs_no_model(clock):
    guard = Guard(clock=clock)
    guard.admit_model_call(ModelCall(input_tokens=7))
    (ticket,) = Guard.restore(guard.snapshot(), clock=clock).open_calls()
    assert ticket.call == ModelCall(input_tokens=7)
    assert (ticket.reserved_tokens, ticket.rates) == (7, None)


def test_a_trip_stays(guard, clock):
    guard.abort("user")
    trip = guard.check()
    again = Guard.restore(guard.snapshot(), clock=clock, price_book=BOOK)
    assert again.trip == trip
    assert again.cancellation.cancelled
    assert isinstance(again.admit_model_call(), Stop)
    assert again.snapshot() == guard.snapshot()


def test_what_is_held_but_has_not_stopped_the_run_yet_stays(clock):
    guard = Guard(Budget(tool_quotas={"web": 1}), clock=clock)
    for _ in range(2):
        guard.admit_tool_call(ToolCall(name="web", kind="hosted"))
    again = Guard.restore(guard.snapshot(), clock=clock)
    assert again.trip is None
    assert str(again.admit_model_call().trip.reason) == "tool_quota"


def test_an_observed_trip_stays(clock):
    guard = Guard(Budget(max_iterations=1), mode="observe", clock=clock, run_id="r")
    guard.admit_model_call()
    guard.admit_model_call()
    again = Guard.restore(guard.snapshot(), clock=clock)
    assert again.snapshot() == guard.snapshot()
    assert isinstance(again.admit_model_call(), Admit)
    assert again.observed_trip == guard.observed_trip


def test_a_loop_is_remembered(clock):
    guard = Guard(clock=clock)
    for _ in range(3):
        guard.settle_tool_call(guard.admit_tool_call(ToolCall(name="a")), "x")
    again = Guard.restore(guard.snapshot(), clock=clock)
    assert again.take_nudge() == guard.take_nudge() is not None
    assert (
        Guard.restore(
            guard.snapshot(), Budget(loop_detection=LoopDetection()), clock=clock
        ).take_nudge()
        is None
    )


def test_under_a_fresh_budget_the_caps_count_from_zero(guard, clock):
    guard.abort()
    guard.check()
    again = Guard.restore(
        guard.snapshot(), Budget(max_iterations=1, max_total_tokens=101_500), clock=clock
    )
    assert again.trip is None
    assert not again.cancellation.cancelled
    assert again.run_id == "r"
    assert again.usage.model_dump(exclude_defaults=True) == {
        "reserved_tokens": 51_000,
        "reserved_usd": Decimal("0.1"),
    }
    earlier = again.earlier_usage
    assert (earlier.iterations, earlier.tool_calls, earlier.seconds) == (2, 2, 10)
    assert (earlier.total_tokens, earlier.cost_usd) == (150_000, Decimal("0.2"))
    assert earlier.reserved_tokens == 0
    # What is in flight may still cost what was set aside for it.
    assert isinstance(again.admit_model_call(ModelCall(input_tokens=501)), Stop)
    third = Guard.restore(again.snapshot(), Budget(), clock=clock)
    assert third.earlier_usage == earlier


def test_numbers_go_on_so_that_no_call_has_two(guard, clock):
    again = Guard.restore(guard.snapshot(), Budget(), clock=clock)
    assert again.admit_model_call().call_id == 5


def test_conditions_are_code_and_must_be_given_again(clock):
    guard = Guard(Budget(max_iterations=9, stop_when=[lambda guard: None]), clock=clock)
    guard.admit_model_call()
    snapshot = guard.snapshot()
    with pytest.raises(CheckpointError, match="a run with stop conditions needs them again"):
        Guard.restore(snapshot)
    again = Guard.restore(snapshot, stop_when=[lambda guard: "enough"], clock=clock)
    assert again.snapshot() == snapshot
    assert again.check().detail == "enough"
    fresh = Guard.restore(snapshot, Budget(stop_when=[lambda guard: "x"]), clock=clock)
    assert (fresh.usage.iterations, fresh.check().detail) == (0, "x")
    with pytest.raises(ConfigurationError, match="stop_when must not be given beside a budget"):
        Guard.restore(snapshot, Budget(), stop_when=[bool])


def test_the_caller_is_told_of_its_own_mistakes(guard):
    with pytest.raises(ConfigurationError, match="a sink must take events"):
        Guard.restore(guard.snapshot(), sinks=[5])


def test_restoring_is_an_event_without_the_conversation(guard, clock):
    events = []
    Guard.restore(guard.snapshot(["secret"]), sinks=[events.append], clock=clock)
    (event,) = events
    assert (event.event, event.seq) == ("run_restored", 1)
    assert event.snapshot["messages"] == []
    assert event.snapshot["counters"] == guard.snapshot().counters


def test_a_childs_snapshot_names_its_parent(guard):
    assert guard.child().snapshot().parent_run_id == "r"
    assert guard.child().snapshot().open_calls == ()
