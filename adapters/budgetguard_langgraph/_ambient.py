"""The hook through which `guard.activate()` reaches code whose configuration is out of reach."""

from __future__ import annotations

from contextvars import ContextVar
from typing import cast

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook

from budgetguard_core import Guard
from budgetguard_langgraph._calls import Calls, keep
from budgetguard_langgraph.callback import BudgetCallback


class _AmbientCallback:
    """Looks to LangChain like a context variable with the callback of the active guard."""

    def get(self) -> BaseCallbackHandler | None:
        guard = Guard.active()
        return None if guard is None else callback_for(guard)


def callback_for(guard: Guard) -> BudgetCallback:
    """Return the one ambient callback of a guard; LangChain tells callbacks apart by identity."""
    calls = guard.attachment(Calls)
    with calls.lock:
        found = calls.handlers.get(guard.run_id)
        if found is None:
            found = BudgetCallback(guard)
            keep(calls.handlers, guard.run_id, found)
    return cast("BudgetCallback", found)


register_configure_hook(
    cast("ContextVar[BaseCallbackHandler | None]", _AmbientCallback()), inheritable=True
)
