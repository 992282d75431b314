"""Run the frameworks' own suites bare and under a budget that never fires, and compare.

    python tests/upstream                      every suite, every way in
    python tests/upstream langgraph --sample   the sample that CI takes
    python tests/upstream strands-agents --way strands.provider

Each difference is an entry of `differences/<suite>.toml` with its reason. One that is not listed
fails, and so does an entry whose difference is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from suites import SUITES, Suite

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


class Unavailable(Exception):
    """A suite that cannot be had here, with the reason."""


def _run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], text=True, **options)  # type: ignore[call-overload,no-any-return]


class Checkout:
    """An environment with a framework, its suite and BudgetGuard."""

    def __init__(self, name: str, suite: Suite, folder: Path) -> None:
        self.name = name
        self.suite = suite
        self.folder = folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.python = self.folder / "venv" / "bin" / "python"
        self.sources = self._sources()

    def _install(self, *packages: str) -> None:
        _run(
            *(sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", self.python),
            *packages,
            check=True,
        )

    def _sources(self) -> Path:
        if not self.python.exists():
            _run(
                sys.executable, "-m", "uv", "venv", "--quiet", self.python.parent.parent, check=True
            )
            self._install(
                "-e", f"{ROOT}[{self.suite.extra}]", self.suite.project, "pytest", *self.suite.needs
            )
        project = self.suite.project
        found = _run(
            *(self.python, "-c", f"import importlib.metadata as m; print(m.version({project!r}))"),
            capture_output=True,
        )
        if found.returncode:
            raise PackageNotFoundError(project)
        release = found.stdout.strip()
        stem = f"{project.replace('-', '_')}-{release}"
        if not (self.folder / stem).exists():
            got = _run(
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--no-binary", project, f"{project}=={release}", "--dest", self.folder),
                capture_output=True,
            )
            archives = list(self.folder.glob("*.tar.gz"))
            if got.returncode or not archives:
                raise Unavailable(f"{project} {release} has no source distribution here")
            with tarfile.open(archives[0]) as archive:
                archive.extractall(self.folder, filter="data")
        sources = self.folder / stem
        if not (sources / self.suite.tests[0]).exists():
            raise Unavailable(f"the source distribution of {project} {release} holds no tests")
        return sources

    def outcomes(self, way: str, *, sample: bool) -> dict[str, str]:
        """The result of each test of the suite, bare where `way` is empty."""
        results = self.folder / f"results-{way or 'bare'}.json"
        results.unlink(missing_ok=True)
        paths = self.suite.sample if sample and self.suite.sample else self.suite.tests
        ran = _run(
            *(self.python, "-m", "pytest", "-q", "-p", "ways", "-p", "no:budgetguard"),
            *("-p", "no:cacheprovider", "-o", "addopts=", "--continue-on-collection-errors"),
            *(f"--ignore={path}" for path in self.suite.leave_out),
            *self.suite.options,
            *paths,
            cwd=self.sources,
            env={
                **os.environ,
                "PYTHONPATH": str(HERE),
                "BUDGETGUARD_UPSTREAM": way,
                "BUDGETGUARD_UPSTREAM_RESULTS": str(results),
                "NO_DOCKER": "true",
            },
            stdout=(self.folder / f"log-{way or 'bare'}.txt").open("w"),
            stderr=subprocess.STDOUT,
        )
        if not results.exists():
            raise Unavailable(
                f"its suite ended with {ran.returncode} and no result: see {self.folder}"
            )
        found: dict[str, str] = json.loads(results.read_text())
        if not found:
            raise Unavailable(f"none of its tests can be imported: see {self.folder}")
        return found


def listed(name: str) -> dict[tuple[str, str], str]:
    """The differences that are known: the reason by way in and test."""
    path = HERE / "differences" / f"{name}.toml"
    known = tomllib.loads(path.read_text()) if path.exists() else {}
    return {
        (way, test): entry["reason"]
        for entry in known.get("difference", [])
        for way in entry["ways"]
        for test in entry["tests"]
    }


def compare(name: str, checkout: Checkout, ways: list[str], *, sample: bool) -> list[str]:
    """Compare a suite in every way in with itself; return what is wrong, in lines."""
    bare = checkout.outcomes("", sample=sample)
    known = listed(name)
    wrong = []
    for way in ways:
        guarded = checkout.outcomes(way, sample=sample)
        differs = {
            test: f"{bare.get(test, 'missing')} -> {guarded.get(test, 'missing')}"
            for test in bare.keys() | guarded.keys()
            if bare.get(test) != guarded.get(test)
        }
        expected = {test for at, test in known if at == way}
        new = sorted(differs.keys() - expected)
        gone = sorted(expected & bare.keys() - differs.keys())
        passed = sum(outcome == "passed" for outcome in bare.values())
        counts = f"{passed} of {len(bare)} pass bare, {len(differs)} differ, {len(new)} not listed"
        print(f"{name} {way}: {counts}", flush=True)
        wrong += [f"{name} {way}: {test}: {differs[test]}" for test in new]
        wrong += [f"{name} {way}: {test}: listed, and no difference any more" for test in gone]
    return wrong


def main() -> int:
    """Run what the command line asks for; 1 where a difference is not listed."""
    parser = argparse.ArgumentParser(prog="python tests/upstream", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--way", action="append", help="only this way in")
    parser.add_argument("--sample", action="store_true", help="only the files of the sample")
    parser.add_argument("--folder", type=Path, help="keep environments and logs here")
    given = parser.parse_args()
    unknown = [name for name in given.suites if name not in SUITES]
    if unknown:
        parser.error(f"no suite {unknown[0]!r}: one of {', '.join(SUITES)}")
    wrong = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in given.suites or SUITES:
            suite = SUITES[name]
            try:
                checkout = Checkout(name, suite, given.folder or Path(temporary))
                ways = [way for way in suite.ways if not given.way or way in given.way]
                wrong += compare(name, checkout, ways, sample=given.sample)
            except Unavailable as reason:
                print(f"{name}: left out, {reason}")
    print("\n".join(wrong) or "Every difference is listed.")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
