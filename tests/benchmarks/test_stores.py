"""What a checkpoint costs as the conversation grows: pages and bytes written, rows, and time.

The null arm writes the same bare row into a file of its own, in the same turns: what is seen there
is SQLite's and the machine's.
"""

import sqlite3
import time

import pytest

from budgetguard_core import Budget, Guard, SqliteStore
from budgetguard_core.kit import Envelope, ModelCall, TokenUsage, ToolCall

pytestmark = pytest.mark.benchmark

SAVES_A_TURN = 4
WINDOW = 50


class Null:
    """One row of constant size in place of the last, and nothing else."""

    def __init__(self, path):
        self.path = path
        self.db = sqlite3.connect(path, isolation_level=None)
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("PRAGMA synchronous = FULL")
        self.db.execute("CREATE TABLE rows(name TEXT PRIMARY KEY, text TEXT)")

    def save(self):
        self.db.execute("INSERT OR REPLACE INTO rows VALUES ('r', ?)", ("x" * 6000,))


class Measured:
    def __init__(self, path, db):
        self.path, self.db = path, db
        # The log is never written back here, so that it tells all that was written.
        db.execute("PRAGMA wal_autocheckpoint = 0")
        self.seconds = 0.0
        self.start()

    def start(self):
        self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.rows, self.seconds = self.db.total_changes, 0.0

    def timed(self, save):
        began = time.perf_counter()
        save()
        self.seconds += time.perf_counter() - began

    def figures(self, saves):
        written = self.path.with_name(self.path.name + "-wal").stat().st_size
        rows = self.db.total_changes - self.rows
        return written / saves, rows / saves, self.seconds / saves * 1e6


def turn(run, history, number):
    """One turn of an agent, with a checkpoint wherever the loop saves one."""
    guard = run.guard
    call = guard.admit_model_call(ModelCall(model="gpt-4o", input_tokens=1200))
    yield
    guard.settle_model_call(call, TokenUsage(1200, 85, 1000))
    history.append({"role": "assistant", "content": f"step {number}: " + "a" * 400})
    yield
    id_ = f"call_{number:024}"
    tool = guard.admit_tool_call(ToolCall(name="read_file", arguments={"n": number}, id=id_))
    yield
    guard.settle_tool_call(tool, f"line {number}")
    history.append({"role": "tool", "tool_call_id": id_, "content": f"{number} " + "b" * 1500})
    yield


def measured(tmp_path, marks):
    store = SqliteStore(tmp_path / "store.sqlite3")
    null = Null(tmp_path / "null.sqlite3")
    budget = Budget(max_iterations=10**9, max_cost_usd=10**6, loop_detection=None)
    run = Envelope(budget=Guard(budget), store=store).open()
    arms = Measured(tmp_path / "store.sqlite3", store._connection), Measured(null.path, null.db)
    history, found = [{"role": "user", "content": "go"}], {}
    for number in range(max(marks) + WINDOW):
        if number in marks:
            for arm in arms:
                arm.start()
        for _ in turn(run, history, number):
            arms[0].timed(lambda: run.save(history))
            arms[1].timed(null.save)
        if number - WINDOW + 1 in marks:
            found[number - WINDOW + 1] = [arm.figures(WINDOW * SAVES_A_TURN) for arm in arms]
        elif number % 200 == 199 and not any(m <= number < m + WINDOW for m in marks):
            for arm in arms:
                arm.start()
    assert store.load(run.guard.run_id).messages == tuple(history)
    store.close()
    null.db.close()
    return found


def test_a_checkpoint_at_turn_5000_costs_what_it_costs_at_turn_50(tmp_path):
    found = measured(tmp_path, [50, 300, 1000, 5000])
    print("\n turn   bytes/save  rows/save  us/save   null: bytes/save  us/save")
    for mark, ((written, rows, us), (null_written, _, null_us)) in found.items():
        print(
            f"{mark:5} {written:12,.0f} {rows:10.2f} {us:8.0f} {null_written:18,.0f} {null_us:8.0f}"
        )
    (first, null_first), (last, null_last) = found[50], found[5000]
    assert null_last[0] <= 1.1 * null_first[0]
    assert last[0] <= 1.2 * first[0]
    assert last[1] <= 1.2 * first[1]
    # The machine's own changes between the two are in the null arm.
    assert last[2] <= 2 * first[2] * max(1, null_last[2] / null_first[2])
