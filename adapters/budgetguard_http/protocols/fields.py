"""The fields of JSON that nothing is known of: read without a failure, whatever it holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

from pydantic_core import from_json

Body: TypeAlias = dict[str, Any]
Event: TypeAlias = tuple[str, Any]
"""One event of a stream: its name (empty where the format has none) and its data."""

# `type`, for values that nothing is known of: the type checkers follow it no further.
_kind_of: Callable[[Any], Any] = type


def parsed(content: bytes) -> Body | None:
    """Return the object of a JSON; None for what is none."""
    try:
        made: Any = from_json(content)
    except ValueError:  # in UTF-16, with a mark of its order, or with half a pair of surrogates
        try:
            made = json.loads(content)
        except (ValueError, RecursionError):
            return None
    return made if _kind_of(made) is dict else None


def items(value: Any) -> list[Any]:
    """Return a list; an empty one for anything else."""
    return value if _kind_of(value) is list else []


def record(value: Any) -> Body:
    """Return an object of JSON; an empty one for anything else."""
    return value if _kind_of(value) is dict else {}


def records(value: Any) -> list[Body]:
    """Return the objects of a list; an empty one in the place of anything else."""
    return [record(one) for one in value] if _kind_of(value) is list else []


def text_or_none(value: Any) -> str | None:
    """Return a text that is not empty; None for anything else."""
    return value if value and _kind_of(value) is str else None


def count_or_none(value: Any) -> int | None:
    """Return a positive whole number; None for anything else."""
    return value if _kind_of(value) is int and value >= 1 else None


def at(value: Any, paths: str) -> Any:
    """Return what stands at a dotted path in objects; of several paths, at the first that holds."""
    found: Any = None
    for path in _steps(paths):
        found = value
        for name in path:
            found = found.get(name) if _kind_of(found) is dict else None
        if found:
            break
    return found


@lru_cache(maxsize=256)
def _steps(paths: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(path.split(".")) for path in paths.split())
