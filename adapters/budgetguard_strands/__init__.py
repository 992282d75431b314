"""BudgetGuard for Strands Agents: a hook provider that ends a run gracefully."""

from budgetguard_strands.provider import DEFAULT_MAX_ITERATIONS, BudgetHookProvider

__all__ = ["DEFAULT_MAX_ITERATIONS", "BudgetHookProvider"]
