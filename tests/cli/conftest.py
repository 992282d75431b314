from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.fixture
def budgetguard():
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
