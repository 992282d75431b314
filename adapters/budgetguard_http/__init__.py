"""BudgetGuard for raw provider clients: one seam at HTTP, below every SDK.

`BudgetTransport` and `AsyncBudgetTransport` bound one client; `bounded_clients` bounds all of them
in a block; `install` puts the same seam below every other adapter and `guard.activate()`.
"""

from importlib.util import find_spec

from budgetguard_core.kit import PROGRESS_TOOL, current_guard, outcome, report_progress, required
from budgetguard_http._policy import is_provider
from budgetguard_http._refusal import CallRefused
from budgetguard_http.ambient import bounded_clients, install, is_installed, uninstall
from budgetguard_http.audit import uncovered_hosts
from budgetguard_http.bedrock import BedrockHooks
from budgetguard_http.transport import AsyncBudgetTransport, BudgetTransport

with required("httpx or httpx2", module="httpx", extra="http"):
    if find_spec("httpx") is None and find_spec("httpx2") is None:
        raise ModuleNotFoundError(name="httpx")

__all__ = [
    "PROGRESS_TOOL",
    "AsyncBudgetTransport",
    "BedrockHooks",
    "BudgetTransport",
    "CallRefused",
    "bounded_clients",
    "current_guard",
    "install",
    "is_installed",
    "is_provider",
    "outcome",
    "report_progress",
    "uncovered_hosts",
    "uninstall",
]
