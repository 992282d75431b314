"""A planner that never calls the same thing twice, and gets nowhere, is corrected and stopped."""

from __future__ import annotations

from budgetguard_core import Budget
from budgetguard_core.breakers import ProgressReports
from budgetguard_core.kit import PROGRESS_TOOL
from budgetguard_core.testing.scripted import Answers
from budgetguard_loop import run_bounded, scripted

# A real model is sent `PROGRESS_TOOL` (name, description, parameters) among its tools, whose body
# `run_bounded` has. This planner is full of ideas, and names one next step whenever it is asked.
REPORT = {
    "claims_so_far": ["looked at three more places"],
    "next_subgoal": "Find the cause.",
    "estimated_remaining_steps": 5,
}
ASKED_AT = {4, 7, 10, 14}  # every third iteration; the correction at 11 begins the count anew
ANSWERS = [
    {PROGRESS_TOOL.name: REPORT} if turn in ASKED_AT else {"search": {"query": f"idea {turn}"}}
    for turn in range(1, 101)
]


def main() -> None:
    outcome = run_bounded(
        scripted.scripted_model(Answers(ANSWERS)),
        Budget(progress=ProgressReports(every_iterations=3), max_iterations=100),
        messages="Why is it slow?",
        tools={"search": lambda query: f"nothing about {query}"},
    )
    print(f"{outcome.status}: {outcome.detail}")
    print(f"after {outcome.usage.iterations} iterations and {outcome.usage.tool_calls} searches")


if __name__ == "__main__":
    main()
