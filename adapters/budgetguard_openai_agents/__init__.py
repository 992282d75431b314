"""BudgetGuard for the OpenAI Agents SDK: hooks, and runs that end as a normal partial result."""

from budgetguard_core.kit import required

with required("The OpenAI Agents SDK", module="agents", extra="openai-agents"):
    from budgetguard_openai_agents._frame import RunStopped
    from budgetguard_openai_agents._runner import install, uninstall
    from budgetguard_openai_agents.runner import (
        BudgetHooks,
        bounded_run,
        bounded_run_streamed,
        bounded_run_sync,
        outcome,
        pending_input,
    )

# Importing is enough for `guard.activate()`; without a budget in force nothing changes.
install()

__all__ = [
    "BudgetHooks",
    "RunStopped",
    "bounded_run",
    "bounded_run_streamed",
    "bounded_run_sync",
    "install",
    "outcome",
    "pending_input",
    "uninstall",
]
