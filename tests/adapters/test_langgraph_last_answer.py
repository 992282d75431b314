"""A last answer of a stopped graph: what its model is sent, and what is kept."""

from __future__ import annotations

from decimal import Decimal

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver

from budgetguard_core import Budget, FinalizeReserve, Price, PriceBook
from budgetguard_core.kit import ANSWER_NOW, in_words
from budgetguard_core.testing import MODEL, Script, calls, says
from budgetguard_langgraph import BudgetCallback, BudgetMiddleware, bounded, outcome
from budgetguard_langgraph._messages import DIALECT
from conformance.budgetguard_langgraph_driver import ScriptedChat
from langgraph_graphs import search, sticky, thread, user

BUDGET = Budget(max_iterations=1, finalize_reserve=FinalizeReserve(tokens=9000))


def stopping(**options):
    script = Script([calls("search"), says("It is 42.")])
    model = ScriptedChat(script=script)
    return script, create_agent(model, [search], system_prompt="Be brief.", **options)


def test_the_thread_keeps_the_answer_and_not_the_question():
    script, agent = stopping(checkpointer=InMemorySaver())
    graph = bounded(agent, BUDGET)
    config = thread()
    result = graph.invoke(user(), config)
    assert result["messages"][-1].content == "It is 42."
    assert result["messages"][-1].response_metadata["finalized"] is True
    kept = graph.get_state(config).values["messages"]
    assert [one.content for one in kept] == [one.content for one in result["messages"]]
    assert ANSWER_NOW not in str(kept)
    assert script.sent[-1].count("Be brief.") == 1


def test_the_middleware_sends_the_system_prompt_too():
    script, agent = stopping(middleware=[BudgetMiddleware(BUDGET)])
    result = agent.invoke(user())
    assert outcome(result).final == "It is 42."
    assert script.sent[-1].count("Be brief.") == 1


def test_dollars_are_enough():
    prices = PriceBook({MODEL: Price(input=100, output=100)})
    reserve = FinalizeReserve(cost_usd=Decimal("0.5"))
    script, agent = stopping()
    budget = Budget(max_iterations=1, max_cost_usd=5, finalize_reserve=reserve)
    result = bounded(agent, budget, price_book=prices).invoke(user())
    assert outcome(result).finalized
    assert outcome(result).usage.cost_usd > Decimal("0.02")
    assert script.bounds[-1] is not None


def test_a_run_whose_first_request_is_refused_answers_without_tools():
    script = Script([says("I would have to look.")])
    agent = create_agent(ScriptedChat(script=script), [search])
    budget = Budget(max_total_tokens=9001, finalize_reserve=FinalizeReserve(tokens=9000))
    result = bounded(agent, budget).invoke(user())
    assert (outcome(result).finalized, script.calls) == (True, 1)
    assert outcome(result).usage.iterations == 0


def test_a_callback_asks_nothing():
    model = ScriptedChat(script=sticky())
    agent = create_agent(model, [search])
    callback = BudgetCallback(BUDGET)
    agent.invoke(user(), {"callbacks": [callback]})
    assert callback.outcome.finalized is False
    assert model.script.calls == 1


def test_a_conversation_is_told_in_words():
    picture = {"type": "image", "url": "https://example.com/a.png"}
    said = in_words(
        [
            SystemMessage("Be brief."),
            SystemMessage("Be brief."),
            HumanMessage("Go."),
            AIMessage("", tool_calls=[{"name": "look", "args": {"at": "it"}, "id": "1"}]),
            ToolMessage("nothing", tool_call_id="1", name="look"),
            HumanMessage([picture]),
            AIMessage(""),
        ],
        DIALECT,
    )
    assert [type(one) for one in said] == [SystemMessage, HumanMessage, AIMessage, HumanMessage]
    assert said[2].content == 'I called look with {"at": "it"}.'
    assert said[3].content == [
        {"type": "text", "text": "look returned: nothing"},
        picture,
        {"type": "text", "text": ANSWER_NOW},
    ]


def test_whoever_reads_the_stream_sees_the_answer():
    _, agent = stopping()
    updates = list(bounded(agent, BUDGET).stream(user(), stream_mode="updates"))
    assert "It is 42." in str(updates[-1])
    _, agent = stopping()
    *_, last = bounded(agent, BUDGET).stream(user(), stream_mode="values")
    assert last["messages"][-1].content == "It is 42."
