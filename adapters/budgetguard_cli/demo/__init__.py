"""`budgetguard demo`: a real runaway in each adapter that is installed, and its end."""
