"""The files of recorded runs that a command reads: found, unpacked, and read line by line."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from budgetguard_cli.screen import printable
from budgetguard_core.kit import Event

STDIN = "-"
LONGEST_LINE = 8 * 2**20
"""Bytes of one line, unpacked. A longer one is no event of a run and is not held in memory."""

_GZIP = b"\x1f\x8b"
_SKIPPED_AT_ONCE = 2**20
_MOST_SHOWN = 20
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)
# One line is one document; its only line is not the file's.
_PLACE_IN_JSON = re.compile(r"at line \d+ column (\d+)")


class Unreadable(Exception):
    """A file cannot be opened, or holds nothing that can be used."""


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
    """Return whether there is a file or folder; none has a name that is too long, or out of reach.

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
    once: dict[str, str] = {}
    for name in names:
        try:
            mode = (os.fstat(0) if name == STDIN else Path(name).stat()).st_mode
        except (OSError, ValueError) as error:
            raise _unreadable(name, getattr(error, "strerror", str(error))) from None
        if name != STDIN and not os.access(name, os.R_OK):
            raise _unreadable(name, "Permission denied")
        files = [name]
        if stat.S_ISDIR(mode):
            logs = [one for one in Path(name).glob("*.jsonl*") if not one.is_dir()]
            files = [str(one) for one in sorted(logs, key=by_attempt)]
            if not files:
                msg = f"{printable(name)} holds no log (*.jsonl). Name a folder that does."
                raise Unreadable(msg)
        for file in files:
            once.setdefault(file if file == STDIN else os.path.realpath(file), file)
    return list(once.values())


def by_attempt(log: Path) -> tuple[int, str]:
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


def read_files(
    files: Iterable[str],
    take: Callable[[str, Line], Problem | None],
    errors: Console,
) -> int:
    """Read files line by line, and name the lines that cannot be used, the first 20 of each.

    Args:
        files: Their names.
        take: Takes a line of a file.
        errors: Where they are named.

    Returns:
        How many lines could not be used.

    Raises:
        Unreadable: A file went away since `readable` looked at it.
    """
    problems = 0
    for file in files:
        count, complaint = 0, ""
        with opened(file) as raw:
            for line in read_lines(raw):
                problem = line if isinstance(line, Problem) else take(file, line)
                if problem is not None:
                    count += 1
                    complaint = f"{printable(file)}:{problem.line}: {printable(problem.reason)}"
                    if count <= _MOST_SHOWN:
                        _complain(errors, complaint)
        if count > _MOST_SHOWN:
            # The last one tells where a damaged file ends.
            more = f"{count - _MOST_SHOWN:,} more lines cannot be read, the last of them:"
            _complain(errors, f"{printable(file)}: {more}")
            _complain(errors, complaint)
        problems += count
    return problems


def _complain(errors: Console, text: str) -> None:
    errors.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def read_lines(file: io.BufferedReader, number: int = 0) -> Iterator[Line | Problem]:
    """Read a file or a pipe line by line, unpacked where it is gzip, whatever its name says.

    Args:
        file: What is read from where it stands.
        number: Of the line before.
    """
    try:
        packed = file.peek(len(_GZIP)).startswith(_GZIP)
        stream = gzip.GzipFile(fileobj=file) if packed else file
        while True:
            number += 1
            data = stream.readline(LONGEST_LINE + 1)
            if len(data) > LONGEST_LINE:
                while data and not data.endswith(b"\n"):
                    data = stream.readline(_SKIPPED_AT_ONCE)
                yield Problem(number, f"a line must have at most {LONGEST_LINE} bytes, got more.")
                continue
            if not data:
                return
            if number == 1:
                # Editors and shells of Windows begin a file with it.
                data = data.removeprefix(codecs.BOM_UTF8)
            if data.strip():
                yield Line(number, data, last=not data.endswith(b"\n"))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        yield Problem(number, f"damaged gzip ({error}); the rest of the file is not read.")
    except OSError as error:
        yield Problem(number, f"{error.strerror or error}; the rest of the file is not read.")


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
    place = ".".join(str(part) for part in problem["loc"])[:200]
    message = _PLACE_IN_JSON.sub(r"at character \1", problem["msg"])
    return f"{place}: {message}." if place else f"{message}."


def _unreadable(file: str, reason: str | None) -> Unreadable:
    msg = f"{printable(file)}: {reason}. Name a file that can be read, or - for standard input."
    return Unreadable(msg)
