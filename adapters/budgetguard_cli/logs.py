"""The files of recorded runs that a command reads: found, unpacked, and read line by line."""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import typer
from pydantic import TypeAdapter, ValidationError

from budgetguard_cli.screen import printable, refuse
from budgetguard_core.kit import Event

_GZIP = b"\x1f\x8b"
_MOST_SHOWN = 20
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)
# One line is one document; its only line is not the file's.
_POSITION_IN_JSON = re.compile(r"at line \d+ column (\d+)")


class Line(NamedTuple):
    """One line that is not empty.

    Attributes:
        number: From 1, empty lines counted.
        last: The line has no end: the file stops in it.
    """

    number: int
    data: bytes
    last: bool


class Problem(NamedTuple):
    """A line that cannot be used, and why."""

    line: int
    reason: str


def is_there(path: str | Path) -> bool:
    """Return whether there is a file or folder; `Path.exists` raises where a name is too long."""
    try:
        Path(path).stat()
    except (OSError, ValueError):
        return False
    return True


def readable(names: Sequence[str]) -> list[str]:
    """Return the files that are named, with the logs (`*.jsonl*`) of a folder in its place.

    Each once, also where a link names it again: its runs would count twice. None is opened: a pipe
    can be opened only once. Ends the command with 2 where a file does not exist or may not be read,
    or a folder has no log.
    """
    once: dict[str, str] = {}
    for name in names:
        try:
            is_folder, files = stat.S_ISDIR(Path(name).stat().st_mode), [name]
        except (OSError, ValueError) as error:
            _refuse(name, getattr(error, "strerror", str(error)))
        if not os.access(name, os.R_OK):
            _refuse(name, "Permission denied")
        if is_folder:
            logs = [one for one in Path(name).glob("*.jsonl*") if not one.is_dir()]
            files = [str(one) for one in sorted(logs, key=by_attempt)]
            if not files:
                refuse(f"{printable(name)} holds no log (*.jsonl). Name a folder that does.")
        for file in files:
            once.setdefault(os.path.realpath(file), file)
    return list(once.values())


def by_attempt(log: Path) -> tuple[int, str]:
    """Sort the logs of one run as it went on: `RUN.jsonl` before `RUN-1795402199.jsonl`."""
    name = log.name.partition(".jsonl")[0]
    return len(name), name


def read_file(file: str, take: Callable[[str, Line], Problem | None]) -> list[Problem]:
    """Hand out the lines of a file, and return those that cannot be used."""
    problems: list[Problem] = []
    try:
        with Path(file).open("rb") as raw:
            for line in read_lines(raw):
                problem = line if isinstance(line, Problem) else take(file, line)
                problems += [] if problem is None else [problem]
    except OSError as error:
        _refuse(file, error.strerror)
    return problems


def complain(file: str, problems: Sequence[Problem]) -> None:
    """Name the lines of a file that cannot be used: the first 20, and where it ends."""
    lines = [f"{printable(file)}:{line}: {printable(reason)}" for line, reason in problems]
    if len(lines) > _MOST_SHOWN:
        more = f"{len(lines) - _MOST_SHOWN:,} more lines cannot be read, the last of them:"
        lines[_MOST_SHOWN:] = [f"{printable(file)}: {more}", lines[-1]]
    for line in lines:
        typer.echo(line, err=True)


def read_lines(file: io.BufferedReader, number: int = 0) -> Iterator[Line | Problem]:
    """Read a file or a pipe on, behind a line of this number, unpacked where it is gzip."""
    packed = False
    try:
        packed = file.peek(len(_GZIP)).startswith(_GZIP)
        for data in gzip.GzipFile(fileobj=file) if packed else file:
            number += 1
            if data.strip():
                yield Line(number, data, last=not data.endswith(b"\n"))
    except (EOFError, OSError, zlib.error) as error:
        problem = f"damaged gzip ({error})" if packed else str(error)
        yield Problem(number + 1, f"{problem}; the rest of the file is not read.")


def read_event(line: Line) -> Event | Problem | None:
    """Read a line of an event log; None for half a line at its end, as a killed process leaves."""
    try:
        return _EVENT.validate_json(line.data.strip())
    except ValidationError as error:
        return None if line.last else Problem(line.number, reason(error))


def reason(error: ValidationError) -> str:
    """Return what is wrong with a line, with no more of it than the name of an event."""
    problem = error.errors(include_url=False, include_input=False)[0]
    if problem["type"] == "union_tag_not_found":
        return "it has no field `event`. Name an event log of BudgetGuard's."
    if problem["type"] == "union_tag_invalid":
        event = str(problem.get("ctx", {}).get("tag"))[:80]
        return f"this release knows no event {event!r}. Read it with the one that wrote it."
    location = ".".join(str(part) for part in problem["loc"])[:200]
    message = _POSITION_IN_JSON.sub(r"at character \1", problem["msg"])
    return f"{location}: {message}." if location else f"{message}."


def _refuse(file: str, reason: str | None) -> NoReturn:
    refuse(f"{printable(file)}: {reason}. Name a file that can be read.")
