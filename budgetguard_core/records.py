"""Records as JSON, whatever a model has written into them."""

from __future__ import annotations

from typing import Any, cast

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError


def dump(record: BaseModel, *, exclude: set[str] | None = None) -> str:
    """Return a record as one JSON object.

    A model may write half of a surrogate pair, which UTF-8 cannot hold, into a name or a message:
    it becomes a question mark, so that it costs neither a checkpoint nor a line of a log.

    Args:
        record: The record.
        exclude: Fields that are left out.

    Raises:
        ValueError: The record holds what JSON cannot.
    """
    try:
        return record.model_dump_json(exclude=exclude)
    except PydanticSerializationError:
        clean = type(record).model_validate(_encodable(record.model_dump()))
        return clean.model_dump_json(exclude=exclude)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        fields = cast("dict[Any, Any]", value)
        return {_encodable(key): _encodable(item) for key, item in fields.items()}
    if isinstance(value, list | tuple):
        items = cast("list[Any] | tuple[Any, ...]", value)
        return [_encodable(item) for item in items]
    return value
