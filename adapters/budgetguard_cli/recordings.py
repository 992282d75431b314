"""The files of recorded runs that a command reads, and what is wrong with them."""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from budgetguard_cli.lines import Line, Problem, read_lines
from budgetguard_cli.terminal import complain, printable
from budgetguard_core import Event

STDIN = "-"
NO_START = "the run of this event has no start in this file."

_MOST_SAID = 20
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)
# One line is one document; its only line is not the file's.
_PLACE_IN_JSON = re.compile(r"at line \d+ column (\d+)")

_Found = TypeVar("_Found")


class Unreadable(Exception):
    """A file cannot be opened, or holds nothing that can be used."""


def is_there(path: str | Path) -> bool:
    """Tell whether there is a file or a folder; none has a name that is too long, or out of reach.

    `Path.exists` raises there.
    """
    try:
        Path(path).stat()
    except (OSError, ValueError):
        return False
    return True


def readable(names: Sequence[str]) -> list[str]:
    """Return the files that are named, with the logs (`*.jsonl*`) of a folder in its place.

    Each once, also where a link names it again: its runs would count twice. None is opened: a pipe
    can be opened only once.

    Raises:
        Unreadable: A file does not exist or may not be read, or a folder has no log.
    """
    files: list[str] = []
    for name in names:
        try:
            mode = (os.fstat(0) if name == STDIN else Path(name).stat()).st_mode
        except (OSError, ValueError) as error:
            raise _unreadable(name, getattr(error, "strerror", str(error))) from None
        if name != STDIN and not os.access(name, os.R_OK):
            raise _unreadable(name, "Permission denied")
        if not stat.S_ISDIR(mode):
            files.append(name)
        elif logs := [one for one in Path(name).glob("*.jsonl*") if not one.is_dir()]:
            files += map(str, sorted(logs, key=by_leg))
        else:
            msg = f"{printable(name)} holds no log (*.jsonl). Name a folder that does."
            raise Unreadable(msg)
    once: dict[str, str] = {}
    for file in files:
        once.setdefault(file if file == STDIN else os.path.realpath(file), file)
    return list(once.values())


def by_leg(log: Path) -> tuple[int, str]:
    """Sort the logs of one run as it went on: `RUN.jsonl` before `RUN-1795402199.jsonl`."""
    name = log.name.partition(".jsonl")[0]
    return len(name), name


def opened(file: str) -> io.BufferedReader:
    """Open a file, or the standard input.

    Raises:
        Unreadable: It cannot be read.
    """
    try:
        # By its number, because the standard input may be closed and then has no object.
        return os.fdopen(0, "rb", closefd=False) if file == STDIN else Path(file).open("rb")
    except OSError as error:
        raise _unreadable(file, error.strerror) from None


class Reading:
    """Reads files, and says which of their lines could not be read.

    Args:
        errors: Where it is said.

    Attributes:
        problems: How many lines could not be read.
    """

    def __init__(self, errors: Console) -> None:
        self._errors = errors
        self.problems = 0

    def files(
        self,
        files: Iterable[str],
        read: Callable[[Iterator[Line | Problem]], Iterable[_Found | Problem]],
    ) -> Iterator[_Found]:
        """Read files one after the other.

        Args:
            files: Their names.
            read: Finds in the lines of one file what is looked for.

        Raises:
            Unreadable: A file went away since `readable` looked at it.
        """
        for file in files:
            with opened(file) as raw:
                yield from self.without_problems(file, read(read_lines(raw)))

    def into(
        self,
        take: Callable[[Iterator[Line | Problem]], Iterable[Problem]],
        files: Iterable[str],
    ) -> None:
        """Have files read by what keeps what it finds, and gives what it could not read.

        Raises:
            Unreadable: As `files` does.
        """
        nothing: Iterator[None] = self.files(files, take)
        for _ in nothing:
            pass

    def without_problems(self, file: str, found: Iterable[_Found | Problem]) -> Iterator[_Found]:
        """Pass on what is no problem; of the problems of a file, the first 20 are said."""
        shown, count, complaint = printable(file), 0, ""
        for one in found:
            if not isinstance(one, Problem):
                yield one
                continue
            count += 1
            self.problems += 1
            complaint = f"{shown}:{one.line}: {printable(one.reason)}"
            if count <= _MOST_SAID:
                complain(self._errors, complaint)
        if count > _MOST_SAID:
            # The last one tells where a damaged file ends.
            more = f"{count - _MOST_SAID:,} more lines cannot be read, the last of them:"
            complain(self._errors, f"{shown}: {more}")
            complain(self._errors, complaint)


def read_event(line: Line) -> Event | Problem | None:
    """Read a line of an event log; None for half a line at its end, as a killed process leaves."""
    try:
        return _EVENT.validate_json(line.data.strip())
    except ValidationError as error:
        return None if line.last else Problem(line.number, reason(error))


def reason(error: ValidationError) -> str:
    """Say what is wrong with a line without repeating more of it than the name of an event."""
    problem = error.errors(include_url=False, include_input=False)[0]
    # A step of a trajectory has a tag of its own.
    is_event = not problem["loc"]
    if is_event and problem["type"] == "union_tag_not_found":
        return "it has no field `event`. Name an event log of BudgetGuard's."
    if is_event and problem["type"] == "union_tag_invalid":
        event = str(problem.get("ctx", {}).get("tag"))[:80]
        return f"this release knows no event {event!r}. Read it with the one that wrote it."
    place = ".".join(str(part) for part in problem["loc"])[:200]
    message = _PLACE_IN_JSON.sub(r"at character \1", problem["msg"])
    return f"{place}: {message}." if place else f"{message}."


def _unreadable(file: str, reason: str | None) -> Unreadable:
    msg = f"{printable(file)}: {reason}. Name a file that can be read, or - for standard input."
    return Unreadable(msg)
