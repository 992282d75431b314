"""The command `budgetguard`: run a script under a budget, look at runs, and operate a ledger."""
