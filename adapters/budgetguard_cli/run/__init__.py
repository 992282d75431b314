"""`budgetguard run`: a script, unchanged, in a tree of processes with one budget."""
