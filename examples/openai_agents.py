"""OpenAI Agents SDK with a scripted model: a runaway that is stopped, and how it goes on."""

from __future__ import annotations

import asyncio

from agents import Agent, Runner, function_tool
from agents.memory import SQLiteSession
from agents.tracing import set_tracing_disabled

from budgetguard_core import Budget, Guard
from budgetguard_core.testing.scripted import Answers
from budgetguard_openai_agents import BudgetHooks, bounded_run, outcome, scripted

SEARCH = {"search": {"input": "France"}}
pages = iter(range(1, 1000))


@function_tool
def search() -> str:
    """Search the web."""
    return f"page {next(pages)} of many"


async def main() -> None:
    set_tracing_disabled(True)
    # Searches until it is asked not to; from then on it never stops.
    model = scripted.scripted_model(Answers([*[SEARCH] * 5, "Paris, I believe.", SEARCH]))
    agent = Agent(name="researcher", model=model, tools=[search])
    session = SQLiteSession("conversation")

    # The runner you have, with hooks: it returns a normal result.
    result = await Runner.run(
        agent,
        "What is the capital of France?",
        session=session,
        hooks=BudgetHooks(Budget(max_iterations=5, max_cost_usd=1)),
    )
    ended = outcome(result)
    print(f"{ended.status}: {ended.detail}, ${ended.usage.cost_usd}")
    print(result.final_output)

    # The same session goes on under a fresh budget.
    result = await bounded_run(
        agent, "Say it without searching.", budget=Budget(max_iterations=5), session=session
    )
    print(f"{outcome(result).status}: {result.final_output}")

    session.close()

    # Agents as tools spend the budget of the run that calls them.
    chief = Agent(
        name="chief",
        model=scripted.scripted_model(Answers([SEARCH])),
        tools=[agent.as_tool(tool_name="search", tool_description="Ask the researcher.")],
    )
    guard = Guard(Budget(max_model_calls=8))
    result = await bounded_run(chief, "Find out.", budget=guard)
    print(f"{outcome(result).stop_reason}: {guard.usage.model_calls} model calls in all")


asyncio.run(main())
