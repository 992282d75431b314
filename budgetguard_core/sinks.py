"""The sinks of events: a function, a file of JSON lines, the standard library's logging."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol, Self, runtime_checkable

from budgetguard_core.events import (
    Aborted,
    CircuitBreakerChanged,
    Event,
    LimitNearlyReached,
    ToolMixUnusual,
    TripObserved,
    Tripped,
)
from budgetguard_core.records import line_of

_WARNINGS = (
    LimitNearlyReached,
    CircuitBreakerChanged,
    ToolMixUnusual,
    Tripped,
    TripObserved,
    Aborted,
)


@runtime_checkable
class Sink(Protocol):
    """Something that takes events. It may raise: that is reported and changes nothing."""

    def emit(self, event: Event) -> None:
        """Take one event."""
        ...

    def flush(self) -> None:
        """Return only when everything taken is safe, as a log on the disk (fsync)."""
        ...


class Listener:
    """A plain callable as a sink."""

    def __init__(self, function: Callable[[Event], object]) -> None:
        # The function itself: each event saves a call.
        self.emit: Any = function

    def flush(self) -> None:
        """Do nothing: a callable keeps nothing back."""


class JsonLinesSink:
    """A trajectory log: one JSON object a line, appended to a file.

    Each line reaches the operating system at once, so a killed process loses none; `flush` also
    makes the disk write it. Arguments and results appear as hashes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file: IO[bytes] = Path(path).open("a+b", buffering=0)  # noqa: SIM115 - closed by close()
        # A killed process, or a full disk, leaves half a line that must not swallow the next one.
        self._torn = self._ends_in_half_a_line()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def emit(self, event: Event) -> None:
        """Append the event's line."""
        line = (line_of(event) + "\n").encode()
        if self._torn:
            line = b"\n" + line
        self._torn = True
        left = len(line) - self._file.write(line)
        while left:
            left -= self._file.write(line[-left:])
        self._torn = False

    def flush(self) -> None:
        """Write what was appended to the disk (fsync)."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; the sink cannot be used after it. Leaving a `with` block does it too."""
        self._file.close()

    def _ends_in_half_a_line(self) -> bool:
        size = self._file.seek(0, os.SEEK_END)
        if size == 0:
            return False
        self._file.seek(size - 1)
        return self._file.read(1) != b"\n"


class LoggingSink:
    """Events as records of the standard library's logging: trips and warnings as WARNING."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("budgetguard")

    def emit(self, event: Event) -> None:
        """Log one event; its fields are JSON, so no name in it can forge a line."""
        level = logging.WARNING if isinstance(event, _WARNINGS) else logging.DEBUG
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s %s", event.event, line_of(event))

    def flush(self) -> None:
        """Flush the logger's own handlers."""
        for handler in self._logger.handlers:
            handler.flush()
