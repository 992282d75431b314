"""BudgetGuard for plain Python loops: the reference adapter."""
