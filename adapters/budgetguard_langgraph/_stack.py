"""What only the call stack tells: LangChain's hooks do not say from where they are called."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

_DEEPEST: Final = 150
_HOOKS: Final = frozenset({"on_chat_model_start", "on_llm_start"})


def frame_of(names: frozenset[str], local: str) -> FrameType | None:
    """Return the innermost frame of a function with one of these names and such a variable."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - no public way
    for _ in range(_DEEPEST):
        if frame is None:
            return None
        if frame.f_code.co_name in names and local in frame.f_code.co_varnames:
            return frame
        frame = frame.f_back
    return None


def close_pending_hooks() -> None:
    """Close the coroutines of other callbacks' hooks, which a raising one leaves behind.

    langchain-core awaits them one after the other and drops the rest; each would warn.
    """
    frame = frame_of(_HOOKS, "inline_tasks")
    if frame is None:
        return
    for name in ("inline_tasks", "non_inline_tasks"):
        tasks: list[Any] = frame.f_locals.get(name, [])
        for task in tasks:
            # The one that runs now is suspended nowhere, and must not be closed.
            if getattr(task, "cr_frame", None) is not None and not task.cr_running:
                task.close()
