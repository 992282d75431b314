"""The tool `report_progress`, as adapters offer it: a description, and a plain function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from budgetguard_core.breakers import (
    REPORT_PROGRESS,
    REPORT_PROGRESS_DESCRIPTION,
    REPORT_PROGRESS_SCHEMA,
)
from budgetguard_core.breakers.progress import NOTED, read_report
from budgetguard_core.frame import current


class ToolForm(NamedTuple):
    """A tool, from which an adapter makes one of its framework's own."""

    name: str
    """Its name."""
    description: str
    """The description that the model reads."""
    parameters: Mapping[str, Any]
    """The JSON Schema of its arguments."""
    report: Callable[[object], str]
    """Its body: takes the arguments, an object or its JSON text, and returns the result."""


def _report(arguments: object) -> str:
    frame = current()
    if frame is not None:
        text: str = frame.guard.report_progress(arguments)
        return text
    # Nobody asks how far it is, but the agent of a user who tries it out is told what is wrong.
    report = read_report(arguments)
    return report if isinstance(report, str) else NOTED


def report_progress(
    claims_so_far: list[str], next_subgoal: str, estimated_remaining_steps: int
) -> str:
    """Hand what the model says of its work to the run around this code.

    For loops that call plain functions; `PROGRESS_TOOL` is the same for a framework.

    Args:
        claims_so_far: What is done or known for certain by now.
        next_subgoal: What the model wants to achieve next, in one sentence.
        estimated_remaining_steps: How many more steps it thinks the work takes.

    Returns:
        The tool's result, for the model.
    """
    return _report(
        {
            "claims_so_far": claims_so_far,
            "next_subgoal": next_subgoal,
            "estimated_remaining_steps": estimated_remaining_steps,
        }
    )


PROGRESS_TOOL: Final = ToolForm(
    REPORT_PROGRESS, REPORT_PROGRESS_DESCRIPTION, REPORT_PROGRESS_SCHEMA, _report
)
"""The tool. A call of it costs no place in `max_tool_calls` where the run asks for reports."""
