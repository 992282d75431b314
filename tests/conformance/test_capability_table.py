"""The capability table in this folder is what the drivers declare."""

from __future__ import annotations

import pytest

import layout
from budgetguard_core.testing import CLAUSES, capability_table
from budgetguard_core.testing.table import BEGIN, END
from conformance.drivers import drivers_of, is_installed


def test_the_readme_of_this_folder_has_exactly_the_table():
    missing = [adapter for adapter in layout.adapters() if not is_installed(adapter)]
    if missing:
        pytest.skip(f"the table has columns for frameworks that are not installed: {missing}")
    drivers = [driver for adapter in layout.adapters() for driver in drivers_of(adapter)]
    _, _, rest = (layout.ROOT / "tests/conformance/README.md").read_text().partition(BEGIN)
    shown, end, _ = rest.partition(END)
    assert end
    # Printed whole when it differs, so that it can be pasted.
    assert shown.strip() == capability_table(drivers), capability_table(drivers)


def test_what_is_declared_beyond_the_clauses_is_shown_by_a_test():
    tests = "".join(path.read_text() for path in (layout.ROOT / "tests/adapters").glob("test_*.py"))
    drivers = [driver for adapter in layout.adapters() for driver in drivers_of(adapter)]
    shown = [test for driver in drivers for test in driver.limits]
    assert [test for test in shown if f"def {test}(" not in tests] == []


def test_the_table_lists_what_is_declared_beyond_the_clauses():
    driver = type("One", (Plain,), {"limits": {"test_it": "it cannot fly"}})()
    assert capability_table([driver]).endswith("\n\nBeyond the clauses:\n\n- mine: it cannot fly")


def test_the_table_tells_modes_and_reasons_apart():
    drivers = [
        type("One", (Plain,), {"name": "one", "modes": ("sync",), "deviations": {2: "It cannot."}}),
        type("Two", (Plain,), {"name": "two", "deviations": {(2, "sync"): "It cannot."}}),
    ]
    lines = capability_table([driver() for driver in drivers]).splitlines()
    # Clause 22 is of streams alone, and one way has none.
    held = len([clause for clause in CLAUSES if clause.modes != ("streamed",)]) - 1
    assert lines[0] == f"{held} of {len(CLAUSES)} clauses hold in every way in; these differ:"
    assert lines[2] == "| clause | mine: `one` | mine: `two` |"
    assert lines[4] == "| ways in | sync | sync, async, streamed |"
    assert lines[5].startswith("| 2.")
    assert lines[5].endswith("| no [1] | async, streamed [1] |")
    (streamed,) = [line for line in lines if line.startswith("| 22.")]
    assert streamed.endswith("| - | yes |")
    assert lines[5 + len(CLAUSES) - held :] == ["", "[1] It cannot."]


def test_the_table_says_what_a_framework_lacks():
    driver = type("One", (Plain,), {"lacks": {"dialogue": "Nobody talks."}})()
    lines = capability_table([driver]).splitlines()
    (dialogue,) = [line for line in lines if line.startswith("| 32.")]
    assert dialogue.endswith("| - [1] |")
    assert lines[-1] == "[1] Nobody talks."


class Plain(drivers_of("budgetguard_loop")[0].__class__):
    adapter = "budgetguard_mine"
    deviations = {}  # noqa: RUF012 - never changed
    lacks = {}  # noqa: RUF012 - never changed
