"""Clauses 31, 32 and 35: what models and providers send."""

from __future__ import annotations

from budgetguard_core.budget import Budget
from budgetguard_core.events import Event
from budgetguard_core.guard import Guard
from budgetguard_core.stop import StopReason
from budgetguard_core.testing.checks import (
    act,
    check_completed,
    check_equal,
    check_nudge,
    check_stopped,
    outcome_of,
    search_tool,
)
from budgetguard_core.testing.conformance import check_history
from budgetguard_core.testing.driver import Driver
from budgetguard_core.testing.failures import expect
from budgetguard_core.testing.scenario import Mode
from budgetguard_core.testing.script import Agent, Call, Reply, Script, Tool, calls, says
from budgetguard_core.usage import estimate_tokens

_SLACK = 0.3


def equal_ids(driver: Driver, mode: Mode) -> None:
    """Clause 31."""

    def same(*names: str) -> Reply:
        return calls(*(Call(name, id="call_0") for name in names))

    tools = [search_tool(), Tool("read", "what was read")]
    done = says("Done.")
    in_turns = [same("search"), same("read"), same("search")]
    in_a_batch = [same("search"), same("read", "search")]
    cases = (
        ([*in_turns, done], in_turns, 3),
        ([same("search", "read"), done], in_a_batch, 2),
    )
    for replies, runaway, asked in cases:
        script = Script(replies)
        guard = Guard(Budget(max_iterations=9))
        ran, scenario = act(driver, mode, script, guard=guard, tools=tools)
        outcome = check_completed(ran)
        check_equal("model calls", (script.calls, outcome.usage.model_calls), (len(replies),) * 2)
        check_equal("results", len([one for one in ran.history if one.role == "tool"]), asked)
        counted = outcome.usage.tool_calls
        check_equal("tool calls counted and started", counted, len(scenario.started))
        check_equal("calls in flight", guard.open_calls(), ())

        # Under a cap each is a call of its own.
        script = Script(runaway)
        ran, scenario = act(driver, mode, script, guard=Budget(max_tool_calls=2), tools=tools)
        outcome = check_stopped(ran, StopReason.MAX_TOOL_CALLS)
        check_equal("tool bodies under a cap", len(scenario.started), 2)
        check_equal("tool calls counted under a cap", outcome.usage.tool_calls, 2)


def dialogue(driver: Driver, mode: Mode) -> None:
    """Clause 32."""
    events: list[Event] = []
    script = Script([says("After you.")])
    other = Agent(name="other", script=Script([says("No, after you.")]))
    guard = Guard(Budget(max_iterations=30), sinks=[events.append])
    ran, _ = act(driver, mode, script, guard=guard, dialogue=other)
    outcome = outcome_of(ran)
    expect(
        outcome.stop_reason in (StopReason.NO_PROGRESS, StopReason.OSCILLATION),
        f"ended {outcome.status} ({outcome.stop_reason}) after {script.calls} answers",
    )
    check_history(ran.history)
    expect(script.calls <= 10, f"{script.calls} answers that say the same")
    check_nudge(events, script, other.script)

    events.clear()
    script = Script(lambda number: says(f"Point {number} is new."))
    other = Agent(name="other", script=Script(lambda number: says(f"And so is {number * 7}.")))
    guard = Guard(Budget(max_iterations=14), sinks=[events.append])
    ran, _ = act(driver, mode, script, guard=guard, dialogue=other)
    check_stopped(ran, StopReason.MAX_ITERATIONS)


def every_usage(driver: Driver, mode: Mode) -> None:
    """Clause 35."""
    expect(driver.usage_records, "the driver gives no usage records")
    for record, meant in driver.usage_records:
        reply = Reply(text="Done.", record=record)
        ran, _ = act(driver, mode, Script([reply]), guard=Guard(Budget(max_iterations=9)))
        usage = check_completed(ran).usage
        for name in meant._fields[:-1]:
            check_equal(f"{name} of {record}", getattr(usage, name), getattr(meant, name))
        check_equal(f"estimated calls of {record}", usage.estimated_calls, 0)

    # Without usage: everything that was sent is estimated.
    asked = "Please look this up, and be careful about it. " * 40
    told = "Looks things up in the books, and says where it found them. " * 40
    answer = "It is in the third book on the left. " * 40
    ran, _ = act(
        driver,
        mode,
        Script([says(answer, None)]),
        guard=Guard(Budget(max_iterations=9)),
        tools=[Tool("search", description=told)],
        user_input=asked,
    )
    usage = check_completed(ran).usage
    check_equal("estimated calls", usage.estimated_calls, 1)
    for name, used, text in (
        ("input", usage.input_tokens, asked + told),
        ("output", usage.output_tokens, answer),
    ):
        real = estimate_tokens(text)
        expect(
            abs(used - real) <= _SLACK * real,
            f"{used} {name} tokens are estimated of {real} that were sent",
        )
