"""The engine of BudgetGuard: a deterministic bound for agent loops."""
