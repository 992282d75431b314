"""The suite has two parts and the benchmarks: every test is in exactly one of them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest

import layout
from budgetguard_core.testing import CLAUSES
from conformance.drivers import drivers_of, is_installed

OPTIONS = layout.pyproject()["tool"]["pytest"]["addopts"]
DEFAULT = OPTIONS[OPTIONS.index("-m") + 1]
PARTS = (DEFAULT, "slow", "benchmark")
# One collection for all parts; pytest itself decides what each takes.
COLLECT = """
import json, sys
import pytest
from _pytest.mark import deselect_by_mark

class Parts:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        found = {"": [item.nodeid for item in items]}
        for part in sys.argv[2:]:
            config.option.markexpr = part
            taken = list(items)
            deselect_by_mark(taken, config)
            found[part] = [item.nodeid for item in taken]
        config.option.markexpr = ""
        with open(sys.argv[1], "w") as file:
            json.dump(found, file)

sys.exit(pytest.main(["--collect-only", "-q", "-m", "", "-p", "no:cacheprovider"], [Parts()]))
"""


def collected(folder):
    file = folder / "found.json"
    done = subprocess.run(
        [sys.executable, "-I", "-c", COLLECT, str(file), *PARTS],
        cwd=layout.ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return json.loads(file.read_text())


@pytest.mark.slow
def test_every_test_is_in_one_part_and_the_first_asks_each_clause_of_each_adapter(tmp_path):
    found = collected(tmp_path)
    assert all(found[part] for part in PARTS)
    assert sorted(name for part in PARTS for name in found[part]) == sorted(found[""])
    asked = {
        (adapter, clause.number)
        for adapter in layout.adapters()
        if is_installed(adapter)
        for driver in drivers_of(adapter)
        for clause in CLAUSES
        if any(clause.is_requested(driver, mode) for mode in driver.modes)
    }
    names = re.findall(r"test_clause\[clause_(\d+)-(\w+)-", "\n".join(found[DEFAULT]))
    assert {(f"budgetguard_{adapter}", int(number)) for number, adapter in names} == asked


def test_ci_runs_what_the_readme_leaves_out():
    runs = [
        shlex.split(line)
        for line in (layout.ROOT / ".ci" / "run").read_text().splitlines()
        if line.startswith("run .venv/bin/python -I -m pytest ")
    ]
    (slow,) = [words for words in runs if words[words.index("-m", 4) + 1] == "slow"]
    assert not [word for word in slow if word.startswith(("tests", "-k", "--deselect"))]
