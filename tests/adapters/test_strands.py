"""What only Strands has: the reference change's own checks, executors, sessions, multi-agent runs.

The reference is the change that Strands' users wait for (`max_iterations` on the agent); its checks
are the first section.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import logging
import threading
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel
from strands import Agent, ModelRetryStrategy, tool
from strands.agent.conversation_manager import (
    SlidingWindowConversationManager,
    SummarizingConversationManager,
)
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolCallEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    MessageAddedEvent,
)
from strands.middleware import InvokeModelStage
from strands.multiagent import GraphBuilder, Swarm
from strands.session import FileSessionManager
from strands.session.snapshot_session_manager import SnapshotSessionManager
from strands.storage import LocalFileStorage
from strands.tools.executors import ConcurrentToolExecutor, SequentialToolExecutor
from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException

from budgetguard_core import (
    AdapterError,
    Budget,
    BudgetExceeded,
    ConfigurationError,
    Guard,
    Price,
    PriceBook,
    StopReason,
)
from budgetguard_core.kit import FRAME, NOT_EXECUTED, OUTCOME_UNKNOWN, SystemClock
from budgetguard_core.testing import MODEL, Call, ManualClock, Reply, Script, calls, says
from budgetguard_core.usage import TokenUsage
from budgetguard_strands import BudgetHookProvider, outcome
from budgetguard_strands.provider import DEFAULT_MAX_ITERATIONS
from conformance.budgetguard_strands_driver import ScriptedModel, chunks_of
from strands_agents import Counter, in_new_process, is_valid, made, results, run, sticky

WAYS = ("sync", "async", "streamed")
DEADLINE = 0.05
"""The clock of the tests passes it where they say so; how often the watcher looks, in seconds."""
FOR_EVER = 240
"""Seconds that nothing in these tests may ever wait."""


@pytest.fixture
def counter():
    return Counter()


class Log:
    """The hooks that fired, in two letters each."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.added: list[dict[str, Any]] = []

    def register_hooks(self, registry, **kwargs):
        for event, name in (
            (BeforeModelCallEvent, "BM"),
            (AfterModelCallEvent, "AM"),
            (AfterInvocationEvent, "AI"),
        ):
            registry.add_callback(event, lambda event, name=name: self.names.append(name))
        registry.add_callback(MessageAddedEvent, self.message_added)

    def message_added(self, event):
        self.names.append("MA")
        self.added.append(event.message)


def took(action):
    clock = SystemClock()
    began = clock.monotonic_ns()
    result = action()
    return result, (clock.monotonic_ns() - began) / 1e9


# The reference's own checks


@pytest.mark.parametrize("way", WAYS)
def test_the_synthetic_message_has_the_reference_shape(way, counter):
    provider = BudgetHookProvider(Budget(max_iterations=2))
    log = Log()
    agent = made(sticky(), counter.tool, hooks=[provider, log])
    result, _ = run(agent, "Go.", way)
    outcome = provider.outcome(agent)
    message = agent.messages[-1]
    assert result.message is message
    assert log.added[-1] is message
    assert message["role"] == "assistant"
    assert message["metadata"] == {
        "synthetic": True,
        "stop_reason": "max_iterations",
        "run_id": outcome.run_id,
    }
    assert message["content"] == [{"text": outcome.final}]
    assert "max_iterations" not in outcome.final


@pytest.mark.parametrize("way", WAYS)
def test_no_model_event_at_the_halt(way, counter):
    log = Log()
    provider = BudgetHookProvider(Budget(max_iterations=2))
    agent = made(sticky(), counter.tool, hooks=[log, provider])
    _, chunks = run(agent, "Go.", way)
    turn = ["BM", "AM", "MA", "MA"]
    assert log.names == ["MA", *turn, *turn, "BM", "MA", "AI"]
    if way == "streamed":
        messages = [chunk["message"] for chunk in chunks if "message" in chunk]
        assert not any((m.get("metadata") or {}).get("synthetic") for m in messages)
        assert not any("force_stop" in chunk for chunk in chunks)


def test_the_default_is_25(counter):
    script = sticky()
    agent = made(script, counter.tool, hooks=[BudgetHookProvider()])
    assert agent("Go.").stop_reason == "max_iterations"
    assert script.calls == DEFAULT_MAX_ITERATIONS == 25


def test_reset_between_invocations_with_a_shared_invocation_state(counter):
    script = sticky()
    agent = made(script, counter.tool, hooks=[BudgetHookProvider(Budget(max_iterations=2))])
    state: dict[str, Any] = {"mine": 1}
    for total in (2, 4, 6):
        result = agent("Go.", invocation_state=state)
        assert result.stop_reason == "max_iterations"
        assert script.calls == total
    assert state["mine"] == 1
    assert is_valid(agent)


class Overflowing(ScriptedModel):
    """Overflows its context window at given calls."""

    def __init__(self, script: Script, at: set[int]) -> None:
        super().__init__(script)
        self.at = at
        self.attempts = 0

    async def stream(self, *args, **kwargs):
        self.attempts += 1
        if self.attempts in self.at:
            raise ContextWindowOverflowException("too long")
        async for chunk in super().stream(*args, **kwargs):
            yield chunk


def overflowing(script, at, budget, *tools):
    agent = made(script, *tools, hooks=[BudgetHookProvider(budget)])
    agent.conversation_manager = SlidingWindowConversationManager(window_size=4)
    agent.model = Overflowing(script, at)
    return agent


def test_reset_on_context_overflow(counter):
    script = Script([calls("search"), calls("search"), calls("search"), says("Done.")])
    agent = overflowing(script, {3}, Budget(max_iterations=3), counter.tool)
    assert agent("Go.").stop_reason == "end_turn"
    assert agent.model.attempts == 5


def test_overflow_recovery_consumes_no_iteration():
    agent = overflowing(Script([says("Done.")]), {1}, Budget(max_iterations=1))
    agent.messages += [
        {"role": role, "content": [{"text": "earlier"}]} for role in ("user", "assistant") * 3
    ]
    assert agent("Go.").stop_reason == "end_turn"
    assert agent.model.attempts == 2


def test_overflowing_again_and_again_is_bounded(counter):
    script = sticky()
    agent = overflowing(script, set(range(4, 400, 4)), Budget(max_iterations=5), counter.tool)
    assert agent("Go.").stop_reason == "max_iterations"
    assert agent.model.attempts < 16


def summarized(at, guard, tool, *asks):
    summarizer = made(Script([*asks, says("A summary.")]), tool, name="summarizer")
    agent = overflowing(sticky(), at, guard, tool)
    agent.conversation_manager = SummarizingConversationManager(
        summary_ratio=0.5, preserve_recent_messages=2, summarization_agent=summarizer
    )
    return agent, summarizer.model.script


