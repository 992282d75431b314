"""Clause 59: a cap asks a person before it stops a run."""

from __future__ import annotations

from typing import Any

from budgetguard_core.budget import Budget
from budgetguard_core.stop import LimitQuestion, StopReason
from budgetguard_core.testing.checks import act, check_completed, check_equal, check_stopped
from budgetguard_core.testing.driver import Driver
from budgetguard_core.testing.scenario import Mode
from budgetguard_core.testing.script import Agent, Script, Tool, calls, changing, says


def limits(driver: Driver, mode: Mode) -> None:
    """Clause 59."""
    asked: list[tuple[str, Any, Any]] = []
    answers: list[dict[str, int] | None] = []

    def person(question: LimitQuestion) -> dict[str, int] | None:
        asked.append((question.reason.value, question.limit, question.used))
        return answers.pop(0) if answers else None

    tools = [Tool("search", changing), Tool("read", changing)]
    both = calls("search", "read")
    facts: dict[str, Any] = {"tools": tools, "on_trip": person}

    # More budget once, then the end.
    answers = [{"max_model_calls": 3}]
    script = Script([both])
    ran, _ = act(driver, mode, script, guard=Budget(max_model_calls=2), **facts)
    check_stopped(ran, StopReason.MAX_MODEL_CALLS)
    check_equal("model calls", script.calls, 3)
    check_equal("questions", asked, [("max_model_calls", 2, 2), ("max_model_calls", 3, 3)])

    # A batch of tool calls runs as a whole.
    asked.clear()
    answers = [{"max_tool_calls": 4}]
    ran, scenario = act(
        driver,
        mode,
        Script([both, both, says("Here.")]),
        guard=Budget(max_tool_calls=3, max_model_calls=9),
        **facts,
    )
    check_completed(ran)
    check_equal("tool bodies", sorted(scenario.started), ["read", "read", "search", "search"])
    # Frameworks differ in how much of a batch is asked for at a time.
    check_equal("questions of a batch", [one[:2] for one in asked], [("max_tool_calls", 3)])

    # A sub-agent's step asks for the caps around it.
    if "tool" in driver.subagents:
        asked.clear()
        answers = [{"max_model_calls": 4}]
        inner = Script([says("Found.")])
        helper = Tool("helper", agent=Agent(name="helper", script=inner))
        script = Script([calls("helper"), says("Here.")])
        facts["tools"] = [helper]
        ran, _ = act(driver, mode, script, guard=Budget(max_model_calls=1), **facts)
        check_completed(ran)
        check_equal("model calls of the sub-agent", inner.calls, 1)
        check_equal("questions of the sub-agent", asked, [("max_model_calls", 1, 1)])
