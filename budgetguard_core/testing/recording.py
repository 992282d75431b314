"""Which parts of a scenario a driver used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Recorded:
    """Remembers which of its attributes were read since it was made."""

    __slots__ = ("_parts_read",)
    _parts_read: set[str]

    def __init__(self) -> None:
        self._forget()

    def __post_init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        # Also for frozen dataclasses.
        object.__setattr__(self, "_parts_read", set())

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.startswith("_"):
            object.__getattribute__(self, "_parts_read").add(name)
        return value


def parts_read(thing: Recorded) -> frozenset[str]:
    """Name the parts that were read."""
    return frozenset(object.__getattribute__(thing, "_parts_read"))


def part(thing: Recorded, name: str) -> Any:
    """Read a part without leaving a trace."""
    return object.__getattribute__(thing, name)


def unread(things: Iterable[Recorded], name: str, unset: Any) -> bool:
    """Return whether a part is set in some of these things, and was read in none of those."""
    having = [thing for thing in things if part(thing, name) != unset]
    return bool(having) and not any(name in parts_read(thing) for thing in having)
