"""The way to a new adapter: what TEMPLATE.md names is there, and the toy adapter went that way."""

from __future__ import annotations

import re

import budgetguard_core
import layout
from budgetguard_core import kit, testing
from budgetguard_core.testing import CLAUSES, Driver

HERE = layout.ROOT / "tests" / "conformance"
TEMPLATE = (layout.ROOT / "tests" / "adapters" / "TEMPLATE.md").read_text()
TOLD = (layout.ROOT / "tests" / "README.md").read_text()


def test_every_verb_that_is_named_exists():
    verbs = set(re.findall(r"\brun\.(\w+)\(", TEMPLATE))
    assert len(verbs) >= 12
    assert [name for name in verbs if not hasattr(kit.Run, name)] == []
    calls = re.findall(r"(?<![.\w])`?(\w+)\((?:budget|run|MyDriver|\.\.\.)", TEMPLATE)
    known = {*dir(kit), *dir(testing), *dir(budgetguard_core), "MyDriver", "test_clause"}
    assert set(calls) - known == set()
    for name in ("modes", "subagents", "lacks", "deviations", "limits"):
        assert f"`{name}`" in TEMPLATE
        assert hasattr(Driver, name)


def test_the_example_is_there_and_as_short_as_is_said():
    files = re.findall(r"^\| `(\w+\.py)`", TEMPLATE, re.MULTILINE)
    assert [name for name in files if not (HERE / name).exists()] == []
    lines = len((HERE / "toy_adapter.py").read_text().splitlines())
    assert lines <= 150
    assert f"{lines} lines that pass every clause" in TOLD


def test_the_toy_adapter_stands_on_public_names_alone():
    source = (HERE / "toy_adapter.py").read_text()
    imported = set(re.findall(r"^from (budgetguard\S*) import", source, re.MULTILINE))
    assert imported <= {"budgetguard_core", "budgetguard_core.kit"}


def test_the_clauses_to_begin_with_exist():
    assert {1, 2, 3, 10} <= {clause.number for clause in CLAUSES}
