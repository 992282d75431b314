"""The wait of a call that its run's breakers hold back: for the pace, a rate limit or a place.

The guard never waits: it says when a call may start. Who makes the call waits here, outside of any
lock, no longer than its run may last, and not at all once the run is aborted. The `Run`, which
imports this, is not typed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from budgetguard_core.breakers.refusal import refusal
from budgetguard_core.decision import NOT_EXECUTED
from budgetguard_core.kit.calls import OpenModelCall, OpenToolCall
from budgetguard_core.kit.flow import Flow, Step
from budgetguard_core.stop import StopReason, Trip


class Bell:
    """Wakes whoever waits for it, in a thread or on an event loop; rung from any thread."""

    def __init__(self) -> None:
        self._rung = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awaited: asyncio.Event

    def ring(self) -> None:
        """Wake it."""
        self._rung.set()
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._awaited.set)

    def heard(self, seconds: float) -> Step:
        """Return the step that waits for it, so many seconds at most."""

        def blocking() -> None:
            self._rung.wait(seconds)
            self._rung.clear()

        async def awaited() -> None:
            self._awaited = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            if not self._rung.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._awaited.wait()
            self._rung.clear()

        return Step(blocking, awaited)


def starts_at_once(run: Any, call: OpenModelCall | OpenToolCall) -> bool:
    """Return whether there is nothing to wait for, as for nearly every call."""
    for ticket in call.tickets:
        if ticket.holds and ticket.breakers is not None:
            return False
    # A tool call may start long after the admission of its batch, so it is asked anew.
    return isinstance(call, OpenModelCall) or not run.has_to_end


def waited(run: Any, call: OpenModelCall | OpenToolCall) -> Flow[Trip | None]:
    """Wait until a call may start; one that is cancelled meanwhile is taken back.

    Returns:
        Why the run ended meanwhile: the call was taken back. None otherwise.
    """
    if _to_wait(run, call, _nobody) > 0:
        bell = Bell()
        forget = run.on_abort(bell.ring)
        try:
            while (seconds := _to_wait(run, call, bell.ring)) > 0:
                yield bell.heard(seconds)
        except BaseException:
            _take_back(run, call)
            raise
        finally:
            forget()
    return _trip_of(run, call)


def _nobody() -> None:
    """Wake nobody."""


def _to_wait(run: Any, call: OpenModelCall | OpenToolCall, wake: Callable[[], object]) -> float:
    """Return for how many seconds to wait before looking again; 0 when there is nothing to do."""
    seconds = 0.0
    for ticket in call.tickets:
        held = ticket.breakers
        if held is None:
            continue
        now = ticket.guard.tree.clock.monotonic_ns()
        seconds = max(seconds, (held.start_ns - now) / 1e9)
        slot = held.queued
        if slot is not None:
            slot.wake = wake
            if slot.granted:
                continue
            if now >= slot.wait_until_ns and isinstance(call, OpenToolCall):
                _refuse(run, call)
                return 0
            seconds = max(seconds, (slot.wait_until_ns - now) / 1e9)
    if seconds <= 0:
        return 0
    if run.has_to_end:
        return 0
    remaining = run.time_left()
    return seconds if remaining is None else min(seconds, remaining)


def _trip_of(run: Any, call: OpenModelCall | OpenToolCall) -> Trip | None:
    """Look whether the run ended while the call waited."""
    if not run.has_to_end:
        return None
    trip: Trip | None = run.check()
    if trip is not None:
        _take_back(run, call)
        if isinstance(call, OpenToolCall):
            call.refuse(NOT_EXECUTED, trip.reason, trip.detail, trip=trip)
    return trip


def _refuse(run: Any, call: OpenToolCall) -> None:
    """Turn a tool call away that got no place in time; the run goes on."""
    run.withdrawn(call)
    call.refuse(
        refusal("busy", call.call.name), StopReason.VELOCITY, "no place became free in time"
    )


def _take_back(run: Any, call: OpenModelCall | OpenToolCall) -> None:
    if isinstance(call, OpenToolCall):
        run.withdrawn(call)
    else:
        run.take_back(call)
