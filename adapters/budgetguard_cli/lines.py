"""The lines of a recording, whatever the file holds, in a bounded amount of memory."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from typing import NamedTuple

LONGEST_LINE = 8 * 2**20
"""Bytes of one line, unpacked. A longer one is no recording of a run and is not held in memory."""

_GZIP = b"\x1f\x8b"
_SKIPPED_AT_ONCE = 2**20


class Line(NamedTuple):
    """One line that is not empty."""

    number: int
    """From 1, empty lines counted."""
    data: bytes
    last: bool
    """The line has no end: the file stops in it."""


class Problem(NamedTuple):
    """A line that says nothing, and why."""

    line: int
    reason: str


def read_lines(file: io.BufferedReader) -> Iterator[Line | Problem]:
    """Read a file or a pipe line by line, unpacked where it is gzip, whatever its name says."""
    try:
        packed = file.peek(len(_GZIP)).startswith(_GZIP)
    except OSError as error:
        yield Problem(1, f"{error.strerror or error}; the file is not read.")
        return
    yield from _lines(gzip.GzipFile(fileobj=file) if packed else file)


def _lines(stream: io.BufferedReader | gzip.GzipFile) -> Iterator[Line | Problem]:
    number = 0
    while True:
        number += 1
        try:
            data = stream.readline(LONGEST_LINE + 1)
            too_long = len(data) > LONGEST_LINE
            end = data
            while too_long and end and not end.endswith(b"\n"):
                data = b""
                end = stream.readline(_SKIPPED_AT_ONCE)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield Problem(number, f"damaged gzip ({error}); the rest of the file is not read.")
            return
        except OSError as error:
            yield Problem(number, f"{error.strerror or error}; the rest of the file is not read.")
            return
        if too_long:
            yield Problem(number, f"a line must have at most {LONGEST_LINE} bytes, got more.")
            continue
        if not data:
            return
        if number == 1:
            # Editors and shells of Windows begin a file with it.
            data = data.removeprefix(codecs.BOM_UTF8)
        if data.strip():
            yield Line(number, data, last=not data.endswith(b"\n"))
