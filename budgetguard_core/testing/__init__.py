"""The testing tools: a manual clock, scripted replies, fixtures, the conformance suite."""

from budgetguard_core.testing.bounded import assert_bounded
from budgetguard_core.testing.clauses import CLAUSES
from budgetguard_core.testing.clock import ManualClock
from budgetguard_core.testing.conformance import Clause
from budgetguard_core.testing.driver import Driver, Feature, Nested, perform, run_in_loop
from budgetguard_core.testing.message import (
    DriverError,
    Message,
    NonConformance,
    check_history,
    check_request,
)
from budgetguard_core.testing.report import Report, check
from budgetguard_core.testing.scenario import (
    LOCATIONS,
    MODES,
    CallMode,
    Location,
    Ran,
    Scenario,
    Scratch,
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
    "LOCATIONS",
    "MODEL",
    "MODES",
    "Agent",
    "Call",
    "CallMode",
    "Clause",
    "Driver",
    "DriverError",
    "Feature",
    "Location",
    "ManualClock",
    "Message",
    "Nested",
    "NonConformance",
    "ProviderError",
    "Ran",
    "Reply",
    "Report",
    "Scenario",
    "Scratch",
    "Script",
    "Tool",
    "arguments_value",
    "assert_bounded",
    "calls",
    "capability_table",
    "check",
    "check_history",
    "check_request",
    "hang",
    "perform",
    "run_in_loop",
    "says",
]
