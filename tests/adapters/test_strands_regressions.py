"""Faults that users met once: each test failed before its fault was mended."""

import asyncio
import gc
import subprocess
import sys
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from strands import Agent, tool
from strands.agent.agent_result import AgentResult
from strands.hooks import BeforeToolCallEvent
from strands.multiagent import GraphBuilder, Swarm
from strands.session import FileSessionManager
from strands.telemetry.metrics import EventLoopMetrics

from budgetguard_core import AdapterError, Budget, Guard, StopReason
from budgetguard_core.kit import outcome_of
from budgetguard_core.testing import Call, ManualClock, Reply, Script, calls, says
from budgetguard_strands import BudgetHookProvider
from conformance.budgetguard_strands_driver import ScriptedModel
from strands_agents import Counter, is_valid, made, run, sticky

WAYS = ("sync", "async", "streamed")


@pytest.fixture
def counter():
    return Counter()


def send_tool(sent):
    @tool
    def send(value: str) -> str:
        """Send."""
        sent.append(value)
        return "sent"

    return send


def sends(times, text=lambda _: "hi"):
    one = [calls(Call("send", text(number))) for number in range(times)]
    return Script([*one, says("Done.")])


def one_node(kind, node):
    if kind == "swarm":
        return Swarm([node])
    builder = GraphBuilder().set_max_node_executions(50)
    builder.add_node(node, "one")
    builder.set_entry_point("one")
    return builder.build()


def answers(result, word="yes"):
    return [
        {"interruptResponse": {"interruptId": one.id, "response": word}}
        for one in result.interrupts
    ]


class Asks:
    """Asks a person before each call."""

    def __init__(self):
        self.asked = []

    def register_hooks(self, registry, **_):
        registry.add_callback(BeforeToolCallEvent, self.before)

    def before(self, event):
        self.asked.append(event.tool_use["toolUseId"])
        if event.interrupt("ok", reason="send?") != "yes":
            event.cancel_tool = "The person said no."


# Attaching

ACTIVATED = """
import sys
sys.path[:0] = [{tests!r}]
import budgetguard_strands
from budgetguard_core import Budget, Guard
from strands_agents import Counter, made, sticky
script = sticky()
with Guard(Budget(max_model_calls=3)).activate():
    made(script, Counter().tool)("Go.", limits={{"turns": 8}})
print(script.calls)
"""


@pytest.mark.slow
def test_an_import_is_enough_for_activate():
    tests = str(Path(__file__).parents[1])
    code = ACTIVATED.format(tests=tests)
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["3"]


def mocked():
    node = Mock(spec=Agent)
    node._session_manager = None
    node.state, node.messages = {}, []
    node.name = node.id = "one"
    message = {"role": "assistant", "content": [{"text": "Mocked."}]}
    result = AgentResult("end_turn", message, EventLoopMetrics(), {})

    async def stream(*_, **__):
        yield {"result": result}

    node.stream_async = Mock(side_effect=stream)
    node.invoke_async = AsyncMock(return_value=result)
    return node


def test_a_node_may_be_a_mock_of_an_agent():
    provider = BudgetHookProvider(Budget(max_iterations=3))
    graph = provider.attach(one_node("graph", mocked()))
    graph("Go.")
    assert provider.outcome(graph).status == "completed"


def test_a_mock_of_an_agent_is_refused_by_its_own_type():
    with pytest.raises(AdapterError, match="got Mock"):
        BudgetHookProvider().attach(mocked())


# Streams


def test_a_stream_of_a_graph_that_is_closed_early_closes_those_within():
    closed = []

    class Endless(ScriptedModel):
        async def stream(self, *args, **kwargs):
            yield {"messageStart": {"role": "assistant"}}
            try:
                while True:
                    await asyncio.sleep(0)
                    yield {"contentBlockDelta": {"delta": {"text": "word "}}}
            finally:
                closed.append(True)

    guard = Guard(Budget(max_iterations=3))

    async def go():
        provider = BudgetHookProvider(guard)
        node = Agent(model=Endless(Script([])), callback_handler=None, name="one")
        whole = provider.attach(one_node("graph", node))
        stream = whole.stream_async("Go.")
        seen = 0
        async for _ in stream:
            seen += 1
            if seen > 20:
                break
        await stream.aclose()
        outcome = provider.outcome(whole)
        # What is within ends in its own turns.
        gc.collect()
        for _ in range(30):
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)
            await asyncio.sleep(0)
        return outcome

    async def checked():
        outcome = await go()
        assert outcome is not None
        assert outcome.status == "failed"
        assert closed == [True]
        assert guard.open_calls() == ()

    asyncio.run(checked())


@pytest.mark.parametrize("part", ["text", "reasoning", "arguments", "swallowed"])
def test_a_stream_that_never_waits_keeps_the_deadline(part):
    clock = ManualClock()
    pieces = []

    class Busy(ScriptedModel):
        async def stream(self, *args, **kwargs):
            yield {"messageStart": {"role": "assistant"}}
            start = (
                {"toolUse": {"name": "search", "toolUseId": "t1"}} if part == "arguments" else {}
            )
            yield {"contentBlockStart": {"start": start}}
            for number in range(300):
                clock.advance(1)
                pieces.append(number)
                text = {"text": "word "}
                if part == "arguments":
                    text = {"toolUse": {"input": '{"value": "x"}' if number == 0 else ""}}
                elif part == "reasoning":
                    text = {"reasoningContent": {"text": "word "}}
                yield {"contentBlockDelta": {"delta": text}}
            yield {"contentBlockStop": {}}
            stop = "tool_use" if part == "arguments" else "end_turn"
            yield {"messageStop": {"stopReason": stop}}

    provider = BudgetHookProvider(Budget(max_seconds=5), clock=clock)
    counter = Counter()
    agent = Agent(
        model=Busy(Script([])), tools=[counter.tool], hooks=[provider], callback_handler=None
    )
    if part == "swallowed":
        from strands.middleware import InvokeModelStage

        async def keep(context, proceed):
            async for event in proceed(context):
                if "data" not in event and "event" not in event:
                    yield event

        agent.add_middleware(InvokeModelStage, keep)
    assert agent("Go.").stop_reason == "max_seconds"
    assert is_valid(agent)
    assert len(pieces) < 150


