"""BudgetGuard for Pydantic AI: a capability that ends a run gracefully."""

from budgetguard_core.kit import required

with required("Pydantic AI", module="pydantic_ai", extra="pydantic-ai"):
    from budgetguard_pydantic_ai.capability import BudgetCapability, install, outcome

# Importing is enough for `guard.activate()`; without a budget in force nothing changes.
install()

__all__ = ["BudgetCapability", "outcome"]
