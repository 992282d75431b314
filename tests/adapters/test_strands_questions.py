"""A cap that asks a person by an interrupt of the agent: `on_trip="ask"`."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from strands import Agent, tool
from strands.hooks import BeforeToolCallEvent
from strands.multiagent import GraphBuilder, Swarm
from strands.session.file_session_manager import FileSessionManager

from budgetguard_core import Budget, StopReason
from budgetguard_core.testing import ManualClock
from budgetguard_core.testing.scripted import Answers
from budgetguard_strands import BudgetHookProvider
from budgetguard_strands.scripted import scripted_model

NUMBERS = itertools.count()
SEARCH = {"search": {"query": "a"}}


@tool
def search(query: str) -> str:
    """Search."""
    return f"{query} {next(NUMBERS)}"


class Chat:
    """An agent; with a folder it is made anew for each call, as in a process of its own."""

    def __init__(self, answers, budget, *, mode="sync", folder=None, hooks=(), tools=(search,)):
        self.model = scripted_model(Answers(answers))
        self.budget, self.mode, self.folder, self.hooks, self.tools = (
            budget,
            mode,
            folder,
            hooks,
            tools,
        )
        self.agent = None

    def call(self, given):
        if self.agent is None or self.folder is not None:
            self.provider = BudgetHookProvider(self.budget, on_trip="ask")
            session = (
                None
                if self.folder is None
                else FileSessionManager(session_id="s", storage_dir=str(self.folder))
            )
            self.agent = Agent(
                agent_id="one",
                model=self.model,
                tools=[*self.tools],
                hooks=[self.provider, *self.hooks],
                session_manager=session,
                callback_handler=None,
            )
        if self.mode == "sync":
            return self.agent(given)
        return asyncio.run(self._stream(given))

    async def _stream(self, given):
        if self.mode == "async":
            return await self.agent.invoke_async(given)
        return [one async for one in self.agent.stream_async(given)][-1]["result"]

    @property
    def outcome(self):
        return self.provider.outcome(self.agent)


def asked(result):
    found = [one.reason for one in result.interrupts or ()]
    return [(one["reason"], one["limit"], one["used"]) for one in found]


def answers(result, *given):
    return [
        {"interruptResponse": {"interruptId": one.id, "response": answer}}
        for one, answer in zip(result.interrupts, given, strict=True)
    ]


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("mode", ["sync", "async", "streamed"])
def test_the_agent_waits_for_more_budget_and_goes_on(mode, saved, tmp_path):
    folder = tmp_path if saved else None
    chat = Chat([SEARCH] * 5 + ["Done."], Budget(max_iterations=2), mode=mode, folder=folder)
    result = chat.call("Go.")
    assert (result.stop_reason, asked(result)) == ("interrupt", [("max_iterations", 2, 2)])
    assert result.interrupts[0].name == "budget_question"
    assert chat.outcome.status == "paused"
    result = chat.call(answers(result, {"max_iterations": 4}))
    assert asked(result) == [("max_iterations", 4, 4)]
    result = chat.call(answers(result, {"max_iterations": 40}))
    assert result.stop_reason == "end_turn"
    assert (chat.outcome.status, chat.outcome.usage.iterations) == ("completed", 6)
    assert [one["role"] for one in chat.agent.messages] == ["user", "assistant"] * 6


@pytest.mark.parametrize("no", [False, "no", {"max_iterations": 1}])
def test_any_other_answer_is_the_end(no):
    chat = Chat([SEARCH], Budget(max_iterations=2))
    result = chat.call("Go.")
    chat.call(answers(result, no))
    assert (chat.outcome.status, chat.outcome.stop_reason) == (
        "terminated",
        StopReason.MAX_ITERATIONS,
    )
    assert chat.outcome.usage.iterations == 2
    assert bool(chat.outcome.errors) is bool(no)


def test_while_nobody_answers_no_time_is_charged():
    clock = ManualClock()
    model = scripted_model(Answers([SEARCH, "Done."]))
    budget = Budget(max_iterations=1, max_seconds=60)
    provider = BudgetHookProvider(budget, on_trip="ask", clock=clock)
    agent = Agent(model=model, tools=[search], hooks=[provider], callback_handler=None)
    result = agent("Go.")
    clock.advance(10_000)
    agent(answers(result, {"max_iterations": 2}))
    assert provider.outcome(agent).status == "completed"
    assert provider.outcome(agent).usage.seconds < 1


@pytest.mark.parametrize("saved", [False, True])
def test_a_batch_of_tools_over_its_cap_asks_and_runs(saved, tmp_path):
    both = [("search", {"query": "a"}), ("search", {"query": "b"})]
    chat = Chat([both, both, "Done."], Budget(max_tool_calls=3), folder=tmp_path if saved else None)
    result = chat.call("Go.")
    assert asked(result) == [("max_tool_calls", 3, 3)]
    result = chat.call(answers(result, {"max_tool_calls": 9}))
    assert result.stop_reason == "end_turn"
    assert chat.outcome.usage.tool_calls == 4


def test_it_waits_beside_questions_of_the_users_own():
    def approve(event: BeforeToolCallEvent):
        if event.interrupt("approve") != "yes":
            event.cancel_tool = "no"

    class Hooks:
        def register_hooks(self, registry, **_):
            registry.add_callback(BeforeToolCallEvent, approve)

    chat = Chat([SEARCH, SEARCH, "Done."], Budget(max_iterations=1), hooks=[Hooks()])
    result = chat.call("Go.")
    assert [one.name for one in result.interrupts] == ["approve"]
    result = chat.call(answers(result, "yes"))
    assert asked(result) == [("max_iterations", 1, 1)]
    result = chat.call(answers(result, {"max_iterations": 9}))
    assert [one.name for one in result.interrupts] == ["approve"]
    # Strands keeps the first answer until nobody is asked any more.
    result = chat.call(answers(result, "yes"))
    assert (result.stop_reason, chat.outcome.usage.iterations) == ("end_turn", 3)


@pytest.mark.parametrize("no", [False, True])
def test_a_question_of_the_users_own_and_one_of_a_cap_in_one_batch(no):
    @tool
    def send(query: str) -> str:
        """Send."""
        return query

    class Hooks:
        def register_hooks(self, registry, **_):
            registry.add_callback(BeforeToolCallEvent, self.approve)

        def approve(self, event):
            if event.tool_use["name"] == "send" and event.interrupt("approve") != "yes":
                event.cancel_tool = "no"

    both = [("send", {"query": "a"}), ("search", {"query": "b"})]
    tools, hooks = [send, search], [Hooks()]
    chat = Chat([both, "Done."], Budget(max_tool_calls=1), hooks=hooks, tools=tools)
    result = chat.call("Go.")
    assert [one.name for one in result.interrupts] == ["approve", "budget_question"]
    result = chat.call(answers(result, "yes", not no and {"max_tool_calls": 9}))
    assert chat.outcome.usage.tool_calls == (1 if no else 2)
    assert chat.outcome.status == ("terminated" if no else "completed")
    results = [one for m in chat.agent.messages for one in m["content"] if "toolResult" in one]
    assert len(results) == 2


def test_a_trip_and_a_question_of_the_users_own_in_one_batch():
    """Nobody is asked about a deadline."""
    ran = []

    @tool
    def send(query: str) -> str:
        """Send."""
        ran.append(query)
        return query

    class Hooks:
        def register_hooks(self, registry, **_):
            registry.add_callback(BeforeToolCallEvent, self.approve)

        def approve(self, event):
            if event.tool_use["name"] == "send":
                event.interrupt("approve")

    clock = ManualClock()

    @tool
    def late(query: str) -> str:
        """Take long."""
        clock.advance(100)
        return query

    both = [("send", {"query": "a"}), ("late", {"query": "b"})]
    model = scripted_model(Answers([both, "Done."]))
    provider = BudgetHookProvider(Budget(max_seconds=60), on_trip="ask", clock=clock)
    hooks = [provider, Hooks()]
    agent = Agent(model=model, tools=[send, late], hooks=hooks, callback_handler=None)
    agent("Go.")
    assert ran == []
    assert provider.outcome(agent).status == "paused"
    assert provider.outcome(agent).usage.model_calls == 1


def test_an_agent_within_asks_for_the_caps_around_it():
    inner = Agent(
        name="helper",
        model=scripted_model(Answers([SEARCH, "Found."])),
        tools=[search],
        callback_handler=None,
    )
    chat = Chat(
        [{"helper": {"input": "Look."}}, "Done."],
        Budget(max_model_calls=2),
        tools=[inner.as_tool(name="helper", description="Help.")],
    )
    result = chat.call("Go.")
    assert asked(result) == [("max_model_calls", 2, 2)]
    assert inner.messages[-1]["role"] == "user"  # nothing of it was lost
    result = chat.call(answers(result, {"max_model_calls": 9}))
    assert (result.stop_reason, chat.outcome.usage.model_calls) == ("end_turn", 4)


@pytest.mark.parametrize("kind", ["graph", "swarm"])
def test_a_node_of_a_team_asks(kind):
    provider = BudgetHookProvider(Budget(max_model_calls=1), on_trip="ask")
    node = Agent(
        name="node",
        model=scripted_model(Answers([SEARCH, "Done."])),
        tools=[search],
        callback_handler=None,
    )
    if kind == "graph":
        builder = GraphBuilder()
        builder.add_node(node, "node")
        builder.set_entry_point("node")
        builder.set_hook_providers([provider])
        builder.set_execution_timeout(60)
        team = builder.build()
    else:
        team = Swarm([node], hooks=[provider])
    result = team("Go.")
    assert asked(result) == [("max_model_calls", 1, 1)]
    result = team(answers(result, {"max_model_calls": 9}))
    assert str(result.status.value) == "completed"
    assert provider.outcome(team).usage.model_calls == 2
