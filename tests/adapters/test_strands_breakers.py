"""The Strands adapter waits where a breaker holds a call back, and offers `report_progress`."""

from __future__ import annotations

import asyncio
import threading

import pytest
from strands import tool

from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.breakers import BulkheadConfig, ProgressReports, RateLimit
from budgetguard_core.clock import SystemClock
from budgetguard_core.events import Event
from budgetguard_core.kit import PROGRESS_TOOL
from budgetguard_core.testing import Script, calls, says
from budgetguard_strands import BudgetHookProvider
from strands_agents import made, run

WAYS = ("sync", "async", "stream")
SHORT = 0.05


def now():
    return SystemClock().monotonic_ns() / 1e9


@pytest.mark.parametrize("way", WAYS)
def test_a_tool_call_waits_for_its_token(way):
    at = []

    @tool
    def search(value: str = "") -> str:
        """Searches."""
        at.append(now())
        return "found"

    limit = RateLimit(rate=1 / SHORT, max_wait_duration=9)
    agent = made(
        Script([calls("search", "search"), says("Done.")]),
        search,
        hooks=[BudgetHookProvider(Budget(rate_limits={"search": limit}, loop_detection=None))],
    )
    began = now()
    assert run(agent, "Go.", way)[0].stop_reason == "end_turn"
    assert len(at) == 2
    assert max(at) - began >= SHORT * 0.9


@pytest.mark.parametrize("way", WAYS)
def test_calls_beyond_the_places_wait_for_one(way):
    inside, most = [0], [0]

    @tool
    async def search(value: str = "") -> str:
        """Searches."""
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        await asyncio.sleep(0)
        inside[0] -= 1
        return "found"

    bulkhead = BulkheadConfig(max_concurrent_calls=1, max_wait_duration=9)
    agent = made(
        Script([calls(*["search"] * 4), says("Done.")]),
        search,
        hooks=[BudgetHookProvider(Budget(bulkheads={"search": bulkhead}, loop_detection=None))],
    )
    assert run(agent, "Go.", way)[0].stop_reason == "end_turn"
    assert most == [1]


def test_an_abort_ends_a_wait():
    admitted, began = threading.Semaphore(0), threading.Semaphore(0)
    started = []

    def listen(event: Event) -> None:
        if event.event == "tool_calls_requested":
            admitted.release(len(event.calls))

    limit = RateLimit(rate=1e-6, max_wait_duration=1e6)
    guard = Guard(Budget(rate_limits={"search": limit}), sinks=[listen])

    @tool
    def search(value: str = "") -> str:
        """Searches."""
        started.append(value)
        began.release()
        return "found"

    agent = made(Script([calls("search", "search")]), search, hooks=[BudgetHookProvider(guard)])

    def press_stop() -> None:
        # One has begun and the other is admitted, and waits for its token.
        for one in (admitted, admitted, began):
            one.acquire(timeout=120)
        guard.abort("enough")

    user = threading.Thread(target=press_stop)
    user.start()
    assert agent("Go.").stop_reason == "aborted"
    user.join()
    assert len(started) == 1


REPORT = {
    "claims_so_far": ["nothing"],
    "next_subgoal": "find the file",
    "estimated_remaining_steps": 5,
}


@pytest.mark.parametrize("way", WAYS)
def test_reports_that_do_not_move_end_the_run(way):
    import json

    from conformance.budgetguard_strands_driver import ScriptedModel

    class Reporting(ScriptedModel):
        asked = 0

        async def stream(self, messages, tool_specs=None, *args, **kwargs):
            type(self).names = {spec["name"] for spec in tool_specs}
            self.asked += 1
            yield {"messageStart": {"role": "assistant"}}
            use = {"name": PROGRESS_TOOL.name, "toolUseId": f"t{self.asked}"}
            yield {"contentBlockStart": {"start": {"toolUse": use}}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(REPORT)}}}}
            yield {"contentBlockStop": {}}
            yield {"messageStop": {"stopReason": "tool_use"}}

    provider = BudgetHookProvider(
        Budget(max_iterations=30, progress=ProgressReports(every_iterations=1), loop_detection=None)
    )
    agent = made(Script([says("never")]), hooks=[provider])
    agent.model = Reporting(Script([says("never")]))
    assert run(agent, "Go.", way)[0].stop_reason == StopReason.STALLED
    assert PROGRESS_TOOL.name in agent.model.names
    assert agent.model.asked < 10
