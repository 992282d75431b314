"""The run around the code that runs, and the call that is open in it."""

from __future__ import annotations

from contextvars import Token

from budgetguard_core.decision import Admit
from budgetguard_core.frame import FRAME, Frame, current
from budgetguard_core.guard import Guard
from budgetguard_core.kit.calls import OpenModelCall

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
        if keeper.clock.is_housekeeping and keeper.clock.keeps_house_for(guard):
            return keeper
        frame = frame.parent
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
                if not any(guard in one.ancestry for one in guards):
                    guards.append(guard)
            if run is not None:
                # A run was opened within all that is around it.
                break
        frame = frame.parent
    return guards


def inside_a_run(frame: Frame | None) -> bool:
    """Return whether a frame is within a run that somebody ends."""
    while frame is not None:
        if frame.is_live and frame.run is not None and not frame.run.is_loose:
            return True
        frame = frame.parent
    return False


def open_model_call() -> OpenModelCall | None:
    """Return the call of a layer above that this code makes; None where it makes one of its own.

    Where a framework has several of a run open before it sends the first (the prompts of one
    `generate`), it is one that no layer below has seen yet.
    """
    frame = innermost = current()
    while frame is not None and innermost is not None and frame.run is innermost.run:
        call = frame.call
        if not (isinstance(call, OpenModelCall) and call.is_open):
            break
        if not call.seen:
            return call
        frame = frame.parent
    call = None if innermost is None else innermost.call
    return call if isinstance(call, OpenModelCall) and call.is_open else None
