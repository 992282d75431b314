"""Every adapter takes a profile, without a line of its own."""

from __future__ import annotations

import asyncio
from importlib.metadata import entry_points

import pytest

import http_loops
import layout
from budgetguard_core import Budget
from budgetguard_core.profiles import ProfileId
from budgetguard_core.testing.scripted import Answers
from provider_server import ProviderServer
from sticky_runs import EVERY, EVERY_NEEDS, http

FILE = "[profiles.small]\nversion = 7\nmax_iterations = 3\nloop_detection = 'none'\n"
FILE += "[profiles.large]\nversion = 8\nmax_iterations = 9\n"


@pytest.fixture(autouse=True)
def _file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BUDGETGUARD_PROFILE", raising=False)
    (tmp_path / "budgetguard.toml").write_text(FILE)


@pytest.fixture(params=sorted(EVERY))
def run(request):
    pytest.importorskip(EVERY_NEEDS[request.param])
    return EVERY[request.param]


def test_there_is_a_run_for_every_adapter():
    assert sorted(EVERY) == layout.adapters()


def test_the_profile_bounds_the_run(run):
    outcome = run(profile="small")
    assert outcome.stop_reason == "max_iterations"
    assert outcome.usage.model_calls == 3
    assert outcome.profile == ProfileId(name="small", version="7")


def test_the_budget_in_code_wins(run):
    outcome = run(Budget(max_iterations=2), profile="small")
    assert outcome.usage.model_calls == 2


def test_the_variable_names_the_profile_where_code_names_nothing(run, monkeypatch):
    monkeypatch.setenv("BUDGETGUARD_PROFILE", "small")
    assert run().usage.model_calls == 3


@pytest.mark.sample(4)
def test_a_cap_in_a_variable_wins_over_the_profile(run, monkeypatch):
    monkeypatch.setenv("BUDGETGUARD_MAX_ITERATIONS", "2")
    assert run(profile="small").usage.model_calls == 2
    assert run(Budget(max_iterations=1), profile="small").usage.model_calls == 1


def test_a_selector_is_asked_in_every_adapter(run):
    tasks = []

    def chosen(task):
        tasks.append(task)
        return "small"

    outcome = run(profile=chosen)
    assert outcome.profile == ProfileId(name="small", version="7")
    (task,) = tasks
    # A block of any client's calls is not told what it will be given.
    assert (task.input_tokens is None) if run is http else (0 < task.input_tokens < 50)


def test_a_transport_takes_a_profile():
    openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")
    from budgetguard_http import BudgetTransport

    transport = BudgetTransport(profile="small")
    with ProviderServer() as server, httpx.Client(transport=transport) as client:
        sdk = openai.OpenAI(api_key="key", base_url=server.url + "/v1", http_client=client)
        http_loops.chat(sdk, http_loops.Loop(result="page"))
        assert server.hits == 3


# The user's selector sees what the framework was told of the run.


def langgraph_graph(model, chosen):
    from langgraph.graph import START, MessagesState, StateGraph

    from budgetguard_langgraph import bounded

    builder = StateGraph(MessagesState)
    builder.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_edge(START, "agent")
    return bounded(
        builder.compile(), profile=lambda task: chosen(task, lambda c: c["configurable"])
    )


def in_langgraph(model, chosen, kind):
    from budgetguard_langgraph import outcome

    given = {"messages": [("user", "Hi.")]}
    graph = langgraph_graph(model, chosen)
    return outcome(graph.invoke(given, {"configurable": {"kind": kind}}))


def in_langgraph_async(model, chosen, kind):
    from budgetguard_langgraph import outcome

    given = {"messages": [("user", "Hi.")]}
    graph = langgraph_graph(model, chosen)
    return outcome(asyncio.run(graph.ainvoke(given, {"configurable": {"kind": kind}})))


def in_a_callback(model, chosen, kind):
    from langgraph.graph import START, MessagesState, StateGraph

    from budgetguard_langgraph import BudgetCallback

    builder = StateGraph(MessagesState)
    builder.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_edge(START, "agent")
    callback = BudgetCallback(profile=lambda task: chosen(task, lambda c: c["metadata"]))
    config = {"callbacks": [callback], "metadata": {"kind": kind}}
    builder.compile().invoke({"messages": [("user", "Hi.")]}, config)
    return callback.outcome


def in_openai_agents(model, chosen, kind):
    from agents import Agent, Runner
    from agents.run import RunConfig

    from budgetguard_openai_agents import BudgetHooks, outcome

    hooks = BudgetHooks(profile=lambda task: chosen(task, lambda c: c))
    agent = Agent(name="reader", model=model)
    quiet = RunConfig(tracing_disabled=True)
    return outcome(
        asyncio.run(Runner.run(agent, "Hi.", hooks=hooks, run_config=quiet, context={"kind": kind}))
    )


def in_pydantic_ai(model, chosen, kind):
    from pydantic_ai import Agent

    from budgetguard_pydantic_ai import BudgetCapability, outcome

    capability = BudgetCapability(profile=lambda task: chosen(task, lambda c: c.deps))
    agent = Agent(model, deps_type=dict, capabilities=[capability])
    return outcome(asyncio.run(agent.run("Hi.", deps={"kind": kind})))


def in_strands(model, chosen, kind):
    from strands import Agent

    from budgetguard_strands import BudgetHookProvider

    provider = BudgetHookProvider(profile=lambda task: chosen(task, lambda c: c))
    agent = Agent(model=model, hooks=[provider], callback_handler=None)
    agent("Hi.", invocation_state={"kind": kind})
    return provider.outcome(agent)


FRAMEWORKS = {
    "langgraph": ("langgraph", in_langgraph),
    "langgraph, async": ("langgraph", in_langgraph_async),
    "langgraph, callback": ("langgraph", in_a_callback),
    "openai_agents": ("openai_agents", in_openai_agents),
    "pydantic_ai": ("pydantic_ai", in_pydantic_ai),
    "strands": ("strands", in_strands),
}


@pytest.mark.parametrize("way", FRAMEWORKS)
@pytest.mark.parametrize("kind", ["small", "large"])
def test_the_selector_sees_the_frameworks_configuration(way, kind):
    framework, run = FRAMEWORKS[way]
    pytest.importorskip({"openai_agents": "agents"}.get(framework, framework))
    (make,) = entry_points(group="budgetguard.scripted_models", name=framework)
    sizes = []

    def chosen(task, place):
        sizes.append(task.input_tokens)
        return place(task.config)["kind"]

    outcome = run(make.load()(Answers(("Done.",))), chosen, kind)
    assert outcome.profile is not None
    assert outcome.profile.name == kind
    assert sizes[0] > 0
