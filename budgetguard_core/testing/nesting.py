"""Clauses 26, 27, 30, 41, 45 and 46: runs inside runs and blocks, and beside one another."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

from budgetguard_core.budget import Budget
from budgetguard_core.decision import ModelCall
from budgetguard_core.events import Event, ModelCallAdmitted, Tripped
from budgetguard_core.guard import Guard
from budgetguard_core.stop import StopReason
from budgetguard_core.testing.driver import Driver, Nested, run_in_loop
from budgetguard_core.testing.message import check_history, expect
from budgetguard_core.testing.scenario import CallMode, Scenario
from budgetguard_core.testing.script import Agent, Reply, Script, Tool, calls, says
from budgetguard_core.testing.trial import (
    Done,
    Trial,
    check_equal,
    in_threads,
    search_tool,
    shape_of,
    sticky,
)
from budgetguard_core.usage import TokenUsage


def nest(
    outer: Driver, inner: Driver, mode: CallMode, guard: Budget | Guard, budget: Budget | Guard
) -> tuple[Done, Script]:
    """Nest a run, whose model never comes to an end, in a tool of another.

    Args:
        outer: Does the run around.
        inner: Does the run in the body of the tool `ask`.
        mode: The way into both.
        guard: The budget of the run around.
        budget: The budget of the run inside.

    Returns:
        The run around, whose model asks once and is done, and the script of the one inside.
    """
    below = sticky("search")
    inside = Nested(inner, Trial(inner, mode).scenario(below, budget))
    model = [calls("ask"), says("I know enough.")]
    return Trial(outer, mode).run(model, guard, Tool("ask", runs=inside)), below


def check_nesting(outer: Driver, inner: Driver, mode: CallMode) -> None:
    """Check that a run inside another one spends the budget around it, exactly.

    Raises:
        NonConformance: It does not.
        DriverError: A driver ignored a part of the scenario.
    """
    _check_nested(outer, inner, mode, None)


def check_other_tree(outer: Driver, inner: Driver, mode: CallMode) -> None:
    """Check that a guard of another tree inside a run is charged beside the run's own.

    Raises:
        NonConformance: It is not.
        DriverError: A driver ignored a part of the scenario.
    """
    _check_nested(outer, inner, mode, Guard)


def _check_nested(
    outer: Driver, inner: Driver, mode: CallMode, linked: Callable[[Budget], Guard] | None
) -> None:
    """Check two runs: one is stopped by the budget around it, the other by its own."""
    for enclosing, own, made in (
        (Budget(max_model_calls=4), Budget(max_model_calls=100), (1, 3)),
        (Budget(max_model_calls=9), Budget(max_model_calls=2), (2, 2)),
    ):
        guard = Guard(enclosing)
        budget = own if linked is None else linked(own)
        done, below = nest(outer, inner, mode, guard, budget)
        check_equal("model calls around and inside", (done.script.calls, below.calls), made)
        if made == (1, 3):
            done.stopped(StopReason.MAX_MODEL_CALLS)
        else:
            done.completed()
        check_equal("tokens counted", done.outcome.usage.total_tokens, 4 * 120)
        check_equal("model calls counted", guard.usage.model_calls, 4)
        guards = [guard]
        if isinstance(budget, Guard):
            check_equal("model calls counted beside", budget.usage.model_calls, below.calls)
            guards.append(budget)
        # Tool calls that a stop interrupted may stay open.
        tickets = [ticket for one in guards for ticket in one.open_calls()]
        flying = [one for one in tickets if isinstance(one.call, ModelCall)]
        check_equal("model calls in flight", flying, [])


def nested(at: Trial) -> None:
    """Clause 26, with the adapter inside itself."""
    check_nesting(at.driver, at.driver, at.mode)
    check_other_tree(at.driver, at.driver, at.mode)


def _runaway(at: Trial) -> Scenario:
    return at.scenario(sticky("search"), Budget(max_iterations=9))


def _check_calls(what: str, guard: Guard, made: int, scenarios: list[Scenario]) -> None:
    check_equal(f"model calls {what}", sum(one.script.calls for one in scenarios), made)
    check_equal(f"model calls counted {what}", guard.usage.model_calls, made)


def activated(at: Trial) -> None:
    """Clause 27."""
    for linked in (None, Guard(Budget(max_iterations=9))):
        guard = Guard(Budget(max_model_calls=3))
        with guard.activate():
            done = at.run(sticky("search"), linked or Budget(max_iterations=9))
        done.stopped(StopReason.MAX_MODEL_CALLS, calls=3)
        for one in (guard, linked or guard):
            check_equal("model calls counted", one.usage.model_calls, 3)

    guard = Guard(Budget(max_model_calls=5))
    scenarios = [_runaway(at) for _ in range(2)]
    with guard.activate():
        contexts = [copy_context() for _ in scenarios]
    in_threads(
        *(
            lambda context=context, one=one: context.run(at.driver.run, one)
            for context, one in zip(contexts, scenarios, strict=True)
        )
    )
    _check_calls("in threads", guard, 5, scenarios)
    if at.is_sync:
        return

    guard = Guard(Budget(max_model_calls=5))
    scenarios = [_runaway(at) for _ in range(2)]

    async def tasks() -> None:
        with guard.activate():
            started = [asyncio.create_task(at.driver.run_async(one)) for one in scenarios]
        await asyncio.gather(*started)

    run_in_loop(tasks(), patience=at.driver.patience)
    _check_calls("in tasks", guard, 5, scenarios)


def not_an_answer(at: Trial) -> None:
    """Clause 30."""

    def agent(script: Script, budget: Budget | None = None) -> Agent:
        return Agent(name="judge", script=script, tools=[search_tool()], budget=budget)

    def requested(tool: Tool) -> Done:
        model = [calls("ask"), says("It is fine.")]
        return at.run(model, Guard(Budget(max_model_calls=3)), tool)

    def judged(judge: Agent) -> Done:
        guard = Guard(Budget(max_model_calls=2))
        return at.run([says("It is fine.")], guard, tools=(), judge=judge)

    def check_unread(done: Done, below: Script, enclosing: int) -> None:
        answers = done.scenario.answers
        expect(answers == [], f"the user's code has read {answers} as an answer")
        done.stopped(StopReason.MAX_MODEL_CALLS, calls=enclosing)
        check_equal("model calls inside", below.calls, 2)

    requested(Tool("ask", agent=agent(Script([says("yes")])))).completed(calls=2)
    for budget in (None, Budget(max_iterations=9)):
        judge = agent(sticky("search"), budget)
        check_unread(requested(Tool("ask", agent=judge)), judge.script, 1)
    # A run of its own, that is no sub-agent in the framework's eyes.
    inside = _runaway(at)
    check_unread(requested(Tool("ask", runs=Nested(at.driver, inside))), inside.script, 1)
    if not at.has("judge"):
        return
    done = judged(agent(Script([says("yes")])))
    done.completed(model_calls=2)
    check_equal("answers that the check has read", done.scenario.answers, ["yes"])
    for budget in (None, Budget(max_iterations=9)):
        judge = agent(sticky("search"), budget)
        check_unread(judged(judge), judge.script, 0)


_TOGETHER = 2.0
"""Seconds that a call of a fan-out waits for the others, where nothing says that they have come."""


def pools(at: Trial) -> None:
    """Clause 41."""
    guard = Guard(Budget(max_model_calls=5))
    scenarios = [_runaway(at) for _ in range(3)]
    with guard.activate(), ThreadPoolExecutor(2) as pool:
        first = threading.Thread(target=at.driver.run, args=(scenarios[0],))
        first.start()
        for started in [pool.submit(at.driver.run, one) for one in scenarios[1:]]:
            started.result()
        first.join()
    _check_calls("in threads", guard, 5, scenarios)


def fan_out(at: Trial) -> None:
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
    in_threads(*(lambda script=script: at.run(script, guard, tools=()) for script in scripts))
    made = sum(script.calls for script in scripts)
    expect(1 <= made < width, f"{made} of {width} calls were let in under {cap} tokens")
    used = guard.usage.total_tokens
    expect(used <= cap, f"{used} tokens under {cap}, with answers of {answer}")


def imported(at: Trial) -> None:
    """Clause 46."""

    def run() -> Done:
        search = Tool("search", lambda number, _: f"result {number}")
        return at.run(lambda number: calls("search") if number < 4 else says("Done."), None, search)

    before = run()
    guard = Guard(Budget(max_model_calls=3))
    with guard.activate():
        done = run()
    check_equal("model calls in the block", (done.script.calls, guard.usage.model_calls), (3, 3))
    check_history(done.history)
    after = run()
    check_equal("model calls behind the block", after.script.calls, 5)
    check_equal("history behind the block", shape_of(after.history), shape_of(before.history))
