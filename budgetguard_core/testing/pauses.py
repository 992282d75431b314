"""Clauses 28, 37, 38 and 44: a run that waits for a person is paused, not ended."""

from __future__ import annotations

from typing import Any, Literal

from budgetguard_core.budget import Budget
from budgetguard_core.events import Event
from budgetguard_core.guard import Guard
from budgetguard_core.outcome import Outcome
from budgetguard_core.sqlite_checkpoints import MemoryStore
from budgetguard_core.stop import StopReason
from budgetguard_core.testing.checks import (
    act,
    check_completed,
    check_equal,
    check_nudge,
    check_stopped,
    outcome_of,
    results_of,
    search_tool,
)
from budgetguard_core.testing.clock import ManualClock
from budgetguard_core.testing.driver import Driver
from budgetguard_core.testing.failures import expect
from budgetguard_core.testing.scenario import PLACES, Mode, Place, Ran, Scratch
from budgetguard_core.testing.script import Call, Script, Tool, calls, says

_SOON = 10
"""Calls after which the detector has seen that nothing comes of them."""
_PATIENT = 12
"""Questions that a person answers."""


class _Case:
    """One agent, its run, and the answers that it is given."""

    def __init__(self, driver: Driver, mode: Mode, script: Script, *tools: Tool) -> None:
        self.driver = driver
        self.mode: Mode = mode
        self.script = script
        self.started: list[str] = []
        self.facts: dict[str, Any] = {
            "tools": [Tool("read", "what was read"), Tool("send", "sent", approval=True), *tools],
            "store": MemoryStore(),
            "shared": Scratch(),
            "started": self.started,
        }

    def begin(self, guard: Budget | Guard) -> Ran:
        ran, _ = act(self.driver, self.mode, self.script, guard=guard, **self.facts)
        return ran

    def go_on(
        self,
        ran: Ran,
        guard: Budget | Guard,
        answer: Literal["approve", "refuse"],
        place: Place = "same object",
    ) -> Ran:
        ran, _ = act(
            self.driver,
            self.mode,
            self.script,
            guard=guard,
            after=ran,
            user_input=None,
            answer=answer,
            place=place,
            **self.facts,
        )
        return ran


def _paused(ran: Ran) -> Outcome:
    outcome = outcome_of(ran)
    check_equal("status of a run that waits for a person", outcome.status, "paused")
    expect(not ran.leaked, f"tasks left behind: {ran.leaked}")
    return outcome


def paused(driver: Driver, mode: Mode) -> None:
    """Clause 28."""
    places: list[Place] = [
        one for one in PLACES if one != "new process" or driver.has("new_process")
    ]
    for place in places:
        # The caps hold over both attempts: four model calls in all, and two of them before.
        case = _Case(driver, mode, Script([calls("read"), calls("send"), calls("read")]))
        budget = Budget(max_model_calls=4)
        outcome = _paused(ran := case.begin(budget))
        check_equal("model calls before the answer", outcome.usage.model_calls, 2)
        check_equal("tool calls before the answer", outcome.usage.tool_calls, 1)
        outcome = check_stopped(
            case.go_on(ran, budget, "approve", place), StopReason.MAX_MODEL_CALLS
        )
        check_equal(f"model calls in all ({place})", case.script.calls, 4)
        check_equal(f"model calls counted ({place})", outcome.usage.model_calls, 4)
        check_equal(f"tool bodies ({place})", case.started[:2], ["read", "send"])

        case = _Case(driver, mode, Script([calls("send"), says("As you wish.")]))
        ran = case.go_on(case.begin(budget), budget, "refuse", place)
        outcome = check_completed(ran)
        check_equal(f"tool calls of a refusal ({place})", outcome.usage.tool_calls, 0)
        check_equal(f"tool bodies of a refusal ({place})", case.started, [])
        check_equal(f"model calls of a refusal ({place})", outcome.usage.model_calls, 2)

    # A person takes longer than the run may.
    clock = ManualClock()
    guard = Guard(Budget(max_seconds=60), clock=clock)
    case = _Case(driver, mode, Script([calls("send"), says("Done.")]))
    ran = case.begin(guard)
    clock.advance(3600)
    check_completed(case.go_on(ran, guard, "approve"))
    check_equal("tool bodies after a long wait", case.started, ["send"])
    expect(guard.usage.seconds < 60, f"{guard.usage.seconds} s with the waiting")

    # A batch in which one call waits and another one does not fit.
    for batch in (("read", "send", "read"), ("send", "read", "read")):
        case = _Case(driver, mode, Script([calls(*batch), says("Never said.")]))
        guard = Guard(Budget(max_tool_calls=1))
        ran = case.begin(guard)
        waits = str(outcome_of(ran).status) == "paused"
        ran = case.go_on(ran, guard, "approve") if waits else ran
        check_stopped(ran, StopReason.MAX_TOOL_CALLS)
        check_equal("model calls of a batch that does not fit", case.script.calls, 1)
        check_equal("tool bodies of a batch that does not fit", len(case.started), 1)
        check_equal("results of the batch", len(results_of(ran.history)), 3)


