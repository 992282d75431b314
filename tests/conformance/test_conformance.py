"""Every clause of the contract, through every driver and every way in."""

from __future__ import annotations

import pytest

import layout
from budgetguard_core.testing import CLAUSES
from conformance.drivers import drivers_of, has_drivers, is_installed, marks


def cases():
    for adapter in layout.adapters():
        # An adapter without drivers fails in test_every_adapter_is_covered.py, and not all here.
        if not (is_installed(adapter) and has_drivers(adapter)):
            continue
        ways = [(driver, mode) for driver in drivers_of(adapter) for mode in driver.modes]
        for clause in CLAUSES:
            asked = [way for way in ways if clause.is_requested(*way)]
            for location, (driver, mode) in enumerate(asked):
                name = f"{adapter.removeprefix('budgetguard_')}-{driver.name}-{mode}"
                # By default each clause is asked in one way in, the next one in the next.
                by_default = location == clause.number % len(asked)
                yield pytest.param(
                    driver,
                    mode,
                    clause,
                    id=f"clause_{clause.number:02}-{name}",
                    marks=[
                        *marks(driver, clause.number),
                        *([] if by_default else [pytest.mark.slow]),
                    ],
                )


@pytest.mark.parametrize(("driver", "mode", "clause"), list(cases()))
def test_clause(driver, mode, clause, monkeypatch):
    if driver.deviation(clause.number, mode):
        # What it cannot end hangs until then.
        monkeypatch.setattr(driver, "patience", 3.0, raising=False)
    clause.judge(driver, mode)
