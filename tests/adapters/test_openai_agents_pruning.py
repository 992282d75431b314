"""Once the window is nearly full, an agent's model is sent what `prune` keeps."""

from __future__ import annotations

import asyncio

import pytest
from agents import SQLiteSession

from budgetguard_core import Budget, Price, PriceBook
from budgetguard_core.kit import TokenUsage, keep_turns
from budgetguard_core.testing import MODEL
from budgetguard_openai_agents import BudgetHooks, outcome
from openai_agents_runs import MODES, agent_of, calls, go, says, script_of, tool

FULL = TokenUsage(9000, 10)
OPTIONS = {
    "prune": keep_turns(1),
    "price_book": PriceBook({MODEL: Price(input=1, output=1, context_window=10_000)}),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_model_is_sent_less_and_the_history_stays_whole(mode):
    replies = [calls("search"), calls("search", usage=FULL), calls("search", "search")]
    agent = agent_of(*replies, says("Done."), tools=[tool("search", [])])
    hooks = BudgetHooks(Budget(max_iterations=9), **OPTIONS)
    result = asyncio.run(go(mode, agent, hooks=hooks))
    assert outcome(result).status == "completed"
    sizes = [sum(1 for one in request) for request in script_of(agent).requests]
    assert sizes[2] == sizes[1] < sizes[3]
    assert len(result.to_input_list()) == 10


@pytest.mark.parametrize("mode", MODES)
def test_a_session_that_is_too_large_is_cut_for_the_model_alone(mode):
    agent = agent_of(calls("search"), says("Done."), tools=[tool("search", [])])
    session = SQLiteSession("one")

    async def main():
        for number in range(4):
            question = f"Question {number}. " + "word " * 3000
            await session.add_items([{"role": "user", "content": question}])
            await session.add_items([{"role": "assistant", "content": "Yes."}])
        hooks = BudgetHooks(Budget(max_iterations=9), **OPTIONS)
        result = await go(mode, agent, hooks=hooks, session=session)
        return result, await session.get_items()

    result, kept = asyncio.run(main())
    assert outcome(result).status == "completed"
    # The first task and the last turn.
    assert [len(request) for request in script_of(agent).requests] == [3, 3]
    assert len(kept) == 8 + 4
