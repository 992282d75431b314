"""What `run_bounded` and its other forms are asked to do, before anything is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, cast

from budgetguard_core import (
    AdapterError,
    Budget,
    BudgetExceeded,
    ConfigurationError,
    Guard,
    Outcome,
)
from budgetguard_core.kit import PROGRESS_TOOL, Envelope, EnvelopeOptions, report_progress
from budgetguard_loop._resume import Resume, begin
from budgetguard_loop._run import Command, Loop, Steps
from budgetguard_loop._settings import Settings, is_async

Step: TypeAlias = Callable[..., Any]
Tools: TypeAlias = Mapping[str, Callable[..., Any]]


class LoopOptions(EnvelopeOptions, total=False):
    """The options of a loop beside its budget; `run_bounded` documents them."""

    messages: str | Iterable[Any]
    tools: Tools | None
    model: str | None
    provider: str | None
    retries: int
    resume: Resume | None


class Plan:
    """A loop that has not begun.

    Attributes:
        step: Makes one model call.
        settings: What the step is given beside the messages.

    Raises:
        ConfigurationError: An option makes no sense.
    """

    def __init__(
        self, step: Step, budget: Budget | Guard | Envelope | None, options: LoopOptions
    ) -> None:
        rest: dict[str, Any] = dict(options)
        self.step = step
        self.settings = Settings(step)
        self._budget = budget
        self._messages: str | Iterable[Any] = rest.pop("messages", ())
        self._tools: Tools = rest.pop("tools", None) or {}
        self._model: str | None = rest.pop("model", None)
        self._provider: str | None = rest.pop("provider", None)
        self._retries: int = rest.pop("retries", 0)
        self._resume: Resume | None = rest.pop("resume", None)
        self._options = rest
        if not callable(step):
            raise ConfigurationError(
                f"step must be a function that takes the messages, got {type(step).__name__}. "
                "Pass one that asks the model and returns its reply."
            )
        _check_tools(self._tools)
        if type(self._retries) is not int or self._retries < 0:
            raise ConfigurationError(
                f"retries must be a whole number >= 0, got {self._retries!r}. "
                "Use 0 for one attempt."
            )

    def check_sync(self) -> None:
        """Refuse functions that only an event loop can call."""
        for name, function in {"step": self.step, **self._tools}.items():
            if is_async(function):
                raise AdapterError(
                    f"run_bounded needs functions that are not async, got {name}. "
                    "Use run_bounded_async."
                )

    def begin(self) -> Loop:
        """Open the run; blocking when it loads a checkpoint."""
        beginning = begin(self._budget, self._options, messages=self._messages, resume=self._resume)
        tools = self._tools
        if beginning.run.guard.budget.progress is not None:
            tools = {PROGRESS_TOOL.name: report_progress, **tools}
        return Loop(
            run=beginning.run,
            messages=beginning.messages,
            tools=tools,
            model=self._model,
            provider=self._provider,
            retries=self._retries,
            interrupted=beginning.interrupted,
            retry=beginning.retry,
        )


def _check_tools(tools: object) -> None:
    if not isinstance(tools, Mapping):
        raise ConfigurationError(
            f"tools must map names to functions, got {type(tools).__name__}. "
            'Use tools={"search": search}.'
        )
    for name, function in cast("Mapping[object, object]", tools).items():
        if not callable(function):
            raise ConfigurationError(
                f"tools must map names to functions, got {type(function).__name__} for "
                f"{str(name)[:80]!r}. Pass the function itself."
            )


def advance(
    steps: Steps, answer: Any = None, *, error: BaseException | None = None
) -> Command | Outcome:
    """Tell the loop what came of its last command, and take the next one, or the outcome."""
    try:
        return steps.send(answer) if error is None else steps.throw(error)
    except StopIteration as end:
        return cast("Outcome", end.value)


def ended(outcome: Outcome, loop: Loop) -> Outcome:
    """Return the outcome to the caller, or raise it where that is asked for.

    Raises:
        BudgetExceeded: The run was stopped, and `on_trip` is `raise` or a run around it was.
    """
    trip = loop.run.trip
    if trip is not None and loop.run.is_passed_on:
        raise BudgetExceeded(trip, outcome)
    return outcome
