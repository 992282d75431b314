"""The capability that puts a budget around each run of an agent, also around those of a block."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any, Unpack

from pydantic_ai import Agent
from pydantic_ai.usage import UsageLimits

from budgetguard_core import Budget, Guard, Outcome, Snapshot, kit
from budgetguard_pydantic_ai import _seams
from budgetguard_pydantic_ai._history import DIALECT
from budgetguard_pydantic_ai._run import BoundedRun, OfBudget

DEFAULT_MAX_ITERATIONS = 25
"""The cap of a capability that is given neither a budget nor a guard."""


class BudgetCapability(OfBudget):
    """A budget around each run of an agent: `Agent(..., capabilities=[BudgetCapability(budget)])`.

    Args:
        budget: A `Budget` (a fresh guard for each run), a `Guard` (shared), or an `Envelope`.
            None: `Budget(max_iterations=25)`.
        resume: An earlier run that the first one goes on from: its `Outcome`, its `Snapshot`, or
            its id in `store`. Its messages are the history where `message_history` is left out.
        options: The options of `kit.Envelope`.
    """

    def __init__(
        self,
        budget: Budget | Guard | kit.Envelope | None = None,
        *,
        resume: Snapshot | Outcome | str | None = None,
        **options: Unpack[kit.EnvelopeOptions],
    ) -> None:
        self._resume = resume
        default = Budget(max_iterations=DEFAULT_MAX_ITERATIONS)
        self.envelope = kit.envelope_of(budget, default=default, **options)

    async def for_run(self, ctx: Any) -> BoundedRun:
        """Return the capability of one run."""
        resume, self._resume = self._resume, None  # of the first run alone
        return BoundedRun(self.envelope, _output_type.get(), resume)

    def earlier_messages(self) -> list[Any]:
        """Return the history of the run that is to be gone on from."""
        earlier, store = self._resume, self.envelope.store
        if isinstance(earlier, str):  # claimed where the run begins
            earlier = None if store is None else store.load(earlier)
        return [] if earlier is None else DIALECT.messages(earlier.messages)


def outcome(result: Any) -> Outcome:
    """Return the outcome of a run by its result, or by the exception that left it.

    Raises:
        AdapterError: None is known: it had no budget, or the run is not over.
    """
    if not hasattr(result, "all_messages"):
        return kit.outcome(result)
    messages, final = result.all_messages(), getattr(result, "output", None)
    own = (one for one in reversed(messages) if one.run_id == result.run_id)
    known = (kit.outcome_of(one, messages=messages, final=final) for one in own)
    return next((found for found in known if found is not None), None) or kit.outcome(result)


_output_type: ContextVar[Any] = ContextVar("budgetguard_pydantic_ai_output_type", default=str)
_original: Any = Agent.iter


@functools.wraps(_original)
def _bounded_iter(self: Any, user_prompt: Any = None, **options: Any) -> Any:
    found: list[Any] = [*(options.get("capabilities") or ())]
    self.root_capability.apply(found.append)
    if not any(isinstance(one, BudgetCapability) for one in found):
        enclosing = kit.current()
        if enclosing is None or (enclosing.run is not None and enclosing.run.is_of_clients):
            # Of a block of clients each call is counted where it is sent.
            return _original(self, user_prompt, **options)
        joined = BudgetCapability(Budget())
        options["capabilities"] = [*(options.get("capabilities") or ()), joined]
    _output_type.set(options.get("output_type") or self.output_type)
    if options.get("usage_limits") is None:
        # Its 50 requests are a default, and nobody's decision.
        options["usage_limits"] = UsageLimits(request_limit=None)
    resumed = (one.earlier_messages() for one in found if isinstance(one, BudgetCapability))
    past = options.get("message_history") or next((one for one in resumed if one), None)
    if past:
        options["message_history"] = past
    if past and user_prompt is None and DIALECT.read(past[-1]).synthetic:
        # Without new words the framework would take the synthetic message for the answer.
        options["message_history"] = past[:-1]
    return _original(self, user_prompt, **options)


def install() -> None:
    """Make every agent of this process a part of the run around it, by the public `Agent.iter`.

    Raises:
        AdapterError: This release of Pydantic AI lacks a name that the adapter needs.
    """
    _seams.check()
    agents: Any = Agent
    agents.iter = _bounded_iter
