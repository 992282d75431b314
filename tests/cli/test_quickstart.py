"""`budgetguard quickstart`: what it writes runs without a key, and is stopped by its budget."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest
from typer.testing import CliRunner

from budgetguard_cli import quickstart as command
from budgetguard_cli.app import app
from budgetguard_cli.quickstart import Framework

NEEDS = {
    "langgraph": "langchain",
    "openai-agents": "agents",
    "strands": "strands",
    "pydantic-ai": "pydantic_ai",
}


def quickstart(*arguments, code=0):
    done = CliRunner().invoke(app, ["quickstart", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


@pytest.mark.parametrize("framework", get_args(Framework))
def test_the_agent_runs_without_a_key_and_is_stopped(tmp_path, framework):
    pytest.importorskip(NEEDS.get(framework, "openai"))
    file = tmp_path / "agent.py"
    quickstart(framework, "-o", file)
    done = subprocess.run(
        [sys.executable, "-I", file], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("terminated max_iterations 0.00")
    assert file.read_text() == quickstart(framework).stdout


def test_a_file_that_is_there_is_kept(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text("mine")
    assert "File exists" in quickstart("loop", "-o", file, code=2).stderr
    assert file.read_text() == "mine"


@pytest.mark.parametrize("name", ["strands", "json"])
def test_a_name_that_would_hide_a_package_is_refused(tmp_path, name):
    pytest.importorskip(name)
    said = quickstart("strands", "-o", tmp_path / f"{name}.py", code=2).stderr
    assert f"{name}.py would hide the package '{name}'" in said
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_named_with_how_it_is_installed(monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    said = quickstart("langgraph").stderr
    assert 'needs langchain, not installed here: pip install ".[langchain]"' in said
