"""The Strands adapter waits where a breaker holds a call back: clauses 48 and 54, and an abort."""

from __future__ import annotations

import threading

from strands import tool

from budgetguard_core import Budget, Guard
from budgetguard_core.breakers import RateLimit
from budgetguard_core.events import Event
from budgetguard_core.testing import Script, calls
from budgetguard_strands import BudgetHookProvider
from strands_agents import made


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
