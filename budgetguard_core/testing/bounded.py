"""The assertion that an agent ends within its envelope."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from budgetguard_core.budget import Budget
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.guard import Guard
from budgetguard_core.kit import outcome_of
from budgetguard_core.outcome import BudgetExceeded, Outcome
from budgetguard_core.usage import Usage


def assert_bounded(
    run: Outcome | Guard | Callable[[], Any] | Any, *, within: Budget, completed: bool = False
) -> Usage:
    """Assert that a run used no more than a budget allows.

    Args:
        run: An outcome; a guard; what an adapter returned or raised; or a function, which is
            called in a block that bounds nothing, so that all that runs in it is judged.
        within: The envelope. It need not be the one that the run had.
        completed: The run must also have ended by itself, and not by a limit.

    Returns:
        What it used.

    Raises:
        AssertionError: It used more: every cap and quota that it exceeded, with what it used.
        ConfigurationError: Nothing is known of a run there.
    """
    __tracebackhide__ = True
    usage, tools, ending = _facts(run)
    passed = [
        f"{name}={cap}: {used} used"
        for name, cap in within.caps().items()
        if (used := getattr(usage, name.removeprefix("max_"))) > cap
    ]
    for pattern, quota in within.tool_quotas.items():
        used = sum(count for name, count in tools.items() if _matches(name, pattern, within))
        if used > quota:
            passed.append(f"tool_quotas[{pattern!r}]={quota}: {used} used")
    if passed:
        raise AssertionError(f"the run exceeded its envelope: {'; '.join(passed)}")
    if completed and ending != "completed":
        raise AssertionError(f"the run must have ended by itself, got {ending}")
    return usage


def _facts(run: Any) -> tuple[Usage, Mapping[str, int], str]:
    if isinstance(run, Guard):
        ending = "completed" if run.trip is None else f"a stop: {run.trip.detail}"
        return run.usage, run.tool_counts, ending
    found = run if isinstance(run, Outcome) else outcome_of(run)
    if found is None and isinstance(run, BudgetExceeded):
        found = run.outcome
    if found is not None:
        tools = Counter(one.name for one in found.tool_calls if one.status != "refused")
        return (
            found.usage,
            tools,
            f"{found.status}: {found.detail or found.error or ''}".strip(": "),
        )
    if callable(run):
        # It bounds nothing. An observing one would let the runs inside it pass their own caps.
        guard = Guard(sinks=None)
        with guard.activate():
            returned = run()
        if inspect.iscoroutine(returned):
            # Nothing has run: it would be judged by nothing.
            returned.close()
            raise ConfigurationError(
                "assert_bounded takes a function that runs, got an async one. Pass "
                "lambda: asyncio.run(agent()), or mark the test with pytest.mark.budget."
            )
        return guard.usage, guard.tool_counts, "completed"
    raise ConfigurationError(
        f"assert_bounded takes an outcome, a guard, an adapter's result or a function, got "
        f"{type(run).__name__}. Pass what the bounded run returned."
    )


def _matches(name: str, pattern: str, budget: Budget) -> bool:
    class_of = next(
        (kind for one, kind in budget.tool_classes.items() if fnmatchcase(name, one)), None
    )
    return fnmatchcase(name, pattern) or (
        class_of is not None and fnmatchcase(f"{class_of}/{name}", pattern)
    )