def test_a_summary_is_no_iteration(counter):
    guard = Guard(Budget(max_iterations=4, loop_detection=None))
    agent, summaries = summarized({3, 5}, guard, counter.tool)
    assert agent("Go.").stop_reason == "max_iterations"
    assert (agent.model.attempts, summaries.calls) == (6, 2)
    assert guard.usage.model_calls == 8


def test_summaries_that_change_nothing_are_bounded(counter):
    guard = Guard(Budget(max_iterations=4, loop_detection=None))
    agent, summaries = summarized(set(range(3, 400)), guard, counter.tool)
    assert agent("Go.").stop_reason == "max_iterations"
    assert summaries.calls < 8


def test_a_summarizer_with_a_cap_of_its_own_is_held_to_it(counter):
    guard = Guard(Budget(max_iterations=9))
    agent, summaries = summarized({3}, guard, counter.tool, calls("search"))
    own = BudgetHookProvider(Budget(max_iterations=1))
    summarizer = own.attach(agent.conversation_manager.summarization_agent)
    agent("Go.")
    assert own.outcome(summarizer).stop_reason == "max_iterations"
    assert summaries.calls == 1


def test_reset_per_resumed_attempt(counter):
    script = Script([calls("search"), says("One."), calls("search"), says("Two.")])
    agent = made(script, counter.tool, hooks=[BudgetHookProvider(Budget(max_iterations=2))])
    attempts = []

    def again(event):
        attempts.append(event.result.stop_reason)
        if len(attempts) == 1:
            event.resume = "And now?"

    agent.hooks.add_callback(AfterInvocationEvent, again)
    assert agent("Go.").stop_reason == "end_turn"
    assert attempts == ["end_turn", "end_turn"]
    assert script.calls == 4


def test_everything_but_the_iterations_runs_on_in_a_resumed_attempt(counter):
    script = Script([calls("search"), says("One.")] * 3)
    provider = BudgetHookProvider(Budget(max_iterations=2, max_model_calls=3))
    agent = made(script, counter.tool, hooks=[provider])
    agent.hooks.add_callback(AfterInvocationEvent, lambda event: setattr(event, "resume", "More."))
    assert agent("Go.").stop_reason == "max_model_calls"
    assert script.calls == 3
    assert provider.outcome(agent).usage.model_calls == 3


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_resume_hook_cannot_spin_after_a_stop(order, counter):
    class Spinning:
        attempts = 0

        def register_hooks(self, registry, **kwargs):
            registry.add_callback(AfterInvocationEvent, self.again)

        def again(self, event):
            self.attempts += 1
            if self.attempts < 50:
                event.resume = "Go on."

    spinning = Spinning()
    hooks = [BudgetHookProvider(Budget(max_total_tokens=300)), spinning]
    if order == "before":
        hooks.reverse()
    script = sticky()
    agent = made(script, counter.tool, hooks=hooks)
    assert agent("Go.").stop_reason == "max_total_tokens"
    assert spinning.attempts == 1
    assert script.calls == 2


def test_an_interrupt_and_its_resume_consume_nothing(counter):
    guard = Guard(Budget(max_iterations=2, max_tool_calls=1))
    script = Script([calls("search"), says("Done.")])
    agent = made(script, counter.tool, hooks=[BudgetHookProvider(guard)])
    agent.hooks.add_callback(
        BeforeToolCallEvent, lambda event: event.interrupt("approval", reason="may it?")
    )
    result = agent("Go.")
    assert result.stop_reason == "interrupt"
    assert (guard.usage.iterations, counter.started) == (1, [])
    answer = {"interruptResponse": {"interruptId": result.interrupts[0].id, "response": "yes"}}
    result = agent([answer])
    assert result.stop_reason == "end_turn"
    usage = guard.usage
    assert (usage.iterations, usage.model_calls, usage.tool_calls) == (2, 2, 1)
    assert len(counter.started) == 1


def test_replaying_a_recorded_tool_call_consumes_no_iteration(counter):
    provider = BudgetHookProvider(Budget(max_iterations=1))
    script = Script([says("Done.")])
    use = {"toolUse": {"toolUseId": "t1", "name": "search", "input": {}}}
    agent = made(
        script,
        counter.tool,
        hooks=[provider],
        messages=[
            {"role": "user", "content": [{"text": "Search."}]},
            {"role": "assistant", "content": [use]},
        ],
    )
    assert agent(None).stop_reason == "end_turn"
    assert (script.calls, len(counter.started)) == (1, 1)
    assert provider.outcome(agent).usage.iterations == 1


@pytest.mark.parametrize("restart", [False, True], ids=["same process", "new process"])
def test_a_leg_between_checkpoints_is_no_fresh_start(restart, counter):
    script = sticky()

    def agent_with(messages, state):
        return made(
            script,
            counter.tool,
            hooks=[BudgetHookProvider(Budget(max_iterations=2))],
            checkpointing=True,
            messages=messages,
            state=state,
        )

    agent = agent_with([], None)
    result = agent("Go.")
    attempts = 0
    while result.stop_reason == "checkpoint":
        attempts += 1
        assert attempts < 20
        if restart:
            kept = json.loads(json.dumps(agent.state.get()))
            agent = agent_with(list(agent.messages), kept)
        resume = {"checkpointResume": {"checkpoint": result.checkpoint.to_dict()}}
        result = agent([resume] if not isinstance(resume, dict) else resume)
    assert result.stop_reason == "max_iterations"
    assert script.calls == 2
    assert is_valid(agent)


# Executors and structured output


@pytest.mark.parametrize("executor", [ConcurrentToolExecutor, SequentialToolExecutor])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_calls_that_fit_run_and_the_rest_get_error_results(executor, kind):
    started = []

    if kind == "sync":

        def work(value: str = "") -> str:
            started.append(value)
            return f"{value} is done"

    else:

        async def work(value: str = "") -> str:
            await asyncio.sleep(0)
            started.append(value)
            return f"{value} is done"

    script = Script([calls(*(Call("work", value) for value in "abcde")), says("Done.")])
    agent = made(
        script,
        tool(name="work", description="Works.")(work),
        hooks=[BudgetHookProvider(Budget(max_tool_calls=2))],
        tool_executor=executor(),
    )
    assert agent("Go.").stop_reason == "max_tool_calls"
    assert sorted(started) == ["a", "b"]
    # Older releases put the results in the order in which they came.
    found = {
        block["toolResult"]["toolUseId"]: block["toolResult"]
        for block in agent.messages[-2]["content"]
    }
    found = [found[block["toolUse"]["toolUseId"]] for block in agent.messages[-3]["content"]]
    assert [result["status"] for result in found] == ["success"] * 2 + ["error"] * 3
    texts = [result["content"][0]["text"] for result in found]
    assert texts == ["a is done", "b is done", NOT_EXECUTED, NOT_EXECUTED, NOT_EXECUTED]
    assert is_valid(agent)


