"""A user's hook asks for another try, of a tool or a model, without end; strands #1556."""

from __future__ import annotations

import pytest

from budgetguard_core import Budget
from budgetguard_core.testing.scripted import Answers
from reports.ways import MODES, run_strands

pytest.importorskip("strands")
MANY = 40


class Again:
    """Tries a failing tool, or any answer of the model, again and again."""

    def __init__(self, kind):
        self.kind, self.tries = kind, 0

    def register_hooks(self, registry, **_):
        from strands.hooks import AfterModelCallEvent, AfterToolCallEvent

        event = AfterToolCallEvent if self.kind == "tool" else AfterModelCallEvent
        registry.add_callback(event, self.after)

    def after(self, event):
        self.tries += 1
        done = event.result["status"] if self.kind == "tool" else event.stop_response
        if done and done != "success" and self.tries < MANY:
            event.retry = True


TRIES = [
    # What is tried again, the budget, how it ends, bodies that start, calls of the model.
    ("tool", Budget(max_tool_calls=3), "max_tool_calls", 3, 1),
    ("tool", Budget(max_cost_usd=1), "no_progress", 4, 1),
    ("tool", Budget(tool_quotas={"flaky": 3}, max_iterations=9), "end_turn", 3, 2),
    ("model", Budget(max_model_calls=4), "max_model_calls", 0, 4),
    ("model", Budget(max_cost_usd=1), "no_progress", 0, 13),
    ("model", Budget(max_total_tokens=500), "max_total_tokens", 0, 4),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", ["guard", "hook"])
@pytest.mark.parametrize(("kind", "budget", "reason", "started", "calls"), TRIES)
def test_each_try_counts(kind, budget, reason, started, calls, first, mode):
    from strands import Agent, tool

    from budgetguard_strands import BudgetHookProvider
    from budgetguard_strands.scripted import scripted_model
    from strands_agents import is_valid

    bodies = []

    @tool
    def flaky(x: int) -> str:
        """Fails."""
        bodies.append(x)
        raise RuntimeError("connection reset")

    answers = Answers([{"flaky": {"x": 1}}, "done"] if kind == "tool" else ["short"])
    provider = BudgetHookProvider(budget)
    hooks = [provider, Again(kind)] if first == "guard" else [Again(kind), provider]
    model = scripted_model(answers)
    agent = Agent(model=model, tools=[flaky], hooks=hooks, callback_handler=None)
    assert run_strands(mode, agent, "Go.").stop_reason == reason
    used = provider.outcome(agent).usage
    assert (len(bodies), answers.calls) == (started, calls)
    assert (used.tool_calls, used.model_calls, used.total_tokens) == (started, calls, 120 * calls)
    assert is_valid(agent)
