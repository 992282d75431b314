"""The command without its extra, and what it says of itself."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("blocked", "named"), [(["typer", "rich"], "rich and typer"), (["rich"], "rich,")]
)
def test_without_the_extra_one_line_says_what_to_install(blocked, named):
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "from budgetguard_cli.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert named in line
    assert 'pip install ".[cli]"' in line


def test_help_names_both_commands(budgetguard):
    done = budgetguard("--help")
    assert done.returncode == 0
    assert b"demo" in done.stdout
    assert b"replay" in done.stdout


def test_help_names_every_cap(budgetguard):
    from budgetguard_core.budget import DIMENSIONS

    text = budgetguard("replay", "--help").stdout.decode()
    assert [name for name in DIMENSIONS if f"--{name.replace('_', '-')} " not in text] == []


def test_the_extra_is_not_needed_to_import_the_core():
    program = "import budgetguard_core, sys; sys.exit('rich' in sys.modules)"
    subprocess.run([sys.executable, "-I", "-c", program], check=True)
