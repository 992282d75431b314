"""Breakers through LangChain's hooks: waits that block nobody else, and reports of progress."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from langchain_core.tools import StructuredTool

from budgetguard_core import Budget, Guard
from budgetguard_core.breakers import BulkheadConfig, ProgressReports, VelocityLimits
from budgetguard_core.testing import Call, Script, calls, says
from budgetguard_langgraph import BudgetMiddleware, report_progress
from langgraph_graphs import StrictChat, bounded_agent, check_request, search, sticky, user

WAYS = ["bounded", "callback", "middleware"]


def attached(way, script, guard, tools=(search,)):
    return bounded_agent(way, guard, StrictChat(script=script), tools)


def paced(what):
    limits = {"model": {"max_tokens_per_minute": 200}, "tool": {"max_tool_calls_per_minute": 2}}
    return Guard(Budget(velocity=VelocityLimits(throttle_at=0.5, **limits[what])))


def waiting(guard, what):
    """Tell whether the second call is admitted: it waits then, for the better part of a minute."""
    return (guard.usage.model_calls if what == "model" else guard.usage.tool_calls) == 2


@pytest.mark.anyio
@pytest.mark.parametrize("what", ["model", "tool"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_wait_leaves_the_loop_to_others_and_ends_with_an_abort(way, what):
    guard, script = paced(what), sticky()
    graph, config = attached(way, script, guard)
    task = asyncio.create_task(graph.ainvoke(user(), config))
    while not waiting(guard, what):  # noqa: ASYNC110 - the guard sets no event
        await asyncio.sleep(0)
    guard.abort("enough")
    async with asyncio.timeout(20):
        await task
    made = script.calls if what == "model" else guard.usage.tool_calls
    assert made == 1
    assert guard.outcome.stop_reason == "aborted"
    check_request(guard.outcome.messages)


@pytest.mark.parametrize("what", ["model", "tool"])
@pytest.mark.parametrize("way", WAYS)
def test_a_wait_of_a_thread_ends_with_an_abort(way, what):
    guard, script = paced(what), sticky()
    graph, config = attached(way, script, guard)
    thread = threading.Thread(target=graph.invoke, args=(user(), config))
    thread.start()
    ticks = threading.Event()
    while not waiting(guard, what):
        ticks.wait(0.001)
    guard.abort("enough")
    thread.join(20)
    assert not thread.is_alive()
    assert (script.calls if what == "model" else guard.usage.tool_calls) == 1
    assert guard.outcome.stop_reason == "aborted"


@pytest.mark.anyio
@pytest.mark.parametrize("way", WAYS)
async def test_a_cancelled_wait_gives_its_place_back(way):
    guard, script = paced("model"), sticky()
    graph, config = attached(way, script, guard)
    task = asyncio.create_task(graph.ainvoke(user(), config))
    while not waiting(guard, "model"):  # noqa: ASYNC110 - the guard sets no event
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert script.calls == guard.usage.model_calls == 1
    assert guard.open_calls() == ()
    assert guard.usage.reserved_tokens == 0


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("way", WAYS)
async def test_calls_of_one_answer_take_turns_where_a_tool_has_one_place(way, mode):
    inside, most = [], []

    def body(value: str = "") -> str:
        """Work alone."""
        inside.append(value)
        most.append(len(inside))
        inside.remove(value)
        return f"done {value}"

    work = StructuredTool.from_function(body, name="work")
    guard = Guard(
        Budget(bulkheads={"work": BulkheadConfig(max_concurrent_calls=1, max_wait_duration=30)})
    )
    script = Script([calls(*[Call("work", str(n)) for n in range(4)]), says("Done.")])
    graph, config = attached(way, script, guard, [work])
    if mode == "sync":
        graph.invoke(user(), config)
    else:
        await graph.ainvoke(user(), config)
    assert len(most) == guard.usage.tool_calls == 4
    assert max(most) == 1
    assert guard.outcome.status == "completed"


def stuck(n):
    """Work, and say the same of it whenever a report is due."""
    if n % 2 == 0:
        return calls(Call("search", str(n)))
    report = {
        "claims_so_far": [f"claim {n}"],
        "next_subgoal": "find the file",
        "estimated_remaining_steps": 5,
    }
    return calls(Call("report_progress", json.dumps(report), fields=report))


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_model_that_reports_no_progress_is_stopped(way, mode):
    guard = Guard(Budget(progress=ProgressReports(every_iterations=2), max_tool_calls=30))
    script = Script(stuck)
    # The middleware brings the tool along.
    tools = [search] if way == "middleware" else [search, report_progress]
    graph, config = attached(way, script, guard, tools)
    if mode == "sync":
        graph.invoke(user(), config)
    else:
        await graph.ainvoke(user(), config)
    assert guard.outcome.stop_reason == "stalled"
    assert script.calls < 20
    # A report costs no place.
    assert guard.usage.tool_calls == guard.tool_counts["search"]
    assert any("report_progress" in one for one in script.sent)


def test_the_middleware_brings_the_tool_only_where_it_is_asked_for():
    assert BudgetMiddleware(Budget(max_iterations=3)).tools == []
    reports = Budget(progress=ProgressReports(every_iterations=2))
    for given in (reports, Guard(reports)):
        assert BudgetMiddleware(given).tools == [report_progress]


def test_the_tool_can_be_tried_out_without_a_budget():
    said = report_progress.invoke(
        {"claims_so_far": [], "next_subgoal": "look", "estimated_remaining_steps": 2}
    )
    assert isinstance(said, str)
