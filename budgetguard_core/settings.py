"""Settings of the plugs, as a budget holds them: plain data, frozen and checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from budgetguard_core.errors import ConfigurationError, shown

NS_PER_SECOND = 1_000_000_000

MOST = 10**18
_MOST_SECONDS = 10**9
_LONGEST_WORDS = 2000
_DOLLAR_DIGITS = 15


def rule(
    holds: Callable[[Any], Any], sentence: str, to: Callable[[Any], Any] = lambda value: value
) -> BeforeValidator:
    """Return a validator of one rule."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(sentence.format(shown(value)))
        return to(value)

    return BeforeValidator(check)


def is_whole(value: Any, least: int = 1, most: int = MOST) -> bool:
    """Return whether a value is a whole number of this range; a bool is none."""
    return type(value) is int and least <= value <= most


def whole(
    least: int = 1, most: int = MOST, end: str = "Leave it out for the default."
) -> BeforeValidator:
    """Return a validator of whole numbers."""
    span = f">= {least}" if most >= 10**6 else f"from {least} to {most}"
    sentence = f"must be a whole number {span}, got {{}}. {end}"
    return rule(lambda value: is_whole(value, least, most), sentence)


def number(
    what: str,
    least: float,
    most: float,
    end: str,
    *,
    exclusive: bool = False,
    optional: bool = False,
) -> BeforeValidator:
    """Return a validator of numbers, which are kept as floats; a bool is none."""

    def holds(value: Any) -> bool:
        if value is None:
            return optional
        if type(value) not in (int, float) or not least <= value <= most:
            return False
        return not (exclusive and value == least)

    return rule(
        holds,
        f"must be {what}, got {{}}. {end}",
        lambda value: value if value is None else float(value),
    )


def are_names(value: Any) -> bool:
    """Return whether a value is a list of texts."""
    return isinstance(value, list | tuple | set | frozenset) and all(
        isinstance(name, str) and name for name in cast("Iterable[Any]", value)
    )


def _cap(value: Any) -> Any:
    if type(value) is int and value > MOST:
        # A number without end overflows what it is compared with.
        raise ValueError(f"must be <= {MOST}, got more. Use None for no cap.")
    if value is not None and not is_whole(value):
        raise ValueError(f"must be a whole number >= 1, got {shown(value)}. Use None for no cap.")
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


def _exceptions(value: Any) -> Any:
    """Return the names of exceptions that are given as types or names."""
    if not isinstance(value, list | tuple | set | frozenset):
        return value
    return [
        one.__name__ if isinstance(one, type) and issubclass(one, BaseException) else one
        for one in cast("Iterable[Any]", value)
    ]


def _share(*, optional: bool) -> BeforeValidator:
    return rule(
        lambda value: (optional and value is None) or (type(value) is float and 0 < value < 1),
        "must be a share between 0 and 1, got {}. Use 0.8 for 80 %.",
    )


_OF_SECONDS = f"a number of seconds {{}} 0 and <= {_MOST_SECONDS}"