def unanswered(driver: Driver, mode: Mode) -> None:
    """Clause 37."""
    for same in (True, False):

        def asking(name: str, same: bool = same) -> Script:
            return Script(lambda number: calls(Call(name, "x" if same else f"x {number}")))

        events: list[Event] = []
        guard = Guard(Budget(max_iterations=30, tool_quotas={"search": 1}), sinks=[events.append])
        script = asking("search")
        ran, scenario = act(driver, mode, script, guard=guard, tools=[search_tool()])
        check_stopped(ran, StopReason.NO_PROGRESS)
        check_equal("tool bodies under a quota", scenario.started, ["search"])
        expect(script.calls <= _SOON, f"{script.calls} calls that the quota refuses")
        check_nudge(events, script)

        if not driver.has("approval"):
            continue
        case = _Case(driver, mode, asking("send"))
        budget = Budget(max_iterations=30)
        ran = _until_over(case, budget, "refuse")
        check_stopped(ran, StopReason.NO_PROGRESS)
        check_equal("tool bodies that a person refused", case.started, [])
        expect(case.script.calls <= _SOON, f"{case.script.calls} calls that a person refuses")


def questions(driver: Driver, mode: Mode) -> None:
    """Clause 38."""
    for place in PLACES:
        if place == "new process" and not driver.has("new_process"):
            continue
        case = _Case(driver, mode, Script([calls(Call("send", "hi"))]))
        ran = _until_over(case, Budget(max_iterations=30), "approve", place)
        check_stopped(ran, StopReason.NO_PROGRESS)
        sent = len(case.started)
        expect(sent <= 6, f"{sent} identical calls, each with an approval ({place})")


def asked(driver: Driver, mode: Mode) -> None:
    """Clause 44."""
    sends = [calls(Call("send", "one")), calls(Call("send", "two")), says("Done.")]
    case = _Case(driver, mode, Script(sends))
    budget = Budget(max_tool_calls=1)
    ran = case.go_on(case.begin(budget), budget, "approve")
    check_stopped(ran, StopReason.MAX_TOOL_CALLS)
    check_equal("tool bodies under a cap", case.started, ["send"])

    case = _Case(driver, mode, Script(sends))
    budget = Budget(tool_quotas={"send": 1})
    ran = case.go_on(case.begin(budget), budget, "approve")
    check_completed(ran)
    check_equal("tool bodies under a quota", case.started, ["send"])


def _until_over(
    case: _Case,
    budget: Budget,
    answer: Literal["approve", "refuse"],
    place: Place = "same object",
) -> Ran:
    """Give the same answer to every question of a run, up to its end."""
    ran = case.begin(budget)
    for _ in range(_PATIENT):
        if outcome_of(ran).status != "paused":
            break
        ran = case.go_on(ran, budget, answer, place)
    return ran
