"""What only LangGraph and LangChain have: interrupts, threads, fan-out, their own limits."""

from __future__ import annotations

import asyncio
import operator
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware, ModelCallLimitMiddleware
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, Send, interrupt

from budgetguard_core import (
    AdapterError,
    Budget,
    BudgetExceeded,
    ConfigurationError,
    Guard,
    Mode,
    StopReason,
)
from budgetguard_core.kit import NOT_EXECUTED, OUTCOME_UNKNOWN
from budgetguard_core.testing import Call, ManualClock, Script, calls, check_history, says
from budgetguard_langgraph import (
    BudgetCallback,
    BudgetInterrupt,
    BudgetMiddleware,
    aresume,
    bounded,
    outcome,
    resume,
)
from conformance.budgetguard_langgraph_driver import ScriptedChat, message, user
from langgraph_graphs import bounded_agent

BODIES: list[str] = []


@pytest.fixture(autouse=True)
def bodies():
    BODIES.clear()
    return BODIES


@tool
def search(value: str = "") -> str:
    """Search."""
    BODIES.append("search")
    return f"result {len(BODIES)}"


@tool
def read(value: str = "") -> str:
    """Read."""
    BODIES.append("read")
    return f"text {len(BODIES)}"


@tool
def ask_person(value: str = "") -> str:
    """Ask a person."""
    answer = interrupt({"question": value})
    BODIES.append("ask_person")
    return f"the person said {answer}"


def thread():
    return {"configurable": {"thread_id": uuid.uuid4().hex}}


def sticky(*names):
    return Script([calls(*(names or ["search"]))])


def agent(script, tools=(search,), **options):
    return create_agent(ScriptedChat(script=script), list(tools), **options)


def history(result):
    return [message(one) for one in result["messages"]]


# The ending on the thread


def test_the_thread_is_closed_and_resume_takes_the_ending_back():
    script = Script([calls("search"), calls("search"), says("Done.")])
    graph = agent(script, checkpointer=InMemorySaver())
    config = thread()
    stopped = bounded(graph, Budget(max_iterations=2)).invoke(user("Go."), config)
    assert outcome(stopped).status == "terminated"
    state = graph.get_state(config)
    assert state.next == ()
    assert state.values["messages"][-1].response_metadata["synthetic"] is True
    ended = resume(graph, config, Budget(max_iterations=5))
    assert ended["messages"][-1].content == "Done."
    assert outcome(ended).status == "completed"
    assert BODIES == ["search", "search"]
    assert not any(m.synthetic for m in history(ended))
    check_history(history(ended))


@pytest.mark.anyio
async def test_a_thread_is_resumed_again_and_again():
    graph = agent(sticky(), checkpointer=InMemorySaver())
    config = thread()
    result = await bounded(graph, Budget(max_iterations=1)).ainvoke(user("Go."), config)
    for n in range(2, 5):
        result = await aresume(graph, config, Budget(max_iterations=1))
        assert result["stop_reason"] == "max_iterations"
        assert len(BODIES) == n
        check_history(history(result))


def test_resume_needs_a_stopped_thread():
    graph = agent(Script([says("Done.")]), checkpointer=InMemorySaver())
    config = thread()
    graph.invoke(user("Go."), config)
    with pytest.raises(AdapterError, match="that a budget stopped, got one that ended by itself"):
        resume(graph, config, Budget())


@pytest.mark.parametrize(
    ("saver", "config", "missing"),
    [(None, thread(), "no checkpointer"), (InMemorySaver(), {}, "no thread_id")],
)
async def test_resume_needs_a_thread(saver, config, missing):
    graph = bounded(agent(sticky(), checkpointer=saver), Budget(max_iterations=1))
    wanted = f"with a checkpointer, got {missing}"
    with pytest.raises(AdapterError, match=wanted):
        resume(graph, config, Budget(max_iterations=1))
    with pytest.raises(AdapterError, match=wanted):
        await aresume(graph, config, Budget(max_iterations=1))


