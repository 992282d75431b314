"""How long a provider that turns a call away asks its client to wait: no longer than the run lasts.

Nobody but the client itself could end that wait, and some wait a day if they are told to.
"""

from __future__ import annotations

import math
from typing import Any, Final

_HEADERS: Final = (("retry-after-ms", 1000), ("retry-after", 1))
_OBEYED: Final = 120
"""Seconds that most clients wait if they are told to. Of more they make a short wait, or raise."""
_ALWAYS_OBEYED: Final = ("anthropic", "mistral")
"""Anthropic's client waits for as long as it is told (2.12), and so does Mistral's (3.7)."""


def shorten(request: Any, response: Any, left: float | None) -> None:
    """Have a client that would wait beyond the end of its run try again then, and be refused.

    Args:
        request: Of httpx or httpx2.
        response: The answer that turns it away.
        left: Seconds that the run has left; None where it has no end.
    """
    if left is None:
        return
    agent = request.headers.get("user-agent", "").lower()
    obeys = any(one in agent for one in _ALWAYS_OBEYED)
    for name, parts in _HEADERS:
        told = response.headers.get(name)
        if told is None:
            continue
        seconds = _number(told) / parts
        if seconds > left and (obeys or seconds <= _OBEYED):
            # Zero would be taken for nothing told.
            response.headers[name] = str(max(math.ceil(left * parts), 1))


def _number(told: str) -> float:
    """Read a number; what is none is a date, and as far away as can be."""
    try:
        return float(told)
    except ValueError:
        return math.inf
