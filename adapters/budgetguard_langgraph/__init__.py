"""BudgetGuard for LangGraph and LangChain: a callback, bounded graphs, a middleware."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import budgetguard_langgraph._ambient as _ambient  # installs the hook of `guard.activate()`
from budgetguard_langgraph._outcomes import outcome
from budgetguard_langgraph.bounded import bounded
from budgetguard_langgraph.callback import BudgetCallback
from budgetguard_langgraph.interrupts import BudgetInterrupt, BudgetStop
from budgetguard_langgraph.resume import aresume, resume

if TYPE_CHECKING:
    from budgetguard_langgraph.executor import bounded_executor
    from budgetguard_langgraph.middleware import BudgetMiddleware

__all__ = [
    "BudgetCallback",
    "BudgetInterrupt",
    "BudgetMiddleware",
    "BudgetStop",
    "aresume",
    "bounded",
    "bounded_executor",
    "outcome",
    "resume",
]

# What needs more than LangGraph, and what has to be installed for it.
_LAZY = {
    "BudgetMiddleware": ("budgetguard_langgraph.middleware", "langchain"),
    "bounded_executor": ("budgetguard_langgraph.executor", "langchain_classic"),
}

del _ambient


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, framework = _LAZY[name]
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != framework:
            raise
        raise ImportError(
            f"{name} needs {framework}, which is not installed. "
            'Install it with the extra `langchain`: pip install ".[langchain]"'
        ) from None
