"""Batches of tool calls that end the run by themselves, and in which a limit has refused one."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from typing import Any

import pytest
from pydantic import BaseModel
from strands import Agent, hooks, tool
from strands.hooks import BeforeToolCallEvent, MessageAddedEvent
from strands.tools.executors import ConcurrentToolExecutor, SequentialToolExecutor

from budgetguard_core import Budget, Guard
from budgetguard_core.testing import Call, Script, calls, says
from budgetguard_strands import BudgetHookProvider
from conformance.budgetguard_strands_driver import ScriptedModel
from strands_agents import Counter, check_request, run, strict

WAYS = ("sync", "async", "stream")
GO_ON = {"role": "user", "content": [{"text": "And now?"}]}


class Answer(BaseModel):
    """The answer."""

    text: str


ANSWER = Call("Answer", fields={"text": "yes"})


@pytest.fixture
def counter():
    return Counter()


@pytest.mark.parametrize("way", WAYS)
def test_a_structured_answer_is_kept_and_the_history_closed(way, counter):
    provider = BudgetHookProvider(Budget(max_tool_calls=1))
    script = Script([calls("search", ANSWER, "search")])
    agent = strict(script, counter.tool, hooks=[provider])
    result, _ = run(agent, "Go.", way, structured_output_model=Answer)
    assert (result.stop_reason, len(counter.started)) == ("max_tool_calls", 1)
    assert result.structured_output == provider.outcome(agent).final == Answer(text="yes")
    assert agent.messages[-1]["metadata"]["synthetic"]
    check_request([*agent.messages, GO_ON])


@pytest.mark.parametrize("way", WAYS)
def test_a_parent_gets_the_structured_answer_of_a_stopped_child(way, counter):
    own = BudgetHookProvider(Budget(max_tool_calls=1))
    child = strict(
        Script([calls("search", ANSWER, "search")]),
        counter.tool,
        hooks=[own],
        structured_output_model=Answer,
    )
    script = Script([calls(Call("child", fields={"input": "Work."})), says("Done.")])
    provider = BudgetHookProvider(Budget(max_iterations=9))
    agent = strict(script, child.as_tool(name="child"), hooks=[provider])
    assert run(agent, "Go.", way)[0].stop_reason == "end_turn"
    given = agent.messages[2]["content"][0]["toolResult"]
    assert given["status"] == "error"
    assert given["content"][0] == {"json": {"text": "yes"}}


@pytest.mark.parametrize("way", WAYS)
def test_an_abort_while_the_answer_is_kept_leaves_it_the_last_message(way):
    guard = Guard(Budget(max_iterations=9))

    async def abort(event: MessageAddedEvent) -> None:
        if event.message["content"] == [{"text": "Done."}]:
            guard.abort("enough")
            await asyncio.Event().wait()

    agent = strict(Script([says("Done.")]), hooks=[BudgetHookProvider(guard)])
    agent.hooks.add_callback(MessageAddedEvent, abort)
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "aborted"
    assert result.message["content"] == [{"text": "Done."}]
    check_request([*agent.messages, GO_ON])


@tool(name="leave")
def leave() -> str:
    """Leaves."""
    return "left"


def by_flag(agent: Any) -> None:
    def flag(event: BeforeToolCallEvent) -> None:
        event.invocation_state["request_state"]["stop_event_loop"] = True

    warnings.simplefilter("ignore", DeprecationWarning)
    agent.hooks.add_callback(BeforeToolCallEvent, flag)


def by_cancelling(agent: Any) -> None:
    if "after_current_tools" not in inspect.signature(Agent.cancel).parameters:
        pytest.skip("younger releases only")

    def cancel(event: BeforeToolCallEvent) -> None:
        event.agent.cancel(message="Bye.", after_current_tools=True)

    agent.hooks.add_callback(BeforeToolCallEvent, cancel)


def by_a_hook(agent: Any) -> None:
    after_tools: Any = getattr(hooks, "AfterToolsEvent", None)
    if "end_turn" not in getattr(after_tools, "__dataclass_fields__", ()):
        pytest.skip("younger releases only")

    def end(event: Any) -> None:
        event.end_turn = "That is all."

    agent.hooks.add_callback(after_tools, end)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ended", [by_flag, by_cancelling, by_a_hook])
def test_what_ends_the_turn_after_its_tools_does_not_hide_the_stop(ended, way, counter):
    provider = BudgetHookProvider(Budget(max_tool_calls=1))
    script = Script([calls("leave", "search"), says("Done.")])
    agent = strict(script, counter.tool, leave, hooks=[provider])
    ended(agent)
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == provider.outcome(agent).stop_reason == "max_tool_calls"
    assert not counter.started
    check_request([*agent.messages, GO_ON])
    assert run(agent, None, way)[0].stop_reason == "end_turn"


class Hangs(ScriptedModel):
    """Writes two words, and hangs."""

    def __init__(self, guard):
        super().__init__(Script([says("never")]))
        self.guard = guard

    async def stream(self, messages, *args, **kwargs):
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockStart": {"start": {}}}
        for word in ("Some ", "words "):
            yield {"contentBlockDelta": {"delta": {"text": word}}}
            await asyncio.sleep(0)
        self.guard.abort("enough")
        await asyncio.Event().wait()


@pytest.mark.parametrize("executor", [ConcurrentToolExecutor, SequentialToolExecutor])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_delegated_agent_says_is_not_its_parents_answer(way, executor):
    guard = Guard(Budget(max_iterations=9))
    child = Agent(model=Hangs(guard), callback_handler=None)
    delegate = child.as_tool(name="child", delegate=True)
    agent = strict(
        Script([calls(Call("child", fields={"input": "Work."}))]),
        delegate,
        hooks=[BudgetHookProvider(guard)],
        tool_executor=executor(),
    )
    assert run(agent, "Go.", way)[0].stop_reason == "aborted"
    assert "Some words" in child.messages[-1]["content"][0]["text"]
    assert "Some words" not in str(agent.messages[-1])
    check_request([*agent.messages, GO_ON])
