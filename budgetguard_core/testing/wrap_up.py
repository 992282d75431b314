"""Clause 56: one request to finish, from a share of a cap on."""

from __future__ import annotations

from typing import Any

from budgetguard_core.budget import Budget
from budgetguard_core.guard import Guard
from budgetguard_core.stop import StopReason
from budgetguard_core.stop_state import Mode as GuardMode
from budgetguard_core.testing.checks import act, check_completed, check_equal, check_stopped
from budgetguard_core.testing.driver import Driver
from budgetguard_core.testing.failures import expect
from budgetguard_core.testing.scenario import Mode, Scratch
from budgetguard_core.testing.script import Script, Tool, calls, changing, says

_WORDS = "Round it off, please"
_BUDGET = Budget(max_iterations=5, wrap_up_at=0.6, wrap_up_message=_WORDS)


def wrap_up(driver: Driver, mode: Mode) -> None:
    """Clause 56."""

    def told(script: Script) -> list[int]:
        return [number for number, sent in enumerate(script.sent) if _WORDS in sent]

    facts: dict[str, Any] = {
        "tools": [Tool("search", changing), Tool("read", changing)],
        "shared": Scratch(),
    }
    both = calls("search", "read")
    script = Script([both, both, both, calls("search"), says("Here."), says("There.")])
    ran, _ = act(driver, mode, script, guard=_BUDGET, **facts)
    check_completed(ran)
    check_equal("requests with the words", told(script), [3])
    expect(not any(_WORDS in one.text for one in ran.history), "the words are in the history")
    more = Budget(max_iterations=9)
    ran, _ = act(driver, mode, script, guard=more, after=ran, user_input="Go on.", **facts)
    check_completed(ran)
    check_equal("requests with the words, after the next run", told(script), [3])

    # A runaway does not heed them, and is stopped where it would have been.
    script = Script([both])
    ran, _ = act(driver, mode, script, guard=_BUDGET, tools=facts["tools"])
    check_stopped(ran, StopReason.MAX_ITERATIONS)
    check_equal("requests with the words, of a runaway", told(script), [3])

    script = Script([both, both, both, both, says("Here.")])
    guard = Guard(_BUDGET, mode=GuardMode.OBSERVE)
    ran, _ = act(driver, mode, script, guard=guard, tools=facts["tools"])
    check_completed(ran)
    check_equal("requests with the words, in OBSERVE", told(script), [])
