"""Every example runs offline, in a process of its own, and shows what it says."""

from __future__ import annotations

import subprocess
import sys

import pytest

import layout

EXAMPLES = sorted((layout.ROOT / "examples").glob("*.py"))
SHOWN = {
    "langgraph_agent": [
        "max_iterations: This run was stopped before it finished. So far 2 tool calls",
        "completed: The report has four pages.",
        "3 model calls, 0.00",
    ],
    "strands_agent": [
        "max_iterations: This run was stopped before it finished.",
        "end_turn: The report has four pages.",
        "5 model calls in all",
        "warning: 4 of 4 max_iterations",
    ],
    "loop_sync": [
        "terminated: max_iterations=2 reached",
        "completed: The report has four pages.",
        "5 model calls in all",
    ],
    "openai_agents": [
        "terminated: max_iterations=5 reached: 5 used",
        "This run was stopped before it finished.",
        "completed: Paris, I believe.",
        "max_model_calls: 8 model calls in all",
    ],
    "tenants": [
        "4 processes made ",
        "they ended by tenant_daily",
        "of $0.60, reserved $0",
    ],
    "loop_async": [
        "the sub-agent: terminated, max_iterations",
        "completed: Take a coat. (5 model calls)",
        "terminated: max_seconds",
        "terminated: max_iterations",
    ],
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(path):
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    for words in SHOWN.get(path.stem, ()):
        assert words in done.stdout


def test_the_examples_that_are_looked_at_exist():
    assert set(SHOWN) <= {path.stem for path in EXAMPLES}
