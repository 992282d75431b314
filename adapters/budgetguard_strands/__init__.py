"""BudgetGuard for Strands Agents: a hook provider that ends a run gracefully."""

from budgetguard_strands.provider import BudgetHookProvider

__all__ = ["BudgetHookProvider"]
