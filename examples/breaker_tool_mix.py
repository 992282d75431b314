"""A run whose tools are unlike those of recorded runs is told of, once, and goes on."""

from __future__ import annotations

from budgetguard_core import Budget
from budgetguard_core.breakers import ToolMix, ToolMixBaseline
from budgetguard_core.events import Event, ToolMixUnusual
from budgetguard_core.testing.scripted import Answers
from budgetguard_loop import run_bounded, scripted

# Recorded from the tools that 80 runs called: they search and read.
BASELINE = ToolMixBaseline.of(
    [{"search": 6, "read_file": 5}, {"search": 9, "read_file": 8}] * 40,
)


def tell(event: Event) -> None:
    if isinstance(event, ToolMixUnusual):
        print(f"told: {event.detail}")


def main() -> None:
    # A model that reads file after file and never searches.
    reads = [{"read_file": {"number": number}} for number in range(100)]
    outcome = run_bounded(
        scripted.scripted_model(Answers([*reads, "I have read everything."])),
        Budget(tool_mix=ToolMix(baseline=BASELINE), max_iterations=200),
        messages="What does the project do?",
        tools={"read_file": lambda number: f"file {number}"},
        sinks=[tell],
    )
    print(f"{outcome.status}: {outcome.usage.tool_calls} files read")


if __name__ == "__main__":
    main()
