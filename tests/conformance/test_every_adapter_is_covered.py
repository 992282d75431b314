"""An adapter that no driver runs through the contract fails the build."""

from __future__ import annotations

from typing import get_args

import pytest

import layout
from budgetguard_core.testing import CLAUSES, MODES, Feature
from conformance.drivers import drivers_of, has_drivers, is_installed

INSTALLED = [adapter for adapter in layout.adapters() if is_installed(adapter)]


@pytest.mark.parametrize("adapter", layout.adapters())
def test_the_adapter_has_a_driver_module(adapter):
    assert has_drivers(adapter)


@pytest.mark.parametrize("adapter", INSTALLED)
def test_every_way_in_is_driven(adapter):
    drivers = drivers_of(adapter)
    assert drivers
    assert {driver.adapter for driver in drivers} == {adapter}
    assert len({driver.name for driver in drivers}) == len(drivers)
    assert {mode for driver in drivers for mode in driver.modes} == set(MODES)


@pytest.mark.parametrize("adapter", INSTALLED)
def test_every_deviation_names_a_clause_and_a_reason(adapter):
    numbers = {clause.number for clause in CLAUSES}
    for driver in drivers_of(adapter):
        for key, reason in driver.deviations.items():
            number, mode = key if isinstance(key, tuple) else (key, driver.modes[0])
            assert number in numbers
            assert mode in driver.modes
            assert len(reason) > 20


@pytest.mark.parametrize("adapter", INSTALLED)
def test_every_missing_feature_is_one_that_a_clause_asks_for_and_has_a_reason(adapter):
    for driver in drivers_of(adapter):
        assert set(driver.lacks) <= set(get_args(Feature))
        assert all(len(reason) > 20 for reason in driver.lacks.values())


def test_the_clauses_are_numbered_without_a_gap():
    assert [clause.number for clause in CLAUSES] == list(range(1, 60))
