"""A deterministic bound for agent loops: budgets, the guard that enforces them, and its records.

What adapters are made of is in `budgetguard_core.kit`, what tests are made of in
`budgetguard_core.testing`.
"""

from budgetguard_core.budget import Budget
from budgetguard_core.errors import (
    AdapterError,
    BudgetGuardError,
    ConfigurationError,
    RunFencedError,
)
from budgetguard_core.event_log import read_events
from budgetguard_core.guard import Guard, Mode, WarningEvent
from budgetguard_core.loop_detection import LoopDetection
from budgetguard_core.outcome import BudgetExceeded, Outcome
from budgetguard_core.pricing import Price, PriceBook
from budgetguard_core.replay import replay
from budgetguard_core.reserve import FinalizeReserve
from budgetguard_core.sinks import JsonLinesSink, LoggingSink
from budgetguard_core.snapshot import Snapshot
from budgetguard_core.sqlite_checkpoints import MemoryStore, SqliteStore
from budgetguard_core.stop import StopReason, Trip, after_iterations, tool_called
from budgetguard_core.usage import Usage

__all__ = [
    "AdapterError",
    "Budget",
    "BudgetExceeded",
    "BudgetGuardError",
    "ConfigurationError",
    "FinalizeReserve",
    "Guard",
    "JsonLinesSink",
    "LoggingSink",
    "LoopDetection",
    "MemoryStore",
    "Mode",
    "Outcome",
    "Price",
    "PriceBook",
    "RunFencedError",
    "Snapshot",
    "SqliteStore",
    "StopReason",
    "Trip",
    "Usage",
    "WarningEvent",
    "after_iterations",
    "read_events",
    "replay",
    "tool_called",
]
