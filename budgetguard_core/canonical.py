"""Canonical arguments and results, and the fingerprints that tell calls apart.

Two values that mean the same have one text, and two that do not have two: whatever is too large
to be written down is digested in whole, never cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from datetime import date, time
from decimal import Decimal
from enum import Enum
from hashlib import blake2b
from itertools import chain, islice
from math import inf
from typing import Any

from pydantic import BaseModel

_DEEPEST = 64
_MOST_PARTS = 100_000
_EXACT_FLOATS = 2**53
_LONGEST_NUMBER = 32
_BIGGEST_WHOLE = 10**_LONGEST_NUMBER
_SMALLEST_WHOLE = -_BIGGEST_WHOLE
# CPython compares two ints of one digit in a single instruction.
_ONE_DIGIT = 2**30 - 1
_FEW_NAMES = 16
_LONGEST_KEY = 256
_SHORT_REPLY = 40
_ERROR_READ = 4000
_ERROR_KEPT = 400

_NOTHING: frozenset[str] = frozenset()
_NUMBER_STARTS = frozenset("-0123456789")
_CODED = _NUMBER_STARTS | frozenset("tfn")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?(e[+-][0-9]+)?").fullmatch
_DIGITS = re.compile(r"[0-9]+(?:[.,:-][0-9]+)*")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_VARIABLE = re.compile(
    r"""
    "[^"]*" | `[^`]*` | (?<!\w)'[^']*'(?!\w)                 # quoted parts
    | (?<![\w.~:/\\-])[\w.~:-]*[/\\][^\s"'`,;)\]}]*          # paths and addresses
    | \b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b
    | \b0x[0-9a-fA-F]+ | \b[0-9a-fA-F]{8,}\b
    | (?: \b(?=[a-fA-F]*[0-9])[0-9a-fA-F]+\b | [0-9]+ ) (?:[.,:][0-9]+)*
    """,
    re.VERBOSE,
)

# `type`, for values that nothing is known of: the type checkers follow it no further.
_kind_of: Callable[[Any], Any] = type


def canonical(value: Any, ignore: AbstractSet[str] = _NOTHING) -> str:
    """Write the arguments of a call as text that cosmetic variation does not change.

    Keys are sorted and white space around strings is trimmed. A string that is the canonical
    spelling of a number, `true`, `false` or `null` is that value (`"5"` = `"5.0"` = 5 = 5.0), any
    other stays a string (`"007"`, `"1.50"`, `"+5"`, `"1e3"`, `"True"`). `True` is not 1, and an
    absent argument is not None. A string that holds a JSON object or list is what it holds, at
    the top only. Tuples are lists; models and dataclasses are the mapping of their fields; enum
    members are their values; arrays are their type, shape and data. Other objects are their
    `repr` without memory addresses, with their attributes where it is elided (`...`), or without
    a `repr` of their own, the name of their type and their attributes.

    A value of more than 100,000 parts is written as a digest of all of them. What lies more than
    64 levels deep is not looked at, nor what a sequence, set or mapping that is not built in
    holds beyond 100,000 parts: it may be made up on demand.

    Args:
        value: The arguments: an object, or its JSON text. Any object is accepted.
        ignore: Names of arguments that do not tell calls apart, such as `request_id`. They are
            left out at the top only: deeper down, the same name may be what the call is about.

    Returns:
        ASCII text, the same in every process and Python version.
    """
    kind = _kind_of(value)
    if kind is not dict:
        if kind is str:
            value = _parsed(value)
        elif ignore and isinstance(value, BaseModel):
            value = _model_fields(value)
        kind = _kind_of(value)
    try:
        if kind is dict:
            if ignore and not ignore.isdisjoint(value):
                value = {name: value[name] for name in value if name not in ignore}
            if len(value) <= _FEW_NAMES:
                return _named(value)
        return ascii(_plain(value, 0, _Walk()))
    except _TooManyParts:
        return ascii(_plain(value, 0, _Walk(digests={})))


def fingerprint(value: Any, *, ignore: AbstractSet[str] = _NOTHING) -> str:
    """Digest the arguments of a call: 16 hexadecimal digits of BLAKE2b over `canonical`."""
    return _digest(canonical(value, ignore=ignore))


def fingerprint_result(result: Any, *, ignore: AbstractSet[str] = _NOTHING) -> str:
    """Digest the result of a call.

    Unlike arguments, text is taken as it is but for the white space around it: a tool is a
    program, so its text has no cosmetic variation, and reading megabytes of JSON would cost more
    than the tool. Everything else is digested as arguments are.

    Args:
        result: What the tool returned. Any object is accepted.
        ignore: Names at the top of a mapping, or of text that holds a JSON object, that do not
            tell results apart, such as `elapsed_ms`. Text is read as JSON only where it holds one
            of them.
    """
    return _digest(_result(result, ignore))


def fingerprint_reply(text: str) -> str:
    """Digest of a reply; from 40 characters on without its numbers and without regard to case."""
    text = text.strip()
    return _digest(text if len(text) < _SHORT_REPLY else _DIGITS.sub("?", text).casefold())


def fingerprint_error(text: str) -> str:
    """Digest of what kind an error is: its text without what varies from call to call.

    Numbers, quoted parts, paths and hexadecimal are masked, and the first 400 characters of what
    is left count.
    """
    masked = _VARIABLE.sub("?", text[:_ERROR_READ].strip())
    return _digest(masked[:_ERROR_KEPT])


KEY_MARKS = frozenset("=#")
"""What a key begins with: the value itself follows, or the digest of one that is not small."""


# Keys: a digest costs as much as the rest, so it is made only where something leaves the process


def arguments_key(value: Any, ignore: AbstractSet[str] = _NOTHING) -> str:
    """Return what stands for the arguments of a call within this process.

    Small arguments stand for themselves. A key is never logged or stored: its `digest_of` is,
    and equals their `fingerprint`.
    """
    text = canonical(value, ignore)
    return f"={text}" if len(text) <= _LONGEST_KEY else f"#{_digest(text)}"


def result_key(result: Any, ignore: AbstractSet[str] = _NOTHING) -> str:
    """Return what stands for the result of a call within this process, as `arguments_key` does."""
    text = result.strip() if type(result) is str and not ignore else _result(result, ignore)
    return f"={text}" if len(text) <= _LONGEST_KEY else f"#{_digest(text)}"


def digest_of(key: str) -> str:
    """Return the fingerprint that a key stands for; one that was given is its own."""
    mark = key[:1]
    if mark == "=":
        return _digest(key[1:])
    return key[1:] if mark == "#" else key


def _result(result: Any, ignore: AbstractSet[str]) -> str:
    if type(result) is not str:
        return canonical(result, ignore=ignore)
    text = result.strip()
    if not ignore or text[:1] != "{" or not any(name in text for name in ignore):
        return text
    found = _parsed(text)
    return text if found is text else canonical(found, ignore=ignore)


# To copy it takes less than to make another one.
_EMPTY_DIGEST = blake2b(digest_size=8)


def _digest(text: str) -> str:
    digest = _EMPTY_DIGEST.copy()
    try:
        digest.update(text.encode())
    except UnicodeEncodeError:
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


# Values


class _TooManyParts(Exception):
    """The text would be too long."""


class _Walk:
    """A look at one value.

    Attributes:
        digests: None while the text is written in full. For what is too large for that, the
            digest of each container, with the container, or its id would be given to another: so
            the cost is that of the memory that the value takes, however it shares its parts.
        direct: Down to which level the containers that are built in are just gone through.
        left: How many more parts may be written.
        made_up: How many more parts of containers that are not built in are looked at.
    """

    __slots__ = ("digests", "direct", "left", "made_up")

    def __init__(self, digests: dict[int, tuple[object, Any]] | None = None) -> None:
        self.digests = digests
        self.direct = _DEEPEST if digests is None else -1
        self.left: float = _MOST_PARTS if digests is None else inf
        self.made_up = _MOST_PARTS

    def some(self, values: Iterable[Any], count: int) -> Iterable[Any]:
        """Return what is looked at of a container that may make up its parts on demand."""
        if self.digests is None:
            if count > self.left:
                raise _TooManyParts
            return values
        looked_at = min(count, self.made_up)
        self.made_up -= looked_at
        if looked_at == count:
            return values
        found: Iterable[Any] = chain(islice(values, looked_at), [("of", count)])
        return found


def _parsed(text: str) -> object:
    text = text.strip()
    if text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text


def _named(value: dict[Any, Any]) -> str:
    """Write a mapping of few names, as arguments are, without a copy of its top."""
    try:
        keys = sorted(value)
    except TypeError:
        return ascii(_mapping(value, 0, _Walk()))
    text = "{"
    walk: _Walk | None = None
    for key in keys:
        if type(key) is not str:
            return ascii(_mapping(value, 0, _Walk()))
        item = value[key]
        kind = _kind_of(item)
        if kind is str:
            item = item.strip()
            if item[:1] in _CODED:
                item = _coded(item)
        elif kind is int:
            if item > _ONE_DIGIT or item < -_ONE_DIGIT:
                item = _whole(item)
        elif kind is not bool and item is not None:
            if walk is None:
                walk = _Walk()
                walk.left -= len(value)
            item = _plain(item, 1, walk)
        text = f"{text}{key!a}: {item!a}, "
    return text[:-2] + "}" if keys else "{}"


def _plain(value: Any, depth: int, walk: _Walk) -> Any:
    """Reduce a value to dicts, lists, strings, numbers and None; tuples mark all other kinds."""
    kind = _kind_of(value)
    if depth <= walk.direct:
        # The containers of nearly all arguments.
        if kind is dict:
            return _mapping(value, depth, walk)
        if kind is list:
            return _items(value, len(value), depth, walk)
    if kind is str:
        return _string(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return _whole(value)
    if kind is float:
        return _real(value)
    if depth > _DEEPEST:
        return _type_only(value)
    if walk.digests is None:
        return _contents(value, depth, walk)
    known = walk.digests.get(id(value))
    if known is not None:
        return known[1]
    walk.digests[id(value)] = (value, ("within itself",))
    plain = _contents(value, depth, walk)
    if type(plain) in (dict, list, tuple):
        plain = ("digest", blake2b(ascii(plain).encode(), digest_size=16).hexdigest())
    walk.digests[id(value)] = (value, plain)
    return plain


def _contents(value: Any, depth: int, walk: _Walk) -> Any:
    kind = _kind_of(value)
    if kind is dict:
        return _mapping(value, depth, walk)
    if kind is list or kind is tuple:
        return _items(value, len(value), depth, walk)
    # The object's own code runs here, and it must not end the run it is a part of.
    try:
        return _other(value, depth, walk)
    except _TooManyParts:
        raise
    except Exception:
        return _type_only(value)


def _mapping(value: dict[Any, Any], depth: int, walk: _Walk) -> Any:
    walk.left -= len(value)
    if walk.left < 0:
        raise _TooManyParts
    plain: dict[str, Any] = {}
    try:
        keys = sorted(value)
    except TypeError:
        return _mapping_by_text(value, depth, walk)
    for key in keys:
        if type(key) is not str:
            # Sorted as text, or 10 and 9 would stand otherwise than "10" and "9".
            return _mapping_by_text(value, depth, walk)
        item = value[key]
        # The values of nearly all arguments, without a call for each.
        kind = _kind_of(item)
        if kind is str:
            item = item.strip()
            if item[:1] in _CODED:
                item = _coded(item)
        elif kind is int:
            if item > _ONE_DIGIT or item < -_ONE_DIGIT:
                item = _whole(item)
        elif kind is not bool and item is not None:
            item = _plain(item, depth + 1, walk)
        plain[key] = item
    return plain


def _mapping_by_text(value: dict[Any, Any], depth: int, walk: _Walk) -> Any:
    texts = [(_key_text(key, depth, walk), key) for key in value]
    named = {text: value[key] for text, key in texts}
    if len(named) == len(value):
        return _mapping(named, depth, walk)
    pairs = [
        ascii((text, type(key).__qualname__, _plain(value[key], depth + 1, walk)))
        for text, key in texts
    ]
    return ("pairs", sorted(pairs))


def _key_text(key: Any, depth: int, walk: _Walk) -> str:
    """Write a key as JSON would: 5 and "5" are the same key."""
    if type(key) is str:
        return key
    plain = _plain(key, depth + 1, walk)
    if type(plain) is str:
        return plain
    kind = _kind_of(plain)
    return ascii(plain) if kind in (dict, list, tuple) else json.dumps(plain)


def _string(text: str) -> Any:
    text = text.strip()
    return _coded(text) if text[:1] in _CODED else text


def _coded(text: str) -> Any:
    return _number(text) if text[:1] in _NUMBER_STARTS else _WORDS.get(text, text)


def _number(text: str) -> Any:
    if len(text) > _LONGEST_NUMBER:
        return text
    if text[:1] != "0" and text.isdigit() and text.isascii():
        return int(text)
    match = _NUMBER(text)
    if match is None:
        return text
    number = int(text) if match.lastindex is None else float(text)
    if str(number) != text:
        return text
    return number if type(number) is int else _real(number)


def _whole(number: int) -> Any:
    # Python refuses to write very long numbers in decimal.
    return number if _SMALLEST_WHOLE < number < _BIGGEST_WHOLE else ("int", hex(number))


def _real(number: float) -> int | float:
    exact = -_EXACT_FLOATS < number < _EXACT_FLOATS and number.is_integer()
    return int(number) if exact else number


def _items(values: Iterable[Any], count: int, depth: int, walk: _Walk) -> list[Any]:
    walk.left -= count
    if walk.left < 0:
        raise _TooManyParts
    plain: list[Any] = []
    for item in values:
        kind = _kind_of(item)
        if kind is str:
            item = item.strip()
            if item[:1] in _CODED:
                item = _coded(item)
        elif kind is int:
            if item > _ONE_DIGIT or item < -_ONE_DIGIT:
                item = _whole(item)
        elif kind is not bool and item is not None:
            item = _plain(item, depth + 1, walk)
        plain.append(item)
    return plain


def _other(value: Any, depth: int, walk: _Walk) -> Any:
    kind = _kind_of(value)
    name = kind.__qualname__
    if isinstance(value, Enum):
        return _plain(value.value, depth + 1, walk)
    if isinstance(value, str):
        return _string(str.__str__(value))
    if isinstance(value, int):
        return _whole(int.__int__(value))
    if isinstance(value, float):
        return _real(float.__float__(value))
    if isinstance(value, Decimal):
        return _decimal(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if issubclass(kind, bytes | bytearray | memoryview):
        return ("bytes", blake2b(value, digest_size=8).hexdigest())
    if isinstance(value, BaseModel):
        return _mapping(_model_fields(value), depth, walk)
    if is_dataclass(kind):
        own = {field.name: getattr(value, field.name) for field in fields(kind)}
        return _mapping(own, depth, walk)
    if issubclass(kind, dict):
        return _mapping(dict(value), depth, walk)
    if issubclass(kind, Mapping):
        return _mapping(dict(walk.some(value.items(), len(value))), depth, walk)
    if issubclass(kind, AbstractSet):
        plain = _items(walk.some(value, len(value)), len(value), depth, walk)
        return ("set", sorted(map(ascii, plain)))
    if kind is not range and issubclass(kind, Sequence):
        return _items(walk.some(value, len(value)), len(value), depth, walk)
    if hasattr(kind, "__array__"):
        array = value.__array__()
        # A table shows the names of its columns; an array shows only its data.
        shown = "" if array is value else _ADDRESS.sub("", repr(value))
        return (name, shown, _array(array, depth, walk))
    if kind.__repr__ is object.__repr__:
        return (name, _attributes(value, depth, walk))
    text = _ADDRESS.sub("", repr(value))
    if "..." in text or "\u2026" in text:
        return (name, text, _attributes(value, depth, walk))
    return (name, text)


def _attributes(value: Any, depth: int, walk: _Walk) -> Any:
    return _mapping(dict(getattr(value, "__dict__", {})), depth, walk)


def _array(array: Any, depth: int, walk: _Walk) -> Any:
    """Reduce an array to its shape and data: its `repr` is elided and rounded."""
    shape = str(array.shape)
    try:
        data = memoryview(array)
    except ValueError:  # numpy shows dates to nobody
        data = None
    if data is None or "O" in data.format:
        return (shape, _plain(array.tolist(), depth + 1, walk))
    return (shape, data.format, blake2b(data.tobytes(), digest_size=16).hexdigest())


def _decimal(number: Decimal) -> Any:
    if not number.is_finite() or abs(number.adjusted()) >= _LONGEST_NUMBER:
        return ("Decimal", str(number))
    text = format(number, "f")
    return _number(text.rstrip("0").rstrip(".") if "." in text else text)


def _model_fields(model: BaseModel) -> dict[str, Any]:
    return {**model.__dict__, **(model.__pydantic_extra__ or {})}


def _type_only(value: object) -> tuple[str]:
    return (type(value).__qualname__,)
