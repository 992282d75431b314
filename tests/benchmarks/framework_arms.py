"""What a framework's turn costs with a guard, beside the same turn without, and without again.

Processor time of runs that take turns, compared round by round: others use the machine too. The
second bare arm tells how far apart equal runs are at that moment, and where that is more than 3 %
the time is not judged. The number of function calls, of Python and of C, is: it is the same on
every machine.
"""

from __future__ import annotations

import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

NOISE = 0.03

Run = Callable[[], object]


def calls_of(run: Run) -> int:
    """Count the calls of one run, in whatever thread."""
    counted = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    run()
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return counted


def compared(
    label: str, arms: Mapping[str, Run], *, units: int, rounds: int = 60
) -> tuple[dict[str, float], dict[str, float]]:
    """Return processor time beside the arm `bare`, and calls beyond it for each unit.

    Args:
        label: What is printed.
        arms: `bare`, `null`, which is the same again, and the ways to compare with them.
        units: Turns, cycles or chunks of one run.
        rounds: How often each runs.
    """
    for run in arms.values():
        run()
    names = list(arms)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        gc.collect()
        gc.disable()
        # No arm is always the one after the collection.
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            began = time.process_time()
            arms[name]()
            taken[name].append(time.process_time() - began)
        gc.enable()
    bare, bare_calls = taken["bare"], calls_of(arms["bare"])
    times: dict[str, float] = {}
    calls: dict[str, float] = {}
    print(f"\n{label}: {bare_calls / units:.0f} calls bare")
    for name, seconds in taken.items():
        times[name] = statistics.median(
            one / other for one, other in zip(seconds, bare, strict=True)
        )
        calls[name] = (calls_of(arms[name]) - bare_calls) / units
        low, middle, high = (q / units * 1e6 for q in statistics.quantiles(seconds, n=4))
        print(
            f"  {name:10} {middle:7.1f} us ({low:.1f} to {high:.1f}), {times[name]:.3f} times; "
            f"{calls[name]:+.0f} calls, {1 + calls[name] * units / bare_calls:.3f} times"
        )
    return times, calls


def judge(times: Mapping[str, float], name: str, most: float) -> None:
    """Hold a time against its goal, where equal runs are equally long."""
    if abs(times["null"] - 1) > NOISE:
        pytest.skip(f"equal runs are {times['null']:.3f} times apart: no time can be judged")
    assert times[name] <= most
