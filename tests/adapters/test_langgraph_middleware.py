"""Other middleware beside ours, in any order: every model call of the agent counts."""

from __future__ import annotations

import importlib

import langchain.agents.middleware as built_in
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, SummarizationMiddleware
from langchain_core.messages import AIMessage
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command

import langgraph_graphs as graphs
from budgetguard_core import AdapterError, Budget, Guard
from budgetguard_core.testing import Call, ProviderError, Reply, Script, calls, says
from budgetguard_langgraph import BudgetMiddleware, aresume, bounded, outcome, resume
from conformance.budgetguard_langgraph_driver import ScriptedChat
from langgraph_graphs import StrictChat, check_request, search, sticky, thread, user


@pytest.fixture(autouse=True)
def bodies():
    graphs.BODIES.clear()


ORDER = pytest.mark.parametrize("order", ["first", "last"])


def placed(order, ours, *others):
    return [ours, *others] if order == "first" else [*others, ours]


@ORDER
def test_summaries_count(order):
    main, summaries = sticky(), Script([says("A summary.")])
    summarize = SummarizationMiddleware(
        model=ScriptedChat(script=summaries), trigger=("messages", 2), keep=("messages", 2)
    )
    ours = BudgetMiddleware(Budget(max_model_calls=6))
    agent = create_agent(
        ScriptedChat(script=main), [search], middleware=placed(order, ours, summarize)
    )
    result = agent.invoke(user())
    assert main.calls + summaries.calls == 6
    assert summaries.calls > 0
    assert outcome(result).status == "terminated"


def test_a_summary_that_a_stop_refuses_is_not_tried_again(monkeypatch):
    """Their model has retries, with seconds between them."""
    naps = []
    monkeypatch.setattr("tenacity.nap.time.sleep", naps.append)
    main, summaries = sticky(), Script([says("A summary.")])
    summarize = SummarizationMiddleware(
        model=ScriptedChat(script=summaries), trigger=("messages", 2), keep=("messages", 2)
    )
    agent = bounded(
        create_agent(ScriptedChat(script=main), [search], middleware=[summarize]),
        Budget(max_model_calls=1),
    )
    result = agent.invoke(user())
    assert result["stop_reason"] == "max_model_calls"
    assert (main.calls, summaries.calls, naps) == (1, 0, [])


@pytest.mark.sample(2)
@ORDER
def test_their_tokens_count(order):
    main, summaries = sticky(), Script([says("A summary.")])
    summarize = SummarizationMiddleware(
        model=ScriptedChat(script=summaries), trigger=("messages", 2), keep=("messages", 2)
    )
    ours = BudgetMiddleware(Budget(max_total_tokens=1000))
    agent = create_agent(
        ScriptedChat(script=main), [search], middleware=placed(order, ours, summarize)
    )
    result = agent.invoke(user())
    assert (main.calls + summaries.calls) * 120 <= 1000 + 120
    assert outcome(result).stop_reason == "max_total_tokens"


@ORDER
def test_the_selection_of_tools_counts(order):
    if not hasattr(built_in, "LLMToolSelectorMiddleware"):
        pytest.skip("this LangChain has none")
    selector = StrictChat(script=Script([Reply(text='{"tools": ["search"]}')]))

    class Selecting(StrictChat):
        def with_structured_output(self, schema, **_):
            return self | (lambda _: {"tools": ["search"]})

    selecting = Selecting(script=selector.script)
    main = sticky()
    selects = built_in.LLMToolSelectorMiddleware(model=selecting, max_tools=1)
    ours = BudgetMiddleware(Budget(max_model_calls=5))
    agent = create_agent(
        StrictChat(script=main), [search, other], middleware=placed(order, ours, selects)
    )
    result = agent.invoke(user())
    assert main.calls + selecting.script.calls == 5
    assert selecting.script.calls > 0
    check_request(result["messages"])


@graphs.tool
def other(value: str = "") -> str:
    """Something else."""
    return "other"


@ORDER
def test_fallbacks_count(order):
    failing = Script([Reply(error=ProviderError("500"))])
    spare = sticky()
    falls = built_in.ModelFallbackMiddleware(StrictChat(script=spare))
    ours = BudgetMiddleware(Budget(max_model_calls=5))
    agent = create_agent(
        StrictChat(script=failing), [search], middleware=placed(order, ours, falls)
    )
    result = agent.invoke(user())
    assert failing.calls + spare.calls == 5
    assert result["stop_reason"] == "max_model_calls"
    check_request(result["messages"])