class Answer(BaseModel):
    """The answer."""

    text: str


class Structured(ScriptedModel):
    """Gives the structured output when it is forced to, or at a given call."""

    def __init__(self, script: Script, at: int | None = None) -> None:
        super().__init__(script)
        self.at = at

    async def stream(self, messages, tool_specs=None, system_prompt=None, **kwargs):
        forced = kwargs.get("tool_choice") is not None
        if forced or self.script.calls == self.at:
            self.script.next("forced")
            use = {"toolUse": {"name": "Answer", "toolUseId": f"so{self.script.calls}"}}
            yield {"messageStart": {"role": "assistant"}}
            yield {"contentBlockStart": {"start": use}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": '{"text": "42"}'}}}}
            yield {"contentBlockStop": {}}
            yield {"messageStop": {"stopReason": "tool_use"}}
            return
        async for chunk in super().stream(messages, tool_specs, system_prompt, **kwargs):
            yield chunk


def test_the_structured_output_tool_is_never_refused(counter):
    script = Script([calls("search", "search"), says("unused")])
    provider = BudgetHookProvider(Budget(max_tool_calls=2, max_iterations=2))
    agent = made(script, counter.tool, hooks=[provider], structured_output_model=Answer)
    agent.model = Structured(script, at=1)
    result = agent("Go.")
    assert result.structured_output == Answer(text="42")
    outcome = provider.outcome(agent)
    assert (outcome.status, outcome.usage.tool_calls) == ("completed", 2)
    assert outcome.final == Answer(text="42")


def test_a_forced_structured_output_over_the_cap_is_a_graceful_stop():
    script = Script([says("The answer is 42.")])
    agent = made(
        script, hooks=[BudgetHookProvider(Budget(max_iterations=1))], structured_output_model=Answer
    )
    agent.model = Structured(script)
    result = agent("Go.")
    assert result.stop_reason == "max_iterations"
    assert result.structured_output is None
    assert script.calls == 1
    assert is_valid(agent)


def test_an_agent_has_one_provider(counter):
    provider = BudgetHookProvider(Budget(max_iterations=3))
    agent = made(sticky(), counter.tool, hooks=[provider])
    assert provider.attach(agent) is agent
    with pytest.raises(ConfigurationError, match="must have one provider"):
        BudgetHookProvider(Budget(max_iterations=2)).attach(agent)
    agent("Go.")
    assert outcome(agent).usage.iterations == 3


def test_an_unknown_tool_is_no_body_but_a_loop_of_it_ends():
    script = Script([calls("no_such_tool")])
    provider = BudgetHookProvider(Budget(max_iterations=50))
    agent = made(script, hooks=[provider])
    assert agent("Go.").stop_reason == "no_progress"
    assert provider.outcome(agent).usage.tool_calls == 0
    assert script.calls < 10


# Deadline and abort


class Hanging(ScriptedModel):
    """Says something and then nothing more, as often as it is told to.

    When it hangs, the clock passes the deadline.
    """

    def __init__(
        self, script: Script, times: int = 10**6, clock: ManualClock | None = None
    ) -> None:
        super().__init__(script)
        self.times = times
        self.clock = clock
        self.pieces = 1
        self.hangs = threading.Event()
        self.cancelled = 0

    async def stream(self, *args, **kwargs):
        self.times -= 1
        if self.times < 0:
            async for chunk in super().stream(*args, **kwargs):
                yield chunk
            return
        try:
            yield {"messageStart": {"role": "assistant"}}
            for _ in range(self.pieces):
                yield {"contentBlockDelta": {"delta": {"text": "So far I have"}}}
            self.hangs.set()
            if self.clock is not None:
                self.clock.advance(60)
            await asyncio.sleep(FOR_EVER)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_hangs_mid_stream_is_left_in_time(way):
    script = Script([says("Here I am again.")])
    clock = ManualClock()
    provider = BudgetHookProvider(Budget(max_seconds=DEADLINE), clock=clock)
    agent = made(script, hooks=[provider])
    agent.model = Hanging(script, times=1, clock=clock)
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "max_seconds"
    assert agent.model.cancelled == 1
    assert is_valid(agent)
    assert agent.messages[-1]["content"][0] == {"text": "So far I have"}
    outcome = provider.outcome(agent)
    assert "So far I have" in outcome.final
    assert (outcome.usage.estimated_calls, outcome.usage.reserved_tokens) == (1, 0)
    result, _ = run(agent, "And now?", way)
    assert result.stop_reason == "end_turn"
    assert is_valid(agent)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_hangs_is_left_in_time_where_a_middleware_keeps_its_text(way):
    clock = ManualClock()
    provider = BudgetHookProvider(Budget(max_seconds=DEADLINE), clock=clock)
    agent = made(Script([]), hooks=[provider])
    agent.model = Hanging(Script([]), clock=clock)
    agent.model.pieces = 3

    async def keep(context, proceed):
        async for event in proceed(context):
            if "data" not in event:
                yield event

    agent.add_middleware(InvokeModelStage, keep)
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "max_seconds"
    assert agent.model.cancelled == 1


@pytest.mark.sample(4)
@pytest.mark.parametrize("executor", [ConcurrentToolExecutor, SequentialToolExecutor])
@pytest.mark.parametrize("way", WAYS)
def test_a_hung_async_tool_is_left_in_time_and_its_sibling_is_kept(executor, way, counter):
    clock = ManualClock()
    ended = asyncio.Semaphore(0)
    siblings = 1 if executor is SequentialToolExecutor else 2
    cancelled = []

    @tool
    async def stuck() -> str:
        """Never ends; the deadline passes when its siblings have ended."""
        for _ in range(siblings):
            await ended.acquire()
        clock.advance(60)
        try:
            await asyncio.sleep(FOR_EVER)
        except asyncio.CancelledError:
            cancelled.append("stuck")
            raise
        return ""

    agent = made(
        sticky("search", "stuck", "search"),
        counter.tool,
        stuck,
        hooks=[BudgetHookProvider(Budget(max_seconds=DEADLINE), clock=clock)],
        tool_executor=executor(),
    )
    agent.hooks.add_callback(AfterToolCallEvent, lambda event: ended.release())
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "max_seconds"
    assert cancelled == ["stuck"]
    found = results(agent)
    assert found[1] == OUTCOME_UNKNOWN
    if executor is SequentialToolExecutor:
        assert (found[0], found[2]) == ("result 1", NOT_EXECUTED)
    else:
        assert {found[0], found[2]} == {"result 1", "result 2"}
    assert is_valid(agent)


def test_a_retry_back_off_is_left_in_time():
    clock = ManualClock()

    def reply(number: int) -> Reply:
        clock.advance(60)
        return Reply(error=ModelThrottledException("slow down"))

    agent = made(
        Script(reply),
        hooks=[BudgetHookProvider(Budget(max_seconds=DEADLINE), clock=clock)],
        retry_strategy=ModelRetryStrategy(max_attempts=5, initial_delay=FOR_EVER),
    )
    result, seconds = took(lambda: agent("Go."))
    assert result.stop_reason == "max_seconds"
    assert seconds < FOR_EVER / 2
    assert is_valid(agent)


async def test_a_task_that_somebody_else_cancels_stays_cancelled():
    provider = BudgetHookProvider(Budget(max_seconds=60))
    script = Script([says("Here I am again.")])
    agent = made(script, hooks=[provider])
    agent.model = Hanging(script, times=1)
    task = asyncio.create_task(agent.invoke_async("Go."))
    await asyncio.to_thread(agent.model.hangs.wait, FOR_EVER)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await agent.invoke_async("Again.")).stop_reason == "end_turn"