Count: TypeAlias = Annotated[int, whole()]
"""A whole number >= 1."""
Cap: TypeAlias = Annotated[int | None, BeforeValidator(_cap)]
"""A whole number >= 1, or None for no cap."""
Seconds: TypeAlias = Annotated[
    float,
    number(
        _OF_SECONDS.format(">"), 0, _MOST_SECONDS, "Leave it out for the default.", exclusive=True
    ),
]
"""Seconds > 0."""
SecondsOrZero: TypeAlias = Annotated[
    float, number(_OF_SECONDS.format(">="), 0, _MOST_SECONDS, "Leave it out for 0.")
]
"""Seconds >= 0."""
Percentage: TypeAlias = Annotated[
    float, number("a percentage > 0 and <= 100", 0, 100, "Use 50 for 50 %.", exclusive=True)
]
"""More than 0 and at most 100."""
Share: TypeAlias = Annotated[float, _share(optional=False)]
"""Between 0 and 1, both left out."""
OptionalShare: TypeAlias = Annotated[float | None, _share(optional=True)]
"""Between 0 and 1, both left out, or None for none."""
Words: TypeAlias = Annotated[
    str,
    rule(
        lambda value: isinstance(value, str) and 1 <= len(value.strip()) <= _LONGEST_WORDS,
        f"must be a text of 1 to {_LONGEST_WORDS} characters, got {{}}. Leave it out for ours.",
    ),
]
"""Words for a model."""
Dollars: TypeAlias = Annotated[Decimal | float | None, BeforeValidator(_dollars)]
"""US dollars > 0, or None for no cap; kept as an exact `Decimal`."""
ExceptionNames: TypeAlias = Annotated[
    tuple[str | type[BaseException], ...],
    rule(
        lambda value: are_names(_exceptions(value)),
        "must be a list of exception types, or of their names or patterns, got {}. "
        'Use [TimeoutError, "*RateLimit*"].',
        lambda value: tuple(_exceptions(value)),
    ),
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
    """Settings: frozen, by keyword only, without unknown fields.

    Raises:
        ConfigurationError: A field makes no sense: rule, value, way out.
    """

    model_config = ConfigDict(
        defer_build=True, frozen=True, extra="forbid", arbitrary_types_allowed=True
    )

    @classmethod
    def nearest(cls, name: str) -> str | None:
        """Return the field that a name nearly is."""
        found = get_close_matches(name, cls.model_fields, n=1, cutoff=0.75)
        return found[0] if found else None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy the settings, changed as `update` says; unlike pydantic's, the copy is validated."""
        del deep  # nothing in them can be changed, so a shallow copy is as good
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**(fields | dict(update or {})))

    # Hidden from type checkers, which know the fields from pydantic and would see only Any here.
    if not TYPE_CHECKING:  # pragma: no branch

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise configuration_error(type(self), error) from None


# Rule and way out of what pydantic refuses by itself.
_RULES = {
    "callable_type": (
        "must be a function",
        'Use a function of yours; for stop_when, tool_called("submit").',
    ),
    "dict_type": ("must be a mapping of names", "Leave it out for none."),
    "literal_error": ("must be {expected}", "Leave it out for the default."),
    "model_type": ("must be a {class_name} or its fields", "Use {class_name}(...){none}."),
    "string_type": ("must be a text", "Leave it out for none."),
    "is_instance_of": ("must be a list or a tuple", "Put what is one in brackets."),
    "tuple_type": ("must be a list or a tuple", "Put what is one in brackets."),
}


def configuration_error(model: type[Settings], error: ValidationError) -> ConfigurationError:
    """Turn pydantic's report into one sentence per problem: rule, value, way out."""
    sentences: list[str] = []
    for problem in error.errors(include_url=False):
        name = ".".join(str(part) for part in problem["loc"])
        kind, message, value = problem["type"], problem["msg"], shown(problem["input"])
        if kind == "extra_forbidden":
            near = model.nearest(name)
            way_out = f"Use {near}" if near else f"Use one of: {', '.join(model.model_fields)}"
            text = f"is not a field of {model.__name__}, got {value}. {way_out}."
        elif kind == "missing":
            text = f"must be given, got nothing. Pass {name}=..."
        elif kind in _RULES:
            # Deeper down, None is not always a choice.
            none = "" if "." in name else "; None goes without it"
            facts = {"none": none, **problem.get("ctx", {})}
            broken, way_out = (part.format(**facts) for part in _RULES[kind])
            text = f"{broken}, got {value}. {way_out}"
        elif kind == "value_error":
            text = message.removeprefix("Value error, ")
        else:
            text = f"{message}, got {value}."
        sentences.append(f"{name} {text}".strip())
    return ConfigurationError("\n".join(sentences))


def nanoseconds(seconds: float) -> int:
    """Turn seconds into whole nanoseconds, at least one where there is any."""
    return max(round(seconds * NS_PER_SECOND), 1) if seconds else 0


