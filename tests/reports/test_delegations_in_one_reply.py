"""Many delegations in one reply, each with a tool call of its own, under shared limits.

pydantic-ai-harness #696, #588.
"""

from __future__ import annotations

import pytest

from budgetguard_core import Budget
from budgetguard_core.testing.scripted import Answers
from reports.ways import AGENT_WAYS, MODES, run_agents

WIDTHS = (2, 4, 8)
BUDGETS = [
    Budget(max_tool_calls=3),
    Budget(max_tool_calls=5),
    Budget(max_model_calls=5),
    Budget(max_iterations=4),
    Budget(max_total_tokens=700),
]


@pytest.mark.sample(11)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", AGENT_WAYS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_no_cap_is_exceeded_and_every_call_is_counted(budget, width, way, mode):
    pytest.importorskip("agents")
    from agents import Agent, function_tool

    from budgetguard_openai_agents import outcome
    from budgetguard_openai_agents.scripted import scripted_model
    from openai_agents_runs import unpaired

    fetched = []

    @function_tool
    async def fetch(n: int) -> str:
        """Fetch."""
        fetched.append(n)
        return f"page {n}"

    of_children = [Answers([{"fetch": {"n": n}}, f"Page {n} is read."]) for n in range(width)]
    delegates = [
        Agent(name=f"c{n}", model=scripted_model(one), tools=[fetch]).as_tool(f"to_{n}", "Fetch.")
        for n, one in enumerate(of_children)
    ]
    of_lead = Answers([[(f"to_{n}", {"input": "Go."}) for n in range(width)], "All done."])
    lead = Agent(name="lead", model=scripted_model(of_lead), tools=delegates)
    result = run_agents(way, mode, lead, budget, "Go.")
    used = outcome(result).usage
    calls = of_lead.calls + sum(one.calls for one in of_children)
    assert used.model_calls == calls
    assert used.total_tokens == 120 * calls
    assert used.tool_calls <= (budget.max_tool_calls or 99)
    assert len(fetched) <= used.tool_calls
    assert calls <= (budget.max_model_calls or 99)
    assert used.iterations <= (budget.max_iterations or 99)
    assert used.total_tokens <= (budget.max_total_tokens or 9_999)
    assert not unpaired(result.to_input_list())
