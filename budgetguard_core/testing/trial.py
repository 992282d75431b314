"""The runs that a clause does through one way in, and the checks of how they ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

from budgetguard_core.budget import Budget
from budgetguard_core.clock import SystemClock
from budgetguard_core.events import Event, ModelCallAdmitted, NudgeTaken
from budgetguard_core.guard import Guard
from budgetguard_core.outcome import Outcome
from budgetguard_core.stop import StopReason
from budgetguard_core.stop_state import ModeName
from budgetguard_core.testing.driver import Driver, Feature, perform
from budgetguard_core.testing.message import Message, check_history, expect
from budgetguard_core.testing.scenario import CallMode, Ran, Scenario
from budgetguard_core.testing.script import Replies, Script, Tool, calls, changing

DEADLINE = 1.5
"""Seconds of the deadlines in clauses whose calls hang: by then they have begun."""
MOMENT = 0.3
"""Seconds before an abort, which may as well come before its call has begun."""
GRACE = 30.0
"""Seconds that a run may take beyond its deadline, on a slow machine."""


@dataclass(frozen=True, slots=True)
class Done:
    """A run that a driver did.

    Attributes:
        ran: The driver's report.
        scenario: What it had to do.
        script: The model of the run.
        seconds: How long it took.
    """

    ran: Ran
    scenario: Scenario
    script: Script
    seconds: float

    @property
    def history(self) -> Sequence[Message]:
        """The conversation after the run."""
        return self.ran.history

    @property
    def started(self) -> list[str]:
        """The tool bodies that were started, by name."""
        return self.scenario.started

    @property
    def results(self) -> list[str]:
        """The results of tool calls in the order in which the model asked."""
        texts = {m.tool_call_id: m.text for m in self.history if m.role == "tool"}
        return [texts[id_] for message in self.history for id_, _ in message.tool_calls]

    @property
    def outcome(self) -> Outcome:
        """The outcome of a run that raised nothing."""
        expect(self.ran.raised is None, f"the run raised {self.ran.raised!r}")
        expect(self.ran.outcome is not None, "the run has no outcome")
        return cast("Outcome", self.ran.outcome)

    def check(self, **counts: object) -> None:
        """Check counts.

        Args:
            counts: `calls` of the model; `bodies` of tools that started, as a number or as names in
                any order; and what the outcome says was used: `iterations`, `model_calls`, ...
        """
        for name, expected in counts.items():
            if name == "calls":
                check_equal("model calls", self.script.calls, expected)
            elif name == "bodies":
                is_number = isinstance(expected, int)
                got = len(self.started) if is_number else sorted(self.started)
                check_equal("tool bodies", got, expected)
            else:
                check_equal(f"{name} counted", getattr(self.outcome.usage, name), expected)

    def stopped(self, reason: StopReason, **counts: object) -> Outcome:
        """Check that a limit ended the run in good order, and counts as `check` does."""
        outcome = self._ended("terminated", reason)
        expect(not self.ran.leaked, f"tasks left behind: {self.ran.leaked}")
        self.check(**counts)
        return outcome

    def completed(self, **counts: object) -> Outcome:
        """Check that the run ended by itself, and counts as `check` does."""
        outcome = self._ended("completed", StopReason.COMPLETED)
        synthetic = any(m.synthetic for m in self.history)
        expect(not synthetic, "a completed run has a synthetic message")
        self.check(**counts)
        return outcome

    def _ended(self, status: str, reason: StopReason) -> Outcome:
        outcome = self.outcome
        expect(
            (outcome.status, outcome.stop_reason) == (status, reason),
            f"ended {outcome.status} ({outcome.stop_reason}: {outcome.detail}), "
            f"expected {status} ({reason})",
        )
        check_history(self.history)
        return outcome


@dataclass(frozen=True, slots=True)
class Trial:
    """One way in of one adapter, in one mode: what a clause is tried on."""

    driver: Driver
    mode: CallMode

    @property
    def is_sync(self) -> bool:
        """True if nothing can interrupt a call that blocks its thread."""
        return self.mode == "sync"

    def has(self, feature: Feature) -> bool:
        """Return whether the framework has a feature."""
        return self.driver.has(feature)

    def scenario(
        self, script: Script, guard: Budget | Guard | None, *tools: Tool, **facts: Any
    ) -> Scenario:
        """Make a scenario; a tool `search` is there where none is given."""
        facts.setdefault("tools", list(tools) or [search_tool()])
        if isinstance(after := facts.get("after"), Done):
            facts["after"] = after.ran
        return Scenario(script=script, mode=self.mode, guard=guard, **facts)

    def run(
        self,
        replies: Script | Replies,
        guard: Budget | Guard | None = None,
        *tools: Tool,
        **facts: Any,
    ) -> Done:
        """Do a run; it raises as `perform` does.

        Args:
            replies: The model, or its answers.
            guard: What is given to the adapter.
            tools: The tools.
            facts: The rest of the `Scenario`; `after` may be what an earlier run returned.
        """
        script = replies if isinstance(replies, Script) else Script(replies)
        scenario = self.scenario(script, guard, *tools, **facts)
        clock = SystemClock()
        began = clock.monotonic_ns()
        ran = perform(self.driver, scenario)
        return Done(ran, scenario, script, (clock.monotonic_ns() - began) / 1e9)


def sticky(*names: str) -> Script:
    """Make a model that asks for the same tools for ever."""
    return Script([calls(*names)])


def search_tool() -> Tool:
    """Make a tool whose results change, so that no loop is seen."""
    return Tool("search", changing)


def watched(*, mode: ModeName = "enforce", **caps: Any) -> tuple[Guard, list[Event]]:
    """Make a guard, and the list that its events go to."""
    events: list[Event] = []
    return Guard(Budget(**caps), mode=mode, sinks=[events.append]), events


def check_equal(what: str, got: object, expected: object) -> None:
    """Raise `NonConformance` unless two things are equal."""
    expect(got == expected, f"{what}: {got!r}, expected {expected!r}")


def shape_of(history: Sequence[Message]) -> list[tuple[str, str, list[str]]]:
    """Reduce a history to what does not depend on ids."""
    return [(m.role, m.text, [name for _, name in m.tool_calls]) for m in history]


def in_threads(*actions: Callable[[], object]) -> None:
    """Run actions at the same time, and raise what the first failing one raised."""
    with ThreadPoolExecutor(len(actions)) as pool:
        for future in [pool.submit(action) for action in actions]:
            future.result()


def nudges_of(events: Sequence[Event]) -> list[str]:
    """List the nudges that were given."""
    given = [e.nudge for e in events if isinstance(e, ModelCallAdmitted) and e.nudge is not None]
    return given + [e.message for e in events if isinstance(e, NudgeTaken)]


def check_nudge(events: Sequence[Event], *scripts: Script) -> None:
    """Check that one nudge was given, and that a model has read it."""
    nudges = nudges_of(events)
    check_equal("nudges", len(nudges), 1)
    # Serialised prompts may escape quotation marks; the sentence up to one is enough.
    words = re.split(r"[\"'\\]", nudges[0])[0]
    known = any(words in sent for script in scripts for sent in script.sent)
    expect(known, f"the model was not told {nudges[0]!r}")
