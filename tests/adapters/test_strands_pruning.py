"""Once the window is nearly full, an agent's model is sent what `prune` keeps."""

from __future__ import annotations

import pytest
from strands import ModelRetryStrategy
from strands.session import FileSessionManager

from budgetguard_core import Budget, MemoryStore, Price, PriceBook
from budgetguard_core.kit import TokenUsage, keep_turns
from budgetguard_core.testing import MODEL, ProviderError, Reply, Script, calls, says
from budgetguard_strands import BudgetHookProvider
from strands_agents import Counter, made

FULL = TokenUsage(9000, 10)
OPTIONS = {
    "prune": keep_turns(1),
    "price_book": PriceBook({MODEL: Price(input=1, output=1, context_window=10_000)}),
}


def agent_of(*replies, budget=Budget(max_iterations=9)):  # noqa: B008 - never changed
    script = Script(replies)
    provider = BudgetHookProvider(budget, **OPTIONS)
    # The SDK waits for seconds before it tries again.
    once = ModelRetryStrategy(max_attempts=1)
    return script, made(script, Counter().tool, hooks=[provider], retry_strategy=once)


def test_the_model_is_sent_less_and_the_history_stays_whole():
    script, agent = agent_of(
        calls("search"), calls("search", usage=FULL), calls("search"), says("Done.")
    )
    agent("Go.")
    assert [len(one) for one in script.requests] == [1, 3, 3, 3]
    assert [message["role"] for message in agent.messages] == ["user", "assistant"] * 4


def test_a_stop_or_a_failure_leaves_the_history_whole():
    budget = Budget(max_iterations=2)
    _, agent = agent_of(calls("search"), calls("search", usage=FULL), budget=budget)
    assert agent("Go.").stop_reason == "max_iterations"
    assert len(agent.messages) == 6

    failing = [calls("search"), calls("search", usage=FULL), calls("search")]
    _, agent = agent_of(*failing, Reply(error=ProviderError("down")))
    with pytest.raises(Exception, match="down"):
        agent("Go.")
    assert len(agent.messages) == 7


HISTORY = [
    message
    for number in range(4)
    for message in (
        {"role": "user", "content": [{"text": f"Question {number}. " + "word " * 3000}]},
        {"role": "assistant", "content": [{"text": "Yes."}]},
    )
]


def test_a_first_prompt_that_is_too_large_is_cut():
    script, agent = agent_of(says("Done."))
    agent.messages[:] = HISTORY
    agent("Go.")
    assert [len(one) for one in script.requests] == [3]
    assert len(agent.messages) == 10


def test_a_session_and_a_checkpoint_stay_whole(tmp_path):
    store, seen = MemoryStore(), []

    class Saved(MemoryStore):
        def save(self, snapshot):
            seen.append(len(snapshot.messages))
            store.save(snapshot)

    script = Script([calls("search"), calls("search", usage=FULL), calls("search"), says("Done.")])
    provider = BudgetHookProvider(Budget(max_iterations=9), store=Saved(), **OPTIONS)
    session = FileSessionManager("one", storage_dir=str(tmp_path))
    agent = made(script, Counter().tool, hooks=[provider], session_manager=session)
    agent("Go.")
    assert [len(one) for one in script.requests] == [1, 3, 3, 3]
    again = made(
        Script([says("Yes.")]), session_manager=FileSessionManager("one", storage_dir=str(tmp_path))
    )
    assert again.messages == agent.messages
    assert len(again.messages) == 8
    assert seen == sorted(seen)
    assert seen[-2:] == [7, 8]
