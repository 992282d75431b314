"""An answer that is cut at its bound raises in Strands, and its text is lost; strands #1320."""

from __future__ import annotations

import pytest

from budgetguard_core import Budget
from budgetguard_core.kit import TokenUsage
from budgetguard_core.testing import Script, says
from reports.ways import MODES, run_strands

pytest.importorskip("strands")
STORY = "word " * 400


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        (Budget(max_output_tokens_per_call=60), "max_output_tokens_per_call"),
        (Budget(max_total_tokens=150, max_output_tokens_per_call=300), "max_total_tokens"),
        (Budget(max_output_tokens_per_call=600), "end_turn"),
    ],
)
def test_the_text_is_kept_and_the_session_goes_on(budget, reason, mode, tmp_path):
    from strands import Agent
    from strands.session import FileSessionManager

    from budgetguard_strands import BudgetHookProvider
    from conformance.budgetguard_strands_driver import ScriptedModel
    from strands_agents import is_valid

    script = Script([says(STORY, TokenUsage(50, 400)), says("The end.")])
    provider = BudgetHookProvider(budget)

    def agent(*hooks):
        session = FileSessionManager("s", storage_dir=str(tmp_path))
        model = ScriptedModel(script)
        return Agent(
            agent_id="a",
            model=model,
            hooks=list(hooks),
            session_manager=session,
            callback_handler=None,
        )

    first = agent(provider)
    assert run_strands(mode, first, "Tell a story.").stop_reason == reason
    written = script.given[0].text
    assert written.startswith("word word")
    assert (written == STORY) == (reason == "end_turn")
    assert any(written.strip() in str(message["content"]) for message in first.messages)
    assert provider.outcome(first).usage.output_tokens == script.given[0].usage.output_tokens
    again = agent()
    run_strands(mode, again, "And?")
    assert is_valid(again)


@pytest.mark.parametrize("mode", MODES)
def test_a_bound_of_the_users_own_raises_as_it_does_unguarded(mode):
    from strands import Agent
    from strands.types.exceptions import MaxTokensReachedException

    from budgetguard_strands import BudgetHookProvider
    from conformance.budgetguard_strands_driver import ScriptedModel

    model = ScriptedModel(Script([says(STORY, TokenUsage(50, 400))]))
    model.update_config(max_tokens=60)
    provider = BudgetHookProvider(Budget(max_iterations=5))
    agent = Agent(model=model, hooks=[provider], callback_handler=None)
    with pytest.raises(MaxTokensReachedException):
        run_strands(mode, agent, "Tell a story.")
    assert provider.outcome(agent).status == "failed"
