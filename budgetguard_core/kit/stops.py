"""Telling a stop from any other exception, also where a task group has wrapped it."""

from __future__ import annotations

from typing import cast

from budgetguard_core.outcome import BudgetExceeded


def is_stop(error: BaseException | None) -> bool:
    """Tell whether an exception says nothing but that a run was stopped.

    It is a `BudgetExceeded`, or a group (of an `asyncio.TaskGroup`, for instance) of nothing else.
    """
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return all(is_stop(one) for one in group.exceptions)
    return isinstance(error, BudgetExceeded)
