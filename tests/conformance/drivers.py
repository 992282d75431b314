"""The drivers of our adapters; each adapter's are in `<adapter>_driver.py`."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import pytest

import layout
from budgetguard_core.testing import Driver, Feature

# What has to be installed for an adapter's drivers to run; the loop needs no framework.
FRAMEWORKS = {
    "budgetguard_http": "openai",
    "budgetguard_langgraph": "langgraph",
    "budgetguard_openai_agents": "agents",
    "budgetguard_pydantic_ai": "pydantic_ai",
    "budgetguard_strands": "strands",
}
# What an adapter does not do yet; whoever adds it takes the line out.
NOT_YET: dict[str, tuple[Feature, ...]] = {}
# Faults that are open: the adapter, and where it is not all of them its ways in, with the issue.
# Strict: whoever mends one takes its line out.
OPEN: dict[tuple[str, int], tuple[str, tuple[str, ...]]] = {
    ("budgetguard_pydantic_ai", 44): ("issue 32", ("run_stream",)),
    ("toy_adapter", 44): ("issue 32", ()),
}
REASONS: dict[Feature, str] = {
    "waits": "this adapter does not wait yet: what is held back starts at once",
    "reports": "this adapter does not offer `report_progress` yet: add a tool of your own",
}


def marks(driver: Driver, clause: int) -> list[pytest.MarkDecorator]:
    """Return the mark of a case that is known to fail."""
    issue, ways = OPEN.get((driver.adapter, clause), ("", ()))
    is_open = bool(issue) and (not ways or driver.name in ways)
    return [pytest.mark.xfail(strict=True, reason=issue)] if is_open else []


def is_installed(adapter: str) -> bool:
    framework = FRAMEWORKS.get(adapter)
    return framework is None or find_spec(framework) is not None


def has_drivers(adapter: str) -> bool:
    return (layout.ROOT / "tests" / "conformance" / f"{adapter}_driver.py").is_file()


@cache
def drivers_of(adapter: str) -> tuple[Driver, ...]:
    """Import the adapter's `DRIVERS`; an adapter without any is an error."""
    found: tuple[Driver, ...] = import_module(f"conformance.{adapter}_driver").DRIVERS
    for driver in found:
        lacking = {feature: REASONS[feature] for feature in NOT_YET.get(adapter, ())}
        type(driver).lacks = {**lacking, **driver.lacks}
    return found
