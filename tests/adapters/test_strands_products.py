"""Two things of Strands at once: what each of them keeps alone holds together too."""

from __future__ import annotations

import asyncio
import threading

import pytest

pytest.importorskip("strands")

from pydantic import BaseModel
from strands import Agent, tool
from strands.agent.conversation_manager import SlidingWindowConversationManager
from strands.hooks import AfterToolCallEvent, BeforeToolCallEvent
from strands.session import FileSessionManager
from strands.tools.executors import ConcurrentToolExecutor, SequentialToolExecutor

from budgetguard_core import Budget, Guard
from budgetguard_core.testing import Call, ManualClock, Script, calls, says
from budgetguard_strands import BudgetHookProvider
from conformance.budgetguard_strands_driver import ScriptedModel
from strands_agents import Counter, check_request, made, run, strict

WAYS = ("sync", "async", "stream")
EXECUTORS = (ConcurrentToolExecutor, SequentialToolExecutor)
DEADLINE = 0.05
FOR_EVER = 240
GO_ON = {"role": "user", "content": [{"text": "And now?"}]}


@pytest.fixture
def counter():
    return Counter()


class Answer(BaseModel):
    """The answer."""

    text: str


class Forced(ScriptedModel):
    """Says something; where its structured output is forced, the deadline passes and it hangs."""

    def __init__(self, script: Script, clock: ManualClock) -> None:
        super().__init__(script)
        self.clock = clock
        self.forced = 0

    async def stream(self, messages, tool_specs=None, system_prompt=None, **kwargs):
        if kwargs.get("tool_choice") is not None:
            self.forced += 1
            yield {"messageStart": {"role": "assistant"}}
            use = {"toolUse": {"name": "Answer", "toolUseId": "so"}}
            yield {"contentBlockStart": {"start": use}}
            self.clock.advance(60)
            await asyncio.sleep(FOR_EVER)
        async for chunk in super().stream(messages, tool_specs, system_prompt, **kwargs):
            yield chunk


@pytest.mark.parametrize("way", WAYS)
def test_a_deadline_in_a_structured_output_that_was_forced(way):
    clock = ManualClock()
    provider = BudgetHookProvider(Budget(max_seconds=DEADLINE), clock=clock)
    agent = strict(Script([says("It is 42.")]), hooks=[provider], structured_output_model=Answer)
    agent.model = Forced(agent.model.script, clock)
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "max_seconds"
    assert result.structured_output is None
    assert agent.model.forced == 1
    outcome = provider.outcome(agent)
    assert (outcome.status, outcome.usage.model_calls) == ("terminated", 2)
    check_request([*agent.messages, GO_ON])
    # Its tool is not left behind.
    assert "Answer" not in agent.tool_registry.registry | agent.tool_registry.dynamic_tools


