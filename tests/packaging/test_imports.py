"""What `import budgetguard_core` brings into a fresh interpreter, and what it offers."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest

import layout

PACKAGES = ["budgetguard_core", *layout.packages()]


def modules_after(statement):
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], check=True, capture_output=True, text=True
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_the_core_brings_no_framework_and_no_prices():
    (forbidden,) = [
        set(contract["forbidden_modules"])
        for contract in layout.pyproject()["tool"]["importlinter"]["contracts"]
        if contract["name"] == "The core imports no adapter and no framework"
    ]
    assert modules_after("import budgetguard_core") & {"genai_prices", *forbidden} == set()


def constants_classes_functions(name):
    """The order that ruff's RUF022 keeps."""
    return (not name.isupper(), not name[0].isupper(), name)


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_sorted_and_exist(package):
    module = import_module(package)
    names = getattr(module, "__all__", [])
    assert list(names) == sorted(set(names), key=constants_classes_functions)
    assert [name for name in names if not hasattr(module, name)] == []
