"""`BUDGETGUARD_LOG=folder`: the trajectory log of every run, without a line of code."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from urllib.parse import quote

from budgetguard_core.events import Event, RunStarted
from budgetguard_core.sinks import Lines, Sink

FOLDER = "BUDGETGUARD_LOG"
"""The environment variable that names the folder."""

_NAME_LENGTH = 100


class RunLog(Lines):
    """The log of one run and its sub-agents: a file of its own in a folder, named after the run.

    The file is opened for each event and not kept open: nobody has to close it, however many runs
    there are and however they end. An event is one write at the end of the file, so a reader sees
    whole lines, and a killed process loses none.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._path: Path | None = None

    def emit(self, event: Event) -> None:
        """Append the event's line."""
        if self._path is None:
            if not isinstance(event, RunStarted):
                # It goes on from another process: the number keeps the two apart.
                name = f"{file_name(event.run_id)}-{event.wall_ns}.jsonl"
            else:
                name = f"{file_name(event.run_id)}.jsonl"
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path = self._folder / name
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            self.write(event, partial(os.write, descriptor))
        finally:
            os.close(descriptor)

    def flush(self) -> None:
        """Write what was appended to the disk (fsync)."""
        if self._path is None:
            return
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def followed(
    sinks: Iterable[Sink | Callable[[Event], object]] | None,
) -> list[Sink | Callable[[Event], object]]:
    """Return the sinks of one run, with the log that `BUDGETGUARD_LOG` asks for."""
    if sinks is None:
        return []
    folder = os.environ.get(FOLDER)
    return [*sinks, RunLog(folder)] if folder else [*sinks]


def file_name(run_id: str) -> str:
    """Return the name of a run's log, without its ending."""
    # A run's name may be anything, also a path.
    return quote(run_id, safe="")[:_NAME_LENGTH].lstrip(".") or "run"
