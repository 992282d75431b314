"""`python tests/benchmarks` says what it can do, and the other benchmarks follow its table."""

from __future__ import annotations

import subprocess
import sys

import pytest

import layout
from benchmarks.__main__ import TESTS
from benchmarks.steps import ROWS

FOLDER = layout.ROOT / "tests" / "benchmarks"


def started(*command):
    done = subprocess.run(
        command, cwd=layout.ROOT, check=False, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


def test_help_is_help():
    code, out, err = started(sys.executable, FOLDER, "--help")
    assert (code, err) == (0, "")
    assert "names of rows" in out
    assert "--counts" in out


def test_a_word_chooses_rows():
    code, out, err = started(sys.executable, FOLDER, "--counts", "step, flat")
    assert (code, err) == (0, "")
    assert out.startswith("step, flat arguments: ")
    assert out.count("\n") == 1


def test_an_unknown_row_is_an_error_that_names_the_rows():
    code, out, err = started(sys.executable, FOLDER, "listener", "no such row")
    assert (code, out) == (2, "")
    assert "no row has 'no such row' in its name" in err
    assert [name for row in ROWS if (name := row.name) not in err] == []
    assert "Traceback" not in err


@pytest.mark.slow
def test_the_other_benchmarks_follow_the_table():
    """The very command; only what it would run is listed in place of being run."""
    code, out, err = started(*TESTS, "--collect-only")
    assert (code, err) == (0, "")
    files = {line.partition("::")[0] for line in out.splitlines() if "::" in line}
    named = {f"tests/benchmarks/{path.name}" for path in FOLDER.glob("test_*.py")}
    assert files == named
