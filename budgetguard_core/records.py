"""Records as JSON, whatever a model has written into them."""

from __future__ import annotations

import re
from typing import Any, cast

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

_CONTROL = re.compile(
    "[\x7f-\x9f\xad\u0600-\u0605\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
"""Characters that JSON does not escape, and a terminal or an editor obeys or does not show."""


def dump(record: BaseModel, *, exclude: set[str] | None = None) -> str:
    """Return a record as one JSON object.

    A model may write half of a surrogate pair, which UTF-8 cannot hold, into a name or a message:
    it becomes a question mark, so that it costs neither a checkpoint nor a line of a log.
    """
    try:
        return record.model_dump_json(exclude=exclude)
    except PydanticSerializationError:
        clean = type(record).model_validate(_encodable(record.model_dump()))
        return clean.model_dump_json(exclude=exclude)


def line_of(record: BaseModel) -> str:
    """Return a record as one line of a log: JSON without any character that a terminal obeys.

    JSON escapes those below U+0020 itself. The others (DEL, C1, line and paragraph separators,
    what turns the direction of writing or shows nothing) are the same text, escaped.
    """
    line = dump(record)
    return line if line.isascii() and "\x7f" not in line else _CONTROL.sub(_escaped, line)


def _escaped(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


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