def test_a_callback_stop_is_resumed_exactly():
    script = Script([calls("search"), says("Done.")])
    graph = agent(script, checkpointer=InMemorySaver())
    config = thread()
    callback = BudgetCallback(Budget(max_iterations=1))
    result = graph.invoke(user("Go."), {**config, "callbacks": [callback]})
    (stop,) = result["__interrupt__"]
    assert stop.value["stop_reason"] == "max_iterations"
    assert callback.outcome.stop_reason is StopReason.MAX_ITERATIONS
    ended = resume(graph, config, Budget(max_iterations=1))
    assert ended["messages"][-1].content == "Done."
    assert BODIES == ["search"]


def test_a_budget_stop_is_not_answered_like_a_person():
    script = Script([calls(Call("ask_person", "transfer?")), says("Done.")])
    graph = agent(script, [ask_person], checkpointer=InMemorySaver())
    config = thread()
    guard = Guard(Budget(max_iterations=1))
    guard.abort()
    graph.invoke(user("Go."), {**config, "callbacks": [BudgetCallback(guard)]})
    with pytest.raises(AdapterError, match=r"Command\(resume=...\) must answer a question"):
        bounded(graph, Budget()).invoke(Command(resume="yes"), config)
    with pytest.raises(AdapterError, match=r"Command\(resume=...\) must answer a question"):
        graph.invoke(Command(resume="yes"), {**config, "callbacks": [BudgetCallback(Budget())]})
    asked = bounded(graph, Budget()).invoke(None, config)
    assert asked["__interrupt__"][0].value == {"question": "transfer?"}
    assert BODIES == []


def test_a_thread_left_open_is_closed_before_a_new_turn():
    """By a callback on a node that can answer no refused call."""

    def tools(state):
        found = state["messages"][-1].tool_calls
        return {"messages": [search.invoke({**call, "type": "tool_call"}) for call in found]}

    script = Script([calls("search", "search"), says("Done.")])
    graph = hand_built(script, tools, checkpointer=InMemorySaver())
    config = thread()
    callback = BudgetCallback(Budget(max_tool_calls=1))
    graph.invoke(user("Go."), {**config, "callbacks": [callback]})
    assert callback.outcome.stop_reason is StopReason.MAX_TOOL_CALLS
    check_history([message(one) for one in callback.outcome.messages])
    result = bounded(graph, Budget()).invoke(user("And now?"), config)
    assert result["messages"][-1].content == "Done."
    check_history(history(result))


def hand_built(script, tools, **options):
    model = ScriptedChat(script=script)
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", tools)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition, ["tools", END])
    graph.add_edge("tools", "agent")
    return graph.compile(**options)


def test_finished_siblings_of_a_refused_call_are_kept_where_the_node_loses_them():
    """A ToolNode that handles no errors fails as a whole; what ran in it is in the history."""
    script = sticky("search", "read", "search")
    node = ToolNode([search, read], handle_tool_errors=False)
    graph = hand_built(script, node, checkpointer=InMemorySaver())
    config = thread()
    result = bounded(graph, Budget(max_tool_calls=2)).invoke(user("Go."), config)
    results = [m.content for m in result["messages"] if isinstance(m, ToolMessage)]
    assert sorted(results[:2]) == ["result 1", "text 2"]
    assert "Not executed" in results[2]
    check_history([message(m) for m in graph.get_state(config).values["messages"]])


# LangGraph's own limits


def test_the_recursion_limit_never_fires_before_the_cap():
    graph = agent(sticky())
    result = bounded(graph, Budget(max_iterations=40)).invoke(user("Go."))
    assert result["stop_reason"] == "max_iterations"
    assert len(BODIES) == 40


