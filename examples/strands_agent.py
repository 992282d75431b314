"""A Strands agent that is stopped and goes on under a fresh budget; and a runaway, streamed."""

from __future__ import annotations

import asyncio

from strands import Agent, tool

from budgetguard_core import Budget
from budgetguard_core.testing.scripted import Answers
from budgetguard_strands import BudgetHookProvider, scripted

PAGES = ["page 1 of 4", "page 2 of 4", "page 3 of 4", "page 4 of 4"]
READS = [{"read_page": {"number": number}} for number in range(1, len(PAGES) + 1)]


@tool
def read_page(number: int) -> str:
    """Read one page of the report."""
    print(f"  reading page {number}")
    return PAGES[number - 1]


async def stream(agent: Agent) -> None:
    """Every way in is bounded alike; a stream also carries the warnings."""
    async for event in agent.stream_async("And once more, from the beginning."):
        if "budgetguard_warning" in event:
            warning = event["budgetguard_warning"]
            print(f"  warning: {warning['used']} of {warning['limit']} {warning['dimension']}")
        elif "result" in event:
            print(f"  {event['result'].stop_reason}")


def main() -> None:
    print("Under a budget that is too small:")
    provider = BudgetHookProvider(Budget(max_iterations=2, max_cost_usd=0.10))
    agent = Agent(
        model=scripted.scripted_model(Answers([*READS, "The report has four pages."])),
        tools=[read_page],
        hooks=[provider],
        callback_handler=None,
    )
    result = agent("How many pages has the report?")
    print(f"  {result.stop_reason}: {result}".rstrip())

    print("Going on under a fresh one:")
    result = agent(None, invocation_state={"budgetguard": Budget(max_iterations=10)})
    print(f"  {result.stop_reason}: {result}".rstrip())
    outcome = provider.outcome(agent)
    if outcome is not None:
        both = outcome.earlier_usage + outcome.usage
        print(f"  {both.model_calls} model calls in all, {both.cost_usd} US dollars")

    print("A model that never stops, streamed:")
    runaway = Agent(
        model=scripted.scripted_model(Answers(READS)),
        tools=[read_page],
        hooks=[BudgetHookProvider(Budget(max_iterations=4))],
        callback_handler=None,
    )
    asyncio.run(stream(runaway))


if __name__ == "__main__":
    main()
