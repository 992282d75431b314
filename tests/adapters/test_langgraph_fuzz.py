"""Random runs: what users combine. The referees count apart from the guard.

`BUDGETGUARD_SEEDS=5000` runs as many seeds by hand, from `BUDGETGUARD_FIRST_SEED` on.
"""

from __future__ import annotations

import asyncio
import os
import random
import warnings

import langchain.agents.middleware as built_in
import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

import langgraph_graphs as graphs
from budgetguard_core import Budget, BudgetExceeded, Guard
from budgetguard_core.testing import Call, ProviderError, Reply, Script, calls, says
from budgetguard_langgraph import BudgetCallback, BudgetMiddleware, bounded
from budgetguard_langgraph.interrupts import is_budget_interrupt
from conformance.budgetguard_langgraph_driver import ScriptedChat
from langgraph_graphs import (
    SHAPES,
    StrictChat,
    check_request,
    functional,
    run,
    search,
    thread,
    user,
)

FIRST = int(os.environ.get("BUDGETGUARD_FIRST_SEED", "0"))
SEEDS = int(os.environ.get("BUDGETGUARD_SEEDS", "160"))
BLOCKS = 8
ENTRIES = ["sync", "stream", "batch", "async", "streamed", "abatch"]


class Referee:
    """Counts what really happens."""

    def __init__(self, rng, *, unique=False):
        self.rng = rng
        self.models = 0
        self.same = 0.0 if unique else 0.2

    def script(self, tools=("search",), fail=0.0, last=12, alone=()):
        """Make a model that asks for tools at random, `alone` those that leave the graph."""
        rng, names = random.Random(self.rng.random()), list(tools)

        def reply(n):
            self.models += 1
            if rng.random() < fail:
                return Reply(error=ProviderError("500"))
            if n % last == last - 1 or rng.random() < 0.15 or not (names or alone):
                return says(f"text {n}")
            if alone and (not names or rng.random() < 0.4):
                return calls(rng.choice(alone))
            wanted = [rng.choice(names) for _ in range(rng.randint(1, 3))]
            same = rng.random() < self.same
            return calls(
                *[Call(one, f"{n}.{i}", f"id{n}" if same else None) for i, one in enumerate(wanted)]
            )

        return Script(reply)

    def chat(self, *tools, **options):
        return StrictChat(script=self.script(tools, **options))


# Graphs. Each builder takes the referee, a checkpointer and the middleware to put in, and returns
# the graph, and what makes its input of a text.


def loop_of(shape):
    return lambda referee, saver, _: graphs.loop(shape, referee.script(), checkpointer=saver)


def plan(referee, saver, _):
    graph = graphs.plan_and_execute(referee.script(()), checkpointer=saver)
    # A state without a reducer for it keeps what the last turn has done.
    return graph, lambda text: {"goal": text}


def workflow(referee, saver, _):
    flow = functional(referee.script(()), list, checkpointer=saver)
    return flow, lambda text: [f"{text} {n}" for n in range(referee.rng.randint(1, 6))]


def fan_out(referee, saver, _):
    count = referee.rng.randint(1, 8)
    graph = graphs.map_reduce(referee.script(()), count, checkpointer=saver)
    return graph, lambda text: {"messages": [HumanMessage(text)], "done": []}


def reflection(referee, saver, _):
    talker = referee.chat()
    graph = StateGraph(MessagesState)
    graph.add_node("draft", lambda s: {"messages": [talker.invoke(s["messages"])]})
    graph.add_node("critic", lambda s: {"messages": [HumanMessage(f"Again {len(s['messages'])}.")]})
    graph.add_edge(START, "draft")
    graph.add_conditional_edges(
        "draft", lambda s: END if len(s["messages"]) % 13 == 12 else "critic", ["critic", END]
    )
    graph.add_edge("critic", "draft")
    return graph.compile(checkpointer=saver), user


def chain(referee, _, __):
    chat, times = referee.chat("search"), referee.rng.randint(1, 6)
    return RunnableLambda(
        lambda text: [(chat | StrOutputParser()).invoke(text) for _ in range(times)]
    ), lambda text: text


def in_a_graph(agent, saver):
    graph = StateGraph(MessagesState)
    graph.add_node("one", agent)
    graph.add_edge(START, "one")
    graph.add_edge("one", END)
    return graph.compile(checkpointer=saver), user


def agent_in_a_graph(referee, saver, _):
    return in_a_graph(create_agent(referee.chat("search"), [search]), saver)


def agent_with_its_own_history(referee, saver, _):
    return in_a_graph(create_agent(referee.chat("search"), [search], checkpointer=True), saver)


def agent_with(*others, fail=0.0, tools=(search,), asks=("search",), **options):
    """Build an agent with more middleware, made by functions of the referee."""

    def build(referee, saver, middleware):
        made = [one(referee) for one in others]
        placed = [*middleware, *made] if referee.rng.random() < 0.5 else [*made, *middleware]
        return create_agent(
            referee.chat(*asks, fail=fail),
            list(tools),
            middleware=placed,
            checkpointer=saver,
            **options,
        ), user

    return build


