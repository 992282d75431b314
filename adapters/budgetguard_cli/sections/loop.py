"""A plain loop with no SDK at all: the request goes out through the standard library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from budgetguard_cli.sections import PROMPT
from budgetguard_cli.sections.chat import complete
from budgetguard_core import Guard, Outcome
from budgetguard_loop import run_bounded

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
]


def run(base_url: str, guard: Guard, read_file: Callable[[str], str]) -> Outcome:
    """Run the classic loop, model, tool, model, until the guard stops it."""

    def ask(
        messages: list[dict[str, Any]], *, max_output_tokens: int | None, seconds: float | None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "gpt-4o", "messages": messages, "tools": _TOOLS}
        if max_output_tokens is not None:
            body["max_completion_tokens"] = max_output_tokens
        return complete(base_url, body, seconds=seconds)

    return run_bounded(ask, guard, messages=PROMPT, tools={"read_file": read_file}, model="gpt-4o")
