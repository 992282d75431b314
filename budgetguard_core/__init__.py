"""A deterministic bound for agent loops: budgets, the guard that enforces them, and its records."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from budgetguard_core.budget import Budget
from budgetguard_core.cancellation import CancellationToken
from budgetguard_core.canonical import fingerprint
from budgetguard_core.clock import Clock, SystemClock
from budgetguard_core.decision import (
    NOT_AVAILABLE,
    NOT_EXECUTED,
    OUTCOME_UNKNOWN,
    Admit,
    ModelCall,
    ModelDecision,
    Nudge,
    Refuse,
    Stop,
    ToolCall,
    ToolDecision,
)
from budgetguard_core.ending import end_run, synthetic_metadata, synthetic_text
from budgetguard_core.errors import (
    AdapterError,
    BudgetGuardError,
    CheckpointError,
    ConfigurationError,
    RunFencedError,
)
from budgetguard_core.events import Event
from budgetguard_core.guard import Guard, Mode, WarningEvent
from budgetguard_core.loop_detection import LoopDetection
from budgetguard_core.outcome import BudgetExceeded, Outcome, ToolCallRecord
from budgetguard_core.pricing import Price, PriceBook
from budgetguard_core.replay import replay
from budgetguard_core.reserve import FinalizeReserve
from budgetguard_core.sinks import JsonLinesSink, LoggingSink, Sink
from budgetguard_core.stop import (
    StopCondition,
    StopReason,
    Trip,
    Violation,
    after_iterations,
    tool_called,
)
from budgetguard_core.usage import TokenUsage, Usage, estimate_tokens

if TYPE_CHECKING:
    from budgetguard_core.event_log import read_events
    from budgetguard_core.snapshot import OpenCall, Snapshot
    from budgetguard_core.sqlite_checkpoints import MemoryStore, SqliteStore
    from budgetguard_core.stores import CheckpointStore, NumberedStore

__all__ = [
    "NOT_AVAILABLE",
    "NOT_EXECUTED",
    "OUTCOME_UNKNOWN",
    "AdapterError",
    "Admit",
    "Budget",
    "BudgetExceeded",
    "BudgetGuardError",
    "CancellationToken",
    "CheckpointError",
    "CheckpointStore",
    "Clock",
    "ConfigurationError",
    "Event",
    "FinalizeReserve",
    "Guard",
    "JsonLinesSink",
    "LoggingSink",
    "LoopDetection",
    "MemoryStore",
    "Mode",
    "ModelCall",
    "ModelDecision",
    "Nudge",
    "NumberedStore",
    "OpenCall",
    "Outcome",
    "Price",
    "PriceBook",
    "Refuse",
    "RunFencedError",
    "Sink",
    "Snapshot",
    "SqliteStore",
    "Stop",
    "StopCondition",
    "StopReason",
    "SystemClock",
    "TokenUsage",
    "ToolCall",
    "ToolCallRecord",
    "ToolDecision",
    "Trip",
    "Usage",
    "Violation",
    "WarningEvent",
    "after_iterations",
    "end_run",
    "estimate_tokens",
    "fingerprint",
    "read_events",
    "replay",
    "synthetic_metadata",
    "synthetic_text",
    "tool_called",
]

# What is loaded when it is asked for: most processes neither take a snapshot nor store one, and
# read no log.
_LATER = {
    "CheckpointStore": "stores",
    "MemoryStore": "sqlite_checkpoints",
    "NumberedStore": "stores",
    "OpenCall": "snapshot",
    "Snapshot": "snapshot",
    "SqliteStore": "sqlite_checkpoints",
    "read_events": "event_log",
}


def __getattr__(name: str) -> Any:
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
