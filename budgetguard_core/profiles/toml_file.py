"""A TOML file whose keys know their lines, so that an error can say where it is."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from budgetguard_core.errors import ConfigurationError

_LARGEST = 2**20


class TomlFile:
    """The content of a TOML file, as plain data; what makes no sense is refused with its line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                raw = file.read(_LARGEST + 1)
            self._text = raw.decode("utf-8-sig")
        except OSError as error:
            raise ConfigurationError(
                f"{path}: {error.strerror}. Name a file that can be read."
            ) from None
        except UnicodeDecodeError:
            raise ConfigurationError(f"{path}: must be UTF-8. Save it as UTF-8.") from None
        if len(raw) > _LARGEST:
            raise ConfigurationError(f"{path}: must have at most {_LARGEST} bytes, got more.")
        try:
            self.content: dict[str, Any] = tomllib.loads(self._text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigurationError(f"{path}: must be TOML, got {error}.") from None

    def line_of(self, key: Sequence[str]) -> int | None:
        """Return the line on which a key is defined, or the nearest table around it; from 1."""
        for length in range(len(key), 0, -1):
            found = self._line_of(key[:length])
            if found is not None:
                return found
        return None

    def error(self, key: Sequence[str], problem: str) -> ConfigurationError:
        """Return the error for a key: file, line, key, problem."""
        line = self.line_of(key)
        where = str(self.path) if line is None else f"{self.path}:{line}"
        return ConfigurationError(f"{where}: {'.'.join(key)} {problem}")

    def _line_of(self, key: Sequence[str]) -> int | None:
        # The parser tells no places. A key stands where the shortest beginning of the file ends
        # that holds it; beginnings that end within a value are no TOML. Slow, and exact.
        lines = self._text.splitlines(keepends=True)
        readable = 0
        for count in range(1, len(lines) + 1):
            try:
                content = tomllib.loads("".join(lines[:count]))
            except tomllib.TOMLDecodeError:
                continue
            if _holds(content, key):
                return readable + 1
            readable = count
        return None


def _holds(content: object, key: Sequence[str]) -> bool:
    for name in key:
        if not isinstance(content, dict) or name not in content:
            return False
        content = cast("dict[str, object]", content)[name]
    return True
