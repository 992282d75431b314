"""The run around the code that runs, and the call that is open in it."""

from __future__ import annotations

from contextvars import Token

from budgetguard_core.decision import Admit
from budgetguard_core.frame import FRAME, Frame, current
from budgetguard_core.guard import Guard

__all__ = ["Frame", "current", "current_call", "current_guard", "entered", "in_force"]


def current_guard() -> Guard | None:
    """Return the guard that a call from this code is charged to, or None outside of any run."""
    frame = current()
    return None if frame is None else frame.guard


def current_call() -> Admit | None:
    """Return the admitted call that this code is the body of, or None outside of any.

    A tool finds its `idempotency_key` here, and in `call.guard.cancellation` the token that tells
    it to stop.
    """
    frame = current()
    return None if frame is None or frame.call is None else frame.call.ticket


class entered:
    """Make a frame the current one in this block. Used once."""

    __slots__ = ("_frame", "_token")

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._token: Token[Frame | None]

    def __enter__(self) -> Frame:
        self._token = FRAME.set(self._frame)
        return self._frame

    def __exit__(self, *_: object) -> None:
        FRAME.reset(self._token)


def housekeeping_for(guard: Guard) -> Guard:
    """Return the guard of the housekeeping that this code does for a run, or the run's own."""
    frame = FRAME.get()
    while frame is not None:
        keeper: Guard = frame.guard
        if keeper.is_housekeeping and keeper.keeps_house_for(guard):
            return keeper
        frame = frame.above
    return guard


def in_force(frame: Frame | None) -> list[Guard]:
    """List the guards that every call in a frame is charged to, the innermost first.

    None of them is charged through another one: an ancestor of a listed guard is left out.
    """
    guards: list[Guard] = []
    while frame is not None:
        if frame.is_live:
            run = frame.run
            for guard in (frame.guard,) if run is None else (frame.guard, *run.guards):
                if not any(guard in one.lineage for one in guards):
                    guards.append(guard)
            if run is not None:
                # A run was opened within all that is around it.
                break
        frame = frame.above
    return guards
