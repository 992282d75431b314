"""One ledger for all processes: ceilings per tenant, reservations, kill switches.

See README.md beside this file for when SQLite is enough, and what survives what.
"""

from budgetguard_core.ledger.ceilings import TenantUsage, WindowUsage
from budgetguard_core.ledger.errors import (
    LedgerChanged,
    LedgerError,
    LedgerRefused,
    LedgerUnreachable,
    Warned,
)
from budgetguard_core.ledger.kill_switch import Kill
from budgetguard_core.ledger.ledger import Ledger, as_ledger
from budgetguard_core.ledger.runs import LedgerRun, Reservation
from budgetguard_core.ledger.windows import Key, Tenant

__all__ = [
    "Key",
    "Kill",
    "Ledger",
    "LedgerChanged",
    "LedgerError",
    "LedgerRefused",
    "LedgerRun",
    "LedgerUnreachable",
    "Reservation",
    "Tenant",
    "TenantUsage",
    "Warned",
    "WindowUsage",
    "as_ledger",
]
