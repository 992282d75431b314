"""Canonical arguments and results, and the fingerprints that tell calls apart.

Two values that mean the same have one text, and two that do not have two: what is too long to be
written down is digested in whole, never cut.
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
from itertools import islice
from typing import Any

from pydantic import BaseModel

_DEEPEST = 64
_MOST_PARTS = 100_000
_LONGEST_TEXT = 20_000
_EXACT_FLOATS = 2**53
_LONGEST_NUMBER = 32
_LARGEST_WHOLE = 10**_LONGEST_NUMBER

_NOTHING: frozenset[str] = frozenset()
_CODED = frozenset("-0123456789tfn")
_WORDS = frozenset(("true", "false", "null"))
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:e[+-][0-9]+)?").fullmatch
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

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
    `repr` without memory addresses, with their attributes where it is elided (`...`) or not their
    own.

    A container of more than 20,000 characters is written as a digest of all of them. What lies
    more than 64 levels deep is not looked at, nor is anything beyond 100,000 containers, or beyond
    as many parts of a container that is not built in.

    Args:
        value: The arguments: an object, or its JSON text. Any object is accepted.
        ignore: Names of arguments that do not tell calls apart, such as `request_id`. They are
            left out at the top only: deeper down, the same name may be what the call is about.

    Returns:
        ASCII text, the same in every process and Python version.
    """
    if type(value) is str:
        value = _parsed(value)
    if ignore and isinstance(value, dict | BaseModel):
        named = _fields(value) or {}
        value = {name: item for name, item in named.items() if name not in ignore}
    return _Walk().text(value, 0)


def fingerprint(value: Any, *, ignore: AbstractSet[str] = _NOTHING) -> str:
    """Digest the arguments of a call: 16 hexadecimal digits of BLAKE2b over `canonical`."""
    return digest(canonical(value, ignore))


def fingerprint_result(result: Any, *, ignore: AbstractSet[str] = _NOTHING) -> str:
    """Digest the `result_text` of the result of a call."""
    return digest(result_text(result, ignore))


def result_text(result: Any, ignore: AbstractSet[str] = _NOTHING) -> str:
    """Write the result of a call: text as it is but for the white space around it.

    Everything else is written as arguments are.
    """
    if type(result) is not str:
        return canonical(result, ignore)
    text = result.strip()
    if text[:1] != "{" or not any(name in text for name in ignore):
        return text
    found = _parsed(text)
    return text if found is text else canonical(found, ignore)


def digest(text: str | bytes) -> str:
    """Digest a text: 16 hexadecimal digits of BLAKE2b."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return blake2b(data, digest_size=8).hexdigest()


class _Walk:
    """A look at one value; `left` is how many more parts of it are looked at."""

    def __init__(self) -> None:
        self.remaining = _MOST_PARTS

    def text(self, value: Any, depth: int) -> str:
        kind = _kind_of(value)
        if kind is str:
            return _string(value)
        if kind is int:
            return _whole(value)
        if value is None or kind is bool:
            return "null" if value is None else "true" if value else "false"
        if kind is float:
            return _real(value)
        text = f"<{kind.__qualname__}>"
        if depth > _DEEPEST or self.remaining <= 0:
            return text
        self.remaining -= 1
        try:
            text = self.contents(value, depth + 1)
        except Exception:  # the object's own code runs here, and must not end the run
            return text
        if len(text) > _LONGEST_TEXT:
            return f"<digest {blake2b(text.encode(), digest_size=16).hexdigest()}>"
        return text

    def contents(self, value: Any, depth: int) -> str:
        kind = of = _kind_of(value)
        if kind is list or kind is tuple:
            return f"[{','.join([self.text(item, depth) for item in value])}]"
        named = _fields(value)
        if named is None and issubclass(kind, Mapping):
            named = dict(self.some(value.items(), len(value)))
        if named is not None:
            pairs = [f"{self.text(key, depth)}:{self.text(named[key], depth)}" for key in named]
            return f"{{{','.join(sorted(pairs))}}}"
        if isinstance(value, Enum):
            return self.text(value.value, depth)
        if isinstance(value, str | int | float | Decimal | date | time):
            return _scalar(value)
        if issubclass(kind, bytes | bytearray | memoryview):
            return f"<bytes {digest(bytes(value))}>"
        if issubclass(kind, AbstractSet):
            return f"<set {','.join(sorted(self.items(value, depth)))}>"
        if issubclass(kind, Sequence) and kind is not range:
            return f"[{','.join(self.items(value, depth))}]"
        # Not `kind`, of which the checks above have left nothing that a type checker knows.
        shown = "" if of.__repr__ is object.__repr__ else _ADDRESS.sub("", repr(value))
        if hasattr(of, "__array__"):  # its text is elided and rounded
            array = value.__array__()
            is_plain = not array.dtype.hasobject
            held = digest(array.tobytes()) if is_plain else self.text(array.tolist(), depth)
            # A table shows the names of its columns.
            shown = f"{'' if array is value else shown} {array.dtype} {array.shape} {held}"
        elif not shown or "..." in shown or "\u2026" in shown:
            shown += self.text(dict(getattr(value, "__dict__", {})), depth)
        return f"<{kind.__qualname__} {shown!a}>"

    def items(self, values: Any, depth: int) -> list[str]:
        texts = [self.text(item, depth) for item in self.some(values, len(values))]
        return texts if len(texts) == len(values) else [*texts, f"<of {len(values)}>"]

    def some(self, values: Iterable[Any], count: int) -> Iterable[Any]:
        looked_at = min(count, self.remaining)
        self.remaining -= looked_at
        return islice(values, looked_at)


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """Return what is named in a dict, model or dataclass; None for anything else."""
    if isinstance(value, dict):
        found: dict[Any, Any] = value  # pyright: ignore[reportUnknownVariableType] - no call
        return found
    if isinstance(value, BaseModel):
        return {**value.__dict__, **(value.__pydantic_extra__ or {})}
    kind = _kind_of(value)
    if is_dataclass(kind):
        return {field.name: getattr(value, field.name) for field in fields(kind)}
    return None


def _parsed(text: str) -> object:
    text = text.strip()
    if text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text


def _string(text: str) -> str:
    text = text.strip()
    if text[:1] in _CODED:
        if text in _WORDS:
            return text
        if len(text) <= _LONGEST_NUMBER and _NUMBER(text):
            number = json.loads(text)
            if str(number) == text:
                return _whole(number) if type(number) is int else _real(number)
    return ascii(text)


def _whole(number: int) -> str:
    # Python refuses to write very long numbers in decimal.
    return str(number) if -_LARGEST_WHOLE < number < _LARGEST_WHOLE else hex(number)


def _real(number: float) -> str:
    exact = -_EXACT_FLOATS < number < _EXACT_FLOATS and number.is_integer()
    return str(int(number)) if exact else repr(number)


def _scalar(value: str | float | Decimal | date | time) -> str:
    """Write a value of a type that is derived from a built-in one, or close to one."""
    if isinstance(value, str):
        return _string(str.__str__(value))
    if isinstance(value, int):
        return _whole(int.__int__(value))
    if isinstance(value, float):
        return _real(float.__float__(value))
    if isinstance(value, date | time):
        return ascii(value.isoformat())
    if not value.is_finite() or abs(value.adjusted()) >= _LONGEST_NUMBER:
        return f"<Decimal {value}>"
    text = format(value, "f")
    return _string(text.rstrip("0").rstrip(".") if "." in text else text)
