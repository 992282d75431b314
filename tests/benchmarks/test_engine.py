"""What a guarded step costs, beside the same step unguarded in the same run.

Both are timed in short turns, one after the other, and each counts with its best turn: a machine
that slows down for a while slows down both.
"""

import gc
import statistics
import subprocess
import sys
import time
import tracemalloc

import pytest

from benchmarks.steps import EVERYTHING, Steps
from budgetguard_core import Guard

pytestmark = pytest.mark.benchmark


def seconds(step, turns=300):
    started = time.perf_counter()
    for _ in range(turns):
        step()
    return (time.perf_counter() - started) / turns


def best_of(*steps, rounds=700):
    """Return each step's best time, in microseconds; collected and paused between turns."""
    times = [[] for _ in steps]
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for step, taken in zip(steps, times, strict=True):
                taken.append(seconds(step))
    finally:
        gc.enable()
    return [min(taken) * 1e6 for taken in times]


def test_a_guarded_step_costs_at_most_13_times_the_same_step_unguarded():
    steps = Steps()
    steps.guarded()
    bare, guarded = best_of(steps.bare, steps.guarded)
    print(f"\nbare {bare:.2f} us, guarded {guarded:.2f} us, {guarded / bare:.1f} times")
    assert guarded <= 13 * bare


def test_step_100_000_costs_what_step_100_costs():
    young, old = Steps(), Steps()
    for _ in range(100):
        young.guarded()
    for _ in range(100_000):
        old.guarded()
    early, late = best_of(young.guarded, old.guarded, rounds=200)
    print(f"\nstep 100 {early:.2f} us, step 100,000 {late:.2f} us")
    assert late <= 1.1 * early


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


@pytest.mark.parametrize(
    ("most", "parent"), [(6_500, None), (5_000, Guard(EVERYTHING, sinks=None))], ids=["own", "one"]
)
def test_ten_thousand_runs_at_the_same_time_are_small(most, parent):
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
    assert each <= most


PYDANTIC = """
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

class Model(BaseModel):
    model_config = ConfigDict(defer_build=True)
    number: int = 0
"""


def test_import_takes_at_most_25_ms_more_than_pydantic():
    def milliseconds(code):
        program = (
            f"import time; t = time.perf_counter()\n{code}\nprint((time.perf_counter() - t) * 1000)"
        )
        done = subprocess.run(
            [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
        )
        return float(done.stdout)

    pydantic, ours = [], []
    for _ in range(15):
        pydantic.append(milliseconds(PYDANTIC))
        ours.append(milliseconds("import budgetguard_core"))
    more = statistics.median(ours) - statistics.median(pydantic)
    print(
        f"\npydantic {statistics.median(pydantic):.0f} ms, "
        f"budgetguard_core {statistics.median(ours):.0f} ms: {more:.0f} ms more"
    )
    assert more <= 25
