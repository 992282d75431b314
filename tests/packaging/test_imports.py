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


@pytest.mark.slow
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


# What each adapter stands on: without it, the error names the extra that brings it.
NEEDED = {
    "budgetguard_http": (["httpx", "httpx2"], "http"),
    "budgetguard_langgraph": (["langchain_core", "langgraph"], "langgraph"),
    "budgetguard_openai_agents": (["agents"], "openai-agents"),
    "budgetguard_pydantic_ai": (["pydantic_ai"], "pydantic-ai"),
    "budgetguard_strands": (["strands"], "strands"),
}


def test_every_adapter_of_a_framework_is_tried_without_it():
    assert set(NEEDED) == set(layout.adapters()) - {"budgetguard_loop"}


@pytest.mark.sample(4)
@pytest.mark.parametrize("adapter", NEEDED)
def test_a_missing_framework_names_the_extra(adapter):
    missing, extra = NEEDED[adapter]
    program = (
        "import importlib.machinery as machinery, sys\n"
        "class Finder(machinery.PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        f"        return None if name in {missing!r} else super().find_spec(name, path, target)\n"
        "sys.meta_path[sys.meta_path.index(machinery.PathFinder)] = Finder\n"
        f"import {adapter}\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: ")
    assert f'pip install ".[{extra}]"' in done.stderr.splitlines()[-1]
