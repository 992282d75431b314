"""A last answer of a stopped agent: what its model is sent, and what is kept."""

from __future__ import annotations

import json

import pytest
from strands import tool
from strands.multiagent import GraphBuilder, Swarm
from strands.session import FileSessionManager

from budgetguard_core import Budget, FinalizeReserve
from budgetguard_core.kit import ANSWER_NOW
from budgetguard_core.kit.history import in_words
from budgetguard_core.testing import Script, calls, says
from budgetguard_strands import BudgetHookProvider
from budgetguard_strands._messages import DIALECT
from strands_agents import Counter, made, run

BUDGET = Budget(max_iterations=1, finalize_reserve=FinalizeReserve(tokens=9000))


def test_the_session_keeps_the_answer(tmp_path):
    script = Script([calls("search"), says("It is 42.")])
    provider = BudgetHookProvider(BUDGET)
    session = FileSessionManager("one", storage_dir=str(tmp_path))
    agent = made(
        script,
        Counter().tool,
        hooks=[provider],
        session_manager=session,
        system_prompt="You are an archivist.",
    )
    result = agent("Find it.")
    assert result.stop_reason == "max_iterations"
    assert str(result).strip() == "It is 42."
    assert result.message["metadata"]["finalized"] is True
    assert "You are an archivist." in script.sent[-1]
    # No word of calls in a request that defines no tools.
    assert "toolUse" not in script.sent[-1]
    assert "search returned: result 1" in script.sent[-1]
    again = made(
        Script([says("Yes.")]), session_manager=FileSessionManager("one", storage_dir=str(tmp_path))
    )
    assert again.messages[-1]["content"] == [{"text": "It is 42."}]
    assert ANSWER_NOW not in json.dumps(again.messages)


def test_a_history_is_told_in_words():
    history = [
        {"role": "user", "content": [{"text": "Go."}]},
        {
            "role": "assistant",
            "content": [
                {"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "x"}}},
                {"toolUse": {"toolUseId": "1", "name": "look", "input": {"at": "it"}}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "toolResult": {
                        "toolUseId": "1",
                        "status": "success",
                        "content": [{"json": {"a": 1}}, {"text": "b"}, {"image": {}}],
                    }
                }
            ],
        },
        {"role": "assistant", "content": [{"reasoningContent": {}}]},
        {"role": "user", "content": [{"toolResult": {"toolUseId": "2", "content": []}}]},
        {"role": "assistant", "content": [{"text": "So far."}]},
    ]
    before = json.dumps(history)
    assert in_words(history, DIALECT) == [
        {"role": "user", "content": [{"text": "Go."}]},
        {"role": "assistant", "content": [{"text": 'I called look with {"at": "it"}.'}]},
        {
            "role": "user",
            "content": [{"text": 'look returned: {"a": 1}b'}, {"text": "The tool returned: "}],
        },
        {"role": "assistant", "content": [{"text": "So far."}]},
        {"role": "user", "content": [{"text": ANSWER_NOW}]},
    ]
    assert json.dumps(history) == before


@pytest.mark.parametrize("kind", ["graph", "swarm"])
@pytest.mark.parametrize("way", ["sync", "async", "stream"])
def test_a_graph_or_swarm_that_is_stopped_asks_nothing(kind, way):
    script = Script([calls("search")])
    agent = made(script, Counter().tool, name="one")
    if kind == "graph":
        builder = GraphBuilder().set_max_node_executions(20)
        builder.add_node(agent, "one")
        whole = builder.build()
    else:
        whole = Swarm([agent])
    provider = BudgetHookProvider(BUDGET)
    provider.attach(whole)
    run(whole, "Go.", way)
    outcome = provider.outcome(whole)
    assert (outcome.status, outcome.finalized, script.calls) == ("terminated", False, 1)
    assert ANSWER_NOW not in "".join(script.sent)


def test_a_child_with_its_own_reserve_answers_and_its_parent_goes_on():
    inner_script = Script([calls("search"), says("It is 42.")])
    inner = made(inner_script, Counter().tool, hooks=[BudgetHookProvider(BUDGET)], name="inner")
    outer_script = Script([calls("ask"), says("The archivist says 42.")])

    @tool(name="ask", description="Asks.")
    def ask(value: str = "") -> str:
        return str(inner("Find it."))

    provider = BudgetHookProvider(Budget(max_iterations=5))
    outer = made(outer_script, ask, hooks=[provider])
    assert str(outer("Go.")).strip() == "The archivist says 42."
    outcome = provider.outcome(outer)
    assert (outcome.status, outcome.usage.model_calls) == ("completed", 4)
    assert "It is 42." in outer_script.sent[-1]


def test_whoever_reads_the_stream_sees_the_answer():
    script = Script([calls("search"), says("It is 42.")])
    agent = made(script, Counter().tool, hooks=[BudgetHookProvider(BUDGET)])
    result, chunks = run(agent, "Go.", "stream")
    assert str(result).strip() == "It is 42."
    told = [one["message"]["content"] for one in chunks if "message" in one]
    assert told[-1] == [{"text": "It is 42."}]
    assert [one["data"] for one in chunks if "data" in one][-1] == "It is 42."
