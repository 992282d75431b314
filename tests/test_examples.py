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
    "pydantic_ai_agent": [
        "max_iterations: This run was stopped before it finished. So far 2 tool calls",
        "completed: The report has four pages.",
        "3 more model calls",
        "max_iterations: Report(pages=4)",
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
    "breaker_circuit": [
        'the model reads: {"error": "tool_unavailable"',
        "terminated: every tool call of 3 rounds in a row met an open circuit breaker",
    ],
    "breaker_rate_limit": ["retry_after_seconds", "completed: 3 of 5 searches"],
    "breaker_bulkhead": ["completed: 6 pages, at most 2 at a time"],
    "breaker_velocity": [
        "terminated: max_tool_calls_per_minute=20 is reached",
        "20 of 200 mails are out",
    ],
    "breaker_progress": ["terminated: 4 reports in a row had the same next subgoal"],
    "breaker_tool_mix": ["told: 20 tool calls are unlike those of 80", "completed: 100 files read"],
    "tenants": [
        "4 processes made ",
        "they ended by tenant_daily",
        "of $0.60, reserved $0",
    ],
    "incident": ["(was told that it goes in a circle)", "oscillation: 4 replies in a row"],
    "approval": [
        "paused: Refund 40 euros for order A-2? -> yes",
        "max_tool_calls: 2 tool calls",
        "60 euros were refunded",
    ],
    "sdk_loops": [
        "openai: max_tool_calls, 5 model calls, 4 tool calls, $0.",
        "anthropic: max_tool_calls, 5 model calls, 4 tool calls, $0.",
    ],
    "fastapi_chat": [
        "ada: Budgets are good. completed $0.004",
        "ada: - tenant_daily $0",
        "grace: Budgets are good. completed $0.004",
    ],
    "loop_async": [
        "the sub-agent: terminated, max_iterations",
        "completed: Take a coat. (5 model calls)",
        "terminated: max_seconds",
        "terminated: max_iterations",
    ],
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(path):
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    # A stop is told as a warning, which Python writes there where nobody set up logging.
    said = [line for line in done.stderr.splitlines() if not line.startswith("run stopped: ")]
    assert (done.returncode, said) == (0, [])
    assert done.stdout
    for words in SHOWN.get(path.stem, ()):
        assert words in done.stdout


def test_every_example_is_looked_at():
    assert set(SHOWN) == {path.stem for path in EXAMPLES}
