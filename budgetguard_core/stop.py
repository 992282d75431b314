"""Why a run ends: reasons, violations, the trip, and stop conditions of the user's own."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict

from budgetguard_core.errors import ConfigurationError, shown


class StopReason(StrEnum):
    """Why a run ended, in order of precedence when several reasons hold at once."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    MAX_ITERATIONS = "max_iterations"
    MAX_MODEL_CALLS = "max_model_calls"
    MAX_SECONDS = "max_seconds"
    MAX_COST_USD = "max_cost_usd"
    UNPRICED_MODEL = "unpriced_model"
    MAX_TOTAL_TOKENS = "max_total_tokens"
    MAX_INPUT_TOKENS = "max_input_tokens"
    MAX_OUTPUT_TOKENS = "max_output_tokens"
    MAX_OUTPUT_TOKENS_PER_CALL = "max_output_tokens_per_call"
    UNMETERED_USAGE = "unmetered_usage"
    TENANT_DAILY = "tenant_daily"
    TENANT_MONTHLY = "tenant_monthly"
    MAX_TOOL_CALLS = "max_tool_calls"
    TOOL_QUOTA = "tool_quota"
    NO_PROGRESS = "no_progress"
    OSCILLATION = "oscillation"
    STALLED = "stalled"
    VELOCITY = "velocity"
    CIRCUIT_OPEN = "circuit_open"
    STOP_CONDITION = "stop_condition"
    FRAMEWORK_LIMIT = "framework_limit"


PRECEDENCE: dict[StopReason, int] = {reason: position for position, reason in enumerate(StopReason)}


class Violation(BaseModel):
    """One limit that holds against the next step."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    reason: StopReason
    """The limit's stop reason."""
    limit: int | float | Decimal | None = None
    """The cap, in the unit of its name; None where the reason has no number."""
    used: int | float | Decimal | None = None
    """The amount used when the step was refused, in the same unit."""
    detail: str = ""
    """One sentence for people. It is never shown to the model."""


class Trip(BaseModel):
    """The first stop of a run. It is sticky: every later admission answers with it."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    reason: StopReason
    """The first of `violations` in the order of `StopReason`."""
    violations: tuple[Violation, ...]
    """Everything that held, in order."""
    run_id: str
    """The run whose limit it was: this one, or an ancestor of it."""

    @property
    def detail(self) -> str:
        """The sentence of the violation that gave the reason."""
        return self.violations[0].detail if self.violations else ""


@dataclass(frozen=True, slots=True)
class LimitQuestion:
    """The question whether a run may go on beyond a cap.

    Attributes:
        run_id: The run whose caps they are; that of a conversation begins with `conversation-`.
        violations: Every cap that would stop it now, the first in the order of reasons first.
        next_step: What the run is about to do.
    """

    run_id: str
    violations: tuple[Violation, ...]
    next_step: str

    @property
    def reason(self) -> StopReason:
        """The first cap that would stop it."""
        return self.violations[0].reason

    @property
    def limit(self) -> Any:
        """The cap."""
        return self.violations[0].limit

    @property
    def used(self) -> Any:
        """The amount that is used of it."""
        return self.violations[0].used

    @property
    def detail(self) -> str:
        """The same as a sentence for people."""
        return self.violations[0].detail

    def to_json(self) -> dict[str, Any]:
        """Return what a framework keeps of it, and shows to a person."""
        facts = {name: getattr(self, name) for name in ("reason", "limit", "used", "detail")}
        plain = {k: str(v) if isinstance(v, Decimal | StrEnum) else v for k, v in facts.items()}
        return {"run_id": self.run_id, **plain, "next_step": self.next_step}


AsksPerson: TypeAlias = Callable[[LimitQuestion], Any]
"""Returns the caps to raise, `{"max_iterations": 40}`, or None for the end; may be async."""


class StopCondition(ABC):
    """A condition of the user's own, asked before each step; it answers with a reason or None.

    Conditions compose: `tool_called("submit") & after_iterations(3)`, `a | b`. A plain callable
    that takes the guard and returns a reason (or True), or None (or False), serves as well.
    """

    @abstractmethod
    def __call__(self, guard: Any) -> str | None:
        """Return why the run should stop before its next step, or None to go on.

        Args:
            guard: The `Guard` of the run.
        """

    def __and__(self, other: Condition) -> StopCondition:
        return _Both(self, as_condition(other), every=True)

    def __rand__(self, other: Condition) -> StopCondition:
        return _Both(as_condition(other), self, every=True)

    def __or__(self, other: Condition) -> StopCondition:
        return _Both(self, as_condition(other), every=False)

    def __ror__(self, other: Condition) -> StopCondition:
        return _Both(as_condition(other), self, every=False)


Condition: TypeAlias = StopCondition | Callable[..., str | bool | None]


class _Both(StopCondition):
    """Two conditions: every one of them has to hold, or the first that does is enough."""

    def __init__(self, left: StopCondition, right: StopCondition, *, every: bool) -> None:
        self._left = left
        self._right = right
        self._every = every

    def __call__(self, guard: Any) -> str | None:
        left = reason_of(self._left, self._left(guard))
        if (left is None) is self._every:
            return left
        right = reason_of(self._right, self._right(guard))
        return right if left is None or right is None else f"{left} and {right}"


class _Callable(StopCondition):
    def __init__(self, function: Callable[..., str | bool | None]) -> None:
        self._function = function

    def __call__(self, guard: Any) -> str | None:
        return reason_of(self._function, self._function(guard))


class tool_called(StopCondition):
    """Hold once a tool was started whose name matches `pattern` (as in a shell: `submit_*`)."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def __call__(self, guard: Any) -> str | None:
        """Return which tool was called, or None."""
        for name in guard.tool_counts:
            if fnmatchcase(name, self._pattern):
                return f"tool {self._pattern!r} was called"
        return None


class after_iterations(StopCondition):
    """Hold once `count` iterations have started. For composing; `max_iterations` is the cap."""

    def __init__(self, count: int) -> None:
        if type(count) is not int or count < 1:
            raise ConfigurationError(
                f"after_iterations must be given a whole number >= 1, got {shown(count)}. "
                "Use after_iterations(5)."
            )
        self._count = count

    def __call__(self, guard: Any) -> str | None:
        """Return how many iterations have started, or None."""
        if guard.usage.iterations < self._count:
            return None
        return f"{self._count} iterations have started"


def as_condition(condition: Condition) -> StopCondition:
    """Turn a plain callable into a `StopCondition`; leave a condition as it is."""
    call = getattr(condition, "__call__", None)  # noqa: B004 - how it is called, not whether
    if inspect.iscoroutinefunction(condition) or inspect.iscoroutinefunction(call):
        raise ConfigurationError(
            f"a stop condition must not be async, got {condition!r}: it is asked before each step, "
            "where nothing can wait. Let async code call guard.abort() instead."
        )
    if isinstance(condition, StopCondition):
        return condition
    if not callable(condition):
        raise ConfigurationError(
            f"a stop condition must be callable, got {condition!r}. "
            "Pass a function that takes the guard and returns a reason or None."
        )
    return _Callable(condition)


def reason_of(condition: object, answer: object) -> str | None:
    """Read what a condition has answered: a reason, or something that is true or is not.

    Raises:
        TypeError: It has answered with something to await.
    """
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise TypeError("a stop condition must not be async")
    if not answer:
        return None
    if isinstance(answer, str):
        return answer
    return getattr(condition, "__name__", "the condition holds")
