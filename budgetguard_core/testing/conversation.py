"""Clause 58: the counters of a conversation go on over its runs."""

from __future__ import annotations

from itertools import count
from typing import Any

from budgetguard_core.budget import Budget
from budgetguard_core.stop import StopReason
from budgetguard_core.testing.checks import act, check_completed, check_equal, check_stopped
from budgetguard_core.testing.driver import Driver
from budgetguard_core.testing.scenario import Mode, Scratch
from budgetguard_core.testing.script import Script, Tool, calls, changing, says

_BUDGET = Budget(max_model_calls=3, per="conversation")
_NUMBERS = count()


def conversation(driver: Driver, mode: Mode) -> None:
    """Clause 58."""
    name = f"clause-58-{driver.name}-{mode}-{next(_NUMBERS)}"
    facts: dict[str, Any] = {"tools": [Tool("search", changing)], "shared": Scratch()}
    search = calls("search")
    script = Script([search, says("Here."), search, says("There.")])
    facts["conversation"] = name
    ran, _ = act(driver, mode, script, guard=_BUDGET, **facts)
    check_completed(ran)
    ran, _ = act(driver, mode, script, guard=_BUDGET, after=ran, user_input="Go on.", **facts)
    check_stopped(ran, StopReason.MAX_MODEL_CALLS)
    check_equal("model calls of both runs", script.calls, 3)
    check_equal("of the second", ran.outcome and ran.outcome.usage.model_calls, 1)

    other = Script([search, says("Here.")])
    facts |= {"conversation": f"{name}-another", "shared": Scratch()}
    ran, _ = act(driver, mode, other, guard=_BUDGET, **facts)
    check_completed(ran)
    check_equal("model calls of another conversation", other.calls, 2)