async def test_a_stream_whose_events_are_each_asked_for_in_a_task_is_left_in_time():
    clock = ManualClock()
    provider = BudgetHookProvider(Budget(max_seconds=DEADLINE), clock=clock)
    agent = made(Script([says("unused")]), hooks=[provider])
    agent.model = Hanging(agent.model.script, clock=clock)
    stream = agent.stream_async("Go.")
    chunks = []
    while "result" not in (chunks[-1] if chunks else {}):
        chunks.append(await asyncio.ensure_future(anext(stream)))
    assert chunks[-1]["result"].stop_reason == "max_seconds"
    assert agent.model.cancelled == 1
    await stream.aclose()


async def test_the_consumer_of_a_stream_is_never_cancelled():
    clock = ManualClock()
    guard = Guard(Budget(max_seconds=DEADLINE), clock=clock)
    agent = made(sticky(), Counter().tool, hooks=[BudgetHookProvider(guard)])
    chunks = []
    async for chunk in agent.stream_async("Go."):
        chunks.append(chunk)
        if len(chunks) == 5:
            clock.advance(60)
            while guard.trip is None:  # noqa: ASYNC110 - nothing tells that the watcher has looked
                await asyncio.sleep(0)
    assert chunks[-1]["result"].stop_reason == "max_seconds"
    assert is_valid(agent)


@pytest.fixture
def nothing_kept_of_the_log(caplog):
    # OpenTelemetry logs a traceback for each generator that is left, and pytest keeps them.
    caplog.set_level(logging.CRITICAL, logger="opentelemetry.context")


async def left_to_the_loop():
    gc.collect()
    for _ in range(40):
        await asyncio.sleep(0)  # Strands leaves the inner generators to it, one after the other


async def test_an_early_break_leaves_no_timer_and_no_listener():
    guard = Guard(Budget(max_seconds=60))
    agent = made(sticky(), Counter().tool, hooks=[BudgetHookProvider(guard)])
    stream = agent.stream_async("Go.")
    async for chunk in stream:
        if "event" in chunk:
            break
    await stream.aclose()
    await left_to_the_loop()
    assert guard.open_calls() == ()
    assert not guard.cancellation._callbacks
    assert guard.usage.total_tokens > 0


@pytest.mark.usefixtures("nothing_kept_of_the_log")
async def test_a_stream_that_is_left_while_a_sub_agent_answers_leaves_nothing_reserved():
    guard = Guard(Budget(max_total_tokens=10**6, max_output_tokens_per_call=50))
    child = made(Script([says("Found.")]), name="child")
    ask = Call("child", "", fields={"input": "Find it."})
    agent = made(Script([calls(ask), says("Done.")]), child, hooks=[BudgetHookProvider(guard)])
    stream = agent.stream_async("Go.")
    async for _ in stream:
        if guard.usage.model_calls == 2 and guard.usage.reserved_tokens:
            break
    await stream.aclose()
    await left_to_the_loop()
    assert guard.usage.model_calls == 2
    assert guard.usage.reserved_tokens == 0
    assert str(child("Again.")).strip() == "Found."


@pytest.mark.usefixtures("nothing_kept_of_the_log")
async def test_a_task_that_is_cancelled_between_two_events_gives_its_agent_back():
    guard = Guard(Budget(max_total_tokens=10**6, max_output_tokens_per_call=50))
    agent = made(Script([says("Done.")]), hooks=[BudgetHookProvider(guard)])
    reading = asyncio.Event()

    async def consumer():
        stream = agent.stream_async("Go.")
        async for chunk in stream:
            if "data" in chunk:
                reading.set()
                await asyncio.Event().wait()

    task = asyncio.create_task(consumer())
    await reading.wait()
    task.cancel()
    await asyncio.wait([task])  # nobody asks what it ended with
    del task
    await left_to_the_loop()
    assert guard.usage.reserved_tokens == 0
    assert (await agent.invoke_async("Again.")).stop_reason == "end_turn"


# Usage


PRICES = PriceBook(
    {
        MODEL: Price(input=1000, output=0),
        "expensive": Price(input=10_000, output=0),
    }
)


def test_a_call_is_priced_by_the_model_that_was_really_called():
    provider = BudgetHookProvider(Budget(max_cost_usd=5), price_book=PRICES)
    script = Script([says("Done.", usage=TokenUsage(100, 0))])
    agent = made(script, hooks=[provider])
    other = ScriptedModel(script)
    other.config["model_id"] = "expensive"

    async def swap(context, proceed):
        context.model = other
        async for event in proceed(context):
            yield event

    agent.add_middleware(InvokeModelStage, swap)
    agent("Go.")
    assert provider.outcome(agent).usage.cost_usd == Decimal(1)


def test_a_routed_call_is_priced_by_the_model_of_its_route():
    routing = pytest.importorskip("strands.models.routing", reason="younger releases only")
    script = Script([says("Done.", usage=TokenUsage(100, 0))])
    cheap, dear = ScriptedModel(script), ScriptedModel(script)
    dear.config["model_id"] = "expensive"

    class Dearest:
        async def select(self, context):
            return context.candidates[-1]

    provider = BudgetHookProvider(Budget(max_cost_usd=5), price_book=PRICES)
    agent = Agent(
        model=routing.ModelRouter([cheap, dear], strategy=Dearest()),
        hooks=[provider],
        callback_handler=None,
    )
    agent("Go.")
    assert provider.outcome(agent).usage.cost_usd == Decimal(1)


