"""Clauses 28, 37, 38 and 44: a run that waits for a person is paused, not ended."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from budgetguard_core.budget import Budget
from budgetguard_core.guard import Guard
from budgetguard_core.sqlite_checkpoints import MemoryStore
from budgetguard_core.stop import StopReason
from budgetguard_core.testing.clock import ManualClock
from budgetguard_core.testing.message import expect
from budgetguard_core.testing.scenario import LOCATIONS, Location, Scratch
from budgetguard_core.testing.script import Call, Replies, Script, Tool, calls, says
from budgetguard_core.testing.trial import Done, Trial, check_equal, check_nudge, watched

Answer: TypeAlias = Literal["approve", "refuse"]

_SOON = 10
"""Calls after which the detector has seen that nothing comes of them."""
_PATIENT = 12
"""Questions that a person answers."""


class _Case:
    """One agent, its run, and the answers that it is given."""

    def __init__(self, at: Trial, replies: Replies) -> None:
        self.at = at
        self.script = Script(replies)
        self.started: list[str] = []
        self.facts: dict[str, Any] = {
            "tools": [Tool("read", "what was read"), Tool("send", "sent", approval=True)],
            "store": MemoryStore(),
            "shared": Scratch(),
            "started": self.started,
        }

    def begin(self, guard: Budget | Guard) -> Done:
        return self.at.run(self.script, guard, **self.facts)

    def go_on(
        self, done: Done, guard: Budget | Guard, answer: Answer, location: Location = "same object"
    ) -> Done:
        facts = {
            **self.facts,
            "user_input": None,
            "after": done,
            "answer": answer,
            "location": location,
        }
        return self.at.run(self.script, guard, **facts)

    def answered(
        self,
        budget: Budget | Guard,
        answer: Answer,
        location: Location = "same object",
        most: int = 1,
    ) -> Done:
        """Give the same answer to every question of a run, so many at most."""
        done = self.begin(budget)
        for _ in range(most):
            if done.outcome.status == "paused":
                done = self.go_on(done, budget, answer, location)
        return done


def _places(at: Trial) -> list[Location]:
    return [one for one in LOCATIONS if one != "new process" or at.has("new_process")]


def paused(at: Trial) -> None:
    """Clause 28."""
    budget = Budget(max_model_calls=4)
    for location in _places(at):
        # The caps hold over both attempts: four model calls in all, and two of them before.
        case = _Case(at, [calls("read"), calls("send"), calls("read")])
        done = case.begin(budget)
        check_equal("status of a run that waits for a person", done.outcome.status, "paused")
        expect(not done.ran.leaked, f"tasks left behind: {done.ran.leaked}")
        done.check(model_calls=2, tool_calls=1)
        done = case.go_on(done, budget, "approve", location)
        done.stopped(StopReason.MAX_MODEL_CALLS, calls=4, model_calls=4)
        check_equal(f"tool bodies ({location})", case.started[:2], ["read", "send"])

        case = _Case(at, [calls("send"), says("As you wish.")])
        done = case.answered(budget, "refuse", location)
        done.completed(tool_calls=0, model_calls=2, bodies=0)

    # A person takes longer than the run may.
    clock = ManualClock()
    guard = Guard(Budget(max_seconds=60), clock=clock)
    case = _Case(at, [calls("send"), says("Done.")])
    done = case.begin(guard)
    clock.advance(3600)
    case.go_on(done, guard, "approve").completed(bodies=["send"])
    expect(guard.usage.seconds < 60, f"{guard.usage.seconds} s with the waiting")

    # A batch in which one call waits and another one does not fit.
    for batch in (("read", "send", "read"), ("send", "read", "read")):
        case = _Case(at, [calls(*batch), says("Never said.")])
        done = case.answered(Guard(Budget(max_tool_calls=1)), "approve")
        done.stopped(StopReason.MAX_TOOL_CALLS, calls=1, bodies=1)
        check_equal("results of the batch", len(done.results), 3)


def unanswered(at: Trial) -> None:
    """Clause 37."""
    for same in (True, False):

        def asking(name: str, same: bool = same) -> Replies:
            return lambda number: calls(Call(name, "x" if same else f"x {number}"))

        guard, events = watched(max_iterations=30, tool_quotas={"search": 1})
        done = at.run(asking("search"), guard)
        done.stopped(StopReason.NO_PROGRESS, bodies=["search"])
        made = done.script.calls
        expect(made <= _SOON, f"{made} calls that the quota refuses")
        check_nudge(events, done.script)

        if at.has("approval"):
            case = _Case(at, asking("send"))
            done = case.answered(Budget(max_iterations=30), "refuse", most=_PATIENT)
            done.stopped(StopReason.NO_PROGRESS, bodies=0)
            made = case.script.calls
            expect(made <= _SOON, f"{made} calls that a person refuses")


def questions(at: Trial) -> None:
    """Clause 38."""
    for location in _places(at):
        case = _Case(at, [calls(Call("send", "hi"))])
        done = case.answered(Budget(max_iterations=30), "approve", location, most=_PATIENT)
        done.stopped(StopReason.NO_PROGRESS)
        sent = len(case.started)
        expect(sent <= 6, f"{sent} identical calls, each with an approval ({location})")


def requested(at: Trial) -> None:
    """Clause 44."""
    sends = [calls(Call("send", "one")), calls(Call("send", "two")), says("Done.")]
    done = _Case(at, sends).answered(Budget(max_tool_calls=1), "approve")
    done.stopped(StopReason.MAX_TOOL_CALLS, bodies=["send"])
    done = _Case(at, sends).answered(Budget(tool_quotas={"send": 1}), "approve")
    done.completed(bodies=["send"])
