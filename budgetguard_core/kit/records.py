"""Plain data and objects of any SDK, read the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Final, TypeGuard, cast

from pydantic import BaseModel

MODEL: Final = type(BaseModel)
"""The class of nearly every model's class."""
# `type`, for values that nothing is known of: the type checkers follow it no further.
kind_of: Callable[[Any], Any] = type
# A tuple, because a union is made anew at each call.
_NAMELESS: Final = (str, int, float, bytes, list, type, type(None))


def is_model(value: object) -> TypeGuard[BaseModel]:
    """Return whether something is a model of pydantic's, which is slow to say so itself."""
    return type(type(value)) is MODEL or isinstance(value, BaseModel)


def part(record: object, name: str) -> Any:
    """Return an item of a mapping or an attribute of an object; None where there is none."""
    return parts_of(record)(name)


def parts_of(record: Any) -> Callable[[str], Any]:
    """Return what looks up the parts of one record by name, as `part` does."""
    if kind_of(record) is dict:
        # Nearly every record.
        found: Callable[[str], Any] = record.get
        return found
    if is_model(record):
        # Not getattr: a model looks for a name that it lacks for about a microsecond.
        extra = record.__pydantic_extra__
        return ({**record.__dict__, **extra} if extra else record.__dict__).get
    if isinstance(record, Mapping):
        return cast("Mapping[str, Any]", record).get
    return partial(attribute, record)


def attribute(record: object, name: str) -> Any:
    """Return an attribute of an object, of a mapping too; None where there is none."""
    try:
        return getattr(record, name, None)
    except Exception:  # code of the SDK's; dictionaries with attributes raise KeyError
        return None


def fields_of(record: object) -> Mapping[Any, Any] | None:
    """Return what a mapping or an object holds, by name; None for what has no names.

    Of an object of another kind than a data class or a model, what is not private.
    """
    if isinstance(record, dict):
        return cast("dict[Any, Any]", record)
    if isinstance(record, _NAMELESS):
        return None
    if is_model(record):
        extra = record.__pydantic_extra__
        return {**record.__dict__, **extra} if extra else record.__dict__
    if isinstance(record, Mapping):
        return cast("Mapping[Any, Any]", record)
    if dataclasses.is_dataclass(record):
        return {name: getattr(record, name) for name in _names_in(cast("Any", type(record)))}
    held: dict[str, Any] | None = getattr(record, "__dict__", None)
    return held and {name: value for name, value in held.items() if not name.startswith("_")}


@lru_cache(maxsize=256)
def _names_in(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
