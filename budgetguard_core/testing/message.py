"""A message of any framework's history, in common words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a framework's history, in common words."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    tool_calls: tuple[tuple[str, str], ...] = ()
    """Id and name of each tool call of an assistant message, handoffs left out."""
    tool_call_id: str | None = None
    """The call that a tool message answers."""
    synthetic: Mapping[str, Any] | None = None
    """The metadata of a synthetic message, None for any other."""
