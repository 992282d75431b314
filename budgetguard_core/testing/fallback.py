"""Clause 57: a cheaper model, from a share of a cap on tokens or dollars on."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from budgetguard_core.budget import Budget
from budgetguard_core.guard import Guard
from budgetguard_core.pricing import Price, PriceBook
from budgetguard_core.stop import StopReason
from budgetguard_core.stop_state import Mode as GuardMode
from budgetguard_core.testing.checks import act, check_completed, check_equal, check_stopped
from budgetguard_core.testing.driver import Driver
from budgetguard_core.testing.scenario import Mode, Scratch
from budgetguard_core.testing.script import (
    FALLBACK,
    MODEL,
    Agent,
    Script,
    Tool,
    calls,
    changing,
    says,
)

# A scripted reply has 120 tokens, which are 12 cents of the model, and 1.2 of the cheaper one.
_BOOK = PriceBook({MODEL: Price(input=1000, output=1000), FALLBACK: Price(input=100, output=100)})
_BUDGET = Budget(max_iterations=7, max_cost_usd=0.6, fallback_at=0.5, fallback_model=FALLBACK)


def _guard(**options: Any) -> Guard:
    return Guard(_BUDGET, price_book=_BOOK, **options)


def fallback(driver: Driver, mode: Mode) -> None:
    """Clause 57."""
    facts: dict[str, Any] = {
        "tools": [Tool("search", changing), Tool("read", changing)],
        "shared": Scratch(),
    }
    both = calls("search", "read")
    script = Script([both] * 4 + [says("Here."), says("There.")])
    ran, _ = act(driver, mode, script, guard=_guard(), **facts)
    check_completed(ran)
    check_equal("models", script.models, [MODEL] * 3 + [FALLBACK] * 2)
    used = ran.outcome.usage.cost_usd if ran.outcome is not None else None
    check_equal("cost", used, Decimal("0.384"))
    guard = Guard(Budget(max_iterations=9), price_book=_BOOK)
    ran, _ = act(driver, mode, script, guard=guard, after=ran, user_input="Go on.", **facts)
    check_completed(ran)
    check_equal("model of the next run", script.models[-1], MODEL)

    # A runaway is stopped where it would have been.
    script = Script([both])
    ran, _ = act(driver, mode, script, guard=_guard(), tools=facts["tools"])
    check_stopped(ran, StopReason.MAX_ITERATIONS)
    check_equal("models of a runaway", script.models, [MODEL] * 3 + [FALLBACK] * 4)

    script = Script([both] * 4 + [says("Here.")])
    guard = _guard(mode=GuardMode.OBSERVE)
    ran, _ = act(driver, mode, script, guard=guard, tools=facts["tools"])
    check_completed(ran)
    check_equal("models, in OBSERVE", set(script.models), {MODEL})

    if "tool" in driver.subagents:
        inner = Script([says("Found."), says("Found.")])
        helper = Tool("helper", agent=Agent(name="helper", script=inner))
        script = Script([calls("helper"), calls("search"), calls("helper"), says("Here.")])
        ran, _ = act(driver, mode, script, guard=_guard(), tools=[helper, Tool("search", changing)])
        check_completed(ran)
        check_equal("models of the sub-agent", inner.models, [MODEL, FALLBACK])
