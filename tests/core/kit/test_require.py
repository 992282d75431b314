"""A missing framework is named with the extra that brings it."""

import importlib

import pytest

from budgetguard_core.kit import required


def test_a_missing_framework_names_its_extra():
    with (
        pytest.raises(ModuleNotFoundError, match=r"Some Framework must be installed.*\[some\]"),
        required("Some Framework", module="some_framework", extra="some"),
    ):
        importlib.import_module("some_framework")


def test_another_missing_module_shows_its_own_error():
    with (
        pytest.raises(ModuleNotFoundError, match="other_module"),
        required("Some Framework", module="some_framework", extra="some"),
    ):
        importlib.import_module("other_module")
