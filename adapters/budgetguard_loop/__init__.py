"""BudgetGuard for plain Python loops: the reference adapter.

`run_bounded` (also `run_bounded_async`, `run_bounded_stream`) is the loop itself; `bounded` is for
a loop of your own around any SDK; `guarded` is for single functions.
"""

from budgetguard_core.kit import current_call, current_guard, outcome, report_progress, token_usage
from budgetguard_loop._calls import AdmittedModelCall, AdmittedToolCall, ToolCalls, ToolRefused
from budgetguard_loop._history import SyntheticMessage
from budgetguard_loop._reply import ModelReply
from budgetguard_loop.decorator import guarded
from budgetguard_loop.explicit import bounded
from budgetguard_loop.run import BoundedStream, run_bounded, run_bounded_async, run_bounded_stream

__all__ = [
    "AdmittedModelCall",
    "AdmittedToolCall",
    "BoundedStream",
    "ModelReply",
    "SyntheticMessage",
    "ToolCalls",
    "ToolRefused",
    "bounded",
    "current_call",
    "current_guard",
    "guarded",
    "outcome",
    "report_progress",
    "run_bounded",
    "run_bounded_async",
    "run_bounded_stream",
    "token_usage",
]