def test_a_lower_recursion_limit_is_reported_as_the_framework_s():
    graph = agent(sticky(), checkpointer=InMemorySaver())
    config = {**thread(), "recursion_limit": 5}
    result = bounded(graph, Budget(max_iterations=40)).invoke(user("Go."), config)
    assert result["stop_reason"] == "framework_limit"
    assert "GraphRecursionError" in outcome(result).detail
    check_history(history(result))
    config.pop("recursion_limit")
    again = resume(graph, config, Budget(max_iterations=1))
    assert again["stop_reason"] == "max_iterations"


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream"])
@pytest.mark.parametrize("mode", ["observe", "off"])
@pytest.mark.anyio
async def test_a_graph_that_is_only_looked_on_is_left_by_its_own_limit(mode, way):
    seen = []
    graph = bounded(agent(sticky()), Budget(), mode=mode, on_trip="raise", on_outcome=seen.append)
    config = {"recursion_limit": 5}

    async def go():
        if way == "ainvoke":
            return await graph.ainvoke(user("Go."), config)
        return list(getattr(graph, way)(user("Go."), config))

    with pytest.raises(GraphRecursionError):
        await go()
    assert [one.status for one in seen] == ["failed"]


def test_the_recursion_limit_of_one_run_leaves_a_shared_guard_to_the_others():
    guard = Guard(Budget(max_iterations=40))
    graph = bounded(agent(sticky()), guard)
    first = graph.invoke(user("Go."), {"recursion_limit": 5})
    assert first["stop_reason"] == "framework_limit"
    assert guard.trip is None
    assert graph.invoke(user("Go."))["stop_reason"] == "max_iterations"


def test_a_stop_that_a_node_swallows_is_told_before_the_recursion_limit_that_it_leads_to():
    graph = StateGraph(MessagesState)
    model = ScriptedChat(script=Script(lambda number: says(f"{number}.")))

    def node(state):
        with suppress(BaseException):
            model.invoke("Go on.")
        return {}

    graph.add_node("node", node)
    graph.add_edge(START, "node")
    graph.add_edge("node", "node")
    result = bounded(graph.compile(), Budget(max_model_calls=2)).invoke(
        user("Go."), {"recursion_limit": 9}
    )
    assert result["stop_reason"] == "max_model_calls"


# A person in the loop


def asked_again_and_again(make):
    """Run an agent that asks a person in every turn; answer until it stops asking."""
    script = Script([calls(Call("ask_person", "again?"))])
    graph, given, config = make(script), user("Go."), thread()
    for answers in range(10):
        result = graph.invoke(given, config)
        if "__interrupt__" not in result:
            break
        given = Command(resume=f"yes {answers}")
    return script.calls, result


def test_the_built_in_limit_begins_anew_with_each_answer():
    """The reason for the next test: seven calls with a limit of two."""

    def make(script):
        limit = ModelCallLimitMiddleware(run_limit=2, exit_behavior="end")
        return agent(script, [ask_person], middleware=[limit], checkpointer=InMemorySaver())

    made, _ = asked_again_and_again(make)
    assert made >= 7


@pytest.mark.parametrize("form", ["budget", "guard"])
def test_an_answer_does_not_begin_the_middleware_s_budget_anew(form):
    def make(script):
        budget = Budget(max_iterations=2)
        middleware = BudgetMiddleware(budget if form == "budget" else Guard(budget))
        return agent(script, [ask_person], middleware=[middleware], checkpointer=InMemorySaver())

    made, result = asked_again_and_again(make)
    assert made == 2
    assert result["stop_reason"] == "max_iterations"
    assert outcome(result).usage.tool_calls == 2
    check_history(history(result))


def test_another_process_goes_on_with_the_middleware_s_counters():
    """A new middleware, as in another process, takes the guard out of the checkpoint."""
    saver = InMemorySaver()
    script = Script([calls(Call("ask_person", "again?"))])

    def make():
        middleware = BudgetMiddleware(Budget(max_iterations=2))
        return agent(script, [ask_person], middleware=[middleware], checkpointer=saver)

    config = thread()
    make().invoke(user("Go."), config)
    make().invoke(Command(resume="yes"), config)
    result = make().invoke(Command(resume="yes"), config)
    assert script.calls == 2
    assert result["stop_reason"] == "max_iterations"


