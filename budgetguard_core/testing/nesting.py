"""Clauses 26, 27, 30, 41, 45 and 46: runs inside runs and blocks, and beside one another."""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from budgetguard_core.budget import Budget
from budgetguard_core.decision import Admit, ModelCall
from budgetguard_core.events import Event, ModelCallAdmitted, Tripped
from budgetguard_core.guard import Guard
from budgetguard_core.stop import StopReason
from budgetguard_core.testing.checks import (
    act,
    check_completed,
    check_equal,
    check_stopped,
    in_threads,
    search_tool,
    shape_of,
    sticky,
)
from budgetguard_core.testing.conformance import check_history
from budgetguard_core.testing.driver import Driver, Nested, check_parts, run_in_loop
from budgetguard_core.testing.failures import expect
from budgetguard_core.testing.scenario import Mode, Ran, Scenario
from budgetguard_core.testing.script import Agent, Reply, Script, Tool, calls, says
from budgetguard_core.usage import TokenUsage


def nest(
    outer: Driver,
    inner: Driver,
    mode: Mode,
    guard: Budget | Guard,
    budget: Budget | Guard,
    *,
    script: Script | None = None,
) -> tuple[Ran, Script, Script]:
    """Nest a run, whose model never comes to an end, in a tool of another.

    Args:
        outer: Does the run around.
        inner: Does the run in the body of the tool `ask`.
        mode: The way into both.
        guard: The budget of the run around.
        budget: The budget of the run inside.
        script: The model of the run around; it asks once, and is done.

    Returns:
        The report of the run around, and the scripts of both.
    """
    script = script or Script([calls("ask"), says("I know enough.")])
    below = sticky("search")
    inside = Scenario(script=below, mode=mode, guard=budget, tools=[search_tool()])
    ran, _ = act(outer, mode, script, guard=guard, tools=[Tool("ask", runs=Nested(inner, inside))])
    return ran, script, below


def model_calls_in_flight(guard: Guard) -> list[Admit]:
    """List what was never settled; tool calls that a stop interrupted may stay open."""
    return [ticket for ticket in guard.open_calls() if isinstance(ticket.call, ModelCall)]


def check_nesting(outer: Driver, inner: Driver, mode: Mode) -> None:
    """Check that a run inside another one spends the budget around it, exactly.

    Raises:
        NonConformance: It does not.
        DriverError: A driver ignored a part of the scenario.
    """
    guard = Guard(Budget(max_model_calls=4))
    ran, script, below = nest(outer, inner, mode, guard, Budget(max_iterations=50))
    check_equal("model calls around and inside", (script.calls, below.calls), (1, 3))
    outcome = check_stopped(ran, StopReason.MAX_MODEL_CALLS)
    check_equal("model calls counted", guard.usage.model_calls, 4)
    check_equal("tokens counted", outcome.usage.total_tokens, 4 * 120)
    check_equal("model calls in flight", model_calls_in_flight(guard), [])

    guard = Guard(Budget(max_model_calls=9))
    ran, script, below = nest(outer, inner, mode, guard, Budget(max_iterations=2))
    check_equal(
        "model calls around and inside, stopped inside", (script.calls, below.calls), (2, 2)
    )
    check_completed(ran)
    check_equal("model calls counted, stopped inside", guard.usage.model_calls, 4)


def check_other_tree(outer: Driver, inner: Driver, mode: Mode) -> None:
    """Check that a guard of another tree inside a run is charged beside the run's own.

    Raises:
        NonConformance: It is not.
        DriverError: A driver ignored a part of the scenario.
    """
    guard, other = Guard(Budget(max_model_calls=4)), Guard(Budget(max_model_calls=100))
    ran, script, below = nest(outer, inner, mode, guard, other)
    check_equal("model calls around and inside, another tree", (script.calls, below.calls), (1, 3))
    check_stopped(ran, StopReason.MAX_MODEL_CALLS)
    used = guard.usage.model_calls, other.usage.model_calls
    check_equal("model calls counted around and beside", used, (4, 3))
    check_equal("model calls in flight beside", model_calls_in_flight(other), [])

    guard, other = Guard(Budget(max_model_calls=9)), Guard(Budget(max_model_calls=2))
    ran, script, below = nest(outer, inner, mode, guard, other)
    check_equal("model calls, stopped beside", (script.calls, below.calls), (2, 2))
    check_completed(ran)
    used = guard.usage.model_calls, other.usage.model_calls
    check_equal("model calls counted, stopped beside", used, (4, 2))
    check_equal("model calls in flight around", model_calls_in_flight(guard), [])


