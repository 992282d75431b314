"""BudgetGuard for LangGraph and LangChain: a callback, bounded graphs, a middleware."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from budgetguard_core.kit import required

with required("LangGraph", module="langgraph", extra="langgraph"):
    import langgraph.errors as _first  # where it is missing, LangChain's core is often missing too

    import budgetguard_langgraph._ambient as _ambient  # installs the hook of the run around
    from budgetguard_langgraph._endings import outcome
    from budgetguard_langgraph.bounded import bounded
    from budgetguard_langgraph.callback import BudgetCallback
    from budgetguard_langgraph.interrupts import BudgetInterrupt, BudgetStop
    from budgetguard_langgraph.progress import report_progress
    from budgetguard_langgraph.resume import aresume, aresume_stream, resume, resume_stream

if TYPE_CHECKING:
    from budgetguard_langgraph.bounded_executor import bounded_executor
    from budgetguard_langgraph.middleware import BudgetMiddleware

__all__ = [
    "BudgetCallback",
    "BudgetInterrupt",
    "BudgetMiddleware",
    "BudgetStop",
    "aresume",
    "aresume_stream",
    "bounded",
    "bounded_executor",
    "outcome",
    "report_progress",
    "resume",
    "resume_stream",
]

# What needs more than LangGraph: what has to be installed for it, and the file that has it. The
# second is named as what it has: where its framework is missing, `from ... import` looks for a
# module of that name, whose error names the command that installs it.
_LAZY = {
    "BudgetMiddleware": ("LangChain", "langchain", "middleware"),
    "bounded_executor": ("langchain-classic", "langchain_classic", "bounded_executor"),
}

del _ambient, _first

for _name, (_, _module, _) in _LAZY.items():
    if find_spec(_module) is None:
        __all__.remove(_name)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    framework, module, file = _LAZY[name]
    try:
        with required(framework, module=module, extra="langchain"):
            found = getattr(import_module(f"{__name__}.{file}"), name)
    except ModuleNotFoundError as error:
        # So that `hasattr` says no.
        raise AttributeError(str(error), name=name) from error
    globals()[name] = found  # an import puts the module there
    return found
