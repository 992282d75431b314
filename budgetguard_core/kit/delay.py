"""The wait of a call that its run's breakers hold back: for the pace, a rate limit or a place.

The guard never waits: it says when a call may start. Who makes the call waits here, outside of any
lock, no longer than its run may last, and not at all once the run is aborted.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from budgetguard_core.breakers import refusal
from budgetguard_core.decision import NOT_EXECUTED
from budgetguard_core.kit.calls import OpenModelCall, OpenToolCall
from budgetguard_core.kit.run import Run
from budgetguard_core.stop import StopReason, Trip


def wait(run: Run, call: OpenModelCall | OpenToolCall) -> Trip | None:
    """Wait until a call may start, in this thread.

    Args:
        run: The run that the call is a part of.
        call: What `Run.model_call` or `Run.batch` returned; ask before its body is started. A tool
            call that gets no place in time is refused: `Run.start` has its result.

    Returns:
        Why the run ended meanwhile: the call was taken back. None otherwise.
    """
    woken = threading.Event()
    forget = run.on_abort(woken.set)
    try:
        while (seconds := _to_wait(run, call, woken.set)) > 0:
            woken.wait(seconds)
            woken.clear()
    finally:
        forget()
    return _trip_of(run, call)


async def wait_async(run: Run, call: OpenModelCall | OpenToolCall) -> Trip | None:
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


def _to_wait(run: Run, call: OpenModelCall | OpenToolCall, wake: Callable[[], object]) -> float:
    """Return for how many seconds to wait before looking again; 0 when there is nothing to do."""
    seconds = 0.0
    for ticket in call.tickets:
        held = ticket.breakers
        if held is None:
            continue
        now = ticket.guard.clock.monotonic_ns()
        seconds = max(seconds, (held.start_ns - now) / 1e9)
        place = held.queued
        if place is not None:
            place.on_granted(wake)
            if place.granted:
                continue
            if now >= place.wait_until_ns and isinstance(call, OpenToolCall):
                _refuse(run, call)
                return 0
            seconds = max(seconds, (place.wait_until_ns - now) / 1e9)
    if seconds <= 0:
        return 0
    left = run.time_left()
    if run.aborted or left == 0:
        return 0
    return seconds if left is None else min(seconds, left)


def _trip_of(run: Run, call: OpenModelCall | OpenToolCall) -> Trip | None:
    """Look whether the run ended while the call waited."""
    if not (run.aborted or run.time_left() == 0):
        return None
    trip = run.check()
    if trip is not None:
        _take_back(run, call)
        if isinstance(call, OpenToolCall):
            call.state = "refused"
            call.refusal, call.reason, call.trip = NOT_EXECUTED, trip.reason, trip
    return trip


def _refuse(run: Run, call: OpenToolCall) -> None:
    """Turn a tool call away that got no place in time; the run goes on."""
    run.withdrawn(call)
    call.state = "refused"
    call.refusal = refusal("busy", call.call.name)
    call.reason = StopReason.VELOCITY


def _take_back(run: Run, call: OpenModelCall | OpenToolCall) -> None:
    if isinstance(call, OpenToolCall):
        run.withdrawn(call)
    else:
        run.unmade(call)