def test_an_answer_does_not_begin_a_bounded_graph_s_budget_anew():
    made, result = asked_again_and_again(
        lambda script: bounded(
            agent(script, [ask_person], checkpointer=InMemorySaver()), Budget(max_iterations=2)
        )
    )
    assert made == 2
    assert result["stop_reason"] == "max_iterations"
    assert outcome(result).usage.tool_calls == 2


def test_a_rejected_call_is_none():
    script = Script([calls("search", "read"), says("Done.")])
    person = HumanInTheLoopMiddleware(interrupt_on={"search": True})
    graph = agent(script, [search, read], middleware=[person], checkpointer=InMemorySaver())
    guard = Guard(Budget(max_tool_calls=5))
    config = thread()
    again = bounded(graph, guard)
    again.invoke(user("Go."), config)
    again.invoke(Command(resume={"decisions": [{"type": "reject", "message": "no"}]}), config)
    assert BODIES == ["read"]
    assert guard.usage.tool_calls == 1
    assert guard.outcome.status == "completed"


# Sub-agents, fan-out, the functional interface


def test_the_built_in_limit_does_not_count_sub_agents_and_ours_does():
    def team(script, below, **options):
        worker = agent(below)

        @tool
        def delegate(value: str = "") -> str:
            """Delegate."""
            return worker.invoke(user("Go."), {"recursion_limit": 11})["messages"][-1].content

        return agent(script, [delegate], **options)

    limit = ModelCallLimitMiddleware(run_limit=2, exit_behavior="end")
    script, below = (
        sticky("delegate"),
        Script(lambda n: says("a") if n % 5 == 4 else calls("search")),
    )
    team(script, below, middleware=[limit]).invoke(user("Go."))
    assert (script.calls, below.calls) == (2, 10)
    for layers in (
        lambda guard: {"middleware": [BudgetMiddleware(guard)]},
        lambda guard: {},
    ):
        guard = Guard(Budget(max_model_calls=4))
        script, below = sticky("delegate"), sticky()
        options = layers(guard)
        graph = team(script, below, **options)
        result = (graph if options else bounded(graph, guard)).invoke(user("Go."))
        assert result["stop_reason"] == "max_model_calls"
        assert (script.calls, below.calls) == (1, 3)


def fan_out(script, count):
    model = ScriptedChat(script=script)

    class State(TypedDict):
        messages: Annotated[list[Any], operator.add]
        done: Annotated[list[str], operator.add]

    def worker(state):
        model.invoke([HumanMessage(state["item"])])
        return {"done": [state["item"]]}

    graph = StateGraph(State)
    graph.add_node("start", lambda state: {})
    graph.add_node("worker", worker)
    graph.add_edge(START, "start")
    graph.add_conditional_edges(
        "start", lambda _: [Send("worker", {"item": str(n)}) for n in range(count)], ["worker"]
    )
    return graph


def test_a_fan_out_keeps_what_is_paid_and_resumes_the_rest():
    script = Script([says("x")])
    graph = fan_out(script, 30).compile(checkpointer=InMemorySaver())
    config = thread()
    result = bounded(graph, Budget(max_iterations=5)).invoke({"messages": [], "done": []}, config)
    assert script.calls == 5
    assert result["stop_reason"] == "max_iterations"
    result = resume(graph, config, Budget(max_iterations=40))
    assert script.calls == 30
    assert sorted(result["done"], key=int) == [str(n) for n in range(30)]


