"""BudgetGuard for Strands Agents: a hook provider that ends a run gracefully."""

from typing import Any, Final

from budgetguard_core import StopReason
from budgetguard_core.kit import required

with required("Strands Agents", module="strands", extra="strands"):
    from budgetguard_strands._agents import install
    from budgetguard_strands.provider import BudgetHookProvider, outcome

# Strands' own type of a stop reason names its own only, and a comparison with another string
# would be an error to a strict type checker.
MAX_ITERATIONS: Final[Any] = str(StopReason.MAX_ITERATIONS)
"""The `AgentResult.stop_reason` of a run that `max_iterations` ended: `"max_iterations"`."""

install()

__all__ = ["MAX_ITERATIONS", "BudgetHookProvider", "install", "outcome"]
