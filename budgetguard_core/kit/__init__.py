"""What an adapter stands on: everything that it needs beside the names of `budgetguard_core`.

An adapter takes an `Envelope` as its budget, opens a `Run` on it, and tells the run what its
framework does. Which budgets apply, what is counted, what a failed call costs, how long it may take
and how the run ends is decided here, once for all adapters.
"""

from budgetguard_core.kit.ambient import Frame, current, current_call, current_guard, entered
from budgetguard_core.kit.calls import Batch, OpenModelCall, OpenToolCall
from budgetguard_core.kit.checkpoints import load_to_resume
from budgetguard_core.kit.delay import wait, wait_async
from budgetguard_core.kit.envelope import (
    Envelope,
    EnvelopeOptions,
    OnTrip,
    envelope_of,
    joined,
)
from budgetguard_core.kit.failed_calls import failed_usage, turned_away
from budgetguard_core.kit.outcomes import outcome_of, remember
from budgetguard_core.kit.projection import Prompt, estimate, project
from budgetguard_core.kit.require import required
from budgetguard_core.kit.run import Run
from budgetguard_core.kit.stops import is_stop
from budgetguard_core.kit.usage import (
    answered_usage,
    merge_usage,
    reported_cost,
    token_usage,
)
from budgetguard_core.kit.watch import Watch, cut_short, supervised

__all__ = [
    "Batch",
    "Envelope",
    "EnvelopeOptions",
    "Frame",
    "OnTrip",
    "OpenModelCall",
    "OpenToolCall",
    "Prompt",
    "Run",
    "Watch",
    "answered_usage",
    "current",
    "current_call",
    "current_guard",
    "cut_short",
    "entered",
    "envelope_of",
    "estimate",
    "failed_usage",
    "is_stop",
    "joined",
    "load_to_resume",
    "merge_usage",
    "outcome_of",
    "project",
    "remember",
    "reported_cost",
    "required",
    "supervised",
    "token_usage",
    "turned_away",
    "wait",
    "wait_async",
]
