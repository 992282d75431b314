"""What every breaker's settings have in common: frozen, checked, with errors that help."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from budgetguard_core.errors import ConfigurationError, shown

NS_PER_SECOND = 1_000_000_000

_MOST = 10**18
_MOST_SECONDS = 10**9
_DOLLAR_DIGITS = 15


def _count(value: object) -> object:
    if type(value) is not int or not 1 <= value <= _MOST:
        raise ValueError(
            f"must be a whole number >= 1, got {shown(value)}. Leave it out for the default."
        )
    return value


def _cap(value: object) -> object:
    if value is not None and (type(value) is not int or not 1 <= value <= _MOST):
        raise ValueError(f"must be a whole number >= 1, got {shown(value)}. Use None for no cap.")
    return value


def _number(value: object) -> float | None:
    # A bool is an int to Python, and never a number of seconds.
    return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]


def _seconds(value: object) -> object:
    number = _number(value)
    if number is None or not 0 < number <= _MOST_SECONDS:
        raise ValueError(
            f"must be a number of seconds > 0 and <= {_MOST_SECONDS}, got {shown(value)}. "
            "Leave it out for the default."
        )
    return number


def _seconds_or_zero(value: object) -> object:
    number = _number(value)
    if number is None or not 0 <= number <= _MOST_SECONDS:
        raise ValueError(
            f"must be a number of seconds >= 0 and <= {_MOST_SECONDS}, got {shown(value)}. "
            "Leave it out for 0."
        )
    return number


def _percentage(value: object) -> object:
    number = _number(value)
    if number is None or not 0 < number <= 100:
        raise ValueError(
            f"must be a percentage > 0 and <= 100, got {shown(value)}. Use 50 for 50 %."
        )
    return number


def _share(value: object) -> object:
    if type(value) is not float or not 0 < value < 1:
        raise ValueError(f"must be a share between 0 and 1, got {shown(value)}. Use 0.8 for 80 %.")
    return value


def _dollars(value: object) -> object:
    if value is None:
        return None
    if type(value) not in (int, float, Decimal):
        raise ValueError(
            f"must be an amount of US dollars > 0 (Decimal, int or float), got {shown(value)}. "
            "Use None for no cap."
        )
    # repr, so that 0.3 means three tenths and not the binary fraction nearest to it.
    amount = value if isinstance(value, Decimal) else Decimal(repr(value))
    if not (amount.is_finite() and amount > 0):
        raise ValueError(f"must be finite and > 0, got {shown(value)}. Use None for no cap.")
    # A huge exponent, either way, would take all memory as an exact integer.
    if not -_DOLLAR_DIGITS <= amount.adjusted() < _DOLLAR_DIGITS:
        raise ValueError(
            f"must be >= 1E-{_DOLLAR_DIGITS} and < 1E+{_DOLLAR_DIGITS}, got {shown(value)}. "
            "Use None for no cap."
        )
    return amount


def _flag(value: object) -> object:
    if type(value) is not bool:
        raise ValueError(f"must be True or False, got {shown(value)}. Leave it out for False.")
    return value


def _names(value: Any) -> object:
    if isinstance(value, list | tuple | set | frozenset):
        names: list[Any] = [
            one.__name__ if isinstance(one, type) and issubclass(one, BaseException) else one
            for one in cast("Iterable[Any]", value)
        ]
        if all(isinstance(name, str) and name for name in names):
            return tuple(names)
    raise ValueError(
        f"must be a list of exception types, or of their names or patterns, got {shown(value)}. "
        'Use [TimeoutError, "*RateLimit*"].'
    )


Count: TypeAlias = Annotated[int, BeforeValidator(_count)]
"""A whole number >= 1."""
Cap: TypeAlias = Annotated[int | None, BeforeValidator(_cap)]
"""A whole number >= 1, or None for no cap."""
Seconds: TypeAlias = Annotated[float, BeforeValidator(_seconds)]
"""Seconds > 0."""
SecondsOrZero: TypeAlias = Annotated[float, BeforeValidator(_seconds_or_zero)]
"""Seconds >= 0."""
Percentage: TypeAlias = Annotated[float, BeforeValidator(_percentage)]
"""More than 0 and at most 100."""
Share: TypeAlias = Annotated[float, BeforeValidator(_share)]
"""Between 0 and 1, both left out."""
Dollars: TypeAlias = Annotated[Decimal | None, BeforeValidator(_dollars)]
"""US dollars > 0, exact, or None for no cap."""
Flag: TypeAlias = Annotated[bool, BeforeValidator(_flag)]
"""True or False."""
ExceptionNames: TypeAlias = Annotated[
    tuple[str | type[BaseException], ...], BeforeValidator(_names)
]
"""Names or patterns of exception types; a type that is given is kept as its name."""


class Frozen(dict[str, Any]):
    """A dict that stays as it is, and can be copied, pickled and written as JSON."""

    def _refuse(self, *_: object, **__: object) -> Any:
        raise TypeError("settings cannot be changed. Make others with model_copy(update=...).")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse  # pyright: ignore[reportAssignmentType]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


class Settings(BaseModel):
    """The settings of a breaker: frozen, by keyword only, without unknown fields.

    Raises:
        ConfigurationError: A field makes no sense: rule, value, way out.
    """

    model_config = ConfigDict(
        defer_build=True, frozen=True, extra="forbid", arbitrary_types_allowed=True
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy the settings, changed as `update` says; unlike pydantic's, the copy is validated."""
        del deep  # nothing in them can be changed, so a shallow copy is as good
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**(fields | dict(update or {})))

    # Hidden from type checkers, which know the fields from pydantic and would see only Any here.
    if not TYPE_CHECKING:  # pragma: no branch

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise ConfigurationError(_sentences(type(self), error)) from None


def _sentences(model: type[BaseModel], error: ValidationError) -> str:
    """Turn pydantic's report into one sentence per problem: rule, value, way out."""
    sentences: list[str] = []
    for problem in error.errors(include_url=False):
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            known = ", ".join(model.model_fields)
            sentences.append(
                f"{name} is not a field of {model.__name__}, got {shown(problem['input'])}. "
                f"Use one of: {known}."
            )
        elif problem["type"] == "value_error":
            sentences.append(f"{name} {problem['msg'].removeprefix('Value error, ')}".strip())
        elif problem["type"] == "missing":
            sentences.append(f"{name} must be given, got nothing. Pass {name}=...")
        else:
            sentences.append(f"{name}: {problem['msg']}, got {shown(problem['input'])}.")
    return "\n".join(sentences)


def nanoseconds(seconds: float) -> int:
    """Turn seconds into whole nanoseconds, at least one where there is any."""
    return max(round(seconds * NS_PER_SECOND), 1) if seconds else 0


def damaged(what: str, state: object) -> ValueError:
    """Say that a state cannot be used."""
    return ValueError(
        f"the state of a {what} must be what state() returned, got {shown(state)}. "
        "Use a new one to go on without it."
    )


def natural(value: object) -> int:
    """Read a whole number >= 0 from a state.

    Raises:
        TypeError: It is not one.
    """
    if type(value) is not int or value < 0:
        raise TypeError
    return value
