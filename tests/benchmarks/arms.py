"""How a cost is measured so that it can be believed: arms in turns, beside a null arm.

Each row has a reference and a subject. They run in short turns, one after the other, and so does
the reference a second time: the null arm, which can only differ by what the machine does. A ratio
is judged where the null arm's is within 3 % of 1. Time is this process's own (`process_time`), and
the bytecode instructions of each arm are counted beside it, which no other process changes.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from time import process_time_ns
from types import FrameType
from typing import Any, Literal, TypeAlias

STRAY = 0.03
"""How far the null arm may be from 1 for a ratio to be judged."""
_ROUNDS = 60
_TURN_NS = 3_000_000
_WARM = 150

Step: TypeAlias = Callable[[], object]
Arms: TypeAlias = tuple[Step, Step]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: What is measured.
        make: Makes the reference and the subject; what they hold open goes on the stack.
        most: The goal: the subject's share of the reference, or its microseconds beside it.
        unit: `times` the reference, or `us` more than it.
        steps: How many steps one call of an arm makes.
        counted: Its instructions are counted; those of other threads, and what is written in C,
            are not among them.
    """

    name: str
    make: Callable[[ExitStack], Arms]
    most: float | None = None
    unit: Literal["times", "us"] = "times"
    steps: int = 1
    counted: bool = True


@dataclass(frozen=True)
class Measured:
    """What came of a row; quartiles, in the row's unit, and the median of the null arm."""

    row: Row
    reference_us: float
    null: float
    quartiles: tuple[float, float, float]
    counted: float | None = None
    """The same from the instructions counted: a share of the reference's, or how many more."""

    @property
    def is_judged(self) -> bool:
        return abs(self.null - 1) <= STRAY

    @property
    def verdict(self) -> str:
        if self.row.most is None:
            return ""
        if not self.is_judged:
            return "not judged"
        return "holds" if self.quartiles[1] <= self.row.most else "FAILS"


def measure(row: Row, rounds: int = _ROUNDS) -> Measured:
    """Run the arms of a row in turns."""
    with ExitStack() as stack:
        reference, subject = row.make(stack)
        for step in (reference, subject):
            for _ in range(max(_WARM // row.steps, 2)):
                step()
        turns = [_turns(reference), _turns(subject), _turns(reference)]
        taken: list[list[float]] = []
        gc.collect()
        gc.disable()
        try:
            for number in range(rounds):
                # The null arm stands as often before the subject as after it.
                order = (0, 1, 2) if number % 2 else (2, 1, 0)
                times = [0.0, 0.0, 0.0]
                for arm in order:
                    step = subject if arm == 1 else reference
                    times[arm] = _time(step, turns[arm]) / row.steps
                taken.append(times)
        finally:
            gc.enable()
    if row.unit == "times":
        found = [2 * of / (one + other) for one, of, other in taken]
    else:
        found = [(of - (one + other) / 2) / 1000 for one, of, other in taken]
    low, middle, high = statistics.quantiles(found, n=4)
    return Measured(
        row,
        statistics.median(one for one, _, _ in taken) / 1000,
        statistics.median(other / one for one, _, other in taken),
        (low, middle, high),
    )


def _time(step: Step, turns: int) -> float:
    started = process_time_ns()
    for _ in range(turns):
        step()
    return (process_time_ns() - started) / turns


def _turns(step: Step) -> int:
    """Find how often a step has to run for a turn that the clock can measure."""
    return max(int(_TURN_NS / max(_time(step, 10), 1)), 1)


# Instructions


def instructions(row: Row, turns: int = 20) -> float:
    """Count the bytecode instructions of a row's arms: the same on every machine and in any noise.

    What is written in C counts as one, whatever it does: the times say what that is.
    """
    with ExitStack() as stack:
        counted: list[float] = []
        for step in row.make(stack):
            for _ in range(max(_WARM // row.steps, 2)):
                step()
            made = max(turns // row.steps, 1)
            counted.append(executed(step, made) / (made * row.steps))
    reference, subject = counted
    return subject / reference if row.unit == "times" else subject - reference


def executed(step: Step, turns: int) -> int:
    """Return the bytecode instructions of some turns: a count that no other process can change."""
    found = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal found
        if event == "call":
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        elif event == "opcode":
            found += 1
        return trace

    before = sys.gettrace()
    # Python 3.12 tells of instructions only where a frame had asked before the tracing began.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        for _ in range(turns):
            step()
    finally:
        sys.settrace(before)
    return found
