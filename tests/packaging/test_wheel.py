"""What a user gets: the wheel, built by hatchling from a copy of the tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser

import pytest

import layout

PACKAGES = ["budgetguard_core", *layout.packages()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    tree = tmp_path_factory.mktemp("tree")
    for name in ("budgetguard_core", "adapters"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(layout.ROOT / name, tree / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(layout.ROOT / name, tree / name)
    subprocess.run(
        [sys.executable, "-I", "-m", "hatchling", "build", "-t", "wheel"],
        cwd=tree,
        check=True,
        capture_output=True,
    )
    (built,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        yield archive


def test_the_wheel_holds_our_packages_and_nothing_else(wheel):
    top = {name.partition("/")[0] for name in wheel.namelist()}
    version = layout.pyproject()["project"]["version"]
    assert top == {*PACKAGES, f"budgetguard-{version}.dist-info"}


def test_the_wheel_holds_every_source_file(wheel):
    names = set(wheel.namelist())
    for base, package in [(layout.ROOT, "budgetguard_core")] + [
        (layout.ROOT / "adapters", name) for name in layout.packages()
    ]:
        sources = {p.relative_to(base).as_posix() for p in (base / package).rglob("*.py")}
        assert sources <= names


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_says_that_it_is_typed(wheel, package):
    assert f"{package}/py.typed" in wheel.namelist()


def test_the_metadata_of_the_wheel(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "MIT"
    extras = layout.pyproject()["project"]["optional-dependencies"]
    assert set(metadata.get_all("Provides-Extra")) == set(extras)
