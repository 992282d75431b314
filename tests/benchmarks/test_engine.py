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

from budgetguard_core import Budget, Guard, ModelCall, TokenUsage, ToolCall

pytestmark = pytest.mark.benchmark

EVERYTHING = Budget(
    max_iterations=10**9,
    max_model_calls=10**9,
    max_tool_calls=10**9,
    max_total_tokens=10**15,
    max_seconds=10**6,
    max_cost_usd=10**9,
    tool_quotas={"read_*": 10**9, "*": 10**9},
    max_output_tokens_per_call=4096,
)


class Call:
    __slots__ = ("arguments", "id", "name")

    def __init__(self, id_, name, arguments):
        self.id = id_
        self.name = name
        self.arguments = arguments


class Response:
    __slots__ = ("id", "model", "text", "tool_calls", "usage")

    def __init__(self, id_, model, text, tool_calls, usage):
        self.id = id_
        self.model = model
        self.text = text
        self.tool_calls = tool_calls
        self.usage = usage


class Steps:
    def __init__(self):
        self.number = 0
        self.guard = Guard(EVERYTHING)

    def bare(self):
        self.number += 1
        arguments = {"path": "/srv/data/file.txt", "limit": self.number}
        call = Call("call_1", "read_file", arguments)
        response = Response("resp_1", "gpt-4o", "", [call], TokenUsage(1200, 85, 1000))
        return response, arguments, f"line {self.number} of the file"

    def guarded(self):
        guard = self.guard
        call = guard.admit_model_call(ModelCall(model="gpt-4o", input_tokens=1200))
        response, arguments, result = self.bare()
        guard.settle_model_call(call, response.usage)
        tools = guard.admit_tool_calls(
            [ToolCall(name="read_file", arguments=arguments, id="call_1")]
        )
        guard.settle_tool_call(tools[0], result)


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
