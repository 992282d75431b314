"""A planner that never calls the same thing twice, and gets nowhere, is corrected and stopped."""

from __future__ import annotations

import json
from typing import Any

from budgetguard_core import Budget
from budgetguard_core.breakers import ProgressReports
from budgetguard_core.kit import PROGRESS_TOOL
from budgetguard_loop import run_bounded

# What a step sends to its provider as its tools; `run_bounded` has the body of the second.
TOOLS = [
    {"name": "search", "parameters": {"query": "string"}},
    {
        "name": PROGRESS_TOOL.name,
        "description": PROGRESS_TOOL.description,
        "parameters": PROGRESS_TOOL.parameters,
    },
]


def model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Stand in for a model that plans and plans: `create(messages=messages, tools=TOOLS)`."""
    name, arguments = "search", {"query": f"idea {len(messages)}"}
    if PROGRESS_TOOL.name in messages[-1]["content"]:
        name = PROGRESS_TOOL.name
        arguments = {
            "claims_so_far": [f"looked at {len(messages)} places"],
            "next_subgoal": "Find the cause.",
            "estimated_remaining_steps": 5,
        }
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"call_{len(messages)}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def main() -> None:
    outcome = run_bounded(
        model,
        Budget(progress=ProgressReports(every_iterations=3), max_iterations=100),
        messages="Why is it slow?",
        tools={"search": lambda query: f"nothing about {query}"},
    )
    print(f"{outcome.status}: {outcome.detail}")
    print(f"after {outcome.usage.iterations} iterations and {outcome.usage.tool_calls} searches")


if __name__ == "__main__":
    main()
