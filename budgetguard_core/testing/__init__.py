"""What users and adapters test with: a manual clock, scripted replies, the conformance suite."""

from budgetguard_core.testing.clauses import CLAUSES
from budgetguard_core.testing.clock import ManualClock
from budgetguard_core.testing.conformance import (
    MODES,
    Clause,
    Driver,
    Message,
    Mode,
    NonConformance,
    Ran,
    Scenario,
    check_history,
    run_in_loop,
)
from budgetguard_core.testing.script import (
    MODEL,
    Agent,
    Call,
    ProviderError,
    Reply,
    Script,
    Tool,
    arguments_value,
    calls,
    hang,
    says,
)
from budgetguard_core.testing.table import capability_table

__all__ = [
    "CLAUSES",
    "MODEL",
    "MODES",
    "Agent",
    "Call",
    "Clause",
    "Driver",
    "ManualClock",
    "Message",
    "Mode",
    "NonConformance",
    "ProviderError",
    "Ran",
    "Reply",
    "Scenario",
    "Script",
    "Tool",
    "arguments_value",
    "calls",
    "capability_table",
    "check_history",
    "hang",
    "run_in_loop",
    "says",
]
