"""The run around the code: one context variable for the engine and all adapters."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final


class Frame:
    """A stretch of code that a guard bounds: a run, one of its calls, or an `activate` block.

    Attributes:
        guard: The guard that calls in here are charged to.
        run: The run that the code is a part of, None in an `activate` block.
        call: The call whose body the code is, None outside of any.
        parent: The frame around this one.
    """

    def __init__(
        self, guard: Any, *, run: Any = None, call: Any = None, parent: Frame | None = None
    ) -> None:
        self.guard = guard
        self.run = run
        self.call = call
        self.parent = parent

    @property
    def is_live(self) -> bool:
        """True if code in here still belongs to the frame's run.

        An ended run is nobody's parent. The body of a call that was started and not settled is
        still its work, whatever became of the run, and so is what a run that was cut has left
        behind in a thread.
        """
        run = self.run
        if run is None or not run.ended or (self.call is not None and self.call.is_open):
            return True
        goes_on: bool = run.goes_on_here
        return goes_on


FRAME: ContextVar[Frame | None] = ContextVar("budgetguard_frame", default=None)
"""The innermost frame around the code that runs, ended ones included: ask `current`."""


class _Nowhere(Frame):
    __slots__ = ()

    @property
    def is_live(self) -> bool:
        """Nothing is a part of it."""
        return False


NOWHERE: Final = _Nowhere(None)
"""As the innermost frame: nothing is around this code, not even what bounds the whole process."""


# The frame around all code of this process.
_PROCESS: Final[list[Frame]] = []


def bound_process(frame: Frame | None) -> None:
    """Put a frame around all code of this process, threads without a context included.

    For whoever owns the whole process, such as `budgetguard run`; None takes it away.
    """
    _PROCESS[:] = [] if frame is None else [frame]


def _process() -> Frame | None:
    return _PROCESS[0] if _PROCESS else None


def innermost() -> Frame | None:
    """Return the innermost frame around this code, an ended one included."""
    return FRAME.get() or _process()


def current() -> Frame | None:
    """Return the innermost frame around this code whose run goes on; None outside of any.

    It is found in this thread or task, in tasks that are started here, in threads that are started
    while a block is open (`threads`), and in those that get a copy of the context. The frame of a
    process that is bounded as a whole is found everywhere.
    """
    frame = FRAME.get()
    while frame is not None and not frame.is_live:
        if frame is NOWHERE:
            return None
        frame = frame.parent
    return frame or _process()
