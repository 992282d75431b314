"""An agent of Pydantic AI that is stopped and goes on under a fresh budget; and typed output."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic_ai import Agent

from budgetguard_core import Budget, FinalizeReserve
from budgetguard_core.testing.scripted import Answers
from budgetguard_pydantic_ai import BudgetCapability, outcome, scripted

PAGES = ["page 1 of 4", "page 2 of 4", "page 3 of 4", "page 4 of 4"]
READS = [{"read_page": {"number": number}} for number in range(1, len(PAGES) + 1)]


class Report(BaseModel):
    """What the agent is to return."""

    pages: int


def read_page(number: int) -> str:
    """Read one page of the report."""
    print(f"  reading page {number}")
    return PAGES[number - 1]


def main() -> None:
    print("Under a budget that is too small:")
    agent = Agent(
        scripted.scripted_model(Answers([*READS, "The report has four pages."])), tools=[read_page]
    )
    small = BudgetCapability(Budget(max_iterations=2, max_cost_usd=0.10))
    result = agent.run_sync("How many pages has the report?", capabilities=[small])
    stopped = outcome(result)
    if stopped is not None:
        print(f"  {stopped.stop_reason}: {result.output}")

    print("Going on under a fresh one:")
    larger = BudgetCapability(Budget(max_iterations=10))
    history = result.all_messages()
    result = agent.run_sync(message_history=history, capabilities=[larger])
    ended = outcome(result)
    if ended is not None:
        print(f"  {ended.status}: {result.output}")
        print(f"  {ended.usage.model_calls} more model calls")

    print("Typed output, with a last answer from what is kept back for it:")
    reserve = FinalizeReserve(tokens=2_000)
    answers = Answers([*READS[:2], {"final_result": {"pages": 4}}])
    typed = Agent(
        scripted.scripted_model(answers),
        tools=[read_page],
        output_type=Report,
        capabilities=[BudgetCapability(Budget(max_iterations=2, finalize_reserve=reserve))],
    )
    report = typed.run_sync("How many pages has the report?")
    ended = outcome(report)
    if ended is not None:
        print(f"  {ended.stop_reason}: {report.output!r}")


if __name__ == "__main__":
    main()
