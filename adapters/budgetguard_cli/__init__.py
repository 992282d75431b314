"""The command `budgetguard`: a demonstration, and replay of recorded runs."""
