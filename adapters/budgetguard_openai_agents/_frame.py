"""The run of the SDK around the code that runs, and the exception that stops it."""

from __future__ import annotations

from typing import Any

from agents import AgentsException

from budgetguard_core import BudgetExceeded
from budgetguard_core.kit import FRAME, Frame


class RunStopped(BudgetExceeded, AgentsException):
    """A run was stopped: `trip` says why, `outcome` is the partial result.

    It leaves a run only with `on_trip="raise"`, or through a run inside a run whose limit it was.
    """


class RunFrame(Frame):
    """Code of a run of the SDK; `asked` is the tool call whose body it is."""

    __slots__ = ("asked", "recorder")

    def __init__(self, recorder: Any, asked: Any = None) -> None:
        run = recorder.run
        call = None if asked is None else asked.opened
        super().__init__(run.guard, run=run, call=call, above=run.above)
        self.recorder = recorder
        self.asked = asked


def around() -> Any:
    """Return the hooks of the run of the SDK around this code; None outside of any."""
    frame = FRAME.get()
    # What a tool's body has run and left behind is not around it.
    while frame is not None:
        if isinstance(frame, RunFrame):
            return frame.recorder
        if frame.is_live:
            return None
        frame = frame.above
    return None