@ORDER
def test_the_editing_of_contexts_changes_nothing(order):
    edits = built_in.ContextEditingMiddleware()
    ours = BudgetMiddleware(Budget(max_model_calls=3))
    script = sticky()
    agent = create_agent(StrictChat(script=script), [search], middleware=placed(order, ours, edits))
    assert agent.invoke(user())["stop_reason"] == "max_model_calls"
    assert script.calls == 3


class Asking(AgentMiddleware):
    """A middleware of a user's own, that asks a model wherever it can."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.tools = []

    def before_agent(self, state, runtime):
        self.model.invoke("before the agent")

    def before_model(self, state, runtime):
        self.model.invoke("before the model")

    def after_model(self, state, runtime):
        self.model.invoke("after the model")

    def wrap_tool_call(self, request, handler):
        self.model.invoke("around the tool")
        return handler(request)


@ORDER
@pytest.mark.parametrize("cap", [1, 2, 3, 4, 5, 6, 7, 8])
def test_whatever_a_user_s_own_middleware_calls_counts(order, cap):
    main, linked = sticky(), Script([says("x")])
    guard = Guard(Budget(max_model_calls=cap, loop_detection=None))
    ours = BudgetMiddleware(guard)
    asking = Asking(StrictChat(script=linked))
    agent = create_agent(
        StrictChat(script=main),
        [search],
        middleware=placed(order, ours, asking),
        checkpointer=InMemorySaver(),
    )
    agent.invoke(user(), thread())
    assert main.calls + linked.calls == guard.usage.model_calls == cap
    assert guard.outcome.status == "terminated"
    check_request(guard.outcome.messages)


@ORDER
def test_also_after_a_person_s_answer_on_new_objects(order):
    """A refused call leads straight to the summary: before any step of ours."""
    saver = InMemorySaver()
    main, linked = Script([calls(Call("search", "a"))]), Script([says("x")])
    config = thread()
    given = user()
    outcomes = []
    for _ in range(6):
        ours = BudgetMiddleware(
            Budget(max_model_calls=5, loop_detection=None), on_outcome=outcomes.append
        )

        class Before(AgentMiddleware):
            tools = ()

            def before_model(self, state, runtime):
                StrictChat(script=linked).invoke("before the model")

        hitl = built_in.HumanInTheLoopMiddleware(interrupt_on={"search": True})
        agent = create_agent(
            StrictChat(script=main),
            [search],
            middleware=placed(order, ours, Before(), hitl),
            checkpointer=saver,
        )
        agent.invoke(given, config)
        if outcomes[-1].status != "paused":
            break
        given = Command(resume={"decisions": [{"type": "reject", "message": "no"}]})
    assert main.calls + linked.calls == 5
    assert outcomes[-1].usage.model_calls == 5
    assert outcomes[-1].status == "terminated"
    assert graphs.BODIES == []


class Swallowing(AgentMiddleware):
    tools = ()

    def wrap_model_call(self, request, handler):
        try:
            return handler(request)
        except Exception:
            return AIMessage("I failed.")


def test_a_swallowed_stop_is_still_the_outcome():
    script = sticky()
    outcomes = []
    ours = BudgetMiddleware(Budget(max_model_calls=2), on_outcome=outcomes.append)
    agent = create_agent(StrictChat(script=script), [search], middleware=[Swallowing(), ours])
    agent.invoke(user())
    assert script.calls == 2
    assert outcomes[-1].stop_reason == "max_model_calls"


def test_two_agents_of_one_process_keep_apart():
    scripts = [sticky(), sticky()]
    agents = [
        create_agent(
            StrictChat(script=one),
            [search],
            middleware=[BudgetMiddleware(Budget(max_iterations=n))],
        )
        for n, one in zip((2, 4), scripts, strict=True)
    ]
    for agent in agents:
        agent.invoke(user())
    assert [one.calls for one in scripts] == [2, 4]


def test_a_bound_does_not_break_a_model_that_does_not_know_it(caplog):
    """As ChatOllama, whose client takes no `max_tokens`: said once, and the call is made."""

    class Strict(ScriptedChat):
        def _generate(self, messages, stop=None, run_manager=None, tools=None, tool_choice=None):
            return super()._generate(messages, stop, run_manager)

    for _ in range(2):
        agent = create_agent(
            Strict(script=Script([says("Done.")])),
            [search],
            middleware=[BudgetMiddleware(Budget(max_output_tokens_per_call=50))],
        )
        assert agent.invoke(user())["messages"][-1].content == "Done."
    warned = [one for one in caplog.records if one.name == "budgetguard_langgraph"]
    assert len(warned) == 1
    assert "Strict" in warned[0].getMessage()


def test_a_sub_agent_with_a_middleware_of_its_own_is_a_part_of_the_run_around():
    inner = sticky()
    child = create_agent(
        StrictChat(script=inner), [search], middleware=[BudgetMiddleware(Budget(max_iterations=2))]
    )

    @graphs.tool
    def delegate(value: str = "") -> str:
        """Delegate."""
        return child.invoke(user(value))["messages"][-1].content

    outer = Script(lambda n: calls(Call("delegate", str(n))))
    guard = Guard(Budget(max_model_calls=7))
    agent = create_agent(StrictChat(script=outer), [delegate], middleware=[BudgetMiddleware(guard)])
    result = agent.invoke(user())
    assert inner.calls + outer.calls == guard.usage.model_calls == 7
    assert result["stop_reason"] == "max_model_calls"
    check_request(result["messages"])


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_graph_in_a_tool_that_was_stopped_in_several_tasks_leaves_no_call_open(mode):
    """LangGraph makes an interrupt of its own of their stops."""
    inner = graphs.map_reduce(Script([says("x")]), 3)

    def delegate(value: str = "") -> str:
        """Ask three at once."""
        return str(inner.invoke({"messages": [], "done": []})["done"])

    async def adelegate(value: str = "") -> str:
        return str((await inner.ainvoke({"messages": [], "done": []}))["done"])

    agent = create_agent(
        StrictChat(script=Script([calls(Call("delegate", "a"))])),
        [StructuredTool.from_function(delegate, coroutine=adelegate)],
        middleware=[BudgetMiddleware(Budget(max_model_calls=1))],
        checkpointer=InMemorySaver(),
    )
    given, config = user(), thread()
    result = await agent.ainvoke(given, config) if mode == "async" else agent.invoke(given, config)
    assert outcome(result).stop_reason == "max_model_calls"
    check_request(agent.get_state(config).values["messages"])


def test_the_middleware_is_found_without_importing_the_agent_first():
    assert importlib.import_module("budgetguard_langgraph").BudgetMiddleware is BudgetMiddleware


class Afterwards(AgentMiddleware):
    """Has steps behind the model and behind the agent."""

    def after_model(self, state, runtime):
        return None

    def after_agent(self, state, runtime):
        return None


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("cap", [1, 2, 3])
@ORDER
async def test_a_thread_that_the_middleware_ended_is_resumed(order, cap, mode):
    """The outcome says so, and it is what a bounded graph's thread does."""
    script = graphs.asks(3)
    saver, config = InMemorySaver(), thread()

    def agent(budget):
        middleware = placed(order, BudgetMiddleware(budget), Afterwards())
        chat = StrictChat(script=script)
        return create_agent(chat, [search], middleware=middleware, checkpointer=saver)

    result = agent(Budget(max_model_calls=cap)).invoke(user(), config)
    assert "resume" in outcome(result).resume
    assert script.calls == cap
    stopped = Guard()
    stopped.abort()
    # An attempt that comes no further takes nothing away.
    assert outcome(resume(agent(Budget()), config, stopped)).stop_reason == "aborted"
    again = resume(agent(stopped), config, Budget())
    assert outcome(again).stop_reason == "aborted"
    check_request(again["messages"])
    graph = agent(Budget())
    if mode == "sync":
        result = resume(graph, config, Budget())
    else:
        result = await aresume(graph, config, Budget())
    assert outcome(result).status == "completed"
    assert result.get("stop_reason") is None
    assert graph.get_state(config).values.get("stop_reason") is None
    assert script.calls == 4
    assert graphs.BODIES == ["0", "1", "2"]
    assert [one.type for one in result["messages"]] == ["human", *["ai", "tool"] * 3, "ai"]
    with pytest.raises(AdapterError, match="ended by itself"):
        resume(graph, config, Budget())


def test_agents_side_by_side_of_which_one_was_ended_are_not_run_again():
    """The other one is through; which of the messages are whose, nothing tells."""
    short, whole = sticky(), graphs.asks(0)
    graph = StateGraph(MessagesState)
    middleware = [BudgetMiddleware(Budget(max_model_calls=1))]
    graph.add_node("a", create_agent(StrictChat(script=whole), [search]))
    graph.add_node("b", create_agent(StrictChat(script=short), [search], middleware=middleware))
    graph.add_edge(START, "a")
    graph.add_edge(START, "b")
    graph, config = graph.compile(checkpointer=InMemorySaver()), thread()
    graph.invoke(user(), config)
    with pytest.raises(AdapterError, match="the checkpoint at which a thread was stopped"):
        resume(graph, config, Budget())
    assert (whole.calls, short.calls) == (1, 1)
