"""Plain data and objects of any SDK, read the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel


def part(record: object, name: str) -> Any:
    """Return an item of a mapping or an attribute of an object; None where there is none."""
    if isinstance(record, Mapping):
        return cast("Mapping[object, Any]", record).get(name)
    if isinstance(record, BaseModel):
        # Not getattr: a model looks for a name that it lacks for about a microsecond.
        value = record.__dict__.get(name)
        extra = record.__pydantic_extra__
        return extra.get(name) if value is None and extra else value
    return getattr(record, name, None)


def fields_of(record: object) -> Mapping[Any, Any] | None:
    """Return what a mapping or an object holds, by name; None for what has no names.

    Of an object of another kind than a data class or a model, what is not private.
    """
    if isinstance(record, Mapping):
        return cast("Mapping[Any, Any]", record)
    if isinstance(record, BaseModel):
        extra = record.__pydantic_extra__
        return {**record.__dict__, **extra} if extra else record.__dict__
    if isinstance(record, type):
        return None
    if dataclasses.is_dataclass(record):
        return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    held: dict[str, Any] | None = getattr(record, "__dict__", None)
    return held and {name: value for name, value in held.items() if not name.startswith("_")}
