"""A cap that asks a person by an interrupt of the agent: `on_trip="ask"`."""

from __future__ import annotations

from typing import Any, Final, NoReturn
from uuid import uuid4

from strands.interrupt import Interrupt, InterruptException

from budgetguard_core.kit import PAUSES, LimitQuestion
from budgetguard_strands import _seams

NAME: Final = "budget_question"
"""The name of an interrupt that asks for more budget.

Its `reason` has `reason`, `limit`, `used`, `detail` and `next_step`. The response
`{"max_iterations": 40}` raises the caps, `False` ends the run.
"""
PAUSES.add(InterruptException)


def ask(question: LimitQuestion) -> NoReturn:
    """Interrupt the agent; it comes back to the same step with the answer."""
    raise InterruptException(Interrupt(f"budgetguard:{uuid4().hex}", NAME, question.to_json()))


def answers_to(target: Any) -> dict[str, Any]:
    """Return the answers that an agent, swarm or graph goes on with, by the run that has asked."""
    found = (one for one in _seams.interrupts_of(target).values() if one.name == NAME)
    return {one.reason["run_id"]: one.response for one in found if one.response is not None}