def test_the_spans_of_a_stopped_run_are_ended(monkeypatch, counter):
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from strands.telemetry.tracer import get_tracer

    class Names(SpanProcessor):
        def __init__(self):
            self.started, self.ended = [], []

        def on_start(self, span, parent_context=None):
            self.started.append(span.name)

        def on_end(self, span):
            self.ended.append(span.name)

    names = Names()
    provider = TracerProvider()
    provider.add_span_processor(names)
    monkeypatch.setattr(get_tracer(), "tracer", provider.get_tracer("strands"))
    agent = made(sticky(), counter.tool, hooks=[BudgetHookProvider(Budget(max_iterations=1))])
    agent("Go.")
    assert names.started.count("execute_event_loop_cycle") == 2
    assert sorted(names.started) == sorted(names.ended)


class Failing(ScriptedModel):
    """Reports its usage and then breaks, `times` times."""

    def __init__(self, script: Script, times: int) -> None:
        super().__init__(script)
        self.times = times

    async def stream(self, *args, **kwargs):
        async for chunk in super().stream(*args, **kwargs):
            yield chunk
        self.times -= 1
        if self.times >= 0:
            raise ModelThrottledException("the stream broke")


def test_a_failure_in_the_middle_of_a_stream_is_charged():
    provider = BudgetHookProvider(Budget(max_total_tokens=1000))
    script = Script([says("Done.", usage=TokenUsage(100, 20))])
    agent = made(
        script,
        hooks=[provider],
        retry_strategy=ModelRetryStrategy(max_attempts=4, initial_delay=0),
    )
    agent.model = Failing(script, times=2)
    assert agent("Go.").stop_reason == "end_turn"
    usage = provider.outcome(agent).usage
    assert (usage.total_tokens, usage.model_calls, usage.failed_calls) == (360, 3, 2)
    assert usage.iterations == 1


def test_a_response_that_a_hook_discards_is_charged():
    provider = BudgetHookProvider(Budget(max_total_tokens=1000))
    agent = made(Script([says("Bad."), says("Good.")]), hooks=[provider])

    def retry_once(event):
        event.retry = agent.model.script.calls == 1

    agent.hooks.add_callback(AfterModelCallEvent, retry_once)
    agent("Go.")
    usage = provider.outcome(agent).usage
    assert (usage.total_tokens, usage.model_calls, usage.iterations) == (240, 2, 1)


def test_a_call_that_a_user_s_hook_refuses_costs_nothing():
    provider = BudgetHookProvider(Budget(max_iterations=1))
    script = Script([says("unused")])
    agent = made(script, hooks=[provider])
    agent.hooks.add_callback(BeforeModelCallEvent, lambda e: setattr(e, "cancel", "Not today."))
    assert agent("Go.").stop_reason == "end_turn"
    assert provider.outcome(agent).usage.model_calls == script.calls == 0


# Agents below agents


def worker(counter: Counter, *hooks: Any, script: Script | None = None, name: str = "worker"):
    return made(script or sticky(), counter.tool, hooks=hooks, name=name, description=name)


def test_a_halted_child_is_marked_for_its_parent_and_gives_its_partial_result(counter):
    script = Script(
        [Reply(text="I found the first half.", tool_calls=(Call("search"),)), calls("search")]
    )
    child = worker(counter, BudgetHookProvider(Budget(max_iterations=2)), script=script)
    provider = BudgetHookProvider(Budget(max_iterations=10))
    agent = made(Script([calls("worker"), says("Fine.")]), child.as_tool(), hooks=[provider])
    assert agent("Go.").stop_reason == "end_turn"
    result = agent.messages[2]["content"][0]["toolResult"]
    assert result["status"] == "error"
    text = json.dumps(result["content"])
    assert "I found the first half." in text
    assert "stopped before it finished" in text
    outcome = provider.outcome(agent)
    assert outcome.usage.model_calls == 4
    assert outcome.tool_calls[0].status == "failed"


def test_a_child_s_legs_do_not_wipe_its_parent_s_iterations(counter):
    child = worker(counter, script=Script([says("Here.")]))
    script = Script([calls("worker")])
    provider = BudgetHookProvider(Budget(max_iterations=6))
    agent = made(script, child.as_tool(), hooks=[provider])
    result = agent("Go.")
    assert result.stop_reason in ("max_iterations", "no_progress")
    assert script.calls + child.model.script.calls <= 6


def test_a_deadline_below_a_deadline_ends_the_leaf_first(monkeypatch):
    # However slow the machine is, the leaf gets the time to end.
    monkeypatch.setattr("budgetguard_core.kit.cancel.GRACE", FOR_EVER)
    clock = ManualClock()
    child = made(Script([says("unused")]), name="worker", description="works")
    child.model = Hanging(child.model.script, clock=clock)
    provider = BudgetHookProvider(Budget(max_seconds=DEADLINE), clock=clock)
    agent = made(Script([calls("worker")]), child.as_tool(), hooks=[provider])
    result = agent("Go.")
    assert result.stop_reason == "max_seconds"
    assert child.model.cancelled == 1
    assert child.messages[-1]["metadata"]["stop_reason"] == "max_seconds"
    assert "So far I have" in results(agent)[0]
    assert is_valid(agent)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_agent_made_inside_a_tool_spends_the_same_budget(kind, counter):
    guard = Guard(Budget(max_model_calls=5))
    provider = BudgetHookProvider(guard)
    below = sticky()

    def child() -> Agent:
        return made(below, counter.tool, hooks=[provider])

    if kind == "sync":

        @tool
        def delegate() -> str:
            """Delegates."""
            return str(child()("Work."))

    else:

        @tool
        async def delegate() -> str:
            """Delegates."""
            return str(await child().invoke_async("Work."))

    script = Script([calls("delegate")])
    agent = made(script, delegate, hooks=[provider])
    assert agent("Go.").stop_reason == "max_model_calls"
    assert script.calls + below.calls == guard.usage.model_calls == 5


def test_a_child_with_a_guard_of_another_tree_is_bounded_by_both(counter):
    other = Guard(Budget(max_iterations=100))
    child = worker(counter, BudgetHookProvider(other))
    guard = Guard(Budget(max_model_calls=6))
    script = Script([calls("worker")])
    agent = made(script, child.as_tool(), hooks=[BudgetHookProvider(guard)])
    assert agent("Go.").stop_reason == "max_model_calls"
    assert (script.calls, child.model.script.calls) == (1, 5)
    # `other` is charged beside, and gets its place back for the call that `guard` refused.
    assert (guard.usage.model_calls, other.usage.model_calls) == (6, 5)


