"""The parts of clauses: performing a run, and checks of its end."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from budgetguard_core.clock import SystemClock
from budgetguard_core.events import Event, ModelCallAdmitted, NudgeTaken
from budgetguard_core.outcome import Outcome
from budgetguard_core.stop import StopReason
from budgetguard_core.testing.conformance import check_history
from budgetguard_core.testing.driver import Driver, perform
from budgetguard_core.testing.failures import expect
from budgetguard_core.testing.message import Message
from budgetguard_core.testing.scenario import Mode, Ran, Scenario
from budgetguard_core.testing.script import Script, Tool, calls, changing

DEADLINE = 1.5
"""Seconds of the deadlines in clauses whose calls hang: by then they have begun."""
MOMENT = 0.3
"""Seconds before an abort, which may as well come before its call has begun."""
GRACE = 30.0
"""Seconds that a run may take beyond its deadline, on a slow machine."""


def sticky(*names: str) -> Script:
    """Make a model that asks for the same tools for ever."""
    return Script([calls(*names)])


def search_tool() -> Tool:
    """Make a tool whose results change, so that no loop is seen."""
    return Tool("search", changing)


def act(driver: Driver, mode: Mode, script: Script, **facts: Any) -> tuple[Ran, Scenario]:
    """Perform a run by a driver; it raises as `perform` does."""
    scenario = Scenario(script=script, mode=mode, **facts)
    return perform(driver, scenario), scenario


def outcome_of(ran: Ran) -> Outcome:
    """Return the outcome of a run that raised nothing."""
    expect(ran.raised is None, f"the run raised {ran.raised!r}")
    expect(ran.outcome is not None, "the run has no outcome")
    return cast("Outcome", ran.outcome)


def check_stopped(ran: Ran, reason: StopReason) -> Outcome:
    """Check that a limit ended a run in good order."""
    outcome = outcome_of(ran)
    expect(
        (outcome.status, outcome.stop_reason) == ("terminated", reason),
        f"ended {outcome.status} ({outcome.stop_reason}: {outcome.detail}), expected {reason}",
    )
    check_history(ran.history)
    expect(not ran.leaked, f"tasks left behind: {ran.leaked}")
    return outcome


def check_completed(ran: Ran) -> Outcome:
    """Check that a run ended by itself."""
    outcome = outcome_of(ran)
    expect(
        outcome.status == "completed",
        f"ended {outcome.status} ({outcome.stop_reason}: {outcome.detail}), expected completed",
    )
    check_history(ran.history)
    expect(not any(m.synthetic for m in ran.history), "a completed run has a synthetic message")
    return outcome


def check_equal(what: str, got: object, expected: object) -> None:
    """Raise `NonConformance` unless two things are equal."""
    expect(got == expected, f"{what}: {got!r}, expected {expected!r}")


def shape_of(history: Sequence[Message]) -> list[tuple[str, str, list[str]]]:
    """Reduce a history to what does not depend on ids."""
    return [(m.role, m.text, [name for _, name in m.tool_calls]) for m in history]


def results_of(history: Sequence[Message]) -> list[str]:
    """List the results of tool calls in the order in which the model asked."""
    texts = {m.tool_call_id: m.text for m in history if m.role == "tool"}
    return [texts[id_] for message in history for id_, _ in message.tool_calls]


def act_timed(driver: Driver, mode: Mode, script: Script, **facts: Any) -> tuple[Ran, float]:
    """Perform a run by a driver, and measure the seconds that it took."""
    clock = SystemClock()
    began = clock.monotonic_ns()
    ran, _ = act(driver, mode, script, **facts)
    return ran, (clock.monotonic_ns() - began) / 1e9


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
    expect(
        any(words in sent for script in scripts for sent in script.sent),
        f"the model was not told {nudges[0]!r}",
    )