def summaries(referee):
    return built_in.SummarizationMiddleware(
        model=referee.chat(), trigger=("messages", 4), keep=("messages", 2)
    )


def fallbacks(referee):
    return built_in.ModelFallbackMiddleware(referee.chat("search"))


def retries(referee):
    return built_in.ModelRetryMiddleware(max_retries=2, initial_delay=0, jitter=False)


def selection(referee):
    class Selecting(StrictChat):
        def with_structured_output(self, schema, **_):
            return self | (lambda _: {"tools": ["search"]})

    return built_in.LLMToolSelectorMiddleware(
        model=Selecting(script=referee.script(())), max_tools=1
    )


def editing(referee):
    return built_in.ContextEditingMiddleware(edits=[built_in.ClearToolUsesEdit(trigger=20, keep=1)])


def approvals(referee):
    return built_in.HumanInTheLoopMiddleware(interrupt_on={"search": True})


@graphs.tool
def other(value: str = "") -> str:
    """Something else."""
    graphs.BODIES.append(value)
    return f"other {value}"


ASKED: set[str] = set()


@graphs.tool
def ask(value: str = "") -> str:
    """Ask a person."""
    if value not in ASKED:
        # The body runs again with the answer, and is the same call.
        ASKED.add(value)
        graphs.BODIES.append(value)
    return str(interrupt(value))


def agent_in_a_tool(referee, saver, middleware):
    child = create_agent(referee.chat("search", last=3), [search])

    @graphs.tool
    def delegate(value: str = "") -> str:
        """Search, by an agent."""
        graphs.BODIES.append(value)
        return child.invoke(user(value))["messages"][-1].content

    agent = create_agent(
        referee.chat("delegate"), [delegate], middleware=middleware, checkpointer=saver
    )
    return agent, user


def quiet(make):
    # Both packages warn of what they use themselves.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def supervisor(referee, saver, _):
    module = pytest.importorskip("langgraph_supervisor")
    # The package puts two answers in a row before its models.
    bob = create_agent(ScriptedChat(script=referee.script(last=4)), [search], name="bob")
    lead = ScriptedChat(script=referee.script((), alone=["transfer_to_bob"]))
    team = quiet(lambda: module.create_supervisor([bob], model=lead).compile(checkpointer=saver))
    return team, user


def swarm(referee, saver, _):
    module = pytest.importorskip("langgraph_swarm")

    def member(name, to):
        chat = ScriptedChat(script=referee.script(alone=[f"transfer_to_{to}"]))
        handoff = module.create_handoff_tool(agent_name=to)
        return create_agent(chat, [search, handoff], name=name)

    def make():
        members = [member("alice", "bob"), member("bob", "alice")]
        team = module.create_swarm(members, default_active_agent="alice")
        return team.compile(checkpointer=saver)

    return quiet(make), user


AGENTS = {
    "agent": agent_with(),
    "agent that fails": agent_with(fail=0.1),
    "agent with summaries": agent_with(summaries),
    "agent with fallbacks": agent_with(fallbacks, fail=0.3),
    "agent with retries": agent_with(retries, fail=0.3),
    "agent with editing": agent_with(editing),
    "agent with selection": agent_with(selection, tools=(search, other)),
    "agent with all of them": agent_with(
        summaries, fallbacks, retries, editing, tools=(search, other), asks=("search", "other")
    ),
    "agent in a tool": agent_in_a_tool,
    "agent that asks": agent_with(tools=(search, ask), asks=("search", "ask")),
    "agent with approvals": agent_with(approvals),
    "agent at breakpoints": agent_with(interrupt_before=["tools"]),
}
GRAPHS = {
    **{f"loop {shape}": loop_of(shape) for shape in SHAPES},
    "agent in a graph": agent_in_a_graph,
    "agent with its own history": agent_with_its_own_history,
    "plan": plan,
    "workflow": workflow,
    "fan-out": fan_out,
    "reflection": reflection,
    "supervisor": supervisor,
    "swarm": swarm,
}
KINDS = {**AGENTS, **GRAPHS, "chain": chain}
ASKING = ("agent that asks", "agent with approvals", "agent at breakpoints")
# Their state is no conversation that a second input goes on with, or their own window cuts calls
# from results.
ONE_TURN = ("plan", "chain", "loop windowed")


def answer(rng, state):
    """Make what a person says to everything that a thread waits for."""
    found = {}
    for task in state.tasks:
        for one in task.interrupts:
            if is_budget_interrupt(one):
                continue
            if isinstance(one.value, dict):
                asked = one.value["action_requests"]
                said = [{"type": rng.choice(["approve", "reject"])} for _ in asked]
                found[one.id] = {"decisions": said}
            else:
                found[one.id] = "yes"
    return Command(resume=found) if found else None


