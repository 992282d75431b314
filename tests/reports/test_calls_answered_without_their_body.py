"""A model asks again and again for what it does not get.

langchain #40753, #37778; openai-agents-js #512; openai-agents-python #191; deepagents #2946;
agno #7962. Under a dollar cap alone, what is refused costs a fraction of a cent each time.
"""

from __future__ import annotations

import json

import pytest

from budgetguard_core import Budget, StopReason
from budgetguard_core.testing.scripted import Answers
from reports.ways import AGENT_WAYS, GRAPH_WAYS, MODES, run_agents, run_graph, run_strands

ENOUGH = 12
DOLLARS = Budget(max_cost_usd=5)
ONE_SEND = Budget(max_cost_usd=5, tool_quotas={"send": 1})
WORDS = {"same": lambda _: "hi", "varied": lambda n: f"hi {n}"}
GIVEN = {"messages": [("user", "Tell them.")]}

each_mode = pytest.mark.parametrize("mode", MODES)
each_words = pytest.mark.parametrize("words", WORDS)


def asking(words, tool="send"):
    return Answers([*({tool: {"text": WORDS[words](n)}} for n in range(ENOUGH)), "Done."])


def send(text: str) -> str:
    """Send."""
    return f"sent {text}"


def check(answers, outcome):
    assert outcome.stop_reason == StopReason.NO_PROGRESS
    assert outcome.status == "terminated"
    assert answers.calls <= 9


# LangGraph: a quota, a limit of LangChain's own, a tool that is not there, a structured answer.


def langgraph_agent(kind, answers, middleware):
    from langchain.agents import create_agent
    from langchain.agents.middleware import ToolCallLimitMiddleware
    from langchain.agents.structured_output import ToolStrategy
    from pydantic import BaseModel

    from budgetguard_langgraph.scripted import scripted_model

    class Verdict(BaseModel):
        score: int

    more = [ToolCallLimitMiddleware(run_limit=1)] if kind == "own limit" else []
    form = ToolStrategy(Verdict) if kind == "invalid answer" else None
    return create_agent(
        scripted_model(answers), [send], middleware=[*more, *middleware], response_format=form
    )


@pytest.mark.sample(5)
@each_mode
@each_words
@pytest.mark.parametrize("way", GRAPH_WAYS)
@pytest.mark.parametrize("kind", ["quota", "own limit", "unknown tool", "invalid answer"])
def test_langgraph(kind, way, words, mode):
    pytest.importorskip("langchain")
    answers = asking(words, {"unknown tool": "sent", "invalid answer": "Verdict"}.get(kind, "send"))
    budget = ONE_SEND if kind == "quota" else DOLLARS
    _, outcome = run_graph(
        way, mode, lambda middleware: langgraph_agent(kind, answers, middleware), budget, GIVEN
    )
    check(answers, outcome)


@each_mode
@pytest.mark.parametrize("way", GRAPH_WAYS)
def test_a_structured_answer_that_is_valid_at_last_is_given(way, mode):
    pytest.importorskip("langchain")
    scores = ["high", "higher", 3]
    answers = Answers([{"Verdict": {"score": score}} for score in scores])
    result, outcome = run_graph(
        way,
        mode,
        lambda middleware: langgraph_agent("invalid answer", answers, middleware),
        DOLLARS,
        GIVEN,
    )
    assert result["structured_response"].score == 3
    assert (outcome.status, outcome.usage.iterations) == ("completed", 3)


# OpenAI Agents SDK: a quota, a guardrail that rejects.


@pytest.mark.sample(5)
@each_mode
@each_words
@pytest.mark.parametrize("way", AGENT_WAYS)
@pytest.mark.parametrize("kind", ["quota", "guardrail"])
def test_openai_agents(kind, way, words, mode):
    pytest.importorskip("agents")
    from agents import Agent, ToolGuardrailFunctionOutput, function_tool, tool_input_guardrail

    from budgetguard_openai_agents import outcome
    from budgetguard_openai_agents.scripted import scripted_model

    @tool_input_guardrail
    def no(data):
        return ToolGuardrailFunctionOutput.reject_content("Not to them.")

    tool = function_tool(send)
    tool.tool_input_guardrails = [no] if kind == "guardrail" else []
    answers = asking(words)
    agent = Agent(name="a", model=scripted_model(answers), tools=[tool])
    budget = ONE_SEND if kind == "quota" else DOLLARS
    check(answers, outcome(run_agents(way, mode, agent, budget, "Tell them.", max_turns=200)))


# Strands: a quota, a hook that cancels, before the provider and after it.


@pytest.mark.sample(5)
@each_mode
@each_words
@pytest.mark.parametrize("kind", ["quota", "hook", "hook behind"])
def test_strands(kind, words, mode):
    pytest.importorskip("strands")
    from strands import Agent, tool
    from strands.hooks import BeforeToolCallEvent

    from budgetguard_strands import BudgetHookProvider
    from budgetguard_strands.scripted import scripted_model

    class No:
        def register_hooks(self, registry, **_):
            registry.add_callback(
                BeforeToolCallEvent, lambda event: setattr(event, "cancel_tool", "Not to them.")
            )

    answers, provider = asking(words), BudgetHookProvider(ONE_SEND if kind == "quota" else DOLLARS)
    hooks = {"quota": [provider], "hook": [No(), provider], "hook behind": [provider, No()]}[kind]
    agent = Agent(
        model=scripted_model(answers), tools=[tool(send)], hooks=hooks, callback_handler=None
    )
    run_strands(mode, agent, "Tell them.")
    check(answers, provider.outcome(agent))