def nested(driver: Driver, mode: Mode) -> None:
    """Clause 26, with the adapter inside itself."""
    check_nesting(driver, driver, mode)
    check_other_tree(driver, driver, mode)


def _scenario(mode: Mode, **facts: Any) -> Scenario:
    return Scenario(script=sticky("search"), mode=mode, tools=[search_tool()], **facts)


def activated(driver: Driver, mode: Mode) -> None:
    """Clause 27."""
    guard = Guard(Budget(max_model_calls=3))
    scenario = _scenario(mode, guard=Budget(max_iterations=9))
    with guard.activate():
        ran = driver.run(scenario)
    check_parts(driver, scenario)
    check_equal("model calls in the block", scenario.script.calls, 3)
    check_stopped(ran, StopReason.MAX_MODEL_CALLS)
    check_equal("model calls counted", guard.usage.model_calls, 3)

    beside = Guard(Budget(max_iterations=9))
    guard = Guard(Budget(max_model_calls=3))
    scenario = _scenario(mode, guard=beside)
    with guard.activate():
        ran = driver.run(scenario)
    check_equal("model calls of a guard in the block", scenario.script.calls, 3)
    check_stopped(ran, StopReason.MAX_MODEL_CALLS)
    used = guard.usage.model_calls, beside.usage.model_calls
    check_equal("model calls counted by both", used, (3, 3))

    guard = Guard(Budget(max_model_calls=5))
    scenarios = [_scenario(mode, guard=Budget(max_iterations=9)) for _ in range(2)]
    with guard.activate():
        contexts = [copy_context() for _ in scenarios]
    in_threads(
        *(
            lambda context=context, scenario=scenario: context.run(driver.run, scenario)
            for context, scenario in zip(contexts, scenarios, strict=True)
        )
    )
    check_equal("model calls in threads", sum(one.script.calls for one in scenarios), 5)
    check_equal("model calls counted in threads", guard.usage.model_calls, 5)
    if mode == "sync":
        return

    guard = Guard(Budget(max_model_calls=5))
    scenarios = [_scenario(mode, guard=Budget(max_iterations=9)) for _ in range(2)]

    async def tasks() -> None:
        with guard.activate():
            started = [asyncio.create_task(driver.run_async(one)) for one in scenarios]
        await asyncio.gather(*started)

    run_in_loop(tasks(), patience=driver.patience)
    check_equal("model calls in tasks", sum(one.script.calls for one in scenarios), 5)
    check_equal("model calls counted in tasks", guard.usage.model_calls, 5)


def not_an_answer(driver: Driver, mode: Mode) -> None:
    """Clause 30."""

    def agent(script: Script, budget: Budget | None = None) -> Agent:
        return Agent(name="judge", script=script, tools=[search_tool()], budget=budget)

    def asked(tool: Tool) -> tuple[Ran, Scenario]:
        script = Script([calls("ask"), says("It is fine.")])
        return act(driver, mode, script, guard=Guard(Budget(max_model_calls=3)), tools=[tool])

    def judged(judge: Agent) -> tuple[Ran, Scenario]:
        script = Script([says("It is fine.")])
        return act(driver, mode, script, guard=Guard(Budget(max_model_calls=2)), judge=judge)

    ran, scenario = asked(Tool("ask", agent=agent(Script([says("yes")]))))
    check_completed(ran)
    check_equal("model calls", scenario.script.calls, 2)
    for budget in (None, Budget(max_iterations=9)):
        judge = agent(sticky("search"), budget)
        ran, scenario = asked(Tool("ask", agent=judge))
        _check_unread(ran, scenario, judge.script, 1, 2)
    # A run of its own, that is no sub-agent in the framework's eyes.
    budget = Budget(max_iterations=9)
    below = sticky("search")
    inside = Scenario(script=below, mode=mode, guard=budget, tools=[search_tool()])
    ran, scenario = asked(Tool("ask", runs=Nested(driver, inside)))
    _check_unread(ran, scenario, below, 1, 2)
    if not driver.has("judge"):
        return
    ran, scenario = judged(agent(Script([says("yes")])))
    outcome = check_completed(ran)
    check_equal("answers that the check has read", scenario.answers, ["yes"])
    check_equal("model calls counted", outcome.usage.model_calls, 2)
    for budget in (None, Budget(max_iterations=9)):
        judge = agent(sticky("search"), budget)
        ran, scenario = judged(judge)
        _check_unread(ran, scenario, judge.script, 0, 2)


