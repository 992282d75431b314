"""The task for which a selector chooses a profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from budgetguard_core.outcome import Outcome
from budgetguard_core.profiles.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task that is about to start.

    Args:
        input_tokens: The estimated size of what the run is given; None where the adapter does not
            know it when the run begins.
        config: The framework's configuration of the run, where the adapter has one.
        history: The last 32 runs of the same envelope that have ended, the oldest first: how they
            ended, and nothing that was said in them.
    """

    input_tokens: int | None = None
    config: Any = None
    history: tuple[Outcome, ...] = ()


Selector: TypeAlias = Callable[[Task], "str | Profile"]
"""Chooses the profile of a task: `lambda task: "quick_qa" if not task.history else "research"`."""