@pytest.mark.parametrize("way", ["callback", "bounded"])
def test_tasks_of_the_functional_interface(way):
    script = Script([says("x")])
    model = ScriptedChat(script=script)

    @task
    def work(item):
        return model.invoke([HumanMessage(item)]).content

    @entrypoint(checkpointer=InMemorySaver())
    def flow(items):
        return [work(item).result() for item in items]

    config = thread()
    guard = Guard(Budget(max_model_calls=3))
    if way == "callback":
        flow.invoke(["a"] * 6, {**config, "callbacks": [BudgetCallback(guard)]})
    else:
        assert bounded(flow, guard).invoke(["a"] * 6, config) == {"stop_reason": "max_model_calls"}
    assert script.calls == 3
    assert guard.outcome.stop_reason is StopReason.MAX_MODEL_CALLS
    assert resume(flow, config, Budget(max_model_calls=3)) == ["x"] * 6
    assert script.calls == 6


@pytest.mark.slow
def test_sub_agents_of_deep_agents_spend_the_same_budget():
    deepagents = pytest.importorskip("deepagents", reason="not in an extra of ours")
    inner = Script([calls("search"), calls("search"), calls("search"), says("found")])
    brief = {"description": "search", "subagent_type": "finder"}
    outer = Script([])
    outer._replies = [calls("task")]
    chat = ScriptedChat(script=outer)

    class Asking(ScriptedChat):
        def _generate(self, messages, stop=None, run_manager=None, **_):
            result = super()._generate(messages)
            answer = result.generations[0].message
            answer.tool_calls = [{**call, "args": brief} for call in answer.tool_calls]
            return result

    del chat
    finder = {
        "name": "finder",
        "description": "finds",
        "system_prompt": "find",
        "tools": [search],
        "model": ScriptedChat(script=inner),
    }
    graph = deepagents.create_deep_agent(model=Asking(script=outer), subagents=[finder])
    guard = Guard(Budget(max_model_calls=4))
    result = bounded(graph, guard).invoke(user("Go."))
    assert result["stop_reason"] == "max_model_calls"
    assert (outer.calls, inner.calls) == (1, 3)


# Code whose configuration is out of reach


def test_an_active_guard_reaches_code_that_passes_no_config():
    script = sticky()

    def somebody_else_s_code():
        return agent(script).invoke(user("Go."))

    guard = Guard(Budget(max_iterations=3))
    with guard.activate():
        result = somebody_else_s_code()
    assert script.calls == 3
    assert result["__interrupt__"][0].value["stop_reason"] == "max_iterations"
    assert guard.outcome.stop_reason is StopReason.MAX_ITERATIONS
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS
    agent(Script([says("Free.")])).invoke(user("Go."))
    assert guard.usage.model_calls == 3


@pytest.mark.anyio
async def test_an_active_guard_bounds_models_that_are_called_on_their_own():
    model = ScriptedChat(script=Script([says("x")]))
    guard = Guard(Budget(max_model_calls=2))
    with guard.activate():
        await model.ainvoke("a")
        model.invoke("b")
        with pytest.raises(BudgetExceeded) as stopped:
            await model.ainvoke("c")
    assert stopped.value.outcome.stop_reason is StopReason.MAX_MODEL_CALLS
    assert model.script.calls == 2


def test_a_budget_below_an_active_guard_is_a_part_of_it():
    script = sticky()
    guard = Guard(Budget(max_model_calls=3))
    with guard.activate():
        result = bounded(agent(script), Budget(max_iterations=10)).invoke(user("Go."))
    assert result["stop_reason"] == "max_model_calls"
    assert script.calls == 3


def test_calls_in_a_pool_that_a_node_starts_spend_the_budget_of_the_run():
    script = Script([says("x")])
    model = ScriptedChat(script=script)

    def node(state):
        with ThreadPoolExecutor() as pool:
            for future in [pool.submit(model.invoke, "a") for _ in range(3)]:
                future.result()
        return {}

    graph = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    guard = Guard(Budget(max_model_calls=1))
    bounded(graph.compile(), guard).invoke(user("Go."))
    assert script.calls == 1
    assert guard.usage.model_calls == 1


