"""Sessions: what is stored and what was returned are one history, which any provider takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from strands import Agent
from strands.agent.conversation_manager import SlidingWindowConversationManager
from strands.hooks import BeforeInvocationEvent
from strands.session import FileSessionManager

from budgetguard_core import Budget
from budgetguard_core.testing import Call, Script, calls, says
from budgetguard_strands import BudgetHookProvider
from strands_agents import Counter, check_request, in_new_process, made, run, strict

WAYS = ("sync", "async", "stream")
# The window of the older releases begins with an answer where it is small, without a guard, too.
WINDOWS = [3, 4, 6, 40]
GO_ON = {"role": "user", "content": [{"text": "And now?"}]}


@pytest.fixture
def counter():
    return Counter()


def stored(folder: Path) -> list[dict]:
    session = FileSessionManager("s", storage_dir=str(folder))
    return [one.to_message() for one in session.list_messages("s", "main")]


def at(folder: Path, script: Script, tool, *hooks, **options) -> Agent:
    return strict(
        script,
        tool,
        hooks=hooks,
        agent_id="main",
        session_manager=FileSessionManager("s", storage_dir=str(folder)),
        **options,
    )


def plain(messages):
    return [{"role": one["role"], "content": one["content"]} for one in messages]


@pytest.mark.sample(7)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("prompts", [(None, None), (None, "And now?"), ("And now?", None)])
def test_a_stopped_session_is_valid_for_ever(way, window, prompts, counter, tmp_path):
    script = Script([calls("search")])
    manager = SlidingWindowConversationManager(window_size=window)
    provider = BudgetHookProvider(Budget(max_iterations=2))
    agent = at(tmp_path, script, counter.tool, provider, conversation_manager=manager)
    run(agent, "Go.", way)
    for prompt in prompts:
        result, _ = run(agent, prompt, way)
        assert result.stop_reason == "max_iterations"
    kept = stored(tmp_path)
    check_request([*kept, GO_ON])
    assert plain(kept[-len(agent.messages) :]) == plain(agent.messages)
    # A reader that has no provider, and one that has it.
    for hooks in ((), (BudgetHookProvider(Budget(max_iterations=9)),)):
        manager = SlidingWindowConversationManager(window_size=window)
        answering = Script([says("Done.")])
        reader = at(tmp_path, answering, counter.tool, *hooks, conversation_manager=manager)
        assert run(reader, "And now?", way)[0].stop_reason == "end_turn"
    check_request([*stored(tmp_path), GO_ON])


def test_going_on_without_words_is_asked_for_neutrally(counter):
    agent = made(
        Script([calls("search"), says("Done.")]),
        counter.tool,
        hooks=[BudgetHookProvider(Budget(max_iterations=1))],
    )
    agent("Go.")
    before = plain(agent.messages)
    assert agent(None).stop_reason == "end_turn"
    assert plain(agent.messages)[: len(before)] == before
    assert agent.messages[len(before)]["content"] == [{"text": "Please go on."}]


def test_a_hook_that_speaks_first_is_heard(counter):
    def speak(event):
        event.messages = [{"role": "user", "content": [{"text": "The hook's words."}]}]

    agent = made(
        Script([calls("search"), says("Done.")]),
        counter.tool,
        hooks=[BudgetHookProvider(Budget(max_iterations=1))],
    )
    agent("Go.")
    agent.hooks.add_callback(BeforeInvocationEvent, speak)
    agent(None)
    assert [one["content"][0] for one in agent.messages if one["role"] == "user"][-1] == {
        "text": "The hook's words."
    }


CHILD = """
import sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
from adapters.test_strands_sessions import at
from budgetguard_core import Budget
from budgetguard_core.testing import Script, calls, says
from budgetguard_strands import BudgetHookProvider
from strands_agents import Counter
counter = Counter()
provider = BudgetHookProvider(Budget(max_iterations=4))
script = Script([calls("search"), says("Done.")])
agent = at(Path(sys.argv[1]), script, counter.tool, provider)
print(agent(None).stop_reason, script.calls, len(counter.started))
print(provider.outcome(agent).usage.iterations)
"""


@pytest.mark.slow
def test_a_stopped_agent_goes_on_in_a_new_process(counter, tmp_path):
    script = Script([calls("search", Call("search", "other"))])
    at(tmp_path, script, counter.tool, BudgetHookProvider(Budget(max_tool_calls=3)))("Go.")
    assert len(counter.started) == 3
    tests = str(Path(__file__).parent.parent)
    words = in_new_process(CHILD.format(tests=tests), str(tmp_path))
    assert words == ["end_turn", "2", "1", "2"]
    check_request([*stored(tmp_path), GO_ON])
