"""The figures of the README's table of what the frameworks' own limits do not do."""

from __future__ import annotations

from decimal import Decimal

import pytest

from budgetguard_core import Budget
from budgetguard_core.kit import TokenUsage
from budgetguard_core.testing.scripted import Answers

SEARCH = {"search": {"query": "x"}}
DELEGATE = {"delegate": {"task": "x"}}
# 1,000 tokens a call; $0.00325 as gpt-4o.
USAGE = TokenUsage(input_tokens=900, output_tokens=100)


def search(query: str) -> str:
    """Search."""
    return f"nothing about {query}"


def langchain_team(main, helper, *middleware):
    from langchain.agents import create_agent

    from budgetguard_langgraph.scripted import scripted_model

    inner = create_agent(scripted_model(helper), tools=[search], middleware=middleware)

    def delegate(task: str) -> str:
        """Delegate."""
        return inner.invoke({"messages": [("user", task)]})["messages"][-1].text

    return create_agent(scripted_model(main), tools=[delegate], middleware=middleware)


def test_model_call_limit_middleware_counts_each_agent_by_itself():
    pytest.importorskip("langchain")
    from langchain.agents.middleware import ModelCallLimitMiddleware

    from budgetguard_langgraph import bounded

    main, helper = Answers([DELEGATE]), Answers([SEARCH])
    team = langchain_team(main, helper, ModelCallLimitMiddleware(run_limit=3))
    team.invoke({"messages": [("user", "Go.")]})
    assert main.calls + helper.calls == 3 + 3 * 3

    main, helper = Answers([DELEGATE]), Answers([SEARCH])
    team = bounded(langchain_team(main, helper), Budget(max_model_calls=3))
    team.invoke({"messages": [("user", "Go.")]})
    assert main.calls + helper.calls == 3


def test_limits_of_strands_are_looked_at_when_they_are_exceeded():
    pytest.importorskip("strands")
    from strands import Agent, tool

    from budgetguard_strands import BudgetHookProvider
    from budgetguard_strands.scripted import scripted_model

    def agent(answers, *hooks):
        model = scripted_model(answers)
        return Agent(model=model, tools=[tool(search)], hooks=list(hooks), callback_handler=None)

    answers = Answers([SEARCH], usage=USAGE)
    assert agent(answers)("Go.", limits={"total_tokens": 2_500}).stop_reason == "limit_total_tokens"
    assert answers.calls * 1_000 == 3_000

    answers = Answers([SEARCH], usage=USAGE)
    budget = Budget(max_total_tokens=2_500, max_output_tokens_per_call=100)
    agent(answers, BudgetHookProvider(budget))("Go.")
    assert answers.calls * 1_000 == 2_000


def test_max_turns_raises_and_counts_each_agent_by_itself():
    pytest.importorskip("agents")
    import asyncio

    from agents import Agent, MaxTurnsExceeded, Runner, function_tool

    from budgetguard_openai_agents import BudgetHooks, outcome
    from budgetguard_openai_agents.scripted import scripted_model

    def team(main, helper):
        inner = Agent(name="h", model=scripted_model(helper), tools=[function_tool(search)])
        delegate = inner.as_tool("delegate", "Delegate.")
        return Agent(name="m", model=scripted_model(main), tools=[delegate])

    main, helper = Answers([{"delegate": {"input": "x"}}]), Answers([SEARCH])
    with pytest.raises(MaxTurnsExceeded):
        asyncio.run(Runner.run(team(main, helper), "Go.", max_turns=3))
    assert main.calls + helper.calls == 3 + 3 * 10

    main, helper = Answers([{"delegate": {"input": "x"}}]), Answers([SEARCH])
    hooks = BudgetHooks(Budget(max_model_calls=3))
    result = asyncio.run(Runner.run(team(main, helper), "Go.", hooks=hooks))
    assert main.calls + helper.calls == outcome(result).usage.model_calls == 3


def test_usage_limits_raise_when_the_money_is_spent():
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent, UsageLimitExceeded, UsageLimits

    from budgetguard_pydantic_ai import BudgetCapability, outcome
    from budgetguard_pydantic_ai.scripted import scripted_model
    from pydantic_ai_agents import ran

    answers = Answers([SEARCH], usage=USAGE)
    agent = Agent(scripted_model(answers), tools=[search])
    with pytest.raises(UsageLimitExceeded):
        ran(agent, "run_sync", usage_limits=UsageLimits(cost_limit=Decimal("0.01")))
    assert answers.calls * Decimal("0.00325") == Decimal("0.013")

    answers = Answers([SEARCH], usage=USAGE)
    budget = Budget(max_cost_usd=0.01, max_output_tokens_per_call=100)
    agent = Agent(scripted_model(answers), tools=[search], capabilities=[BudgetCapability(budget)])
    assert outcome(ran(agent, "run_sync")).usage.cost_usd <= Decimal("0.01")
    assert answers.calls == 3