class Case:
    """One seed: what it combines, and what it has to end like."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.kind, self.entry = rng.choice(list(KINDS)), rng.choice(ENTRIES)
        ways = ["callback"]
        if self.kind != "chain":
            ways.append("bounded")
        if self.kind in AGENTS:
            ways.append("middleware")
        self.way = rng.choice(ways)
        self.calls_cap = rng.choice([None, 1, 2, 3, 5])
        self.tools_cap = rng.choice([None, 1, 2, 4])
        self.budget = Budget(
            max_model_calls=self.calls_cap,
            max_tool_calls=self.tools_cap,
            max_total_tokens=rng.choice([None, None, 400, 1000]),
            loop_detection=None,
        )
        self.guard = Guard(self.budget) if rng.random() < 0.5 else None
        self.outcomes = []
        # LangChain answers all calls of one id when a person rejects one of them.
        self.referee = Referee(rng, unique=self.kind == "agent with approvals")
        lasting = self.kind in (*ASKING, "agent with its own history")
        lasting = lasting or (rng.random() < 0.5 and self.kind != "chain")
        self.saver = InMemorySaver() if lasting else None
        middleware = []
        if self.way == "middleware":
            middleware = [BudgetMiddleware(self.given, on_outcome=self.outcomes.append)]
        self.graph, self.input = KINDS[self.kind](self.referee, self.saver, middleware)
        self.config = {**thread(), "recursion_limit": 300}

    def __repr__(self):
        return f"{self.kind}, {self.way}, {self.entry}, {self.budget}, {self.guard}, {self.saver}"

    @property
    def given(self):
        return self.budget if self.guard is None else self.guard

    def attached(self):
        """Bound the graph anew, as each request of a server does."""
        options = {"on_outcome": self.outcomes.append}
        if self.kind == "loop elsewhere":
            options["messages_key"] = "history"
        if self.way == "callback":
            callback = BudgetCallback(self.given, **options)
            return self.graph, {**self.config, "callbacks": [callback]}
        if self.way == "bounded":
            return bounded(self.graph, self.given, **options), self.config
        return self.graph, self.config

    async def turn(self, text):
        """Run one turn up to its end, whatever a person is asked in it."""
        before = (0, 0) if self.guard else (self.referee.models, len(graphs.BODIES))
        given, failed = self.input(text), None
        for _ in range(40):
            self.outcomes.clear()
            graph, config = self.attached()
            try:
                await run(graph, given, config, self.entry)
            except BudgetExceeded:
                assert self.kind == "chain"
            except ProviderError as error:
                failed = error
            # Each attempt has exactly one outcome.
            assert len(self.outcomes) == 1, self.outcomes
            given = None
            if self.kind in ASKING and failed is None:
                given = answer(self.rng, self.graph.get_state(self.config))
            # A run may be stopped in the batch in which it asks: the question stays.
            if given is None and self.outcomes[0].status != "paused":
                break
            assert self.kind in ASKING
        self.ended(self.outcomes[0], before, failed)
        return failed

    def ended(self, outcome, before, failed):
        """Compare what the guard says with what the referees have seen."""
        models, bodies = self.referee.models - before[0], len(graphs.BODIES) - before[1]
        assert outcome.usage.model_calls == models
        assert outcome.usage.tool_calls == bodies
        assert self.calls_cap is None or models <= self.calls_cap
        assert self.tools_cap is None or bodies <= self.tools_cap
        assert (outcome.status == "failed") is (failed is not None)
        assert outcome.status in ("completed", "terminated", "failed")
        if self.guard is not None:
            assert not self.guard.open_calls()
            assert self.guard.usage.reserved_tokens == 0
        # A chain may end with an answer that asks for tools: nobody was to run them.
        if outcome.messages and (self.kind != "chain" or outcome.status == "terminated"):
            self.check(outcome.messages)
        if self.saver is None or failed or self.way == "callback":
            return
        # What the thread holds can be sent as it is, and ends as the outcome says.
        kept = self.graph.get_state(self.config).values
        if not isinstance(kept, list):
            kept = (kept or {}).get("messages", (kept or {}).get("history", []))
        if not kept or not isinstance(kept[0], (HumanMessage, AIMessage)):
            return
        self.check(kept)
        # A stop outside of what the middleware wraps ends the graph as the callback's does.
        if self.way != "middleware":
            assert not self.graph.get_state(self.config).next
            synthetic = bool(kept[-1].response_metadata.get("synthetic", False))
            assert (outcome.status == "terminated") is synthetic

    def is_left_open(self):
        """Tell whether a callback, which cannot write to a state, had to leave calls open."""
        if self.way != "callback" or self.saver is None:
            return False
        state = self.graph.get_state(self.config)
        return "tools" in state.next or "one" in state.next

    def check(self, messages):
        if self.kind not in ("supervisor", "swarm"):
            check_request(messages)


async def one_run(seed):
    graphs.BODIES.clear()
    ASKED.clear()
    case = Case(seed)
    try:
        turns = 1 if case.saver is None or case.kind in ONE_TURN else case.rng.randint(1, 3)
        for number in range(turns):
            await case.turn(f"Go {number}.")
            if case.is_left_open():
                return
    except BaseException as error:
        error.add_note(f"seed {seed}: {case}")
        raise


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("block", range(BLOCKS))
def test_whatever_is_combined_the_caps_hold_and_nothing_is_lost(block):
    for seed in range(FIRST + block, FIRST + SEEDS, BLOCKS):
        asyncio.run(one_run(seed))
