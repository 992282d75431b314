"""Breakers on recorded runs of our own making, and what the README says of those of others.

The runs of others are not part of this repository: `tests/benchmarks/test_breakers.py` has them.
"""

from __future__ import annotations

import json

import pytest

from budgetguard_core import Budget, PriceBook
from budgetguard_core.breakers import ToolMix, ToolMixBaseline
from budgetguard_core.events import ToolMixUnusual
from recorded_runs import STARTING_VALUES, judged, tools
from trajectories import Trajectory


def turn(number, *names, error=False, result=None):
    """A model call that asks for tool calls, and their results."""
    calls = [
        {"name": name, "args": {"number": number, "place": place}, "id": f"c{number}.{place}"}
        for place, name in enumerate(names)
    ]
    usage = {"input": 2000 + 150 * number, "output": 60}
    said = {"role": "assistant", "tool_calls": calls, "content_len": 12, "usage": usage}
    done = [
        {
            "role": "tool",
            "name": call["name"],
            "id": call["id"],
            "result_hash": result or call["id"],
            "result_len": 300,
            "error": error,
        }
        for call in calls
    ]
    return [said, *done]


def recorded(turns, **fields):
    steps = [{"role": "user", "content_len": 40}, *(step for one in turns for step in one)]
    run = {"run_id": "r", "model": "gpt-4o", "success": True, "termination": "done", **fields}
    return Trajectory.model_validate_json(json.dumps({**run, "steps": steps}))


SUCCESSFUL = {
    "forty reads": recorded(turn(n, "read_file") for n in range(40)),
    "edit and test": recorded(
        turn(n, ("edit_file", "run_tests")[n % 2], error=n % 6 == 1) for n in range(40)
    ),
    "batches of eight": recorded(
        turn(n, *["search"] * (8 if n % 5 == 0 else 1)) for n in range(25)
    ),
    "a tool that fails now and then": recorded(
        turn(n, "fetch", error=n % 4 == 0) for n in range(40)
    ),
    "few calls": recorded([turn(0, "search"), turn(1, "book"), turn(2)]),
    "none": recorded([turn(0)]),
}
RUNAWAYS = {
    "velocity": recorded((turn(n, *["search"] * 3) for n in range(120)), success=False),
    "circuit_open": recorded((turn(n, "fetch", error=True) for n in range(120)), success=False),
}


@pytest.mark.parametrize("breaker", [*STARTING_VALUES, "tool mix", "all of them"])
def test_no_successful_run_is_stopped_at_the_starting_values(breaker):
    fields = dict(STARTING_VALUES.get(breaker, {}))
    if breaker == "all of them":
        for one in STARTING_VALUES.values():
            fields |= one
    prices = PriceBook()
    for name, run in SUCCESSFUL.items():
        others = [tools(other) for other in SUCCESSFUL.values() if other is not run]
        if breaker in ("tool mix", "all of them"):
            fields["tool_mix"] = ToolMix(
                baseline=ToolMixBaseline.of([dict(mix) for mix in others if mix])
            )
        budget = Budget(loop_detection=None, **fields)
        trip, _ = judged(run, budget, prices)
        assert trip is None, name


@pytest.mark.parametrize(
    ("reason", "breaker"), [("velocity", "velocity"), ("circuit_open", "circuit breaker")]
)
def test_a_runaway_of_new_calls_is_stopped(reason, breaker):
    budget = Budget(loop_detection=None, **STARTING_VALUES[breaker])
    trip, _ = judged(RUNAWAYS[reason], budget, PriceBook())
    assert trip is not None
    assert trip.reason == reason


def test_a_mix_of_reads_alone_is_told_and_stops_nothing():
    mixes = [{"search": 6, "read_file": 5}, {"search": 9, "read_file": 8}] * 40
    budget = Budget(loop_detection=None, tool_mix=ToolMix(baseline=ToolMixBaseline.of(mixes)))
    trip, told = judged(SUCCESSFUL["forty reads"], budget, PriceBook())
    assert (trip, told[ToolMixUnusual]) == (None, 1)
