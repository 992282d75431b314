"""The Agents SDK's adapter as its README writes it: checked by mypy and pyright, never run."""

from __future__ import annotations

from typing import Any

from agents import Agent, RunHooks, Runner, RunResult, RunResultStreaming, function_tool

from budgetguard_core import Budget, Guard, Outcome, Price, PriceBook, SqliteStore
from budgetguard_core.kit import Envelope
from budgetguard_openai_agents import (
    BudgetHooks,
    bounded_run,
    bounded_run_streamed,
    bounded_run_sync,
    outcome,
)


@function_tool
def search(query: str) -> str:
    """Search the web."""
    return f"Nothing about {query}."


class MyHooks(RunHooks[Any]):
    """A user's own."""


class Own(BudgetHooks):
    """The budget's, with something of a user's."""


agent: Agent[Any] = Agent(name="researcher", model="gpt-4o", tools=[search])
prices = PriceBook({"gpt-4o": Price(input=2.50, output=10)})
guard = Guard(Budget(max_model_calls=2), price_book=prices)
hooks = BudgetHooks(Budget(max_iterations=2, max_cost_usd=0.50), inner=MyHooks())
tool = agent.as_tool(None, None, hooks=BudgetHooks(Budget(max_iterations=3)))
sync: RunResult = bounded_run_sync(agent, "What is new?", budget=Envelope(budget=Budget()))


async def main() -> Outcome:
    result: RunResult = await Runner.run(agent, "What is new?", hooks=hooks)
    first: Outcome = outcome(result)
    result = await bounded_run(agent, "Go.", budget=guard, store=SqliteStore("runs.db"))
    result = await bounded_run(agent, [], budget=Budget(), store=SqliteStore("r"), resume="r")
    streamed: RunResultStreaming = bounded_run_streamed(agent, "Go.", budget=Own(Budget()).envelope)
    async for event in streamed.stream_events():
        if event.type == "run_item_stream_event":
            print(event.name, guard.usage.cost_usd)
    return first if result.final_output else outcome(streamed)


BudgetHooks(Budget(), on_trip="never")  # type: ignore[arg-type]
