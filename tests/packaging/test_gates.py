"""Every gate is seen to fire on a planted violation, and on nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest

import layout


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the sources, with one more adapter in every list."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("budgetguard_core", "adapters"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(layout.ROOT / name, tree / name, ignore=ignore)
    config = (layout.ROOT / "pyproject.toml").read_text()
    (tree / "pyproject.toml").write_text(
        config.replace('"budgetguard_loop"', '"budgetguard_loop", "budgetguard_planted"')
    )
    planted = tree / "adapters" / "budgetguard_planted"
    planted.mkdir()
    (planted / "__init__.py").write_text('"""An adapter."""\n')
    return tree


def lint_imports(tree):
    # The copy, not the installed package, is what the linter has to find.
    path = os.pathsep.join([str(tree), str(tree / "adapters")])
    program = "from importlinter.cli import lint_imports_command as main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


IMPORTS = [
    ("budgetguard_core", "langgraph"),
    ("budgetguard_core", "typer"),
    ("budgetguard_core", "pytest"),
    ("budgetguard_core", "budgetguard_loop"),
    ("budgetguard_planted", "budgetguard_loop"),
    ("budgetguard_loop", "budgetguard_cli"),
    ("budgetguard_planted", "budgetguard_core.guard"),
    ("budgetguard_planted", "budgetguard_core.kit.run"),
]
ALLOWED = (
    "import budgetguard_core.kit\nfrom budgetguard_core import Guard\n"
    "from budgetguard_core.kit import Run\n"
)


@pytest.mark.slow
def test_the_import_rules_hold_and_fire(tree):
    clean = lint_imports(tree)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    planted = []
    for number, (package, target) in enumerate(IMPORTS):
        home = tree if package == "budgetguard_core" else tree / "adapters"
        file = home / package / f"planted_{number}.py"
        file.write_text(f"import {target}\n" + ALLOWED * (home != tree))
        planted.append(file)
    broken = lint_imports(tree)
    for file in planted:
        file.unlink()
    assert broken.returncode == 1, broken.stdout + broken.stderr
    missing = [
        f"{package}.planted_{number} -> {target}"
        for number, (package, target) in enumerate(IMPORTS)
        if f"{package}.planted_{number} -> {target}" not in broken.stdout
    ]
    assert missing == []
    assert "-> budgetguard_core.kit (" not in broken.stdout
    assert "-> budgetguard_core (" not in broken.stdout


# Files, what is added to them, and the words with which the rule names the violation.
ROOMS = [
    (
        {"budgetguard_core/usage.py": "\ndef ask():\n    from budgetguard_core import counters\n"},
        "budgetguard_core.usage -> budgetguard_core.counters",
    ),
    (
        {"budgetguard_core/breakers/planted.py": "from budgetguard_core import guard\n"},
        "budgetguard_core.breakers.planted -> budgetguard_core.guard",
    ),
    (
        {"budgetguard_core/counters.py": "\nfrom budgetguard_core import kit\n"},
        "budgetguard_core.counters -> budgetguard_core.kit",
    ),
    (
        {"budgetguard_core/settings.py": "\nfrom budgetguard_core.breakers import velocity\n"},
        "A budget is plain data BROKEN",
    ),
    (
        {"budgetguard_core/stop_state.py": "\nfrom budgetguard_core import plugs\n"},
        "Counters know no plug BROKEN",
    ),
    (
        {"budgetguard_core/tree.py": "\nfrom budgetguard_core.ledger import errors\n"},
        "The engine needs no ledger BROKEN",
    ),
    ({"budgetguard_core/unplaced.py": ""}, "budgetguard_core.unplaced"),
]
KIT = "import budgetguard_core.guard\n"
CIRCLES = {
    "budgetguard_core": ("from budgetguard_core import {}\n", "import typing\n"),
    "budgetguard_cli": ("from budgetguard_cli.{} import A\n", "A = 1\n"),
    "budgetguard_http": ("from budgetguard_http.{} import A\n", "A = 1\n"),
    "budgetguard_langgraph": (
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n"
        "    from budgetguard_langgraph.{} import A\n",
        "A = 1\n",
    ),
    "budgetguard_loop": ("def f():\n    import budgetguard_loop.{}\n", "A = 1\n"),
    "budgetguard_pydantic_ai": ("import budgetguard_pydantic_ai.{}\n", "A = 1\n"),
    "budgetguard_strands": ("import budgetguard_strands.{}\n", "A = 1\n"),
}


@contextmanager
def planted(tree, files):
    """Add text to files, and take it back."""
    before = {tree / name: None for name in files}
    try:
        for name, text in files.items():
            file = tree / name
            before[file] = file.read_text() if file.exists() else None
            file.write_text((before[file] or "") + text)
        yield
    finally:
        for file, text in before.items():
            if text is None:
                file.unlink()
            else:
                file.write_text(text)


@pytest.mark.slow
def test_the_layers_hold_and_fire(tree):
    files = {"budgetguard_core/kit.py": KIT}
    for added, _ in ROOMS:
        files |= added
    with planted(tree, files):
        broken = lint_imports(tree)
    assert "The layers of the core BROKEN" in broken.stdout
    assert [words for _, words in ROOMS if words not in broken.stdout] == []
    with planted(tree, {"budgetguard_core/kit.py": KIT}):
        assert "The layers of the core KEPT" in lint_imports(tree).stdout


@pytest.mark.slow
def test_every_circle_is_seen(tree):
    files = {}
    for package, (imports, rest) in CIRCLES.items():
        home = package if package == "budgetguard_core" else f"adapters/{package}"
        files[f"{home}/planted_a.py"] = imports.format("planted_b") + rest
        files[f"{home}/planted_b.py"] = imports.format("planted_a") + rest
    with planted(tree, files):
        broken = lint_imports(tree)
    assert "No import circle BROKEN" in broken.stdout
    report = broken.stdout.partition("Broken contracts")[2]
    assert [name for name in CIRCLES if f"No cycles are allowed in {name}." not in report] == []
