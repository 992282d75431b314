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


class Lines:
    """Events as lines of JSON, each written in whole."""

    torn = False
    """The last line is a half one, as a killed process or a full disk leaves it."""

    def write(self, event: Event, write: Callable[[bytes], int]) -> None:
        """Write an event's line; a half one before it does not swallow it."""
        line = f"{line_of(event)}\n".encode()
        if self.torn:
            line = b"\n" + line
        self.torn = True
        while line:
            line = line[write(line) :]
        self.torn = False


class JsonLinesSink(Lines):
    """A trajectory log: one JSON object a line, appended to a file.

    Each line reaches the operating system at once, so a killed process loses none; `flush` also
    makes the disk write it. Arguments and results appear as hashes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file: IO[bytes] = Path(path).open("a+b", buffering=0)  # noqa: SIM115 - closed by close()
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            self.torn = self._file.read(1) != b"\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def emit(self, event: Event) -> None:
        """Append the event's line."""
        self.write(event, self._file.write)

    def flush(self) -> None:
        """Write what was appended to the disk (fsync)."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; the sink cannot be used after it. Leaving a `with` block does it too."""
        self._file.close()


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
