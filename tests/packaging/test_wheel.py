"""What a user gets: the wheel and the sdist, built by hatchling from a copy of the tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser

import pytest

import layout

PACKAGES = ["budgetguard_core", *layout.packages()]


SHIPPED = ("budgetguard_core", "adapters", "tests", "examples")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    tree = tmp_path_factory.mktemp("tree")
    for name in SHIPPED:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(layout.ROOT / name, tree / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", ".gitignore"):
        shutil.copy(layout.ROOT / name, tree / name)
    subprocess.run(
        [sys.executable, "-I", "-m", "hatchling", "build"],
        cwd=tree,
        check=True,
        capture_output=True,
    )
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(built):
    (file,) = built.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield archive


@pytest.fixture(scope="module")
def sdist(built):
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        yield archive


@pytest.mark.slow
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


@pytest.mark.sample(4)
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
    assert metadata["Name"] == "budgetguard"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (layout.ROOT / "README.md").read_text()
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    files = set(wheel.namelist())
    assert f"{name.rpartition('/')[0]}/licenses/LICENSE" in files


def test_the_wheel_holds_the_data_that_is_read(wheel):
    """All that is no Python: SQL, Lua, schemas, dashboards, pages."""
    names = set(wheel.namelist())
    for base in (layout.ROOT, layout.ROOT / "adapters"):
        for package in PACKAGES:
            files = (file for file in (base / package).rglob("*") if file.is_file())
            data = {file.relative_to(base).as_posix() for file in files if file.suffix != ".pyc"}
            assert data <= names


def test_the_wheel_holds_nothing_of_a_machine(wheel):
    endings = {name.rpartition(".")[2] for name in wheel.namelist()}
    assert not endings & {"pyc", "so", "db", "sqlite3", "log", "env"}
    assert sum(file.file_size for file in wheel.infolist()) < 4 * 2**20


def test_the_sdist_holds_what_the_tests_need_and_nothing_else(sdist):
    version = layout.pyproject()["project"]["version"]
    paths = [name.partition("/") for name in sdist.getnames()]
    assert {top for top, _, _ in paths} == {f"budgetguard-{version}"}
    rest = {path for _, _, path in paths}
    files = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO", ".gitignore"}
    assert {path.partition("/")[0] for path in rest} == {*SHIPPED, *files}
    for name in SHIPPED:
        sources = {
            p.relative_to(layout.ROOT).as_posix() for p in (layout.ROOT / name).rglob("*.py")
        }
        assert sources <= rest
    assert not [path for path in rest if path.endswith(".pyc")]
