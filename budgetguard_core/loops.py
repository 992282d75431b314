"""Canonical arguments, and the detector of repetition and oscillation.

Why one rule: a call is *stale* when the same tool, the same arguments and the same result were
all seen since the user last spoke. Stale calls in a row are what an identical call, a cycle of
tools and two agents in a circle have in common, while paging, polling that advances and "probe,
change something, probe again" bring something new and are left alone.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from datetime import date, time
from decimal import Decimal
from enum import Enum
from fnmatch import translate
from hashlib import blake2b
from itertools import islice
from typing import Annotated, Any, Self, TypeAlias, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from budgetguard_core.errors import ConfigurationError
from budgetguard_core.stop import StopReason, Violation

_DEEPEST = 64
_MOST_PARTS = 100_000
_EXACT_FLOATS = 2**53
_LONGEST_NUMBER = 32
_BIGGEST_WHOLE = 10**_LONGEST_NUMBER
_SMALLEST_WHOLE = -_BIGGEST_WHOLE
_FLAT_PARTS = 64
_LONGEST_NAME = 64
_LONGEST_CYCLE = 4

_NOTHING: frozenset[str] = frozenset()
_NUMBER_STARTS = "-0123456789"
_CODED = frozenset(f"{_NUMBER_STARTS}tfn")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?(e[+-][0-9]+)?").fullmatch
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_UNSPEAKABLE = re.compile(r"[^\w.:/-]+")

# `type`, for values that nothing is known of: the type checkers follow it no further.
_kind_of: Callable[[Any], Any] = type

_Key: TypeAlias = tuple[str, str, str]


# Canonical text


def canonical(value: Any, *, ignore: AbstractSet[str] = _NOTHING) -> str:
    """Write the arguments of a call as text that cosmetic variation does not change.

    Keys are sorted and white space around strings is trimmed. A string that is the canonical
    spelling of a number, `true`, `false` or `null` is that value (`"5"` = `"5.0"` = 5 = 5.0), any
    other stays a string (`"007"`, `"1.50"`, `"+5"`, `"1e3"`, `"True"`). `True` is not 1, and an
    absent argument is not None. A string that holds a JSON object or list is what it holds, at
    the top only. Tuples are lists; models and dataclasses are the mapping of their fields; enum
    members are their values. Other objects are their `repr` without memory addresses, or without
    a `repr` of their own, the name of their type and their attributes.

    What lies more than 64 levels deep, or beyond 100,000 parts, is not looked at.

    Args:
        value: The arguments: an object, or its JSON text. Any object is accepted.
        ignore: Names of arguments that do not tell calls apart, such as `request_id`. They are
            left out at the top only: deeper down, the same name may be what the call is about.

    Returns:
        ASCII text, the same in every process and Python version.
    """
    if type(value) is str:
        value = _parsed(value)
    elif ignore and isinstance(value, BaseModel):
        value = _model_fields(value)
    kind = _kind_of(value)
    if kind is dict:
        arguments: dict[Any, Any] = value
        if ignore and not ignore.isdisjoint(arguments):
            arguments = {name: arguments[name] for name in arguments if name not in ignore}
        return ascii(_mapping(arguments, 0, [_MOST_PARTS]))
    return ascii(_plain(value, 0, [_MOST_PARTS]))


def fingerprint(value: Any, *, ignore: AbstractSet[str] = _NOTHING) -> str:
    """Digest the arguments of a call: 16 hexadecimal digits of BLAKE2b over `canonical`."""
    text = None
    if value.__class__ is dict and len(value) <= _FLAT_PARTS and ignore.isdisjoint(value):
        text = _flat(value)
    if text is None:
        text = canonical(value, ignore=ignore)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def fingerprint_result(result: Any) -> str:
    """Digest the result of a call.

    Unlike arguments, text is taken as it is but for the white space around it: a tool is a
    program, so its text has no cosmetic variation, and reading megabytes of JSON would cost more
    than the tool. Everything else is digested as arguments are.
    """
    if type(result) is str:
        text = result.strip()
        try:
            data = text.encode()
        except UnicodeEncodeError:
            data = text.encode("utf-8", "surrogatepass")
        return blake2b(data, digest_size=8).hexdigest()
    return fingerprint(result)


def _parsed(text: str) -> object:
    text = text.strip()
    if text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text


def _plain(value: Any, depth: int, left: list[int]) -> Any:
    """Reduce a value to dicts, lists, strings, numbers and None; tuples mark all other kinds."""
    left[0] -= 1
    if depth > _DEEPEST or left[0] < 0:
        return _type_only(value)
    kind = _kind_of(value)
    if kind is str:
        return _string(value)
    if value is None or kind is bool:
        return value
    if kind is dict:
        return _mapping(value, depth, left)
    if kind is int:
        return _whole(value)
    if kind is float:
        return _real(value)
    if kind is list or kind is tuple:
        return _items(value, len(value), depth, left)
    # The object's own code runs here, and it must not end the run it is a part of.
    try:
        return _other(value, depth, left)
    except Exception:
        return _type_only(value)


def _flat(value: dict[Any, Any]) -> str | None:
    """Write what `canonical` would, in half the time, for the arguments of nearly every call.

    None when a key is no string, or a value is neither a string nor a whole number.
    """
    parts: list[str] = []
    try:
        keys = sorted(value)
    except TypeError:
        return None
    for key in keys:
        item = value[key]
        if type(item) is str:
            item = item.strip()
            if item[:1] in _CODED:
                item = _string(item)
        elif type(item) is not int or not _SMALLEST_WHOLE < item < _BIGGEST_WHOLE:
            return None
        if type(key) is not str:
            return None
        parts.append(f"{key!a}: {item!a}")
    return f"{{{', '.join(parts)}}}"


def _mapping(value: dict[Any, Any], depth: int, left: list[int]) -> Any:
    if len(value) > left[0]:
        left[0] = 0
        return ("dict", len(value))
    left[0] -= len(value)
    plain: dict[str, Any] = {}
    try:
        keys = sorted(value)
    except TypeError:
        keys = sorted(value, key=_key_text)
    for key in keys:
        item = value[key]
        kind = _kind_of(item)
        if kind is str:
            item = _string(item)
        elif kind is not int or not _SMALLEST_WHOLE < item < _BIGGEST_WHOLE:
            item = _plain(item, depth + 1, left)
        if type(key) is not str:
            # Sorted as text, or 10 and 9 would stand otherwise than "10" and "9".
            return _mapping({_key_text(key): value[key] for key in keys}, depth, left)
        plain[key] = item
    return plain


def _key_text(key: Any) -> str:
    """Write a key as JSON would: 5 and "5" are the same key."""
    if type(key) is str:
        return key
    plain = _plain(key, 0, [_DEEPEST])
    if type(plain) is str:
        return plain
    kind = _kind_of(plain)
    return ascii(plain) if kind in (dict, list, tuple) else json.dumps(plain)


def _string(text: str) -> Any:
    text = text.strip()
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


def _items(values: Iterable[Any], count: int, depth: int, left: list[int]) -> list[Any]:
    plain: list[Any] = []
    for item in islice(values, count):
        if left[0] <= 0:
            plain.append(("list", count))
            break
        plain.append(_plain(item, depth + 1, left))
    return plain


def _other(value: Any, depth: int, left: list[int]) -> Any:
    kind = _kind_of(value)
    name = kind.__qualname__
    if isinstance(value, Enum):
        return _plain(value.value, depth + 1, left)
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
        return _mapping(_model_fields(value), depth, left)
    if is_dataclass(kind):
        own = {field.name: getattr(value, field.name) for field in fields(kind)}
        return _mapping(own, depth, left)
    if issubclass(kind, Mapping):
        return _mapping(dict(islice(value.items(), len(value))), depth, left)
    if issubclass(kind, AbstractSet):
        return ("set", sorted(map(ascii, _items(value, len(value), depth, left))))
    if kind is not range and issubclass(kind, Sequence):
        return _items(value, len(value), depth, left)
    if kind.__repr__ is not object.__repr__:
        return (name, _ADDRESS.sub("", repr(value)))
    return (name, _mapping(dict(getattr(value, "__dict__", {})), depth, left))


def _decimal(number: Decimal) -> Any:
    if not number.is_finite() or abs(number.adjusted()) >= _LONGEST_NUMBER:
        return ("Decimal", str(number))
    text = format(number, "f")
    return _number(text.rstrip("0").rstrip(".") if "." in text else text)


def _model_fields(model: BaseModel) -> dict[str, Any]:
    return {**model.__dict__, **(model.__pydantic_extra__ or {})}


def _type_only(value: object) -> tuple[str]:
    return (type(value).__qualname__,)


# Settings


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _count(value: object) -> object:
    if type(value) is not int or value < 1:
        msg = (
            f"must be a whole number >= 1, got {_show(value)}. "
            "Use loop_detection=None to turn the detection off."
        )
        raise ValueError(msg)
    return value


def _window(value: object) -> object:
    if type(value) is not int or not 8 <= value <= 4096:
        msg = f"must be a whole number from 8 to 4096, got {_show(value)}. Leave it out for 64."
        raise ValueError(msg)
    return value


def _names(value: Any) -> object:
    if isinstance(value, list | tuple | set | frozenset):
        names: list[Any] = list(cast("Iterable[Any]", value))
        if all(isinstance(name, str) and name for name in names):
            return tuple(names)
    msg = f'must be a list of names, got {_show(value)}. Use ["a_name"] for one name.'
    raise ValueError(msg)


class LoopDetection(BaseModel):
    """When a run that brings nothing new is corrected, and when it is stopped.

    A call is stale when its tool, its arguments and its result were all seen since the user last
    spoke. With the defaults an identical call is corrected after its third time and, if the model
    goes on, stopped after its fifth.

    Raises:
        ConfigurationError: A field makes no sense: rule, value, way out.
    """

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    nudge_after: Annotated[int, BeforeValidator(_count)] = 2
    """Stale calls in a row after which the model is corrected, before its next call."""
    stop_after: Annotated[int, BeforeValidator(_count)] = 4
    """Stale calls in a row after which the run is stopped, before its next call.

    At least one of them comes after the correction, so a batch that passes this number at once
    is corrected first. The calls that crossed it are billed.
    """
    window: Annotated[int, BeforeValidator(_window)] = 64
    """Different calls, with their results, that are remembered; the least recent goes first."""
    exempt: Annotated[tuple[str, ...], BeforeValidator(_names)] = ()
    """Tools that are not looked at, by name or pattern (`poll_*`, `sleep`, `think`).

    For tools that are meant to be called again with nothing new to say. An exempt call neither
    adds to a row of stale calls nor ends it.
    """
    ignore_arguments: Annotated[tuple[str, ...], BeforeValidator(_names)] = (
        "request_id",
        "requestId",
        "correlation_id",
        "correlationId",
        "trace_id",
        "traceId",
        "span_id",
        "spanId",
        "idempotency_key",
        "idempotencyKey",
        "nonce",
    )
    """Arguments that change with every call and mean nothing, by exact name, at the top only."""

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigurationError(_sentences(error)) from None

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.stop_after <= self.nudge_after:
            msg = (
                f"stop_after must be > nudge_after={self.nudge_after}, got {self.stop_after}. "
                "The model needs one more call to adapt."
            )
            raise ValueError(msg)
        return self


def _sentences(error: ValidationError) -> str:
    sentences: list[str] = []
    for problem in error.errors(include_url=False):
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            known = ", ".join(LoopDetection.model_fields)
            sentences.append(f"{name} is not a field of LoopDetection. Use one of: {known}.")
        else:
            sentences.append(f"{name} {problem['msg'].removeprefix('Value error, ')}".strip())
    return "\n".join(sentences)


# The detector


class LoopDetector:
    """Finds stale calls in a row, at constant memory and constant cost per call.

    Whoever admits the steps of a run takes the `nudge` before each, even where it cannot be
    delivered, and stops when `tripped`. Not safe for threads by itself: the guard's lock is.

    Attributes:
        due: A nudge waits to be taken.
        tripped: The run is to be stopped: `stop_after` stale calls in a row, the last of them
            after the nudge was taken. Where nobody takes it, `window` more calls trip as well.
        ignored: The names of arguments to leave out of a call's fingerprint.
    """

    __slots__ = (
        "_exempt",
        "_given",
        "_nudge_after",
        "_recent",
        "_row",
        "_seen",
        "_stop_after",
        "_window",
        "due",
        "ignored",
        "tripped",
    )

    def __init__(self, settings: LoopDetection) -> None:
        self._nudge_after = settings.nudge_after
        self._stop_after = settings.stop_after
        self._window = settings.window
        patterns = "|".join(translate(pattern) for pattern in settings.exempt)
        self._exempt = re.compile(patterns).match if patterns else None
        self.ignored = frozenset(settings.ignore_arguments)
        # How often each call was seen, the least recent first.
        self._seen: dict[_Key, int] = {}
        self._recent: deque[_Key] = deque(maxlen=2 * _LONGEST_CYCLE)
        self._row = 0
        self._given = False
        self.due = False
        self.tripped = False

    def observe(self, tool: str, arguments: str, result: str) -> None:
        """Take in a call that has ended, failed ones included.

        Args:
            tool: The tool's name, or what stands for it (a handoff, a node of a graph).
            arguments: The `fingerprint` of its arguments.
            result: The `fingerprint_result` of its result, or of the text of its error. Constant
                where there is none (a handoff).
        """
        if self._exempt is not None and self._exempt(tool):
            return
        if len(tool) > _LONGEST_NAME:
            # The model wrote the name: what is kept of it must not grow with it.
            tool = f"{tool[:40]}#{fingerprint_result(tool)}"
        key = (tool, arguments, result)
        seen = self._seen
        count = seen.pop(key, 0)
        seen[key] = count + 1
        self._recent.append(key)
        if count:
            row = self._row = self._row + 1
            if self._given:
                self.tripped = row >= self._stop_after
            elif row >= self._nudge_after:
                self.due = True
                self.tripped = row >= self._stop_after + self._window
            return
        if len(seen) > self._window:
            del seen[next(iter(seen))]
        if self._row:
            self._end_row()

    def user_turn(self) -> None:
        """Forget everything: the user spoke, so asking the same again is no repetition."""
        self._seen.clear()
        self._recent.clear()
        self._end_row()

    def nudge(self) -> str | None:
        """Take the corrective sentence for the model, if one is due; it counts as given then.

        It speaks of the work alone, and is due once in a row of stale calls.
        """
        if not self.due:
            return None
        self._given = True
        self.due = False
        self.tripped = False
        period = self._period()
        tools = ", ".join(self._tools(period))
        if period == 1:
            count = self._seen[self._recent[-1]]
            what = (
                f"You have called {tools} with these arguments {count} times and got the same "
                "result each time"
            )
        elif period:
            what = (
                f"You are going round in a circle of the same {period} calls ({tools}), and they "
                "bring the same results each time"
            )
        else:
            what = (
                f"Your latest calls ({tools}) were made before with the same arguments, and "
                "brought the same results again"
            )
        return f"{what}; try another approach, or report what blocks you."

    def violation(self) -> Violation:
        """Say why the run is stopped; asked when `tripped`.

        The reason is `oscillation` when the latest calls went twice round a cycle of 2 to 4
        different calls, and `no_progress` otherwise.
        """
        period = self._period()
        tools = ", ".join(self._tools(period))
        return Violation(
            reason=StopReason.OSCILLATION if period > 1 else StopReason.NO_PROGRESS,
            limit=self._stop_after,
            used=self._row,
            detail=(
                f"{self._row} calls in a row brought a result already seen for the same "
                f"arguments, stop_after={self._stop_after}; "
                + (f"cycle of {period}: {tools}" if period > 1 else f"latest: {tools}")
            ),
        )

    def state(self) -> dict[str, Any]:
        """Return what the detector knows, ready for JSON. It holds no argument and no result."""
        return {
            "seen": [[*key, count] for key, count in self._seen.items()],
            "recent": [list(key) for key in self._recent],
            "row": self._row,
            "given": self._given,
            "tripped": self.tripped,
        }

    @classmethod
    def from_state(cls, settings: LoopDetection, state: object) -> Self:
        """Make a detector that goes on where another's `state` was taken.

        Under other settings the row is kept and judged by the new numbers.

        Raises:
            ValueError: The state is damaged.
        """
        detector = cls(settings)
        try:
            detector._load(cast("dict[str, Any]", state))
        except (AttributeError, KeyError, TypeError, ValueError):
            msg = (
                f"the state of a loop detector must be what state() returned, got {_show(state)}. "
                "Use a new LoopDetector to go on without it."
            )
            raise ValueError(msg) from None
        return detector

    def _load(self, state: dict[str, Any]) -> None:
        seen = {_key(entry[:-1]): _natural(entry[-1]) for entry in state["seen"]}
        recent = [_key(entry) for entry in state["recent"]]
        row, given, tripped = state["row"], state["given"], state["tripped"]
        sound = (
            state.keys() == {"seen", "recent", "row", "given", "tripped"}
            and len(seen) == len(state["seen"])
            and len(recent) <= 2 * _LONGEST_CYCLE
            and list(seen)[-1:] == recent[-1:]
            and all(count >= 1 for count in seen.values())
            and type(given) is type(tripped) is bool
            and _natural(row) < sum(seen.values(), 1)
            and (row > 0 or not (given or tripped))
        )
        if not sound:
            raise ValueError
        self._seen = dict(list(seen.items())[-self._window :])
        self._recent.extend(recent)
        self._row = row
        self._given = given
        self.due = not given and row >= self._nudge_after
        self.tripped = tripped and row >= self._stop_after

    def _end_row(self) -> None:
        self._row = 0
        self._given = False
        self.due = False
        self.tripped = False

    def _period(self) -> int:
        """Find the shortest cycle that the latest calls went round twice; 0 for none."""
        recent = list(self._recent)
        for period in range(1, _LONGEST_CYCLE + 1):
            if len(recent) >= 2 * period and recent[-period:] == recent[-2 * period : -period]:
                return period
        return 0

    def _tools(self, period: int) -> list[str]:
        recent = list(self._recent)[-(period or self._row) :]
        names = [_speakable(tool) for tool, _, _ in recent]
        return names if period else list(dict.fromkeys(names))


def _key(entry: Sequence[object]) -> _Key:
    tool, arguments, result = entry
    if not (isinstance(tool, str) and isinstance(arguments, str) and isinstance(result, str)):
        raise TypeError
    return tool, arguments, result


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError
    return value


def _speakable(tool: str) -> str:
    """Make a name that the model wrote safe to put into a sentence."""
    return _UNSPEAKABLE.sub("_", tool)[:_LONGEST_NAME] or "_"
