"""The task for which a selector chooses a profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from budgetguard_core.budget import ProfileId
from budgetguard_core.outcome import Outcome, Status
from budgetguard_core.profiles.profile import Profile
from budgetguard_core.stop import StopReason
from budgetguard_core.usage import Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRun:
    """An earlier run of the same envelope: how it ended, and nothing that was said in it."""

    profile: ProfileId | None
    status: Status
    stop_reason: StopReason | None
    usage: Usage

    @classmethod
    def of(cls, outcome: Outcome) -> PastRun:
        """Take what is kept of an outcome."""
        return cls(
            profile=outcome.profile,
            status=outcome.status,
            stop_reason=outcome.stop_reason,
            usage=outcome.usage,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task that is about to start.

    Args:
        input_tokens: The estimated size of what the run is given; None where the adapter does not
            know it when the run begins.
        config: The framework's configuration of the run, where the adapter has one.
        history: The last 32 runs of the same envelope that have ended, the oldest first.
    """

    input_tokens: int | None = None
    config: Any = None
    history: tuple[PastRun, ...] = ()


Selector: TypeAlias = Callable[[Task], "str | Profile"]
"""Chooses the profile of a task: `lambda task: "quick_qa" if not task.history else "research"`."""