# The callback


def test_a_budget_is_fresh_for_each_top_level_call():
    script = sticky()
    graph = agent(script)
    callback = BudgetCallback(Budget(max_iterations=2))
    for n in (2, 4):
        graph.invoke(user("Go."), {"callbacks": [callback]})
        assert script.calls == n
    graph.batch([user("a"), user("b")], {"callbacks": [callback]})
    assert script.calls == 8


def test_calls_outside_of_any_chain_share_one_budget():
    model = ScriptedChat(script=Script([says("x")]))
    callback = BudgetCallback(Budget(max_iterations=2))
    config = {"callbacks": [callback]}
    model.invoke("a", config)
    model.invoke("b", config)
    with pytest.raises(BudgetInterrupt, match="max_iterations"):
        model.invoke("c", config)
    assert callback.outcome.stop_reason is StopReason.MAX_ITERATIONS


def test_a_stop_is_no_warning_in_the_log(caplog):
    agent(sticky()).invoke(user("Go."), {"callbacks": [BudgetCallback(Budget(max_iterations=1))]})
    assert not [r for r in caplog.records if r.name.startswith("langchain_core")]


def test_another_handler_s_failure_is_still_logged(caplog):
    class Broken(BaseCallbackHandler):
        def on_chat_model_start(self, *_, **__):
            raise ValueError("broken")

    ScriptedChat(script=Script([says("x")])).invoke("a", {"callbacks": [Broken()]})
    assert "broken" in caplog.text


@pytest.mark.parametrize("make", [BudgetCallback, BudgetMiddleware])
def test_what_is_no_budget_is_refused(make):
    with pytest.raises(
        ConfigurationError, match="must be a Budget, a Guard or an Envelope, got int"
    ):
        make(5)


def test_only_a_compiled_graph_can_be_bounded():
    with pytest.raises(AdapterError, match="takes a compiled graph, got StateGraph"):
        bounded(StateGraph(MessagesState), Budget())


def test_the_middleware_without_a_guard_says_so():
    with pytest.raises(AdapterError, match="needs a guard, got none"):
        agent(sticky(), middleware=[BudgetMiddleware()]).invoke(user("Go."))


@pytest.mark.parametrize("way", ["bounded", "middleware", "callback"])
def test_observe_changes_nothing_in_the_history(way):
    guard = Guard(Budget(max_iterations=1), mode=Mode.OBSERVE)
    same = Call("search", "same")
    script = Script([*[calls(same)] * 4, says("Done.")])
    graph, config = bounded_agent(way, guard, ScriptedChat(script=script), [read_nothing])
    result = graph.invoke(user("Go."), config)
    assert {m.content for m in result["messages"] if isinstance(m, ToolMessage)} == {"nothing"}
    assert guard.outcome.status == "completed"
    assert guard.outcome.observed


@tool("search")
def read_nothing(value: str = "") -> str:
    """Read."""
    return "nothing"


def test_a_name_the_node_does_not_know_starts_nothing():
    script = Script([calls("search", "invented"), says("Done.")])
    guard = Guard(Budget(max_tool_calls=1))
    result = bounded(agent(script), guard).invoke(user("Go."))
    assert guard.usage.tool_calls == 1
    assert guard.outcome.status == "completed"
    assert result["messages"][-1].content == "Done."


def test_of_64_parallel_calls_those_that_fit_run():
    script = sticky(*["search"] * 64)
    guard = Guard(Budget(max_tool_calls=40))
    result = bounded(agent(script), guard).invoke(user("Go."))
    assert len(BODIES) == guard.usage.tool_calls == 40
    check_history(history(result))


def test_calls_with_one_id_are_two_calls():
    script = Script([calls(Call("search", "a", "same"), Call("read", "b", "same")), says("Done.")])
    guard = Guard(Budget(max_tool_calls=1))
    node = ToolNode([search, read])
    bounded(hand_built(script, node), guard).invoke(user("Go."))
    assert len(BODIES) == guard.usage.tool_calls == 1