@pytest.mark.parametrize("way", WAYS)
def test_the_agents_that_strands_own_subagent_tool_makes_spend_the_budget(way):
    vended = pytest.importorskip("strands.vended_tools.subagent", reason="younger releases only")
    name = vended.subagent.tool_name
    fields = vended.subagent.tool_spec["inputSchema"]["json"]
    arguments = dict.fromkeys(fields["required"], "work")

    class Delegating(ScriptedModel):
        """Delegates as long as it may, and so do the agents that are made."""

        async def stream(self, *args, **kwargs):
            self.script.next("")
            assert self.script.calls < 50
            use = {"toolUse": {"name": name, "toolUseId": f"d{self.script.calls}"}}
            yield {"messageStart": {"role": "assistant"}}
            yield {"contentBlockStart": {"start": use}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(arguments)}}}}
            yield {"contentBlockStop": {}}
            yield {"messageStop": {"stopReason": "tool_use"}}

    guard = Guard(Budget(max_model_calls=6, loop_detection=None))
    script = Script([says("unused")])
    agent = made(script, vended.subagent, hooks=[BudgetHookProvider(guard)])
    agent.model = Delegating(script)
    agent.model.config["context_window_limit"] = 200_000
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "max_model_calls"
    assert script.calls == guard.usage.model_calls == 6
    assert "stopped before it finished" in results(agent)[0]
    assert is_valid(agent)


@pytest.mark.parametrize("last", [False, True])
def test_an_agent_that_a_hook_of_the_users_message_runs_belongs_to_the_run(last, counter):
    advisor = made(Script([says("Fine.")]))

    def ask(event):
        if event.message["role"] == "user" and "text" in event.message["content"][0]:
            advisor("Is it fine?")

    agent = made(sticky(), counter.tool)
    provider = BudgetHookProvider(Budget(max_model_calls=3))
    if not last:
        provider.attach(agent)
    agent.hooks.add_callback(MessageAddedEvent, ask)
    provider.attach(agent)
    assert agent("Go.").stop_reason == "max_model_calls"
    assert agent.model.script.calls == 2
    assert provider.outcome(agent).usage.model_calls == 3
    assert FRAME.get() is None


def test_a_hook_of_the_users_message_that_raises_leaves_nothing_behind(counter):
    def refuse(event):
        raise ValueError("not that")

    agent = made(sticky(), counter.tool, hooks=[BudgetHookProvider(Budget(max_model_calls=3))])
    agent.hooks.add_callback(MessageAddedEvent, refuse)

    async def go():
        with pytest.raises(ValueError, match="not that"):
            await agent.invoke_async("Go.")
        return FRAME.get()

    assert asyncio.run(go()) is None


def test_a_run_that_a_hook_refuses_shows_nothing_to_its_consumer(counter):
    def refuse(event):
        event.cancel = "not now"

    agent = made(sticky(), counter.tool, hooks=[BudgetHookProvider(Budget(max_model_calls=3))])
    agent.hooks.add_callback(BeforeInvocationEvent, refuse)

    async def go():
        return [FRAME.get() async for _ in agent.stream_async("Go.")]

    assert set(asyncio.run(go())) == {None}


def test_an_agent_that_a_hook_runs_belongs_to_the_run(counter):
    guard = Guard(Budget(max_model_calls=4))
    provider = BudgetHookProvider(guard)
    judge = Script([says("Good.")])

    async def judged(event):
        await made(judge, hooks=[BudgetHookProvider(Budget(max_iterations=9))]).invoke_async("Ok?")

    script = sticky()
    agent = made(script, counter.tool, hooks=[provider])
    agent.hooks.add_callback(AfterModelCallEvent, judged)
    assert agent("Go.").stop_reason == "max_model_calls"
    assert (script.calls, judge.calls) == (2, 2)
    assert guard.usage.model_calls == 4


def handing_over(to: str, name: str, *hooks: Any) -> Agent:
    def reply(number: int) -> Reply:
        return Reply(handoff=to) if number % 2 == 0 else says("Your turn.")

    return made(Script(reply), hooks=hooks, name=name, description=name)


@pytest.mark.parametrize("way", WAYS)
def test_a_swarm_spends_one_budget(way):
    agents = [handing_over("b", "a"), handing_over("a", "b")]
    provider = BudgetHookProvider(Budget(max_iterations=6, loop_detection=None))
    swarm = provider.attach(Swarm(agents, max_handoffs=50, max_iterations=50))
    run(swarm, "Go.", way)
    outcome = provider.outcome(swarm)
    assert (outcome.status, outcome.stop_reason) == ("terminated", StopReason.MAX_ITERATIONS)
    assert sum(agent.model.script.calls for agent in agents) == 6
    assert outcome.usage.model_calls == 6
    run(swarm, "Once more.", way)
    assert sum(agent.model.script.calls for agent in agents) == 12


def test_a_swarm_whose_agents_hand_over_in_a_circle_is_told_and_then_ended():
    agents = [handing_over("b", "a"), handing_over("a", "b")]
    provider = BudgetHookProvider(Budget(max_iterations=100))
    swarm = provider.attach(Swarm(agents, max_handoffs=60, max_iterations=60))
    swarm("Go.")
    outcome = provider.outcome(swarm)
    assert outcome.stop_reason == StopReason.OSCILLATION
    assert any("going round in a circle" in sent for a in agents for sent in a.model.script.sent)
    assert sum(agent.model.script.calls for agent in agents) < 30


def graph_of(**nodes: Agent) -> GraphBuilder:
    builder = GraphBuilder()
    for name, agent in nodes.items():
        builder.add_node(agent, name)
    return builder


@pytest.mark.parametrize("way", WAYS)
def test_the_parallel_nodes_of_a_graph_never_overshoot(way, counter):
    agents = {name: worker(counter, name=name) for name in ("a", "b", "c")}
    builder = graph_of(**agents)
    for name in agents:
        builder.set_entry_point(name)
    builder.set_max_node_executions(10)
    guard = Guard(Budget(max_model_calls=7, loop_detection=None))
    provider = BudgetHookProvider(guard)
    graph = provider.attach(builder.build())
    run(graph, "Go.", way)
    assert sum(agent.model.script.calls for agent in agents.values()) == 7
    assert provider.outcome(graph).stop_reason == StopReason.MAX_MODEL_CALLS
    assert guard.outcome.usage.model_calls == 7
    for agent in agents.values():
        assert is_valid(agent)


def test_a_graph_that_goes_round_for_ever_ends_with_its_budget():
    agents = {name: made(Script([says(name)]), name=name) for name in ("a", "b")}
    builder = graph_of(**agents)
    builder.add_edge("a", "b")
    builder.add_edge("b", "a", condition=lambda state: True)
    builder.set_entry_point("a")
    builder.set_max_node_executions(500)
    builder.reset_on_revisit(True)
    provider = BudgetHookProvider(Budget(max_iterations=8, loop_detection=None))
    graph = provider.attach(builder.build())
    result = graph("Go.")
    assert sum(agent.model.script.calls for agent in agents.values()) == 8
    assert len(result.execution_order) <= 10
    assert provider.outcome(graph).stop_reason == StopReason.MAX_ITERATIONS
    assert graph.max_node_executions == 500