class BulkheadConfig(Settings):
    """The calls of its tools that may run at once, together.

    Names and defaults are those of resilience4j's documentation
    (https://resilience4j.readme.io/docs/bulkhead).
    """

    max_concurrent_calls: Count = 25
    """Calls that run at the same time."""
    max_wait_duration: SecondsOrZero = 0.0
    """Seconds that a call may wait for a place. With 0, one that finds none is refused at once."""


_LONGEST_TEXT = 200

CallOutcome: TypeAlias = Literal["success", "failure", "ignored"]


_WindowSize: TypeAlias = Annotated[int, whole(1, 100_000, "Leave it out for 100.")]


class CircuitBreakerConfig(Settings):
    """The conditions under which a circuit breaker opens, and closes again.

    The defaults are resilience4j's, made for services with many calls a second. An agent calls a
    tool far less often: for one, begin with `sliding_window_size=10, minimum_number_of_calls=5,
    permitted_number_of_calls_in_half_open_state=2, slow_call_duration_threshold=30`.
    """

    failure_rate_threshold: Percentage = 50.0
    """Percentage of failed calls in the window at which the breaker opens."""
    slow_call_rate_threshold: Percentage = 100.0
    """Percentage of slow calls in the window at which the breaker opens."""
    slow_call_duration_threshold: Seconds = 60.0
    """Seconds; a call that takes longer is slow, whether it fails or not."""
    permitted_number_of_calls_in_half_open_state: _WindowSize = 10
    """Trial calls when half-open. The last of them to end closes the breaker or opens it again."""
    sliding_window_size: _WindowSize = 100
    """The last calls, so many, by which the breaker goes."""
    minimum_number_of_calls: Count = 100
    """Calls that the window must hold before a rate is judged: at most its size."""
    wait_duration_in_open_state: Seconds = 60.0
    """Seconds that the breaker stays open before it lets trial calls through."""
    record_exceptions: ExceptionNames = ()
    """Failures, by type or name pattern: subclasses are too. Empty: everything that was
    raised. Whatever else is raised counts as a success."""
    ignore_exceptions: ExceptionNames = ()
    """Neither failures nor successes, even where `record_exceptions` has them too."""
    record_result: Callable[[Any], bool] | None = Field(default=None, exclude=True)
    """Judges whether a result that was returned is a failure. It is code and is in no snapshot."""
    stop_after_open_rounds: Count = 3
    """Rounds in a row in which every tool call was turned away by an open breaker, after which the
    run is stopped with `circuit_open`. Not a field of resilience4j: services have no rounds."""

    def outcome_of(self, result: object, error: BaseException | str | None) -> CallOutcome:
        """Classify a call for the breaker.

        Args:
            result: What the call returned, where it raised nothing.
            error: What it raised, or what its framework says of that.
        """
        if error is None:
            failed = self.record_result is not None and self.record_result(result)
            return "failure" if failed else "success"
        names = _names_of(error)
        if _matches(self.ignore_exceptions, names):
            return "ignored"
        if not self.record_exceptions or _matches(self.record_exceptions, names):
            return "failure"
        return "success"


def _names_of(error: BaseException | str) -> list[str]:
    if isinstance(error, str):
        return [error[:_LONGEST_TEXT]]
    return [one.__name__ for one in type(error).__mro__[:-1]]


def _matches(patterns: tuple[str | type[BaseException], ...], names: list[str]) -> bool:
    return any(fnmatchcase(name, cast("str", pattern)) for pattern in patterns for name in names)


_Rate: TypeAlias = Annotated[
    float,
    number(
        "a number of calls per second from 1E-6 to 1E+6",
        1e-6,
        1e6,
        "Use 0.5 for one call in two seconds.",
    ),
]


class RateLimit(Settings):
    """The calls of its tools that are permitted in a period, together."""

    rate: _Rate
    """Calls per second in the long run; a token comes back every 1/rate seconds."""
    burst: Count = 1
    """Calls that may start at once after a pause: the size of the bucket."""
    max_wait_duration: SecondsOrZero = 0.0
    """Seconds that a call may wait for its token. One that would wait longer is refused at once."""


