"""What surrounds the code that runs: one context variable for the engine and all adapters."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any


class Frame:
    """A stretch of code that a guard bounds: a run, one of its calls, or an `activate` block.

    Attributes:
        guard: The guard that calls in here are charged to.
        run: The run that the code is a part of, None in an `activate` block.
        call: The call whose body the code is, None outside of any.
        above: The frame around this one.
    """

    __slots__ = ("above", "call", "guard", "run")

    def __init__(
        self, guard: Any, *, run: Any = None, call: Any = None, above: Frame | None = None
    ) -> None:
        self.guard = guard
        self.run = run
        self.call = call
        self.above = above

    @property
    def is_live(self) -> bool:
        """Whether code in here still belongs to the frame's run.

        An ended run is nobody's parent. The body of a call that was started and not settled is
        still its work, whatever became of the run.
        """
        return (
            self.run is None or not self.run.ended or (self.call is not None and self.call.is_open)
        )


FRAME: ContextVar[Frame | None] = ContextVar("budgetguard_frame", default=None)
"""The innermost frame around the code that runs, ended ones included: ask `current`."""


def current() -> Frame | None:
    """Return the innermost frame around this code whose run goes on; None outside of any.

    It is found in this thread or task, in tasks that are started here, and in threads that get a
    copy of the context.
    """
    frame = FRAME.get()
    while frame is not None and not frame.is_live:
        frame = frame.above
    return frame