def test_an_analyzer_and_a_verifier_that_go_round_are_told_and_then_ended():
    agents = {name: made(Script([says(f"{name} again")]), name=name) for name in ("a", "b")}
    builder = graph_of(**agents)
    builder.add_edge("a", "b")
    builder.add_edge("b", "a", condition=lambda state: True)
    builder.set_entry_point("a")
    builder.set_max_node_executions(500)
    builder.reset_on_revisit(True)
    provider = BudgetHookProvider(Budget(max_iterations=100))
    graph = provider.attach(builder.build())
    graph("Go.")
    outcome = provider.outcome(graph)
    assert outcome.stop_reason == StopReason.OSCILLATION
    assert outcome.usage.model_calls < 12
    assert any("going round in a circle" in s for a in agents.values() for s in a.model.script.sent)


def test_a_swarm_inside_a_graph_spends_the_graph_s_budget():
    agents = [handing_over("b", "a"), handing_over("a", "b")]
    swarm = Swarm(agents, max_handoffs=50, max_iterations=50)
    builder = GraphBuilder()
    builder.add_node(swarm, "team")
    builder.set_entry_point("team")
    builder.set_max_node_executions(3)
    provider = BudgetHookProvider(Budget(max_model_calls=5, loop_detection=None))
    graph = provider.attach(builder.build())
    graph("Go.")
    assert sum(agent.model.script.calls for agent in agents) == 5
    assert provider.outcome(graph).stop_reason == StopReason.MAX_MODEL_CALLS


# Nudges and warnings


def test_a_nudge_travels_in_a_tool_result_and_is_kept(tmp_path):
    @tool
    def read(value: str = "") -> str:
        """Reads."""
        return "nothing new"

    def agent_of(session):
        return made(
            Script([calls(Call("read", "same"))]),
            read,
            hooks=[BudgetHookProvider(Budget(max_iterations=30))],
            session_manager=FileSessionManager(session_id=session, storage_dir=str(tmp_path)),
        )

    agent = agent_of("one")
    assert agent("Go.").stop_reason == "no_progress"
    assert is_valid(agent)
    told = [text for text in results(agent) if "try another approach" in text]
    assert len(told) == 1
    assert any("try another approach" in sent for sent in agent.model.script.sent)
    again = agent_of("one")
    assert results(again) == results(agent)


def test_a_nudge_also_travels_in_a_refused_tool_call(counter):
    provider = BudgetHookProvider(Budget(max_iterations=30, tool_quotas={"search": 1}))
    script = Script([calls(Call("search", "same"))])
    agent = made(script, counter.tool, hooks=[provider])
    assert agent("Go.").stop_reason == "no_progress"
    assert len(counter.started) == 1
    told = [text for text in results(agent) if "try another approach" in text]
    assert len(told) == 1
    assert is_valid(agent)
    statuses = {
        block["toolResult"]["status"]
        for message in agent.messages[3:]
        for block in message["content"]
        if "toolResult" in block
    }
    assert statuses == {"error"}


def test_a_warning_is_in_the_stream_and_reaches_the_callback_handler(counter):
    handled = []
    agent = made(sticky(), counter.tool, hooks=[BudgetHookProvider(Budget(max_iterations=5))])
    agent.callback_handler = lambda **event: handled.append(event)
    _, chunks = run(agent, "Go.", "streamed")
    warnings = [chunk["budgetguard_warning"] for chunk in chunks if "budgetguard_warning" in chunk]
    assert [(w["dimension"], w["limit"], w["used"]) for w in warnings] == [("max_iterations", 5, 4)]
    assert any("budgetguard_warning" in event for event in handled)
    assert not any("warning" in sent for sent in agent.model.script.sent)


# Sessions, state, resuming


def sessions():
    yield pytest.param(
        lambda path: FileSessionManager(session_id="s", storage_dir=str(path)), id="file"
    )
    yield pytest.param(
        lambda path: SnapshotSessionManager("s", storage=LocalFileStorage(str(path))),
        id="snapshot",
    )


@pytest.mark.parametrize("session", list(sessions()))
def test_a_session_keeps_the_ending_and_the_counters(session, tmp_path, counter):
    script = Script([calls("search"), calls("search"), calls("search"), says("Done.")])

    def agent_of() -> tuple[Agent, BudgetHookProvider]:
        provider = BudgetHookProvider(Budget(max_iterations=2))
        manager = session(tmp_path)
        return made(script, counter.tool, hooks=[provider], session_manager=manager), provider

    agent, provider = agent_of()
    assert agent("Go.").stop_reason == "max_iterations"
    first = provider.outcome(agent)

    agent, provider = agent_of()
    assert agent.messages[-1]["metadata"]["synthetic"] is True
    kept = agent.state.get("budgetguard")
    assert kept["status"] == "stopped"
    assert json.loads(kept["snapshot"])["counters"]["iterations"] == 2
    assert agent("Go on.").stop_reason == "end_turn"
    assert is_valid(agent)
    second = provider.outcome(agent)
    assert second.run_id == first.run_id
    assert (second.usage.iterations, second.earlier_usage.iterations) == (2, 2)

    agent, _ = agent_of()
    assert agent.state.get("budgetguard") is None
    assert is_valid(agent)


@pytest.mark.parametrize("session", list(sessions()))
def test_going_on_without_new_input_is_valid_in_the_session_too(session, tmp_path, counter):
    script = Script([calls("search"), says("Done."), says("More.")])

    def agent_of() -> Agent:
        provider = BudgetHookProvider(Budget(max_iterations=1))
        return made(script, counter.tool, hooks=[provider], session_manager=session(tmp_path))

    assert agent_of()("Go.").stop_reason == "max_iterations"
    agent = agent_of()
    assert agent(None).stop_reason == "end_turn"
    assert is_valid(agent)
    agent = agent_of()
    assert agent("And more?").stop_reason == "end_turn"
    assert is_valid(agent)


@pytest.mark.parametrize(
    "damage",
    ["text", {"status": "stopped"}, {"status": "stopped", "snapshot": '{"run_id": "x"}'}],
)
def test_a_damaged_state_is_reported_and_the_run_starts_anew(damage, counter):
    provider = BudgetHookProvider(Budget(max_iterations=2))
    agent = made(sticky(), counter.tool, hooks=[provider], state={"budgetguard": damage})
    assert agent("Go.").stop_reason == "max_iterations"
    outcome = provider.outcome(agent)
    assert outcome.usage.iterations == 2
    assert any("resume" in error for error in outcome.errors)


