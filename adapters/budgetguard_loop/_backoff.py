"""How long to wait before a failed model call is tried again."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, cast

FIRST = 0.5
"""Seconds before the first retry; doubled with each one after it, as the SDKs of OpenAI and
Anthropic do."""
LONGEST = 8.0
"""Seconds that a wait of our own choice is at most."""
_HIGHEST_WORD = 120.0


def delay_after(error: BaseException, attempt: int) -> float:
    """Return the seconds to wait: what the provider asks for, else exponential with jitter.

    Args:
        error: What the attempt failed with. A `Retry-After` of up to two minutes in the headers of
            its response is kept.
        attempt: The number of the attempt that failed, from 0.
    """
    asked = _retry_after(error)
    if asked is not None:
        return asked
    longest = min(FIRST * 2.0**attempt, LONGEST)
    return longest * random.uniform(0.75, 1.0)  # noqa: S311 - spreads retries, keeps no secret


def _retry_after(error: BaseException) -> float | None:
    headers: Any = getattr(getattr(error, "response", None), "headers", None)
    if not isinstance(headers, Mapping) and not hasattr(headers, "get"):
        return None
    fields = cast("Mapping[str, Any]", headers)
    for name, unit in (("retry-after-ms", 1000), ("retry-after", 1), ("Retry-After", 1)):
        try:
            seconds = float(fields.get(name)) / unit  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue
        if 0 <= seconds <= _HIGHEST_WORD:
            return seconds
    return None
