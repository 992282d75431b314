"""The tool with which a model says how far it is, where its budget asks for that."""

from __future__ import annotations

from typing import Any, Final

from langchain_core.tools import StructuredTool

from budgetguard_core.kit import PROGRESS_TOOL


def _report(**arguments: Any) -> str:
    return PROGRESS_TOOL.report(arguments)


report_progress: Final = StructuredTool(
    name=PROGRESS_TOOL.name,
    description=PROGRESS_TOOL.description,
    args_schema=dict(PROGRESS_TOOL.parameters),
    func=_report,
)
"""The tool for `Budget(progress=...)`: `create_agent(model, [*tools, report_progress])`.

`BudgetMiddleware` with such a budget brings it along. A call of it costs no place in
`max_tool_calls`.
"""
