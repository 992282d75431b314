"""The Pydantic AI adapter as users annotate it: type-checked by mypy and pyright, never run."""

from __future__ import annotations

from pydantic_ai import Agent

from budgetguard_core import Budget, Guard, Outcome, SqliteStore
from budgetguard_core.kit import Envelope
from budgetguard_pydantic_ai import BudgetCapability, outcome

capability = BudgetCapability(Budget(max_iterations=25), store=SqliteStore("runs.db"))
agent = Agent("test", output_type=int, capabilities=[capability])
result = agent.run_sync("Go.")
number: int = result.output
ended: Outcome | None = outcome(result)
shared = BudgetCapability(Guard(Budget()), on_trip="raise")
whole = BudgetCapability(Envelope(budget=Budget(max_iterations=3)))

try:
    agent.run_sync("Go.", capabilities=[shared])
except ValueError as error:
    failed: Outcome | None = outcome(error)

BudgetCapability(Budget(), on_trip="never")  # type: ignore[arg-type]
