"""Blocks of code that a guard bounds, and those of work about a run that is no part of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from budgetguard_core.budget import Budget
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.frame import FRAME, Frame, current, innermost
from budgetguard_core.threads import THREADS

if TYPE_CHECKING:
    from budgetguard_core.guard import Guard

_G = TypeVar("_G", bound="Guard")
_Owner = TypeVar("_Owner", bound="Guard")
_LOG: Final = logging.getLogger("budgetguard")
_NOTHING_ADMITTED: Final = (
    "guard.activate(): no call was admitted in the block, so nothing in it was bounded. Import the "
    "adapter of your framework before the block, or give the run to the adapter itself; raw "
    "clients need budgetguard_http.install()."
)


@contextmanager
def activated(guard: _G) -> Generator[_G]:
    """Bound every run of every adapter in a block by a guard (`Guard.activate`)."""
    before = _starts(guard)
    token = FRAME.set(Frame(guard, parent=innermost()))
    block = THREADS.open_block()
    try:
        yield guard
    finally:
        THREADS.closed(block)
        FRAME.reset(token)
    # In a run that was stopped before, nothing is admitted because it is bounded.
    if _starts(guard) == before and guard.trip is None and guard.mode != "off":
        _LOG.warning(_NOTHING_ADMITTED)


def _starts(guard: Guard) -> int:
    used = guard.usage
    return used.model_calls + used.tool_calls


class Housekeeping(Generic[_G]):
    """A block of code that the deadline of the run around it does not bind, but one of its own.

    With `async with`, what the block awaits is cancelled when its time is over, and the block ends
    with `TimeoutError`. With `with`, no further model call starts then: an adapter raises
    `TimeoutError`, and a call in flight has its own limit in `Admit.seconds`.

    Args:
        make: Makes the guard that the block's calls are charged to, a child of the run's.
        seconds: How long the block may take.
        answers_for: The id of the stopped run whose last answer it is, if it is one.
    """

    def __init__(
        self, make: Callable[[], _G], seconds: float, *, answers_for: str | None = None
    ) -> None:
        self._make = make
        self._seconds = seconds
        self._answers_for = answers_for

    @staticmethod
    def of(guard: _Owner, seconds: float) -> Housekeeping[_Owner]:
        """Return a block of a run's housekeeping (`Guard.housekeeping`)."""
        try:
            caps = Budget(max_seconds=seconds, loop_detection=None)
        except ConfigurationError:
            caps = None
        if caps is None or caps.max_seconds is None:
            raise ConfigurationError(
                f"seconds must be a number of seconds > 0, got {seconds!r}. Use seconds=30."
            )
        return Housekeeping(lambda: guard.child(caps), caps.max_seconds)

    def __enter__(self) -> _G:
        """Begin; the time starts now."""
        outer = current()
        self._waiting = _enclosing_calls(outer)
        self._guard = self._make()
        self._guard.start()
        self._guard.clock.begin_housekeeping(self._waiting, answers_for=self._answers_for)
        # Its calls are none of the call around it, which is a turn or a tool of the run.
        run, parent = (None, None) if outer is None else (outer.run, outer.parent)
        if outer is not None and run is None:
            parent = outer
        self._token = FRAME.set(Frame(self._guard, run=run, parent=parent))
        return self._guard

    def __exit__(self, *_: object) -> None:
        """End: the run's time counts again."""
        FRAME.reset(self._token)
        self._guard.clock.end_housekeeping(self._waiting)

    async def __aenter__(self) -> _G:
        """Begin, and watch the time."""
        import asyncio

        guard = self.__enter__()
        self._limit = asyncio.timeout(guard.time_left())
        await self._limit.__aenter__()
        return guard

    async def __aexit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        """End; a block that was cut ends with `TimeoutError`."""
        self.__exit__()
        try:
            await self._limit.__aexit__(kind, *error)
        except TimeoutError:
            raise TimeoutError(late(self._seconds)) from None


def late(seconds: float | None) -> str:
    """Record that housekeeping was cut."""
    return f"housekeeping must end within {seconds} seconds, and did not. Give it more seconds."


def _enclosing_calls(frame: Frame | None) -> list[Any]:
    """List the admissions of the calls in whose bodies this code runs."""
    tickets: list[Any] = []
    while frame is not None:
        if frame.call is not None:
            tickets += frame.call.tickets
        frame = frame.parent
    return tickets
