"""A turn ends by time while its tools run, and the session has to take the next one.

strands harness-sdk #3651, #2025, #2296.
"""

from __future__ import annotations

import asyncio

import pytest

from budgetguard_core import Budget, Guard
from budgetguard_core.testing import ManualClock
from budgetguard_core.testing.scripted import Answers
from reports.ways import MODES, run_strands

pytest.importorskip("strands")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hangs", ["async tool", "sync tool"])
def test_what_was_done_is_kept_and_the_session_goes_on(hangs, mode, tmp_path):
    from strands import Agent, tool
    from strands.session import FileSessionManager

    from budgetguard_strands import BudgetHookProvider
    from budgetguard_strands.scripted import scripted_model
    from strands_agents import is_valid, results

    clock, done = ManualClock(), []

    @tool
    def quick(x: int) -> str:
        """Quick."""
        done.append(x)
        return f"fact {x}"

    @tool
    async def slow(x: int) -> str:
        """Hangs."""
        clock.advance(60)
        await asyncio.Event().wait()

    @tool
    def slow_sync(x: int) -> str:
        """Comes back late."""
        clock.advance(60)
        done.append(x)
        return "late"

    def agent(answers, *hooks):
        return Agent(
            agent_id="a",
            model=scripted_model(Answers(answers)),
            tools=[quick, slow, slow_sync],
            hooks=list(hooks),
            session_manager=FileSessionManager("s", storage_dir=str(tmp_path)),
            callback_handler=None,
        )

    hung = "slow" if hangs == "async tool" else "slow_sync"
    guard = Guard(Budget(max_seconds=0.5), clock=clock)
    batch = [("quick", {"x": 1}), ("quick", {"x": 3}), (hung, {"x": 2})]
    first = agent([batch, "done"], BudgetHookProvider(guard))
    assert run_strands(mode, first, "Look.").stop_reason == "max_seconds"
    assert is_valid(first)
    assert sorted(done) == ([1, 3] if hangs == "async tool" else [1, 2, 3])
    texts = results(first)
    assert texts[:2] == ["fact 1", "fact 3"]
    assert ("outcome is unknown" if hangs == "async tool" else "late") in texts[2]

    again = agent([{"quick": {"x": 9}}, "done"], BudgetHookProvider(Budget(max_iterations=5)))
    assert again.messages == first.messages
    assert run_strands(mode, again, "And now?").stop_reason == "end_turn"
    assert done[-1] == 9
    assert is_valid(again)


def test_a_time_out_of_the_users_own_leaves_what_it_leaves_unguarded():
    from strands import Agent, tool

    from budgetguard_strands import BudgetHookProvider
    from budgetguard_strands.scripted import scripted_model

    begun = asyncio.Event()

    @tool
    async def slow(x: int) -> str:
        """Hangs."""
        begun.set()
        await asyncio.Event().wait()

    async def left(*hooks):
        begun.clear()
        model = scripted_model(Answers([{"slow": {"x": 1}}]))
        agent = Agent(model=model, tools=[slow], hooks=list(hooks), callback_handler=None)
        task = asyncio.create_task(agent.invoke_async("Look."))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return agent

    async def both():
        provider = BudgetHookProvider(Budget(max_seconds=60))
        bare, guarded = await left(), await left(provider)
        assert [m["role"] for m in guarded.messages] == [m["role"] for m in bare.messages]
        assert provider.outcome(guarded).status == "failed"

    asyncio.run(both())
