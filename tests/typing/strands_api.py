"""The Strands adapter as users annotate it: type-checked by mypy and pyright, never run."""

from __future__ import annotations

from strands import Agent

from budgetguard_core import Budget, Guard, Outcome, SqliteStore
from budgetguard_core.kit import Envelope
from budgetguard_strands import MAX_ITERATIONS, BudgetHookProvider

provider = BudgetHookProvider(Budget(max_iterations=25), store=SqliteStore("runs.db"))
plugged = Agent(plugins=[provider])
agent: Agent = provider.attach(Agent(hooks=[provider]))
result = agent("Go.")
stopped: bool = result.stop_reason == MAX_ITERATIONS
outcome: Outcome | None = provider.outcome(agent)
shared = BudgetHookProvider(Guard(Budget()), on_trip="raise")
whole = BudgetHookProvider(Envelope(budget=Budget(max_iterations=3)))

BudgetHookProvider(Budget(), on_trip="never")  # type: ignore[arg-type]
