"""A framework's own limit beside a budget, and a node that the budget stopped, are no completion.

langgraph #5548; langchain #33178, #16263; strands harness-sdk #2124, #2360;
openai-agents-python #844.
"""

from __future__ import annotations

import asyncio

import pytest

from budgetguard_core import Budget
from budgetguard_core.testing.scripted import Answers
from reports.ways import AGENT_WAYS, GRAPH_WAYS, MODES, run_agents, run_graph, run_strands

WIDE = Budget(max_cost_usd=1, max_iterations=50)
GIVEN = {"messages": [("user", "Go.")]}
each_mode = pytest.mark.parametrize("mode", MODES)


def runaway():
    return Answers([{"search": {"query": f"q{n}"}} for n in range(30)])


def search(query: str) -> str:
    """Search."""
    return f"a fact about {query}"


def check(outcome):
    assert (outcome.status, outcome.stop_reason) == ("terminated", "framework_limit")
    assert outcome.detail


LIMITS = ("ModelCallLimitMiddleware", "ToolCallLimitMiddleware")


@each_mode
@pytest.mark.parametrize(
    ("kind", "way"),
    # The recursion limit leaves the other ways in as it leaves the graph.
    [*((kind, way) for kind in LIMITS for way in GRAPH_WAYS), ("react", "bounded")],
)
def test_langgraph(kind, way, mode):
    pytest.importorskip("langchain")
    from langchain.agents import create_agent, middleware
    from langgraph.prebuilt import create_react_agent

    from budgetguard_langgraph.scripted import scripted_model

    answers = runaway()

    def make(others):
        if kind == "react":
            return create_react_agent(scripted_model(answers), [search])
        limit = getattr(middleware, kind)(run_limit=3, exit_behavior="end")
        return create_agent(scripted_model(answers), [search], middleware=[limit, *others])

    config = {"recursion_limit": 7} if kind == "react" else {}
    _, outcome = run_graph(way, mode, make, WIDE, GIVEN, config)
    assert 3 <= answers.calls <= 4
    check(outcome)


@each_mode
@pytest.mark.parametrize("way", AGENT_WAYS)
@pytest.mark.parametrize("handled", [False, True])
def test_openai_agents(handled, way, mode):
    pytest.importorskip("agents")
    from agents import Agent, function_tool
    from agents.run_error_handlers import RunErrorHandlerResult

    from budgetguard_openai_agents import outcome
    from budgetguard_openai_agents.scripted import scripted_model

    answers = runaway()
    agent = Agent(name="a", model=scripted_model(answers), tools=[function_tool(search)])
    more = {}
    if handled:
        answer = RunErrorHandlerResult(final_output="What I have.")
        more["error_handlers"] = {"max_turns": lambda _: answer}
    result = run_agents(way, mode, agent, WIDE, "Go.", max_turns=3, **more)
    assert answers.calls == 3
    check(outcome(result))
    if handled:
        assert result.final_output == "What I have."


@each_mode
@pytest.mark.parametrize("limits", [{"turns": 3}, {"total_tokens": 300}, {"output_tokens": 50}])
def test_strands(limits, mode):
    pytest.importorskip("strands")
    from strands import Agent, tool

    from budgetguard_strands import BudgetHookProvider
    from budgetguard_strands.scripted import scripted_model

    provider = BudgetHookProvider(WIDE)
    model, tools = scripted_model(runaway()), [tool(search)]
    agent = Agent(model=model, tools=tools, hooks=[provider], callback_handler=None)
    run_strands(mode, agent, "Go.", limits=limits)
    check(provider.outcome(agent))


@each_mode
@pytest.mark.parametrize("why", ["own limit", "budget"])
@pytest.mark.parametrize("kind", ["swarm", "graph"])
def test_teams_of_strands(kind, why, mode):
    """The only node that goes in circles is stopped; or the team's own limit ends it."""
    pytest.importorskip("strands")
    from strands import Agent, tool
    from strands.multiagent import GraphBuilder, Swarm

    from budgetguard_strands import BudgetHookProvider
    from budgetguard_strands.scripted import scripted_model

    provider = BudgetHookProvider(WIDE)

    def node(name, *answers):
        model, tools = scripted_model(Answers(answers)), [tool(search)]
        return Agent(name=name, model=model, tools=tools, callback_handler=None)

    def over(name):
        return {"handoff_to_agent": {"agent_name": name, "message": "Your turn."}}

    circle = why == "budget"
    if kind == "swarm":
        nodes = [node("one", {"search": {"query": "x"}})]
        if not circle:
            nodes = [node("one", over("two")), node("two", over("one"))]
        team = Swarm(nodes, hooks=[provider], max_handoffs=3)
    else:
        builder = GraphBuilder()
        builder.add_node(node("one", {"search": {"query": "x"}} if circle else "text"), "one")
        if not circle:
            builder.add_edge("one", "one", condition=lambda _: True)
        builder.set_entry_point("one")
        builder.set_max_node_executions(3)
        builder.set_hook_providers([provider])
        team = builder.build()
    assert run_strands(mode, team, "Go.").status.value == "failed"
    outcome = provider.outcome(team)
    expected = "no_progress" if circle else "framework_limit"
    assert (outcome.status, outcome.stop_reason) == ("terminated", expected)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    "limits", [{"max_iterations": 3}, {"max_iterations": None, "max_execution_time": 1e-9}]
)
def test_the_older_executor(limits, mode):
    pytest.importorskip("langchain_classic")
    from langchain_classic.agents import AgentExecutor, create_tool_calling_agent
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.tools import tool

    from budgetguard_langgraph import bounded_executor, outcome
    from budgetguard_langgraph.scripted import scripted_model

    words = [("human", "{input}"), ("placeholder", "{agent_scratchpad}")]
    prompt, tools = ChatPromptTemplate.from_messages(words), [tool(search)]
    agent = create_tool_calling_agent(scripted_model(runaway()), tools, prompt)
    executor = bounded_executor(AgentExecutor(agent=agent, tools=tools, **limits), WIDE)
    given = {"input": "Go."}
    result = executor.invoke(given) if mode == "sync" else asyncio.run(executor.ainvoke(given))
    check(outcome(result))
