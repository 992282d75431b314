"""BudgetGuard for LangGraph and LangChain: a callback, bounded graphs, a middleware."""

from __future__ import annotations

from budgetguard_langgraph._ambient import callback_for as _callback_for
from budgetguard_langgraph._outcomes import outcome
from budgetguard_langgraph.bounded import bounded
from budgetguard_langgraph.callback import BudgetCallback
from budgetguard_langgraph.interrupts import BudgetInterrupt, BudgetStop
from budgetguard_langgraph.resume import aresume, resume

__all__ = [
    "BudgetCallback",
    "BudgetInterrupt",
    "BudgetStop",
    "aresume",
    "bounded",
    "outcome",
    "resume",
]

del _callback_for
