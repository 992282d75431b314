"""The answer to a model whose call is turned away: about the work, in a form it can read."""

from __future__ import annotations

import json
import math
import re
from typing import Literal, TypeAlias

from budgetguard_core.decision import Refuse
from budgetguard_core.stop import StopReason

RefusalKind: TypeAlias = Literal["tool_unavailable", "rate_limited", "busy"]

_LONGEST_NAME = 64
_UNSPEAKABLE = re.compile(r"[^\w.:/-]+")
_WHY: dict[RefusalKind, str] = {
    "tool_unavailable": "Not executed: this tool keeps failing at the moment.",
    "rate_limited": "Not executed: this tool is called too often at the moment.",
    "busy": "Not executed: too many calls of this tool are running at the moment.",
}


def refusal(kind: RefusalKind, tool: str, retry_after: float | None = None) -> str:
    """Write the result of a tool call that was turned away and may be made again later.

    Args:
        kind: Why: an open circuit breaker, a rate limit, a full bulkhead.
        tool: The tool's name. The model wrote it, so only what a name is made of is kept.
        retry_after: Seconds after which the call can be made again; None if that is not known.

    Returns:
        A JSON object with `error`, `tool`, `message` and `retry_after_seconds`.
    """
    seconds = None if retry_after is None else max(math.ceil(retry_after), 1)
    later = "later" if seconds is None else f"in {seconds} s"
    return json.dumps(
        {
            "error": kind,
            "tool": _UNSPEAKABLE.sub("_", tool)[:_LONGEST_NAME] or "_",
            "message": f"{_WHY[kind]} Go on without it, or try again {later}.",
            "retry_after_seconds": seconds,
        }
    )


def turned_away(kind: RefusalKind, tool: str, detail: str, after: float | None) -> Refuse:
    """Refuse a tool call that a breaker does not let start; the run goes on."""
    reason = StopReason.CIRCUIT_OPEN if kind == "tool_unavailable" else StopReason.VELOCITY
    return Refuse(reason, detail, refusal(kind, tool, after))
