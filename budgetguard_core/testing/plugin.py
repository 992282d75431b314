"""A pytest plugin for tests of agents' endings: fixtures, and a marker that fails a test.

pytest finds it by itself where BudgetGuard is installed. `-p no:budgetguard` leaves it out.
"""

from __future__ import annotations

import inspect
import unittest
from collections.abc import Callable, Generator
from functools import wraps
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from budgetguard_core.budget import Budget
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.event_log import read_events
from budgetguard_core.guard import Guard
from budgetguard_core.replay import replay
from budgetguard_core.testing.bounded import assert_bounded
from budgetguard_core.testing.clock import ManualClock
from budgetguard_core.testing.scripted import Answer, Answers
from budgetguard_core.usage import TokenUsage

__all__ = ["assert_bounded"]

_GROUP = "budgetguard.scripted_models"
_MARKER = "budget"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker with pytest."""
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(**caps): fail the test if what it runs exceeds this envelope; nothing is "
        "stopped. The caps are those of budgetguard_core.Budget.",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse the marker where it would watch nothing."""
    of_class = getattr(item, "cls", None)
    is_old = isinstance(of_class, type) and issubclass(of_class, unittest.TestCase)
    if is_old and item.get_closest_marker(_MARKER) is not None:
        pytest.fail(
            f"pytest.mark.{_MARKER} watches test functions, got a method of a unittest.TestCase. "
            "Use assert_bounded in it.",
            pytrace=False,
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Observe a marked test, and fail it when a run in it exceeds its envelope."""
    marker = pyfuncitem.get_closest_marker(_MARKER)
    if marker is None:
        return (yield)
    within = Budget(*marker.args, **marker.kwargs)
    # It bounds nothing. An observing one would let the runs inside it pass their own caps.
    guard = Guard(sinks=None)
    test = pyfuncitem.obj
    if inspect.iscoroutinefunction(test):
        # An event loop's runner may have been started before, in a context of its own.
        @wraps(test)
        async def observed(*args: Any, **kwargs: Any) -> Any:
            with guard.activate():
                return await test(*args, **kwargs)

        pyfuncitem.obj = observed
    try:
        with guard.activate():
            result = yield
    finally:
        pyfuncitem.obj = test
    try:
        assert_bounded(guard, within=within)
    except AssertionError as error:
        pytest.fail(str(error), pytrace=False)
    if not guard.usage.model_calls and not guard.tool_counts:
        pyfuncitem.warn(
            pytest.PytestWarning(
                f"pytest.mark.{_MARKER} saw no call: an agent that no adapter bounds is not seen. "
                "Bound it, or leave the marker out."
            )
        )
    return result


@pytest.fixture
def manual_clock() -> ManualClock:
    """A clock that moves only when it is told to: `manual_clock.advance(seconds)`."""
    return ManualClock()


@pytest.fixture
def budget_guard(manual_clock: ManualClock) -> Callable[..., Guard]:
    """Make guards on the test's manual clock.

    A guard bounds whatever it is given to: `bounded(graph, budget_guard(max_iterations=3))`.
    """

    def make(budget: Budget | None = None, **caps: Any) -> Guard:
        return Guard(budget or Budget(**caps), clock=manual_clock, sinks=None)

    return make


@pytest.fixture
def scripted_model() -> Callable[..., Any]:
    """Make a model of an installed framework that gives scripted answers.

    `scripted_model("langgraph", {"search": {"query": "x"}}, "Done.")` asks for a tool and then ends
    the run; `model.answers.calls` is how often it was called.
    """

    def make(framework: str, *answers: Answer, usage: TokenUsage | None = None) -> Any:
        known = {one.name: one for one in entry_points(group=_GROUP)}
        if framework not in known:
            raise ConfigurationError(
                f"framework {framework!r} is not known. Use one of: {', '.join(sorted(known))}."
            )
        scripted = Answers(answers) if usage is None else Answers(answers, usage=usage)
        make_model: Callable[[Answers], Any] = known[framework].load()
        return make_model(scripted)

    return make


@pytest.fixture
def recorded_run(request: pytest.FixtureRequest) -> Callable[..., Guard]:
    """Read a recorded run, from the folder of the test: `recorded_run("runs/slow.jsonl")`.

    It is lived through again by the engine, under its own budget or another one, and comes back as
    a guard: for `assert_bounded(recorded_run("runs/slow.jsonl"), within=Budget(...))`.
    """

    def read(path: str | Path, *, within: Budget | None = None) -> Guard:
        found = request.path.parent / path
        with found.open("rb") as lines:
            return replay(read_events(lines), budget=within)

    return read
