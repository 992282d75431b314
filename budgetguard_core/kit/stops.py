"""Telling a stop from any other exception, and telling of it in the log."""

from __future__ import annotations

import json
import logging
from typing import cast

from budgetguard_core.outcome import BudgetExceeded
from budgetguard_core.stop import Trip

_LOG = logging.getLogger("budgetguard")


def is_stop(error: BaseException | None) -> bool:
    """Return whether an exception says nothing but that a run was stopped.

    It is a `BudgetExceeded`, or a group (of an `asyncio.TaskGroup`, for instance) of nothing else.
    """
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return all(is_stop(one) for one in group.exceptions)
    return isinstance(error, BudgetExceeded)


def log_stop(trip: Trip, run_id: str) -> None:
    """Log that a run was stopped: one WARNING, with reason, limit, used and run.

    They are attributes of the record too, for handlers that write structured logs.

    Args:
        trip: Why it was stopped.
        run_id: The run.
    """
    first = trip.violations[0] if trip.violations else None
    limit = None if first is None else first.limit
    used = None if first is None else first.used
    # As JSON, so that no name in it can forge a line of the log.
    _LOG.warning(
        "run stopped: reason=%s limit=%s used=%s run=%s",
        trip.reason,
        limit,
        used,
        json.dumps(run_id),
        extra={
            "stop_reason": str(trip.reason),
            "limit": limit,
            "used": used,
            "run_id": run_id,
        },
    )