def test_an_abort_during_a_sync_stream_ends_it():
    script = Script(lambda n: calls("search"))
    guard = Guard(Budget())
    stream = bounded(agent(script), guard).stream(user("Go."), stream_mode="updates")
    parts = []
    for part in stream:
        parts.append(part)
        if len(parts) == 3:
            threading.Thread(target=guard.abort).run()
    assert guard.outcome.stop_reason is StopReason.ABORTED
    assert parts[-1]["budgetguard"]["stop_reason"] == "aborted"
    assert script.calls == 2


@pytest.mark.anyio
@pytest.mark.parametrize("way", ["bounded", "callback"])
async def test_healthy_runs_at_the_same_time_on_one_guard_are_no_loop(way):
    script = Script(lambda n: calls(Call("search", "same")) if n < 10 else says("Done."))
    guard = Guard(Budget(max_iterations=100))
    graph = agent(script, [read_nothing])
    config = {"callbacks": [BudgetCallback(guard)]} if way == "callback" else {}
    together = bounded(graph, guard) if way == "bounded" else graph
    results = await asyncio.gather(*(together.ainvoke(user("Go."), config) for _ in range(10)))
    assert {result["messages"][-1].content for result in results} == {"Done."}
    answers = [m.content for r in results for m in r["messages"] if isinstance(m, ToolMessage)]
    assert answers == ["nothing"] * 10
    assert guard.usage.model_calls == 20
    assert all(outcome(result).status == "completed" for result in results)


# Layers in layers


@pytest.mark.anyio
@pytest.mark.parametrize("inner", ["guard", "budget"])
async def test_a_middleware_in_a_bounded_graph_ends_once(inner):
    script, guard = sticky(), Guard(Budget(max_iterations=3))
    middleware = BudgetMiddleware(guard if inner == "guard" else Budget(max_iterations=9))
    graph = agent(script, middleware=[middleware], checkpointer=InMemorySaver())
    config = thread()
    result = await bounded(graph, guard).ainvoke(user("Go."), config)
    assert script.calls == guard.usage.model_calls == 3
    assert guard.usage.total_tokens == 360
    assert result["stop_reason"] == "max_iterations"
    assert sum(m.synthetic is not None for m in history(result)) == 1
    check_history([message(m) for m in graph.get_state(config).values["messages"]])


def test_the_middleware_s_own_lower_cap_ends_the_agent_and_not_what_is_around_it():
    script = sticky()
    graph = agent(script, middleware=[BudgetMiddleware(Budget(max_iterations=2))])
    guard = Guard(Budget(max_iterations=9))
    result = bounded(graph, guard).invoke(user("Go."))
    assert script.calls == guard.usage.model_calls == 2
    assert guard.trip is None
    # The graph did not end by itself, and the outcome says whose stop it was.
    assert guard.outcome.status == "terminated"
    assert guard.outcome.violations[0].limit == 2
    assert result["stop_reason"] == "max_iterations"


@pytest.mark.anyio
async def test_raise_gives_an_exception_with_the_outcome():
    graph = agent(sticky())
    with pytest.raises(BudgetExceeded) as stopped:
        await bounded(graph, Budget(max_iterations=1), on_trip="raise").ainvoke(user("Go."))
    assert stopped.value.outcome.usage.model_calls == 1
    check_history([message(m) for m in stopped.value.outcome.messages])


@pytest.mark.anyio
async def test_the_caller_s_own_cancellation_is_not_a_stop():
    from budgetguard_core.testing import Reply

    guard = Guard(Budget(max_seconds=60))
    graph = bounded(agent(Script([Reply(hang=True)])), guard)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await graph.ainvoke(user("Go."))
    assert guard.trip is None
    assert guard.open_calls() == ()
    assert guard.usage.failed_calls == 1


