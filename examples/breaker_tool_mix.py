"""A run whose tools are unlike those of recorded runs is told of, once, and goes on."""

from __future__ import annotations

from typing import Any

from budgetguard_core import Budget
from budgetguard_core.breakers import ToolMix, ToolMixBaseline
from budgetguard_core.events import Event, ToolMixUnusual
from budgetguard_loop import run_bounded

# `budgetguard baseline LOG...` records one; here are 80 runs that search and read.
BASELINE = ToolMixBaseline.of(
    [{"search": 6, "read_file": 5}, {"search": 9, "read_file": 8}] * 40,
)


def model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Stand in for a model that reads file after file and never searches."""
    if len(messages) > 200:
        return {"role": "assistant", "content": "I have read everything."}
    function = {"name": "read_file", "arguments": f'{{"number": {len(messages)}}}'}
    call = {"id": f"call_{len(messages)}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tell(event: Event) -> None:
    if isinstance(event, ToolMixUnusual):
        print(f"told: {event.detail}")


def main() -> None:
    outcome = run_bounded(
        model,
        Budget(tool_mix=ToolMix(baseline=BASELINE), max_iterations=200),
        messages="What does the project do?",
        tools={"read_file": lambda number: f"file {number}"},
        sinks=[tell],
    )
    print(f"{outcome.status}: {outcome.usage.tool_calls} files read")


if __name__ == "__main__":
    main()