# A person is asked about each, and says no, or yes to the same thing each time. Every request has
# objects of its own, as in a web server; the state goes from one to the next.


def over_pauses(begin, go_on):
    """Answer until nobody is asked; return how often that was, and the outcome."""
    asked, (waits, outcome) = 0, begin()
    while waits and asked < ENOUGH:
        asked += 1
        waits, outcome = go_on(waits)
    return asked, outcome


def langgraph_pauses(way, mode, answers, budget, decision):
    from langchain.agents import create_agent
    from langchain.agents.middleware import HumanInTheLoopMiddleware
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.types import Command

    from budgetguard_langgraph.scripted import scripted_model

    saver = InMemorySaver()

    def make(middleware):
        ask = HumanInTheLoopMiddleware(interrupt_on={"send": True})
        return create_agent(
            scripted_model(answers), [send], middleware=[ask, *middleware], checkpointer=saver
        )

    def run(given):
        config = {"configurable": {"thread_id": "1"}}
        _, outcome = run_graph(way, mode, make, budget, given, config)
        return outcome.status == "paused", outcome

    decisions = Command(resume={"decisions": [{"type": decision}]})
    return over_pauses(lambda: run(GIVEN), lambda _: run(decisions))


def agents_pauses(way, mode, answers, budget, decision):
    import asyncio

    from agents import Agent, RunState, function_tool

    from budgetguard_openai_agents import outcome
    from budgetguard_openai_agents.scripted import scripted_model

    agent = Agent(
        name="a",
        model=scripted_model(answers),
        tools=[function_tool(send, needs_approval=True)],
    )

    def run(given):
        result = run_agents(way, mode, agent, budget, given, max_turns=200)
        state = json.loads(json.dumps(result.to_state().to_json())) if result.interruptions else {}
        return state, outcome(result)

    def answer(waits):
        state = asyncio.run(RunState.from_json(agent, waits))
        for item in state.get_interruptions():
            (state.approve if decision == "approve" else state.reject)(item)
        return run(state)

    return over_pauses(lambda: run("Tell them."), answer)


def strands_pauses(way, mode, answers, budget, decision, folder):
    from strands import Agent, tool
    from strands.hooks import BeforeToolCallEvent
    from strands.session import FileSessionManager

    from budgetguard_strands import BudgetHookProvider
    from budgetguard_strands.scripted import scripted_model

    class Ask:
        def register_hooks(self, registry, **_):
            registry.add_callback(BeforeToolCallEvent, self.before)

        def before(self, event):
            if event.interrupt("ok", reason="send?") != "approve":
                event.cancel_tool = "The person said no."

    def run(given):
        provider = BudgetHookProvider(budget)
        agent = Agent(
            agent_id="a",
            model=scripted_model(answers),
            tools=[tool(send)],
            hooks=[Ask(), provider],
            session_manager=FileSessionManager("s", storage_dir=str(folder)),
            callback_handler=None,
        )
        result = run_strands(mode, agent, given)
        return (list(result.interrupts or ()), provider.outcome(agent))

    def answer(waits):
        said = [{"interruptResponse": {"interruptId": i.id, "response": decision}} for i in waits]
        return run(said)

    return over_pauses(lambda: run("Tell them."), answer)


PAUSES = [
    *(
        pytest.param("langchain", langgraph_pauses, way, id=f"langgraph-{way}")
        for way in GRAPH_WAYS
    ),
    *(pytest.param("agents", agents_pauses, way, id=f"agents-{way}") for way in AGENT_WAYS),
    pytest.param("strands", strands_pauses, "provider", id="strands"),
]
each_pausing = pytest.mark.parametrize(("needs", "pausing", "way"), PAUSES)


def paused(needs, pausing, way, mode, answers, budget, decision, folder):
    pytest.importorskip(needs)
    more = (folder,) if needs == "strands" else ()
    return pausing(way, mode, answers, budget, decision, *more)


@pytest.mark.sample(5)
@each_mode
@each_pausing
@pytest.mark.parametrize(
    ("words", "decision"), [("same", "reject"), ("varied", "reject"), ("same", "approve")]
)
def test_over_pauses(needs, pausing, way, words, decision, mode, tmp_path):
    answers = asking(words)
    asked, outcome = paused(needs, pausing, way, mode, answers, DOLLARS, decision, tmp_path)
    assert asked <= 8
    check(answers, outcome)


@pytest.mark.sample(5)
@each_mode
@each_pausing
@pytest.mark.parametrize("decision", ["approve", "reject"])
def test_caps_hold_over_pauses(needs, pausing, way, decision, mode, tmp_path):
    answers = asking("varied")
    budget = Budget(max_iterations=5, max_tool_calls=3, loop_detection=None)
    asked, outcome = paused(needs, pausing, way, mode, answers, budget, decision, tmp_path)
    caps = {"approve": ("max_tool_calls", 4, 3), "reject": ("max_iterations", 5, 0)}
    reason, calls, sent = caps[decision]
    assert (outcome.stop_reason, answers.calls, outcome.usage.tool_calls) == (reason, calls, sent)
    # Nobody is asked about the call that the cap refuses.
    assert asked == (3 if decision == "approve" else 5)


@pytest.mark.sample(5)
@each_mode
@each_pausing
def test_a_person_is_asked_for_no_call_that_a_quota_refuses(needs, pausing, way, mode, tmp_path):
    answers = asking("varied")
    budget = Budget(max_iterations=6, tool_quotas={"send": 1})
    asked, outcome = paused(needs, pausing, way, mode, answers, budget, "approve", tmp_path)
    assert (asked, answers.calls, outcome.usage.tool_calls) == (1, 6, 1)
