"""`budgetguard doctor`: what would hold here, before a script is started."""