@pytest.mark.anyio
@pytest.mark.parametrize("left", ["cancelled", "refused", "waiting"])
async def test_a_new_turn_says_of_open_calls_what_is_known_of_them(left):
    started = asyncio.Event()

    @tool
    async def pay(value: str = "") -> str:
        """Pay."""
        started.set()
        await asyncio.sleep(60)

    script = Script([calls(Call("search"), Call("pay")), says("Done.")])
    options = {"interrupt_before": ["tools"]} if left == "waiting" else {}
    plain = create_agent(
        ScriptedChat(script=script), [search, pay], checkpointer=InMemorySaver(), **options
    )
    graph, config = bounded(plain, Budget()), thread()
    if left == "cancelled":
        going = asyncio.create_task(graph.ainvoke(user("Go."), config))
        await started.wait()
        going.cancel()
        await asyncio.wait([going])
    elif left == "waiting":
        await graph.ainvoke(user("Go."), config)
    else:
        callback = BudgetCallback(Budget(max_tool_calls=1))
        await plain.ainvoke(user("Go."), {**config, "callbacks": [callback]})
    result = await graph.ainvoke(user("And now?"), config)
    told = [m.content for m in result["messages"] if isinstance(m, ToolMessage)]
    assert told[-1] == (OUTCOME_UNKNOWN if left == "cancelled" else NOT_EXECUTED)


def fetches_first(script, fetch):
    graph = StateGraph(MessagesState)
    graph.add_node("fetch", fetch)
    graph.add_node("agent", lambda s: {"messages": [ScriptedChat(script=script).invoke("Go.")]})
    graph.add_edge(START, "fetch")
    graph.add_edge("fetch", "agent")
    return graph.compile()


@pytest.mark.anyio
async def test_the_deadline_ends_a_node_that_hangs_before_any_call():
    async def fetch(state):
        await asyncio.sleep(60)

    graph = bounded(fetches_first(Script([says("Done.")]), fetch), Budget(max_seconds=0.2))
    result = await graph.ainvoke(user("Go."))
    assert result["stop_reason"] == "max_seconds"


@pytest.mark.parametrize("way", ["callback", "bounded", "chain"])
def test_the_time_of_a_run_begins_with_the_run(way):
    outcomes, script, clock = [], Script([says("Done.")]), ManualClock()
    budget, options = Budget(max_seconds=10), {"clock": clock, "on_outcome": outcomes.append}
    graph = fetches_first(script, lambda state: clock.advance(11))
    if way == "bounded":
        bounded(graph, budget, **options).invoke(user("Go."))
    else:
        given: Any = graph if way == "callback" else RunnableLambda(lambda _: graph.invoke(_))
        with suppress(BudgetExceeded):
            given.invoke(user("Go."), {"callbacks": [BudgetCallback(budget, **options)]})
    assert script.calls == 0
    assert outcomes[0].stop_reason == "max_seconds"
    assert outcomes[0].usage.seconds == 11


@pytest.mark.anyio
async def test_nothing_is_left_behind_by_runs_that_are_over():
    from budgetguard_core.testing import Reply
    from budgetguard_langgraph._run import OWNERS

    before = len(OWNERS)
    guard = Guard(Budget(max_iterations=10**6))
    callback = BudgetCallback(guard)
    config = {"callbacks": [callback]}
    script = Script(lambda n: calls("search") if n % 2 == 0 else says("Done."))
    hung = bounded(agent(Script([Reply(hang=True)])), guard)
    for _ in range(10):
        await agent(script).ainvoke(user("Go."), config)
        await bounded(agent(script), guard).ainvoke(user("Go."), config)
        async for _ in agent(script).astream(user("Go."), config, stream_mode="messages"):
            break
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await hung.ainvoke(user("Go."))
    await asyncio.sleep(0.05)
    assert len(OWNERS) == before
    assert guard.open_calls() == ()
