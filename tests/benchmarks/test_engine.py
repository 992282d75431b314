"""What is no ratio of times: instructions, memory, and the import.

How long a step takes is in the table of `python tests/benchmarks`.
"""

import gc
import statistics
import subprocess
import sys
import tracemalloc

import pytest

from benchmarks.arms import STRAY, Row, instructions
from benchmarks.steps import EVERYTHING, Steps, aged, beside_a_plain_one, step
from budgetguard_core import Guard

pytestmark = pytest.mark.benchmark


def test_a_step_costs_what_its_row_says():
    """By instructions, which no machine changes; the times are the table's."""
    counted = instructions(Row("step", step()))
    print(f"\n{counted:.1f} times the instructions of the same step unguarded")
    assert counted <= 33


def test_step_100_000_costs_what_step_100_costs():
    counted = instructions(Row("late", beside_a_plain_one(lambda: aged(100_000))))
    print(f"\nstep 100,000: {counted:.3f} times the instructions of step 100")
    assert counted <= 1.01


def test_memory_is_constant():
    steps = Steps()
    for _ in range(2_000):
        steps.guarded()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(50_000):
            steps.guarded()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    print(f"\n{grown} bytes after 50,000 steps")
    assert grown < 50_000


@pytest.mark.parametrize("parent", [None, Guard(EVERYTHING, sinks=None)], ids=["own", "one"])
def test_ten_thousand_runs_at_the_same_time_are_small(parent):
    def run():
        guard = Guard(EVERYTHING, sinks=None) if parent is None else parent.child()
        Steps(guard).guarded()
        return guard

    run()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        runs = [run() for _ in range(10_000)]
        gc.collect()
        each = (tracemalloc.get_traced_memory()[0] - before) / len(runs)
    finally:
        tracemalloc.stop()
    print(f"\n{each:.0f} bytes a run")
    assert each <= 9_500


PYDANTIC = """
from pydantic import BaseModel

class Model(BaseModel):
    number: int = 0
"""
OURS = PYDANTIC + "import budgetguard_core"


def test_import_takes_at_most_55_ms_more_than_pydantic():
    def milliseconds(code):
        program = (
            "import time; t = time.process_time_ns()\n"
            f"{code}\nprint((time.process_time_ns() - t) / 1e6)"
        )
        done = subprocess.run(
            [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
        )
        return float(done.stdout)

    taken = [[milliseconds(code) for code in (PYDANTIC, OURS, PYDANTIC)] for _ in range(21)]
    pydantic = statistics.median(one for one, _, _ in taken)
    more = statistics.median(ours - (one + other) / 2 for one, ours, other in taken)
    null = statistics.median(other / one for one, _, other in taken)
    print(f"\npydantic {pydantic:.0f} ms, null arm {null:.3f}, budgetguard_core {more:.0f} ms more")
    if abs(null - 1) > STRAY:
        pytest.skip("equal imports are too far apart: no time can be judged")
    assert more <= 55
