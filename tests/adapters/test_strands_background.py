"""Tools that run in the background (Strands 1.62) end with the run that they are of."""

from __future__ import annotations

import asyncio
import threading

import pytest
from strands import tool
from strands.hooks import AfterInvocationEvent, BeforeModelCallEvent

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.testing import ManualClock, Script, calls, says
from budgetguard_strands import BudgetHookProvider
from strands_agents import run, strict

pytest.importorskip("strands.background_tasks", reason="younger releases only")

WAYS = ("sync", "async", "stream")
ALWAYS = {"always": ["work"]}


class Work:
    """A tool whose body ends when the model has answered, or never."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.started = 0
        self.hangs = hangs
        self.began = threading.Semaphore(0)
        self.answered = threading.Event()
        self.cancelled = threading.Event()
        self.tool = tool(name="work", description="Works.")(self.run)

    async def run(self) -> str:
        self.started += 1
        self.began.release()
        if self.hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        try:
            await asyncio.to_thread(self.answered.wait)
        finally:
            self.answered.set()  # the thread must not outlive the body
        self.answered.clear()
        return f"result {self.started}"


def working(script, work, provider, **options):
    return strict(script, work.tool, hooks=[provider], background_tasks=ALWAYS, **options)


class AfterBodies:
    """Holds each model call but the first until so many bodies have begun, in whatever thread."""

    def __init__(self, work, number):
        self.work, self.number, self.model_calls = work, number, 0

    def register_hooks(self, registry, **kwargs):
        registry.add_callback(BeforeModelCallEvent, self.before)

    async def before(self, event):
        self.model_calls += 1
        if self.model_calls == 2:
            for _ in range(self.number):
                assert await asyncio.to_thread(self.work.began.acquire, timeout=600)


@pytest.mark.parametrize("way", WAYS)
def test_the_caps_hold_over_the_frameworks_continuations(way):
    # The model always asks again, and answers in between: each answer is followed by a
    # continuation with the results of the tasks.
    work = Work()

    def reply(number):
        if number % 2:
            work.answered.set()
        return says("Wait.") if number % 2 else calls("work")

    script = Script(reply)
    provider = BudgetHookProvider(Budget(max_iterations=3))
    agent = working(script, work, provider)
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "max_iterations"
    assert script.calls == 3
    outcome = provider.outcome(agent)
    assert (outcome.status, outcome.usage.iterations) == ("terminated", 3)


@pytest.mark.parametrize("way", WAYS)
def test_exactly_m_bodies_start(way):
    script = Script([calls("work", "work", "work"), says("Wait.")])
    work = Work(hangs=True)
    provider = BudgetHookProvider(Budget(max_tool_calls=2))
    agent = working(script, work, provider)
    agent.hooks.add_hook(AfterBodies(work, 2))
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "max_tool_calls"
    assert work.started == 2
    assert provider.outcome(agent).usage.tool_calls == 2


def test_each_of_several_in_a_batch_counts():
    from strands.tools.executors import SequentialToolExecutor

    work = Work(hangs=True)
    provider = BudgetHookProvider(Budget(max_tool_calls=2))
    script = Script([calls("work", "work", "work")])
    agent = working(script, work, provider, tool_executor=SequentialToolExecutor())
    agent.hooks.add_hook(AfterBodies(work, 2))
    assert agent("Go.").stop_reason == "max_tool_calls"
    assert work.started == 2


def test_their_results_are_in_the_outcome():
    work = Work()
    work.answered.set()
    provider = BudgetHookProvider(Budget(max_iterations=5))
    agent = working(Script([calls("work"), says("Done.")]), work, provider)
    assert agent("Go.").stop_reason == "end_turn"
    outcome = provider.outcome(agent)
    assert [(one.name, one.status) for one in outcome.tool_calls] == [("work", "completed")]
    assert outcome.usage.tool_calls == 1


@pytest.mark.parametrize("way", WAYS)
def test_the_deadline_ends_what_strands_waits_for(way):
    work = Work(hangs=True)
    clock = ManualClock()
    provider = BudgetHookProvider(Budget(max_seconds=0.05), clock=clock)
    agent = working(Script([calls("work"), says("Wait.")]), work, provider)
    agent.hooks.add_hook(AfterBodies(work, 1))
    # The deadline passes while Strands waits for the body.
    agent.hooks.add_callback(AfterInvocationEvent, lambda event: clock.advance(60))
    result, _ = run(agent, "Go.", way)
    assert result.stop_reason == "max_seconds"
    assert provider.outcome(agent).stop_reason == StopReason.MAX_SECONDS
    assert work.cancelled.wait(600)
    assert agent.messages[-1]["metadata"]["synthetic"]


@pytest.mark.parametrize("way", WAYS)
def test_an_abort_ends_what_strands_waits_for(way):
    guard = Guard(Budget(max_iterations=9))
    work = Work(hangs=True)
    agent = working(Script([calls("work"), says("Wait.")]), work, BudgetHookProvider(guard))
    agent.hooks.add_hook(AfterBodies(work, 1))
    user = threading.Thread(target=guard.abort, args=["enough"])
    agent.hooks.add_callback(AfterInvocationEvent, lambda event: user.ident or user.start())
    result, _ = run(agent, "Go.", way)
    user.join()
    assert result.stop_reason == "aborted"
    assert work.cancelled.wait(600)


def test_a_stop_does_not_wait_for_them():
    work = Work(hangs=True)
    script = Script([calls("work")])
    agent = working(script, work, BudgetHookProvider(Budget(max_iterations=2)))
    agent.hooks.add_hook(AfterBodies(work, 1))
    assert agent("Go.").stop_reason == "max_iterations"
    assert work.cancelled.wait(600)


def test_the_next_turn_after_a_stop_can_be_sent():
    work = Work(hangs=True)
    script = Script([calls("work"), calls("work"), says("Done."), says("Done.")])
    agent = working(script, work, BudgetHookProvider(Budget(max_iterations=2)))
    assert agent("Go.").stop_reason == "max_iterations"
    result = agent("And?", invocation_state={"budgetguard": Budget(max_iterations=9)})
    assert result.stop_reason == "end_turn"


def test_agents_in_them_spend_the_budget_of_the_run():
    below = Script([calls("nothing")])

    @tool
    async def work() -> str:
        """Works."""
        return str(await strict(below).invoke_async("Work."))

    provider = BudgetHookProvider(Budget(max_model_calls=6))
    script = Script([calls("work"), says("Wait."), says("Done.")])
    agent = strict(script, work, hooks=[provider], background_tasks=ALWAYS)
    agent("Go.")
    assert script.calls + below.calls == 6
    assert provider.outcome(agent).stop_reason == StopReason.MAX_MODEL_CALLS
