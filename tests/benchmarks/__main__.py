"""The table of what everything costs: `.venv/bin/python tests/benchmarks`.

Names of rows, or parts of them, choose among them. `--counts` leaves out the times. Without names
the benchmarks that need a server or a framework, and those of memory and import, follow.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

# Started as a folder, Python knows this folder and not the one that the modules are named from.
sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest

from benchmarks.arms import Measured, instructions, measure
from benchmarks.steps import ROWS


def written(one: Measured) -> str:
    """Write a row of the table."""
    row = one.row
    unit = "" if row.unit == "times" else " us"
    low, middle, high = one.quartiles
    counted = "" if one.counted is None else f"{one.counted:.2f}"
    goal = "" if row.most is None else f"{row.most:g}{unit}"
    return (
        f"| {row.name} | {one.reference_us:.2f} | {one.null:.3f} "
        f"| {middle:.2f}{unit} ({low:.2f} to {high:.2f}) | {counted} | {goal} | {one.verdict} |"
    )


def main(arguments: list[str]) -> None:
    wanted = [word for word in arguments if not word.startswith("--")]
    rows = [row for row in ROWS if not wanted or any(word in row.name for word in wanted)]
    if "--counts" in arguments:
        for row in rows:
            if row.counted:
                print(f"{row.name}: {instructions(row):.2f}", flush=True)
        return
    print("| what | reference, us | null arm | cost (quartiles) | instructions | goal | verdict |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        counted = instructions(row) if row.counted else None
        print(written(replace(measure(row), counted=counted)), flush=True)
    if not wanted:
        raise SystemExit(pytest.main(["-q", "-s", "-m", "benchmark", str(Path(__file__).parent)]))


if __name__ == "__main__":
    main(sys.argv[1:])
