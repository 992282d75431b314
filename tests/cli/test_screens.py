"""The screens in the command line's SCREENS.md are those that the commands show."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import layout
from budgetguard_cli.app import app
from run_logs import write

SCREENS = layout.ROOT / "adapters" / "budgetguard_cli" / "SCREENS.md"
COMMANDS = ("show log.jsonl", "show log.jsonl --run stopped", "replay log.jsonl")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("columns", [80, 140])
def test_the_screen_is_the_one_that_is_shown(tmp_path, monkeypatch, command, columns):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "log.jsonl")
    done = CliRunner().invoke(app, command.split(), env={"COLUMNS": str(columns)})
    assert done.exit_code == 0, done.output
    lines = "\n".join(line.rstrip() for line in done.stdout.strip("\n ").splitlines())
    screen = f"`budgetguard {command}`, {columns} columns:\n\n```text\n{lines}\n```\n"
    assert screen in SCREENS.read_text(encoding="utf-8"), screen
