"""What is known of objects of others, for as long as they live."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

_V = TypeVar("_V")


class ByIdentity(Generic[_V]):
    """A dictionary whose keys are told apart by identity and not kept alive.

    Users' agents and nodes may be equal to one another, or have no hash, as dataclasses have none.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Any], _V]] = {}

    def get(self, key: Any) -> _V | None:
        """Return what is known of an object, or None."""
        found = self._values.get(id(key))
        return None if found is None or found[0]() is not key else found[1]

    def set(self, key: Any, value: _V) -> None:
        """Note something of an object, until it is gone."""
        values, number = self._values, id(key)
        values[number] = (weakref.ref(key, lambda _: values.pop(number, None)), value)

    def pop(self, key: Any) -> _V | None:
        """Forget an object, and return what was known of it, or None."""
        found = self._values.pop(id(key), None)
        return None if found is None else found[1]


def is_a(target: object, *kinds: type[Any]) -> bool:
    """Return whether an object is an instance by its own type; a mock only claims to be one."""
    return issubclass(type(target), kinds)