class VelocityLimits(Settings):
    """The speed of a run: the most in any 60 seconds.

    A call counts when it starts, with what is reserved for it, and is corrected when it ends. The
    call that reaches a ceiling is the last: the next one is not admitted and the run is stopped.
    """

    max_tokens_per_minute: Cap = None
    """Tokens, prompt plus completion. Checked before each model call."""
    max_cost_usd_per_minute: Dollars = None
    """US dollars. Checked before each model call."""
    max_tool_calls_per_minute: Cap = None
    """Tool bodies that start. Checked before each tool call: exactly this many start."""
    throttle_at: Share = 0.8
    """The share of a ceiling from which on calls are delayed until the pace is below it again, by
    61 seconds at most."""


_Rows: TypeAlias = Annotated[int, whole(2, 10**6)]


class ProgressReports(Settings):
    """The moments at which the model is asked how far it is, and the definition of a standstill.

    At a standstill the model is corrected first. The run is stopped with `stalled` when its next
    report shows no change, or does not come. It is the planner who reports: a sub-agent is asked
    only where its own budget says so, as one that lacks the tool would be stopped for its silence.
    """

    every_iterations: Count = 10
    """Iterations without a report after which the model is asked for one."""
    same_subgoal: _Rows = 3
    """Reports in a row with the same `next_subgoal` that are a standstill. Case, white space and
    punctuation do not matter."""
    flat_estimate: _Rows = 3
    """Reports in a row whose `estimated_remaining_steps` does not fall that are a standstill."""
    unanswered: Count = 2
    """Requests in a row without a report that are a standstill."""


_MOST_TOOLS = 1024

_LONGEST_NAME = 200


def _are_tools(value: Any) -> bool:
    if (
        not isinstance(value, Mapping)
        or not 0 < len(cast("Mapping[Any, Any]", value)) <= _MOST_TOOLS
    ):
        return False
    return all(
        isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME and is_whole(count, 1, 10**12)
        for name, count in cast("Mapping[Any, Any]", value).items()
    )


_Tools: TypeAlias = Annotated[
    Mapping[str, int],
    rule(
        _are_tools,
        f"must map 1 to {_MOST_TOOLS} tool names to whole numbers >= 1, got {{}}. "
        "Record it with ToolMixBaseline.of(runs).",
        dict,
    ),
    AfterValidator(Frozen),
]
_Alpha: TypeAlias = Annotated[
    float,
    rule(
        lambda value: type(value) is float and 0 < value <= 0.5,
        "must be a probability > 0 and <= 0.5, got {}. Leave it out for 0.001.",
    ),
]


class ToolMixBaseline(Settings):
    """The frequencies with which runs of this kind call their tools; recorded, kept as JSON."""

    format_version: Literal[1] = 1
    """The form of this record."""
    runs: Count
    """Runs that were recorded."""
    tools: _Tools
    """Calls of each tool in all of them."""

    @classmethod
    def of(cls, runs: Iterable[Mapping[str, int]]) -> Self:
        """Record a baseline.

        Args:
            runs: The tool calls of each run by name. Runs without a call are left out.

        Raises:
            ConfigurationError: No run called a tool, or the runs call more than 1,024 tools.
        """
        kept = [run for run in runs if run]
        calls: Counter[str] = Counter()
        for run in kept:
            calls.update(run)
        return cls(runs=max(len(kept), 1), tools=calls)


class ToolMix(Settings):
    """The difference from the baseline's tools at which somebody should look at a run.

    The run is looked at when it has made `minimum_number_of_calls` tool calls, and each time that
    number has doubled.
    """

    baseline: ToolMixBaseline
    """The usual tools."""
    alpha: _Alpha = 0.001
    """The improbability of the mix, from 0 to 1: the share of usual runs that would be reported
    at each look."""
    minimum_number_of_calls: Count = 20
    """Tool calls before the first look."""
