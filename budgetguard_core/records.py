"""Records as JSON, whatever a model has written into them."""

from __future__ import annotations

from typing import Any, cast

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError


def dump(record: BaseModel) -> str:
    """Return a record as one JSON object.

    A model may write half of a surrogate pair, which UTF-8 cannot hold, into a name or a message:
    it becomes a question mark, so that it costs neither a checkpoint nor a line of a log.

    Raises:
        ValueError: The record holds what JSON cannot.
    """
    try:
        return record.model_dump_json()
    except PydanticSerializationError:
        return type(record).model_validate(_encodable(record.model_dump())).model_dump_json()


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
