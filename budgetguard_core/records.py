"""Records as JSON, whatever a model has written into them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from inspect import get_annotations
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    Self,
    cast,
    dataclass_transform,
    get_type_hints,
)

from pydantic import BaseModel, GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, PydanticSerializationError, core_schema

_CONTROL = re.compile(
    "[\x7f-\x9f\xad\u0600-\u0605\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
"""What JSON does not escape, and a terminal or an editor obeys or does not show."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Record:
    """A frozen record that is validated when it is read, and not when the engine makes it.

    Its fields are what its class annotates; a value there is the default. There are dozens of
    kinds, and a process that reads and writes none of them builds no schema.

    Args:
        **fields: The fields by name; they are validated.

    Raises:
        ValidationError: A field is missing, unknown or of another type.
    """

    _beginning: ClassVar[dict[str, Any]] = {}
    """Every field in its order, with its default or None."""
    _required: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        own = {name: vars(cls).get(name, ...) for name in get_annotations(cls)}
        cls._beginning = cls._beginning | {
            name: None if default is ... else default for name, default in own.items()
        }
        cls._required |= {name for name, default in own.items() if default is ...}

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(_fields_of(type(self)).validator.validate_python(fields))

    @classmethod
    def made(cls, fields: dict[str, Any]) -> Self:
        """Make a record of all of its fields, in their order, as they are."""
        record = object.__new__(cls)
        record.__dict__.update(fields)
        return record

    def model_dump(self, *, mode: Literal["python", "json"] = "python") -> dict[str, Any]:
        """Return the fields as plain data.

        Args:
            mode: `json` for values that JSON can hold.
        """
        plain: dict[str, Any] = _fields_of(type(self)).serializer.to_python(
            self.__dict__, mode=mode
        )
        return plain

    def model_dump_json(self) -> str:
        """Return the record as one JSON object.

        Raises:
            ValueError: The record holds what JSON cannot.
        """
        return self.to_json().decode()

    def to_json(self) -> bytes:
        """Return the record as one JSON object in UTF-8.

        Raises:
            ValueError: The record holds what JSON cannot.
        """
        line: bytes = _fields_of(type(self)).serializer.to_json(self.__dict__)
        return line

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """Return a copy with other values for some fields; they are not validated."""
        return self.made({**self.__dict__, **(update or {})})

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({fields})"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise ValueError(f"{name} is frozen. Make another record with model_copy(update=...).")

    def __delattr__(self, name: str) -> NoReturn:
        raise ValueError(f"{name} is frozen. Make another record with model_copy(update=...).")

    @classmethod
    def schema_of_fields(cls, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Make the schema of a dictionary of the record's fields."""
        hints = get_type_hints(cls, include_extras=True)
        fields: dict[str, core_schema.TypedDictField] = {}
        for name, default in cls._beginning.items():
            field = handler.generate_schema(hints[name])
            required = name in cls._required
            if not required:
                field = core_schema.with_default_schema(field, default=default)
            fields[name] = core_schema.typed_dict_field(field, required=required)
        return core_schema.typed_dict_schema(
            fields,
            extra_behavior="forbid",
            config=core_schema.CoreConfig(ser_json_inf_nan="strings"),
        )

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        fields = cls.schema_of_fields(handler)
        return core_schema.no_info_after_validator_function(
            cls.made,
            fields,
            serialization=core_schema.wrap_serializer_function_ser_schema(
                lambda record, write: write(record.__dict__), schema=fields
            ),
        )


class _Fields:
    """The fields of a kind of record, as pydantic asks for their schema."""

    def __init__(self, kind: type[Record]) -> None:
        self._kind = kind

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return self._kind.schema_of_fields(handler)


def _adapter_of(kind: type[Record]) -> TypeAdapter[dict[str, Any]]:
    return TypeAdapter(Annotated[dict[str, Any], _Fields(kind)])


_fields_of: Any = cache(_adapter_of)
"""Makes the schema of a kind of record when the first is read or written."""


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


def line_of(record: BaseModel | Record) -> str:
    """Return a record as one line of a log: JSON without any character that a terminal obeys.

    JSON escapes those below U+0020 itself. The others (DEL, C1, line and paragraph separators,
    what turns the direction of writing or shows nothing) are the same text, escaped.

    Raises:
        ValueError: The record holds what JSON cannot.
    """
    return encoded_line(record).decode()


def encoded_line(record: BaseModel | Record) -> bytes:
    """Return what `line_of` does, as it stands in a file.

    Raises:
        ValueError: The record holds what JSON cannot.
    """
    if isinstance(record, Record):
        try:
            line = record.to_json()
        except PydanticSerializationError:
            line = type(record)(**_encodable(record.model_dump())).to_json()
    else:
        line = dump(record).encode()
    if line.isascii() and b"\x7f" not in line:
        return line
    return _CONTROL.sub(_escaped, line.decode()).encode()


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
