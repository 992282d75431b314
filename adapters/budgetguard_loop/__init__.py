"""BudgetGuard for plain Python loops: the reference adapter.

`run_bounded` (also `run_bounded_async`, `run_bounded_stream`) is the loop itself; `bounded` is for
a loop of your own around any SDK; `guarded` is for single functions.
"""

from budgetguard_loop._ambient import current_call, current_guard
from budgetguard_loop._history import SyntheticMessage
from budgetguard_loop._reply import ModelReply
from budgetguard_loop._usage import extract_usage
from budgetguard_loop.decorator import ToolRefused, guarded
from budgetguard_loop.explicit import AdmittedModelCall, AdmittedToolCall, bounded
from budgetguard_loop.run import (
    BoundedStream,
    run_bounded,
    run_bounded_async,
    run_bounded_stream,
)

__all__ = [
    "AdmittedModelCall",
    "AdmittedToolCall",
    "BoundedStream",
    "ModelReply",
    "SyntheticMessage",
    "ToolRefused",
    "bounded",
    "current_call",
    "current_guard",
    "extract_usage",
    "guarded",
    "run_bounded",
    "run_bounded_async",
    "run_bounded_stream",
]
