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
_FIRST_WAIT, _LONGEST_WAIT = 0.5 * 0.75, 8 * 0.75
"""Seconds that OpenAI's family of clients waits at least if it is told nothing, twice as many
after each attempt."""


def shorten(request: Any, response: Any, left: float | None) -> None:
    """Shorten the wait of a client to the end of its run, where its retry is refused.

    Args:
        request: Of httpx or httpx2.
        response: The answer that turns it away.
        left: Seconds that the run has left, none where it was aborted; None where it has no end.
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
            response.headers[name] = _written(left * parts)
    tried = request.headers.get("x-stainless-retry-count", "")
    if not tried.isdecimal() or any(name in response.headers for name, _ in _HEADERS):
        return
    if left < min(_FIRST_WAIT * 2.0 ** min(int(tried), 9), _LONGEST_WAIT):
        response.headers["retry-after-ms"] = _written(left * 1000)


def _written(value: float) -> str:
    # Zero would be taken for nothing told.
    return str(max(math.ceil(value), 1))


def _number(told: str) -> float:
    """Read a number; what is none is a date, and as far away as can be."""
    try:
        return float(told)
    except ValueError:
        return math.inf
