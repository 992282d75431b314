"""Streams that are left at any event, in any way: nothing leaks, and the conversation goes on."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import pytest
from agents import Agent, Runner, function_tool, handoff
from agents.memory import SessionABC
from agents.result import RunResultStreaming

from budgetguard_core import Budget, Guard
from budgetguard_core.testing.scripted import Answers
from budgetguard_openai_agents import BudgetHooks, RunStopped, bounded_run_streamed, outcome
from budgetguard_openai_agents.scripted import scripted_model
from openai_agents_runs import MODES, go, tool, unpaired
from strict_openai_server import check_responses_input

pytestmark = pytest.mark.anyio
HOWS = ("break", "immediate", "after_turn", "task")


class ListSession(SessionABC):
    """A session that needs no thread, so that a run makes the same steps each time."""

    session_id = "list"
    session_settings = None

    def __init__(self) -> None:
        self.items: list[Any] = []

    async def get_items(self, limit: int | None = None) -> list[Any]:
        await asyncio.sleep(0)
        return self.items[-limit:] if limit else list(self.items)

    async def add_items(self, items: list[Any]) -> None:
        await asyncio.sleep(0)
        self.items += items

    async def pop_item(self) -> Any:
        await asyncio.sleep(0)
        return self.items.pop() if self.items else None

    async def clear_session(self) -> None:
        self.items.clear()


def team(bodies: list[str]) -> tuple[Agent[Any], Answers, Answers]:
    """Make an agent with a tool, a sub-agent and one to hand over to."""
    below = Answers([{"search": {}}, "Found."])
    main = Answers(
        [
            [("search", {}), ("ask", {"input": "?"})],
            {"transfer_to_other": {}},
            {"search": {}},
            "All done.",
        ]
    )
    search = tool("search", bodies)
    worker = Agent(name="worker", model=scripted_model(below), tools=[search])
    other = Agent(name="other", model=scripted_model(main), tools=[search])
    ask = worker.as_tool(tool_name="ask", tool_description="Ask.")
    first = Agent(
        name="main", model=scripted_model(main), tools=[search, ask], handoffs=[handoff(other)]
    )
    return first, main, below


async def left(result: RunResultStreaming, at: int, how: str) -> int:
    """Leave a stream at an event; return how many there were."""
    seen = 0
    stream = result.stream_events()
    try:
        async for _ in stream:
            seen += 1
            if seen != at:
                continue
            if how == "break":
                break
            if how == "task":
                result.run_loop_task.cancel()
            else:
                result.cancel(mode=how)
    except asyncio.CancelledError:
        assert how == "task"
    finally:
        await stream.aclose()
    await asyncio.wait({result.run_loop_task})
    return seen


async def events_of_all() -> int:
    agent, _, _ = team([])
    return await left(bounded_run_streamed(agent, "Go.", budget=Budget(max_iterations=9)), 0, "")


@pytest.mark.parametrize("how", HOWS)
async def test_at_any_event(how):
    most = await events_of_all()
    assert most > 15
    for at in range(1, most + 1):
        bodies: list[str] = []
        agent, main, below = team(bodies)
        guard, session = Guard(Budget(max_iterations=9)), ListSession()
        ended: list[str] = []
        hooks = BudgetHooks(guard, on_outcome=lambda found, ended=ended: ended.append(found.status))
        result = bounded_run_streamed(agent, "Go.", budget=guard, hooks=hooks, session=session)
        await left(result, at, how)
        assert len(ended) == 1, at
        assert ended[0] in ("failed", "completed"), at
        assert outcome(result).status == ended[0], at
        assert guard.trip is None
        usage = guard.usage
        assert usage.model_calls == main.calls + below.calls, at
        assert usage.reserved_tokens == 0, at
        assert guard.tool_counts.get("search", 0) == len(bodies), at
        assert not unpaired(session.items), at
        check_responses_input(session.items)
        # The next turn works.
        agent.model = Agent(name="a", model=scripted_model(Answers(["Hello."]))).model
        again = await go("run_streamed", agent, "Hi.", session=session, hooks=BudgetHooks(Budget()))
        assert again.final_output == "Hello.", at


async def stopped_at(task: asyncio.Task[Any], step: int, stop: Callable[[], object]) -> bool:
    """Stop a run after so many steps of the loop; tell whether it was over before."""
    for _ in range(step):
        await asyncio.sleep(0)
    over = task.done()
    stop()
    await asyncio.wait({task})
    return over


def exact(guard: Guard, made: int, bodies: list[str], at: int) -> None:
    """Compare the counts; a call that was cut on its way to the model or the body counts."""
    assert made <= guard.usage.model_calls <= made + 1, at
    assert len(bodies) <= guard.tool_counts.get("search", 0) <= len(bodies) + 1, at
    assert guard.usage.reserved_tokens == 0, at


@pytest.fixture
def leftovers():
    """Let go of what the SDK leaves behind: work that was cancelled before its first step."""
    yield
    gc.collect()


never_awaited = pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@never_awaited
@pytest.mark.parametrize("kept", [False, True], ids=["list", "session"])
@pytest.mark.parametrize("mode", MODES)
async def test_an_abort_at_any_step(mode, kept, leftovers):
    statuses: set[str] = set()
    for at in count(0, 7):
        bodies: list[str] = []
        agent, main, below = team(bodies)
        guard, session = Guard(Budget(max_iterations=9)), ListSession() if kept else None
        task = asyncio.create_task(go(mode, agent, session=session, hooks=BudgetHooks(guard)))
        over = await stopped_at(task, at, partial(guard.abort, "enough"))
        result = task.result()
        found = outcome(result)
        statuses.add(found.status)
        assert found.status == "terminated" or result.final_output == "All done.", at
        exact(guard, main.calls + below.calls, bodies, at)
        history = result.to_input_list()
        assert not unpaired(history), at
        check_responses_input(history)
        if session is not None:
            assert len(session.items) == len(history), at
            assert not unpaired(session.items), at
            check_responses_input(session.items)
        if over:
            break
    assert statuses == {"terminated", "completed"}


@never_awaited
async def test_a_cancellation_at_any_step(leftovers):
    for at in count(1, 5):
        bodies: list[str] = []
        agent, main, below = team(bodies)
        guard, ended = Guard(Budget(max_iterations=9)), []
        hooks = BudgetHooks(guard, on_outcome=ended.append)
        task = asyncio.create_task(go("run", agent, hooks=hooks))
        over = await stopped_at(task, at, task.cancel)
        for _ in range(20):
            await asyncio.sleep(0)
        exact(guard, main.calls + below.calls, bodies, at)
        assert len(ended) == 1, at
        assert not unpaired(ended[0].messages), at
        assert ended[0].status == ("failed" if task.cancelled() else "completed"), at
        if over:
            break


@pytest.mark.parametrize("mode", MODES)
async def test_the_body_of_a_tool_keeps_to_the_caps_when_its_run_was_cancelled(mode):
    """A plain function runs in a thread, where nobody can cancel it."""
    below = scripted_model(Answers(["More."] * 9))
    began, cancelled, done = (threading.Event() for _ in range(3))

    def work() -> str:
        began.set()
        cancelled.wait(30)
        for _ in range(5):
            with suppress(RunStopped):
                asyncio.run(Runner.run(Agent(name="below", model=below), "Go on."))
        done.set()
        return "Done."

    agent = Agent(
        name="main",
        model=scripted_model(Answers([{"work": {}}])),
        tools=[function_tool(work)],
    )
    hooks = BudgetHooks(Budget(max_model_calls=3))
    task = asyncio.create_task(go(mode, agent, hooks=hooks))
    assert await asyncio.to_thread(began.wait, 30)
    task.cancel()
    await asyncio.wait({task})
    cancelled.set()
    assert await asyncio.to_thread(done.wait, 30)
    assert below.answers.calls == 2
