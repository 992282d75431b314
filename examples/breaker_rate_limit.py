"""A tool that is called too often waits for its turn, or is told when to try again."""

from __future__ import annotations

from typing import Any

from budgetguard_core import Budget
from budgetguard_core.breakers import RateLimit
from budgetguard_loop import run_bounded


def model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Stand in for a model that asks for five searches at once."""
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": "That is what I could find."}
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "search", "arguments": f'{{"query": "part {number}"}}'},
        }
        for number in range(5)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def search(query: str) -> str:
    print(f"  searching for {query}")
    return f"something about {query}"


def main() -> None:
    # Two at once, then ten a second; who would wait longer than a tenth of a second is refused.
    limit = RateLimit(rate=10, burst=2, max_wait_duration=0.1)
    outcome = run_bounded(
        model,
        Budget(rate_limits={"sea*": limit}, max_iterations=25),
        messages="Look everything up.",
        tools={"search": search},
    )
    print(f"  the last result: {outcome.messages[-2]['content']}")
    print(f"{outcome.status}: {outcome.usage.tool_calls} of 5 searches")


if __name__ == "__main__":
    main()