def test_a_stop_is_in_the_text_of_the_stream(counter):
    provider = BudgetHookProvider(Budget(max_iterations=2))
    agent = made(sticky(), counter.tool, hooks=[provider])
    result, chunks = run(agent, "Go.", "streamed")
    text = "".join(chunk["data"] for chunk in chunks if "data" in chunk)
    assert result.message["content"][-1]["text"] in text


# Endings


@pytest.mark.parametrize("mode", ["observe", "off"])
@pytest.mark.parametrize("way", WAYS)
def test_a_cancelled_agent_gets_no_message_where_nothing_is_enforced(mode, way):
    def after(*hooks):
        @tool
        def leave(value: str = "") -> str:
            """Leave."""
            agent.cancel()
            return "left"

        agent = made(sticky("leave"), leave, hooks=hooks)
        result, _ = run(agent, "Go.", way)
        return result.stop_reason, [one["role"] for one in agent.messages]

    assert after(BudgetHookProvider(Budget(max_iterations=5), mode=mode)) == after()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("turns", [0, 1])
def test_the_outcome_is_on_the_exception(way, turns, counter):
    script = Script([*[calls("search")] * turns, Reply(error=ValueError("no such model"))])
    provider = BudgetHookProvider(Budget(max_iterations=5))
    agent = made(script, counter.tool, hooks=[provider])
    with pytest.raises(Exception, match="no such model") as raised:
        run(agent, "Go.", way)
    outcome = outcome_of(raised.value)
    assert outcome is not None
    assert outcome.status == "failed"
    assert outcome.usage.model_calls == turns + 1


def test_the_outcome_of_a_graph_is_on_the_exception():
    script = Script([Reply(error=ValueError("no such model"))])
    provider = BudgetHookProvider(Budget(max_iterations=5))
    node = Agent(model=ScriptedModel(script), callback_handler=None, name="one")
    graph = provider.attach(one_node("graph", node))
    with pytest.raises(Exception, match="no such model") as raised:
        graph("Go.")
    assert outcome_of(raised.value) is not None


@pytest.mark.parametrize("kind", ["graph", "swarm"])
def test_what_the_detector_stops_in_a_node_is_not_completed(kind):
    provider = BudgetHookProvider(Budget(max_iterations=50))
    node = made(sends(30), send_tool([]), name="one")
    whole = provider.attach(one_node(kind, node))
    assert whole("Tell them.").status.value == "failed"
    found = provider.outcome(whole)
    assert (found.status, found.stop_reason) == ("terminated", StopReason.NO_PROGRESS)


# Persons and hooks


@pytest.mark.parametrize("kind", ["graph", "swarm"])
def test_an_approval_in_a_node_is_no_new_word_of_the_user(kind):
    sent = []
    provider = BudgetHookProvider(Budget(max_total_tokens=10**7))
    node = made(sends(30), send_tool(sent), hooks=[Asks()], name="one")
    whole = provider.attach(one_node(kind, node))
    result = whole("Tell them.")
    while result.status.value == "interrupted":
        result = whole(answers(result))
    assert len(sent) < 8
    assert provider.outcome(whole).stop_reason == StopReason.NO_PROGRESS


@pytest.mark.parametrize("budget", [Budget(max_tool_calls=1), Budget(tool_quotas={"send": 1})])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", ["guard", "hook"])
def test_a_person_is_asked_for_no_call_that_a_cap_refuses(budget, way, first):
    sent = []
    batch = calls(*(Call("send", f"hi {number}") for number in range(3)))
    asks, provider = Asks(), BudgetHookProvider(budget)
    hooks = [provider, asks] if first == "guard" else [asks, provider]
    agent = made(Script([batch, says("Done.")]), send_tool(sent), hooks=hooks)
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "interrupt"
    assert len(result.interrupts) == 1
    result, _ = run(agent, answers(result), way)
    # The approved call runs, although the batch went over the cap.
    assert sent == ["hi 0"]
    assert result.stop_reason == ("max_tool_calls" if budget.max_tool_calls else "end_turn")
    assert is_valid(agent)


@pytest.mark.parametrize("place", ["same object", "new object"])
def test_the_approved_call_of_a_batch_with_a_trip_runs(place, counter, tmp_path):
    sent = []

    class AsksForSend(Asks):
        def before(self, event):
            if event.tool_use["name"] == "send":
                super().before(event)

    batch = calls(Call("send", "hi"), Call("search"), Call("search", "2"))
    script = Script([batch, says("Done.")])

    def agent():
        session = FileSessionManager("s", storage_dir=str(tmp_path))
        hooks = [AsksForSend(), BudgetHookProvider(Budget(max_tool_calls=2))]
        tools = [send_tool(sent), counter.tool]
        return made(script, *tools, hooks=hooks, session_manager=session, agent_id="a")

    at = agent()
    result = at("Go.")
    assert result.stop_reason == "interrupt"
    assert len(counter.started) == 1
    at = at if place == "same object" else agent()
    result = at(answers(result))
    assert sent == ["hi"]
    assert len(counter.started) == 1
    assert result.stop_reason == "max_tool_calls"
    assert is_valid(at)
