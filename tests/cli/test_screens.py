"""The screens in the command line's README are those that the commands show.

`PYTHONPATH=tests python tests/cli/test_screens.py` writes them anew.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import layout
from budgetguard_cli.app import app
from budgetguard_core import Budget, Guard, JsonLinesSink
from budgetguard_core.kit import ModelCall, TokenUsage, end_run
from budgetguard_core.profiles import ProfileId
from budgetguard_core.testing import ManualClock
from run_logs import write

README = layout.ROOT / "adapters" / "budgetguard_cli" / "README.md"
HEADING = "\n## Screens\n"
LEDGER = "--ledger sqlite:///ledger.sqlite3"
COMMANDS = (
    "--help",
    "demo --quick --framework loop",
    "quickstart loop",
    "doctor agent.py --model gpt-4o",
    "run --max-seconds 60 agent.py",
    "show log.jsonl",
    "show log.jsonl --run stopped",
    "show log.jsonl --run stopped --markdown",
    "watch log.jsonl --once",
    "report log.jsonl",
    "calibrate forty.jsonl --labelled",
    "calibrate forty.jsonl --check",
    "replay log.jsonl --max-model-calls 4",
    f"ledger set --tenant acme --daily-usd 20 {LEDGER}",
    f"kill --tenant acme --who ann --why loops {LEDGER}",
    f"ledger show {LEDGER}",
    f"revive --tenant acme {LEDGER}",
    f"ledger runs {LEDGER}",
    f"ledger reconcile {LEDGER}",
    f"ledger check {LEDGER}",
    f"ledger adopt {LEDGER}",
)
# What is another each time, at the same width.
VARIES = (
    (r"20[2-9]\d-\d\d-\d\d", "2026-03-02"),
    (r"\d\d:\d\d:\d\d(?= UTC)", "12:00:00"),
    (r"\b[0-9a-f]{12}([0-9a-f]{20})?\b", "0" * 12),
    (r"silent for [\d,]+ s", "silent for 99 s"),
    (r"sqlite:///\S*/ledger", "sqlite:////data/ledger"),
    (r"(max_seconds +)\d\.\d(?= +60)", "\\g<1>0.5"),
)


def forty(path):
    """Healthy runs of 1 to 40 calls."""
    with JsonLinesSink(path) as sink:
        for calls in range(1, 41):
            profile = ProfileId(name="research", version="1")
            clock = ManualClock()
            budget = Budget(max_iterations=1000, loop_detection=None, profile=profile)
            guard = Guard(budget, run_id=f"r{calls}", sinks=[sink], clock=clock)
            for _ in range(calls):
                ticket = guard.admit_model_call(ModelCall(model="gpt-4o"))
                clock.advance(2)
                guard.settle_model_call(ticket, TokenUsage(90, 10))
            end_run(guard, trip=None)


def screens(folder, columns):
    """Every command's screen, at a width."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        write(Path("log.jsonl"))
        forty(Path("forty.jsonl"))
        Path("agent.py").write_text("if False:\n    import vertexai\n")
        for command in COMMANDS:
            environment = {"COLUMNS": str(columns), "BUDGETGUARD_LOG": ""}
            done = CliRunner().invoke(
                app, command.split(), env=environment, prog_name="budgetguard"
            )
            text = "\n".join(line.rstrip() for line in done.output.strip("\n ").splitlines())
            for pattern, same in VARIES:
                text = re.sub(pattern, same, text)
            yield command, text
    finally:
        os.chdir(before)


def fenced(text):
    fence = "````" if "```" in text else "```"
    return f"{fence}text\n{text}\n{fence}\n"


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 140])
def test_the_screens_are_those_that_are_shown(tmp_path, columns):
    written = README.read_text(encoding="utf-8").partition(HEADING)[2]
    for command, text in screens(tmp_path, columns):
        block = written.partition(f"`budgetguard {command}`, ")[2].partition("\n`budgetguard ")[0]
        assert f"{columns} columns" in block
        assert f"\n\n{fenced(text)}" in block, text


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        kept = README.read_text(encoding="utf-8").partition(HEADING)[0]
        parts = [
            f"{kept}{HEADING}\nWhat each command shows, narrow and wide. A test compares them.\n"
        ]
        found = [list(screens(one, 80)), list(screens(other, 140))]
        for (command, narrow), (_, wide) in zip(*found, strict=True):
            both = {"80 columns and 140 columns": narrow}
            if narrow != wide:
                both = {"80 columns": narrow, "140 columns": wide}
            blocks = (f"{width}:\n\n{fenced(text)}" for width, text in both.items())
            parts.append(f"`budgetguard {command}`, " + "\nand ".join(blocks))
    README.write_text("\n".join(parts), encoding="utf-8")
