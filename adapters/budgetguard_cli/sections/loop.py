"""A plain loop with no SDK at all: the request goes out through the standard library."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from budgetguard_cli.sections import PROMPT
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
    url = urlsplit(base_url)

    def ask(
        messages: list[dict[str, Any]], *, max_output_tokens: int | None, seconds: float | None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "gpt-4o", "messages": messages, "tools": _TOOLS}
        if max_output_tokens is not None:
            body["max_completion_tokens"] = max_output_tokens
        # Not urllib: it would send a loopback request through a proxy.
        connection = HTTPConnection(url.hostname or "", url.port, timeout=seconds)
        try:
            connection.request(
                "POST",
                f"{url.path}/chat/completions",
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            msg = f"the server answered {answer.status}: {text[:200]!r}"
            raise ConnectionError(msg)
        reply: dict[str, Any] = json.loads(text)
        return reply

    return run_bounded(ask, guard, messages=PROMPT, tools={"read_file": read_file}, model="gpt-4o")