def _check_unread(ran: Ran, scenario: Scenario, below: Script, around: int, inside: int) -> None:
    expect(scenario.answers == [], f"the user's code has read {scenario.answers} as an answer")
    check_equal(
        "model calls around and inside", (scenario.script.calls, below.calls), (around, inside)
    )
    check_stopped(ran, StopReason.MAX_MODEL_CALLS)


_TOGETHER = 2.0
"""Seconds that a call of a fan-out waits for the others, where nothing says that they have come."""


def pools(driver: Driver, mode: Mode) -> None:
    """Clause 41."""
    guard = Guard(Budget(max_model_calls=5))
    scenarios = [_scenario(mode, guard=Budget(max_iterations=9)) for _ in range(3)]
    with guard.activate(), ThreadPoolExecutor(2) as pool:
        first = threading.Thread(target=driver.run, args=(scenarios[0],))
        first.start()
        for started in [pool.submit(driver.run, one) for one in scenarios[1:]]:
            started.result()
        first.join()
    check_equal("model calls in threads", sum(one.script.calls for one in scenarios), 5)
    check_equal("model calls counted in threads", guard.usage.model_calls, 5)


def fan_out(driver: Driver, mode: Mode) -> None:
    """Clause 45."""
    width, cap, answer = 6, 3_000, 900
    ready = threading.Event()
    waiting = itertools.count(1)

    def heard(event: Event) -> None:
        # Nobody answers before all have been let in, or one has been refused.
        if isinstance(event, Tripped) or (
            isinstance(event, ModelCallAdmitted) and next(waiting) == width
        ):
            ready.set()

    def reply(_: int) -> Reply:
        ready.wait(_TOGETHER)
        return says("A long answer.", TokenUsage(100, answer))

    guard = Guard(Budget(max_total_tokens=cap), sinks=[heard])
    scripts = [Script(reply) for _ in range(width)]
    in_threads(
        *(lambda script=script: act(driver, mode, script, guard=guard) for script in scripts)
    )
    made = sum(script.calls for script in scripts)
    expect(1 <= made < width, f"{made} of {width} calls were let in under {cap} tokens")
    used = guard.usage.total_tokens
    expect(used <= cap, f"{used} tokens under {cap}, with answers of {answer}")


def imported(driver: Driver, mode: Mode) -> None:
    """Clause 46."""

    def run() -> tuple[Ran, Script]:
        script = Script(lambda number: calls("search") if number < 4 else says("Done."))
        search = Tool("search", lambda number, _: f"result {number}")
        scenario = Scenario(script=script, mode=mode, guard=None, tools=[search])
        ran = driver.run(scenario)
        check_parts(driver, scenario)
        return ran, script

    before, _ = run()
    guard = Guard(Budget(max_model_calls=3))
    with guard.activate():
        ran, script = run()
    check_equal("model calls in the block", script.calls, 3)
    check_equal("model calls counted", guard.usage.model_calls, 3)
    check_history(ran.history)
    after, script = run()
    check_equal("model calls behind the block", script.calls, 5)
    check_equal("history behind the block", shape_of(after.history), shape_of(before.history))
