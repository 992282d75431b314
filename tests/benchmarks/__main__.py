"""The table of what everything costs: `.venv/bin/python tests/benchmarks`.

Without words the benchmarks that need a server or a framework, and those of memory and import,
follow.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

# Started as a folder, Python knows this folder and not the one that the modules are named from.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.arms import Measured, Row, instructions, measure
from benchmarks.steps import ROWS

HERE = Path(__file__).parent
# In a process of their own: pytest has to be first to import what it measures.
TESTS = (sys.executable, "-I", "-m", "pytest", "-q", "-s", "-m", "benchmark", str(HERE))
"""The benchmarks that follow the table."""


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


def rows_of(words: Sequence[str]) -> list[Row]:
    """Choose the rows that have one of the words in their names; all of them without words.

    Raises:
        ValueError: No row has the word.
    """
    for word in words:
        if not any(word in row.name for row in ROWS):
            names = "\n".join(f"  {row.name}" for row in ROWS)
            raise ValueError(f"no row has {word!r} in its name. The rows are:\n{names}")
    return [row for row in ROWS if not words or any(word in row.name for word in words)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python tests/benchmarks",
        description="Print what everything costs, each row beside a null arm.",
        epilog="Without words the other benchmarks follow: frameworks, servers, memory, import.",
    )
    parser.add_argument("words", nargs="*", help="names of rows, or parts of them")
    parser.add_argument("--counts", action="store_true", help="count instructions, leave out times")
    given = parser.parse_args(arguments)
    try:
        rows = rows_of(given.words)
    except ValueError as unknown:
        parser.error(str(unknown))
    if given.counts:
        for row in rows:
            if row.counted:
                print(f"{row.name}: {instructions(row):.2f}", flush=True)
        return 0
    print("| what | reference, us | null arm | cost (quartiles) | instructions | goal | verdict |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        counted = instructions(row) if row.counted else None
        print(written(replace(measure(row), counted=counted)), flush=True)
    if given.words:
        return 0
    return subprocess.run(TESTS, cwd=HERE.parents[1], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
