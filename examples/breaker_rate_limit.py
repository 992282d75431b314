"""A tool that is called too often waits for its turn, or is told when to try again."""

from __future__ import annotations

from budgetguard_core import Budget
from budgetguard_core.breakers import RateLimit
from budgetguard_core.testing.scripted import Answers
from budgetguard_loop import run_bounded, scripted


def search(query: str) -> str:
    print(f"  searching for {query}")
    return f"something about {query}"


def main() -> None:
    # Two at once, then ten a second; who would wait longer than a tenth of a second is refused.
    limit = RateLimit(rate=10, burst=2, max_wait_duration=0.1)
    searches = [("search", {"query": f"part {number}"}) for number in range(5)]
    answers = Answers([searches, "That is what I could find."])
    outcome = run_bounded(
        scripted.scripted_model(answers),
        Budget(rate_limits={"sea*": limit}, max_iterations=25),
        messages="Look everything up.",
        tools={"search": search},
    )
    print(f"  the last result: {outcome.messages[-2]['content']}")
    print(f"{outcome.status}: {outcome.usage.tool_calls} of 5 searches")


if __name__ == "__main__":
    main()
