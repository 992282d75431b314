"""BudgetGuard for the OpenAI Agents SDK: hooks, and runs that end as a normal partial result."""

from budgetguard_openai_agents._meter import RunStopped
from budgetguard_openai_agents.hooks import BudgetHooks
from budgetguard_openai_agents.runner import (
    bounded_run,
    bounded_run_streamed,
    bounded_run_sync,
    outcome,
    unsent_input,
)

__all__ = [
    "BudgetHooks",
    "RunStopped",
    "bounded_run",
    "bounded_run_streamed",
    "bounded_run_sync",
    "outcome",
    "unsent_input",
]
