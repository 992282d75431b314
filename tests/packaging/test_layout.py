"""The lists in pyproject.toml agree with the folders, and the README with `.ci/run`."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import entry_points

import grimp
from packaging.requirements import Requirement

import layout

PROJECT = layout.pyproject()
EXTRAS = PROJECT["project"]["optional-dependencies"]
# Extras that are no framework.
OTHER_EXTRAS = {"all", "otel", "postgres", "redis", "test"}
# A framework that shares the adapter of another one.
SHARED_ADAPTER = {"langchain": "budgetguard_langgraph"}
# An adapter that needs no extra, because it needs no framework.
NO_FRAMEWORK = {"budgetguard_loop"}


def contract(name: str) -> dict[str, list[str]]:
    (found,) = [c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["name"] == name]
    return found


def test_adapters_is_a_folder_and_not_a_package():
    assert not (layout.ROOT / "adapters" / "__init__.py").exists()


def test_every_folder_under_adapters_is_a_package():
    folders = [p for p in (layout.ROOT / "adapters").iterdir() if p.name != "__pycache__"]
    assert sorted(p.name for p in folders) == layout.packages()


def test_what_is_not_an_adapter_exists():
    assert set(layout.NOT_ADAPTERS) <= set(layout.packages())


def test_the_wheel_lists_every_package():
    listed = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert listed == ["budgetguard_core", *(f"adapters/{name}" for name in layout.packages())]


def test_import_linter_knows_every_package():
    listed = PROJECT["tool"]["importlinter"]["root_packages"]
    assert listed == ["budgetguard_core", *layout.packages()]


def test_the_core_may_import_no_package_of_ours():
    forbidden = contract("The core imports no adapter and no framework")["forbidden_modules"]
    assert set(layout.packages()) <= set(forbidden)


def test_every_adapter_is_kept_from_the_others():
    assert contract("Adapters do not import each other")["modules"] == layout.adapters()


def test_every_adapter_is_kept_from_the_command_line():
    assert contract("Nothing imports the command line")["source_modules"] == layout.adapters()


def test_every_package_is_kept_from_circles():
    listed = contract("No import circle")["ancestors"]
    assert listed == ["budgetguard_core", *layout.packages()]


def test_no_module_imports_the_package_that_it_is_in():
    packages = ["budgetguard_core", *layout.packages()]
    graph = grimp.build_graph(*packages, cache_dir=None)
    assert {name: graph.find_modules_that_directly_import(name) for name in packages} == {
        name: {
            module
            for module in graph.find_modules_that_directly_import(name)
            if module.partition(".")[0] != name
        }
        for name in packages
    }


def test_every_framework_adapter_has_its_extra():
    named = {f"budgetguard_{extra.replace('-', '_')}" for extra in EXTRAS}
    assert set(layout.adapters()) - NO_FRAMEWORK <= named


def test_all_brings_every_framework():
    (everything,) = EXTRAS["all"]
    assert Requirement(everything).extras == set(EXTRAS) - OTHER_EXTRAS


def test_every_dependency_has_a_floor():
    groups = [
        PROJECT["build-system"]["requires"],
        PROJECT["project"]["dependencies"],
        *EXTRAS.values(),
        *PROJECT["dependency-groups"].values(),
    ]
    requirements = [Requirement(line) for group in groups for line in group]
    assert [
        str(r) for r in requirements if r.name != "budgetguard" and ">=" not in str(r.specifier)
    ] == []


def test_the_command_resolves():
    (script,) = entry_points(group="console_scripts", name="budgetguard")
    assert callable(script.load())


def test_ci_runs_the_command_of_the_readme():
    ci = (layout.ROOT / ".ci" / "run").read_text()
    (line,) = [line for line in ci.splitlines() if line.startswith("test_command=")]
    (command,) = shlex.split(line.partition("=")[2])
    readme = (layout.ROOT / "README.md").read_text()
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    shown = [line for block in blocks for line in block.splitlines()]
    assert command in shown
    assert (
        'python3 -m venv .venv && .venv/bin/pip install -e ".[all]" && .venv/bin/budgetguard demo'
        in shown
    )