def at(folder, script, *tools, hooks=(), **options) -> Agent:
    session = FileSessionManager("s", storage_dir=str(folder))
    return strict(script, *tools, hooks=hooks, agent_id="main", session_manager=session, **options)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("window", [40, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_session_with_a_window_that_is_stopped_within_a_batch(
    way, window, executor, counter, tmp_path
):
    script = Script([calls(*["search"] * 3)])

    def agent_of(cap: int) -> tuple[Agent, BudgetHookProvider]:
        provider = BudgetHookProvider(Budget(max_tool_calls=cap))
        manager = SlidingWindowConversationManager(window_size=window)
        options = {"conversation_manager": manager, "tool_executor": executor()}
        return at(tmp_path, script, counter.tool, hooks=[provider], **options), provider

    started = 0
    for cap, prompt in ((2, "Go."), (4, None), (1, "And now?"), (5, "More.")):
        agent, provider = agent_of(cap)
        result, _ = run(agent, prompt, way)
        assert result.stop_reason == "max_tool_calls"
        started += cap
        assert len(counter.started) == started
        assert provider.outcome(agent).usage.tool_calls == cap
        check_request([*agent.messages, GO_ON])
        session = FileSessionManager("s", storage_dir=str(tmp_path))
        kept = [one.to_message() for one in session.list_messages("s", "main")]
        check_request([*kept, GO_ON])


class Approval:
    """The user's hook that asks before each call of a tool."""

    def register_hooks(self, registry, **kwargs):
        registry.add_callback(BeforeToolCallEvent, self.before)

    def before(self, event):
        name = f"approve-{event.tool_use['toolUseId']}"
        if event.tool_use["name"] == "search" and event.interrupt(name) != "yes":
            event.cancel_tool = "The person said no."


def answers(result, word):
    return [
        {"interruptResponse": {"interruptId": one.id, "response": word}}
        for one in result.interrupts
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("given", ["budget", "guard"])
def test_an_agent_as_a_tool_that_asks_a_person(given, way, counter):
    child_script = Script([calls("search"), calls("search"), says("Found.")])
    child = made(child_script, counter.tool, hooks=[Approval()], name="child")
    script = Script([calls("child"), says("Done.")])
    budget = Budget(max_model_calls=4)
    provider = BudgetHookProvider(Guard(budget) if given == "guard" else budget)
    agent = made(script, child.as_tool(name="child"), hooks=[provider])
    result, _ = run(agent, "Go.", way)
    for _ in range(9):
        if result.stop_reason != "interrupt":
            break
        assert provider.outcome(agent).status == "paused"
        result, _ = run(agent, answers(result, "yes"), way)
    # One call of the agent's own, and three of its child's: the fifth never starts.
    assert result.stop_reason == "max_model_calls"
    assert script.calls + child_script.calls == 4
    assert provider.outcome(agent).usage.model_calls == 4
    check_request([*agent.messages, GO_ON])


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("way", WAYS)
def test_an_agent_that_is_cancelled_by_a_tool_and_then_goes_on(way, executor, counter):
    provider = BudgetHookProvider(guard := Guard(Budget(max_tool_calls=4)))

    @tool
    def leave() -> str:
        """Cancels the agent."""
        agent.cancel()
        return "left"

    script = Script([calls("search", "leave", "search"), calls("search", "search")])
    agent = strict(script, counter.tool, leave, hooks=[provider], tool_executor=executor())
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "cancelled"
    outcome = provider.outcome(agent)
    assert (outcome.status, outcome.usage.reserved_tokens) == ("failed", 0)
    # Counted is what has started, and nothing is open.
    assert guard.usage.tool_calls == len(counter.started) + 1
    assert not guard.open_calls()
    check_request([*agent.messages, GO_ON])
    result, _ = run(agent, "And now?", way)
    assert result.stop_reason == "max_tool_calls"
    assert len(counter.started) + 1 == 4
    check_request([*agent.messages, GO_ON])


@pytest.mark.parametrize("way", WAYS)
def test_a_cancelled_agent_whose_cap_is_reached_too_is_stopped(way, counter):
    provider = BudgetHookProvider(Budget(max_tool_calls=1))

    def cancel(event):
        event.agent.cancel()

    agent = strict(Script([calls("search", "search")]), counter.tool, hooks=[provider])
    agent.hooks.add_callback(AfterToolCallEvent, cancel)
    run(agent, "Go.", way)
    assert len(counter.started) == 1
    # The stop came first and is final.
    assert provider.outcome(agent).status == "terminated"
    check_request([*agent.messages, GO_ON])


class Hangs(ScriptedModel):
    """Says a word and hangs, once; then answers."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.hangs = threading.Event()

    async def stream(self, *args, **kwargs):
        if self.hangs.is_set():
            async for chunk in super().stream(*args, **kwargs):
                yield chunk
            return
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockDelta": {"delta": {"text": "So"}}}
        self.hangs.set()
        await asyncio.sleep(FOR_EVER)


@pytest.mark.parametrize("kind", ["guard", "budget"])
async def test_a_cancellation_from_outside_with_a_session(kind, tmp_path, counter):
    budget = Budget(max_model_calls=2)
    provider = BudgetHookProvider(Guard(budget) if kind == "guard" else budget)
    agent = at(tmp_path, Script([says("Done.")]), counter.tool, hooks=[provider])
    agent.model = Hangs(Script([calls("search")]))
    task = asyncio.create_task(agent.invoke_async("Go."))
    await asyncio.to_thread(agent.model.hangs.wait, FOR_EVER)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    failed = provider.outcome(agent)
    assert (failed.status, failed.usage.model_calls) == ("failed", 1)
    assert failed.usage.estimated_calls == 1
    result = await agent.invoke_async("And now?")
    assert result.stop_reason == "max_model_calls"
    # A guard that was given goes on counting; a budget begins anew with each invocation.
    assert agent.model.script.calls == (1 if kind == "guard" else 2)


@pytest.mark.parametrize("cap", [1, 3, 5])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_equal_ids_in_a_batch_of_every_executor(executor, way, cap, counter):
    batch = calls(*(Call("search", str(place), id="search") for place in range(3)))
    provider = BudgetHookProvider(Budget(max_tool_calls=cap))
    agent = made(Script([batch]), counter.tool, hooks=[provider], tool_executor=executor())
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "max_tool_calls"
    assert len(counter.started) == cap
    assert provider.outcome(agent).usage.tool_calls == cap
    check_request([*agent.messages, GO_ON])


def test_a_graph_of_a_session_whose_node_is_stopped_after_an_answer(counter, tmp_path):
    from strands.multiagent import GraphBuilder

    worker = Script([calls("search"), calls("search"), says("Found.")])
    writer = Script([says("Written.")])

    def graph_of(cap: int):
        builder = GraphBuilder()
        one = made(worker, counter.tool, hooks=[Approval()], name="worker", agent_id="worker")
        builder.add_node(one, "worker")
        builder.add_node(made(writer, name="writer", agent_id="writer"), "writer")
        builder.add_edge("worker", "writer")
        builder.set_max_node_executions(9)
        builder.set_session_manager(FileSessionManager("g", storage_dir=str(tmp_path)))
        graph = builder.build()
        provider = BudgetHookProvider(Budget(max_model_calls=cap))
        provider.attach(graph)
        return graph, provider

    graph, provider = graph_of(2)
    result = graph("Go.")
    for _ in range(9):
        if not result.interrupts:
            break
        graph, provider = graph_of(2)
        result = graph(answers(result, "yes"))
    assert provider.outcome(graph).stop_reason == "max_model_calls"
    assert (worker.calls, writer.calls) == (2, 0)
    graph, provider = graph_of(9)
    result = graph("Go on.")
    for _ in range(9):
        if not result.interrupts:
            break
        result = graph(answers(result, "yes"))
    assert str(result.status) == "Status.COMPLETED"
    assert (provider.outcome(graph).status, writer.calls) == ("completed", 1)
