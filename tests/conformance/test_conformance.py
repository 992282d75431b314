"""Every clause of the contract, through every driver and every way in."""

from __future__ import annotations

import pytest

import layout
from budgetguard_core.testing import CLAUSES
from conformance.drivers import drivers_of, has_drivers, is_installed


def cases():
    for adapter in layout.adapters():
        # An adapter without drivers fails in test_every_adapter_is_covered.py, and not all here.
        if not (is_installed(adapter) and has_drivers(adapter)):
            continue
        for driver in drivers_of(adapter):
            for mode in driver.modes:
                for clause in CLAUSES:
                    if mode in clause.modes:
                        name = f"{adapter.removeprefix('budgetguard_')}-{driver.name}-{mode}"
                        yield pytest.param(driver, mode, clause, id=f"{clause.number:02}-{name}")


@pytest.mark.parametrize(("driver", "mode", "clause"), list(cases()))
def test_clause(driver, mode, clause):
    reason = driver.deviation(clause.number, mode)
    if reason is None:
        clause.check(driver, mode)
        return
    try:
        clause.check(driver, mode)
    except Exception:
        return
    pytest.fail(
        f"clause {clause.number} holds through {driver.name} ({mode}), but a deviation is "
        f"declared: {reason!r}. Take it out."
    )
