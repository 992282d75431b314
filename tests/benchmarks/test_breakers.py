"""Breakers: on recorded runs of others at the starting values of their README, and their cost."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import layout
from budgetguard_core import Budget, PriceBook
from budgetguard_core.breakers import ToolMix, ToolMixBaseline, VelocityLimits
from budgetguard_core.breakers.velocity import VelocityMeter
from budgetguard_core.events import (
    CallDelayed,
    CircuitBreakerChanged,
    ToolCallTurnedAway,
    ToolMixUnusual,
)
from recorded_runs import STARTING_VALUES, judged, tools
from trajectories import Trajectory

TRAJECTORIES = Path(
    os.environ.get("BUDGETGUARD_TRAJECTORIES") or layout.ROOT.parent / "shared" / "trajectories"
)
README = layout.ROOT / "budgetguard_core" / "breakers" / "README.md"


def runs():
    """Every recorded run, and the domain that its task is of."""
    for path in sorted(TRAJECTORIES.glob("*.jsonl.gz")):
        for line in gzip.decompress(path.read_bytes()).splitlines():
            record = json.loads(line)
            domain = (record["source"], str(record["task"]).partition(":")[0])
            yield domain, Trajectory.model_validate_json(line)


def table():
    """The README's rows: what each breaker did on all runs."""
    prices = PriceBook()
    recorded = list(runs())
    successful = defaultdict(list)
    for domain, run in recorded:
        if run.success and tools(run):
            successful[domain].append(tools(run))
    everything = {
        name: value for fields in STARTING_VALUES.values() for name, value in fields.items()
    }
    rows = {}
    for name, fields in {**STARTING_VALUES, "tool mix": None, "all of them": everything}.items():
        found = Counter()
        for domain, run in recorded:
            fields_here = dict(fields or {})
            if name in ("tool mix", "all of them"):
                # Against the others of its domain: with itself in it, it would look more usual.
                others = list(successful[domain])
                if run.success and tools(run) in others:
                    others.remove(tools(run))
                if others:
                    fields_here["tool_mix"] = ToolMix(baseline=ToolMixBaseline.of(others))
            budget = Budget(loop_detection=None, on_unpriced="count_zero", **fields_here)
            trip, told = judged(run, budget, prices)
            kind = "runaway" if run.runaway else "success" if run.success else "failure"
            found[kind, "stopped"] += trip is not None
            found["delayed"] += told[CallDelayed]
            found["turned away"] += told[ToolCallTurnedAway]
            found["opened"] += told[CircuitBreakerChanged]
            found[kind, "told"] += told[ToolMixUnusual]
        rows[name] = found
    return rows


def written(rows):
    lines = [
        "| breaker | successful runs stopped | other runs stopped | runaways stopped "
        "| calls delayed | calls turned away | tool mix told (successful, other, runaway) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in rows.items():
        told = ", ".join(str(found[kind, "told"]) for kind in ("success", "failure", "runaway"))
        lines.append(
            f"| {name} | {found['success', 'stopped']} of 441 "
            f"| {found['failure', 'stopped']} of 260 "
            f"| {found['runaway', 'stopped']} of 5 | {found['delayed']} | {found['turned away']} "
            f"| {told} |"
        )
    return "\n".join(lines)


@pytest.mark.benchmark
@pytest.mark.skipif(not TRAJECTORIES.is_dir(), reason="the recorded trajectories are not here")
def test_at_the_starting_values_no_successful_run_is_stopped():
    rows = table()
    print(written(rows))
    assert all(found["success", "stopped"] == 0 for found in rows.values())
    assert written(rows) in README.read_text(encoding="utf-8")


@pytest.mark.benchmark
def test_memory_of_the_pace_is_constant_at_a_million_events():
    meter = VelocityMeter(
        VelocityLimits(max_tokens_per_minute=10**12, max_tool_calls_per_minute=10**12)
    )

    def held():
        return [(len(window.ring), sys.getsizeof(window.ring)) for window in meter._windows]

    before = held()
    for number in range(500_000):
        now = number * 20_000_000
        meter.book(meter.start_of_model_call(now), 7)
        meter.book(meter.start_of_tool_call(now), tool_calls=1)
    assert held() == before