def test_what_a_tool_writes_into_the_state_raises_no_cap(counter):
    provider = BudgetHookProvider(Budget(max_iterations=2))
    script = sticky()
    agent = made(script, counter.tool, hooks=[provider])
    agent("Go.")
    kept = agent.state.get("budgetguard")
    snapshot = json.loads(kept["snapshot"])
    snapshot["budget"]["max_iterations"] = 10**6
    snapshot["mode"] = "off"
    snapshot["counters"]["iterations"] = 0
    agent.state.set("budgetguard", kept | {"snapshot": json.dumps(snapshot)})
    assert agent("Go on.").stop_reason == "max_iterations"
    assert script.calls == 4


def test_one_agent_serves_runs_under_different_budgets(counter):
    script = sticky()
    agent = made(script, counter.tool, hooks=[BudgetHookProvider(Budget(max_iterations=9))])
    guard = Guard(Budget(max_iterations=3))
    agent("Go.", invocation_state={"budgetguard": guard})
    assert (script.calls, guard.usage.iterations) == (3, 3)
    agent("Go.", invocation_state={"budgetguard": Budget(max_iterations=1)})
    assert script.calls == 4
    agent("Go.")
    assert script.calls == 13
    with pytest.raises(ConfigurationError, match="must be a Budget, a Guard or an Envelope"):
        agent("Go.", invocation_state={"budgetguard": 5})


def test_on_trip_raise_keeps_the_history_and_raises_once(counter):
    provider = BudgetHookProvider(Budget(max_iterations=1), on_trip="raise")
    agent = made(sticky(), counter.tool, hooks=[provider])
    with pytest.raises(BudgetExceeded, match="max_iterations") as caught:
        agent("Go.")
    assert caught.value.outcome.messages == tuple(agent.messages)
    assert is_valid(agent)
    with pytest.raises(BudgetExceeded):
        agent("Again.")


def test_a_child_never_raises_into_its_parent_s_history(counter):
    provider = BudgetHookProvider(Budget(max_model_calls=4), on_trip="raise")
    agent = made(Script([calls("worker")]), worker(counter).as_tool(), hooks=[provider])
    with pytest.raises(BudgetExceeded):
        agent("Go.")
    assert "max_model_calls" not in " ".join(results(agent))


# Attaching


def test_as_a_plugin(counter):
    try:
        agent = made(sticky(), counter.tool, plugins=[BudgetHookProvider(Budget(max_iterations=2))])
    except TypeError:
        pytest.skip("this release has no plugins")
    assert agent("Go.").stop_reason == "max_iterations"
    assert agent.model.script.calls == 2


def test_attached_to_an_agent_that_has_run_before(counter):
    script = Script([says("Hello."), calls("search")])
    agent = made(script, counter.tool)
    agent("Hi.")
    provider = BudgetHookProvider(Budget(max_iterations=2))
    assert provider.attach(provider.attach(agent)) is agent
    assert agent("Go.").stop_reason == "max_iterations"
    assert script.calls == 3


def test_a_swarm_and_a_graph_take_it_as_their_own_hook():
    agents = [handing_over("b", "a"), handing_over("a", "b")]
    provider = BudgetHookProvider(Budget(max_iterations=4, loop_detection=None))
    swarm = Swarm(agents, hooks=[provider], max_handoffs=50, max_iterations=50)
    swarm("Go.")
    assert sum(agent.model.script.calls for agent in agents) == 4
    assert provider.outcome(swarm).stop_reason == StopReason.MAX_ITERATIONS
    provider = BudgetHookProvider(Budget(max_iterations=4, loop_detection=None))
    agent = made(sticky(), Counter().tool)
    builder = graph_of(only=agent).set_hook_providers([provider])
    builder.set_entry_point("only")
    builder.set_max_node_executions(3)
    graph = builder.build()
    graph("Go.")
    assert agent.model.script.calls == 4
    assert provider.outcome(graph).stop_reason == StopReason.MAX_ITERATIONS


def test_on_trip_raise_of_a_swarm():
    agents = [handing_over("b", "a"), handing_over("a", "b")]
    provider = BudgetHookProvider(Budget(max_iterations=4, loop_detection=None), on_trip="raise")
    swarm = provider.attach(Swarm(agents, max_handoffs=50, max_iterations=50))
    with pytest.raises(BudgetExceeded, match="max_iterations"):
        swarm("Go.")


def test_the_user_s_own_call_of_a_tool_is_none_of_the_run_s(counter):
    provider = BudgetHookProvider(Budget(max_tool_calls=1))
    agent = made(sticky(), counter.tool, hooks=[provider])
    agent.tool.search(value="before", record_direct_tool_call=False)
    assert agent("Go.").stop_reason == "max_tool_calls"
    after = agent.tool.search(value="after", record_direct_tool_call=False)
    assert after["status"] == "success"
    assert (len(counter.started), provider.outcome(agent).usage.tool_calls) == (3, 1)


def test_what_cannot_be_attached_is_refused():
    with pytest.raises(AdapterError, match="must be an Agent, Swarm or Graph, got object"):
        BudgetHookProvider().attach(object())


def test_a_release_without_a_place_for_the_guard_fails_loudly():
    program = """
import strands, strands.middleware._agent_stream as stages
del stages.AgentStreamStage
try:
    import budgetguard_strands
except Exception as error:
    print(type(error).__name__, "place" in str(error))
"""
    assert in_new_process(program) == ["AdapterError", "True"]


def test_an_agent_with_a_loop_of_its_own_is_bounded_too(counter):
    class Own(Agent):
        async def _execute_event_loop_cycle(self, *args, **kwargs):
            async for event in super()._execute_event_loop_cycle(*args, **kwargs):
                yield event

    log = Log()
    hooks = [BudgetHookProvider(Budget(max_iterations=2)), log]
    model = ScriptedModel(sticky())
    agent = Own(model=model, tools=[counter.tool], hooks=hooks, callback_handler=None)
    assert agent("Go.").stop_reason == "max_iterations"
    assert log.names[-2:] == ["MA", "AI"]
    assert model.script.calls == 2
    assert is_valid(agent)


def test_a_copied_agent_runs_by_itself(counter):
    agent = made(sticky(), counter.tool, hooks=[BudgetHookProvider(Budget(max_iterations=2))])
    twin = copy.copy(agent)
    twin.messages = []
    twin.model = ScriptedModel(Script([says("Mine.")]))
    assert str(twin("Go.")).strip() == "Mine."
    assert agent.messages == []


def test_chunks_are_those_of_a_stream():
    # Keeps the scripted model honest: what Strands reads from it is what was scripted.
    agent = made(Script([says("Hello there.", TokenUsage(7, 3))]))
    result = agent("Hi.")
    assert str(result).strip() == "Hello there."
    assert result.metrics.accumulated_usage["totalTokens"] == 10
    assert len(list(chunks_of(says("Hello there."), {}))) == 6
