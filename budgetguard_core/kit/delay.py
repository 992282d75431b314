"""The wait of a call that its run's breakers hold back: for the pace, a rate limit or a place.

The guard never waits: it says when a call may start. Who makes the call waits here, outside of any
lock, no longer than its run may last, and not at all once the run is aborted.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol

from budgetguard_core.breakers.refusal import refusal
from budgetguard_core.decision import NOT_EXECUTED
from budgetguard_core.kit.calls import OpenModelCall, OpenToolCall
from budgetguard_core.stop import StopReason, Trip


class Waiting(Protocol):
    """The part of a run that a waiting call needs."""

    @property
    def has_to_end(self) -> bool:
        """True if the run was aborted or its deadline has passed."""
        ...

    def time_left(self) -> float | None:
        """Seconds until the nearest deadline; None without one."""
        ...

    def on_abort(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call back once when the run is aborted; the answer takes that back."""
        ...

    def check(self) -> Trip | None:
        """Ask whether the run has to end now."""
        ...

    def withdrawn(self, call: OpenToolCall) -> None:
        """Take back a tool call that did not start."""
        ...

    def take_back(self, call: OpenModelCall) -> None:
        """Take back a model call that was not made."""
        ...


def starts_at_once(run: Waiting, call: OpenModelCall | OpenToolCall) -> bool:
    """Return whether there is nothing to wait for, as for nearly every call."""
    for ticket in call.tickets:
        if ticket.holds and ticket.breakers is not None:
            return False
    # A tool call may start long after the admission of its batch, so it is asked anew.
    return isinstance(call, OpenModelCall) or not run.has_to_end


def wait(run: Waiting, call: OpenModelCall | OpenToolCall) -> Trip | None:
    """Wait until a call may start, in this thread.

    Returns:
        Why the run ended meanwhile: the call was taken back. None otherwise.
    """
    if _to_wait(run, call, _nobody) > 0:
        woken = threading.Event()
        forget = run.on_abort(woken.set)
        try:
            while (seconds := _to_wait(run, call, woken.set)) > 0:
                woken.wait(seconds)
                woken.clear()
        finally:
            forget()
    return _trip_of(run, call)


async def wait_async(run: Waiting, call: OpenModelCall | OpenToolCall) -> Trip | None:
    """Wait until a call may start, in this task; as `wait`. Cancelled, it takes the call back."""
    if _to_wait(run, call, _nobody) <= 0:
        return _trip_of(run, call)
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()

    def wake() -> None:
        # Comes from any thread, also when the loop is over.
        if not loop.is_closed():
            loop.call_soon_threadsafe(woken.set)

    forget = run.on_abort(wake)
    try:
        while (seconds := _to_wait(run, call, wake)) > 0:
            try:
                async with asyncio.timeout(seconds):
                    await woken.wait()
            except TimeoutError:
                continue
            woken.clear()
    except asyncio.CancelledError:
        _take_back(run, call)
        raise
    finally:
        forget()
    return _trip_of(run, call)


def _nobody() -> None:
    """Wake nobody."""


def _to_wait(run: Waiting, call: OpenModelCall | OpenToolCall, wake: Callable[[], object]) -> float:
    """Return for how many seconds to wait before looking again; 0 when there is nothing to do."""
    seconds = 0.0
    for ticket in call.tickets:
        held = ticket.breakers
        if held is None:
            continue
        now = ticket.guard.tree.clock.monotonic_ns()
        seconds = max(seconds, (held.start_ns - now) / 1e9)
        place = held.queued
        if place is not None:
            place.wake = wake
            if place.granted:
                continue
            if now >= place.wait_until_ns and isinstance(call, OpenToolCall):
                _refuse(run, call)
                return 0
            seconds = max(seconds, (place.wait_until_ns - now) / 1e9)
    if seconds <= 0:
        return 0
    if run.has_to_end:
        return 0
    left = run.time_left()
    return seconds if left is None else min(seconds, left)


def _trip_of(run: Waiting, call: OpenModelCall | OpenToolCall) -> Trip | None:
    """Look whether the run ended while the call waited."""
    if not run.has_to_end:
        return None
    trip = run.check()
    if trip is not None:
        _take_back(run, call)
        if isinstance(call, OpenToolCall):
            call.refuse(NOT_EXECUTED, trip.reason, trip.detail, trip=trip)
    return trip


def _refuse(run: Waiting, call: OpenToolCall) -> None:
    """Turn a tool call away that got no place in time; the run goes on."""
    run.withdrawn(call)
    call.refuse(
        refusal("busy", call.call.name), StopReason.VELOCITY, "no place became free in time"
    )


def _take_back(run: Waiting, call: OpenModelCall | OpenToolCall) -> None:
    if isinstance(call, OpenToolCall):
        run.withdrawn(call)
    else:
        run.take_back(call)
