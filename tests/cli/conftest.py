from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from budgetguard_cli.app import app


@pytest.fixture
def budgetguard():
    """The command, in this process and without a terminal."""

    def run(*arguments, **environment):
        done = CliRunner().invoke(app, list(map(str, arguments)), env=environment)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.output
        return subprocess.CompletedProcess(
            arguments, done.exit_code, done.stdout_bytes, done.stderr_bytes
        )

    return run


@pytest.fixture
def budgetguard_process():
    """The command as users run it: a process of its own, without a terminal."""

    def run(*arguments, stdin=None, **environment):
        return subprocess.run(
            # Not -I: it would ignore PYTHONIOENCODING. -P keeps the working tree out as well.
            [sys.executable, "-P", "-m", "budgetguard_cli", *map(str, arguments)],
            input=stdin,
            capture_output=True,
            timeout=60,
            env={**os.environ, **environment},
            check=False,
        )

    return run
