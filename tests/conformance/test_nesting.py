"""Every adapter inside every adapter: one budget, in every way in.

The clauses have an adapter inside itself; here each has each other one inside, and the toy, which
stands for adapters that are not ours.
"""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from itertools import product

import pytest

import layout
from budgetguard_core import Budget, Guard, StopReason
from budgetguard_core.testing import MODES, Nested, Script, Tool, calls, says
from budgetguard_core.testing.driver import run_in_loop
from budgetguard_core.testing.nesting import check_nesting, check_other_tree, nest
from budgetguard_core.testing.trial import Trial, in_threads, sticky
from conformance.drivers import drivers_of, has_drivers, is_installed
from conformance.toy_driver import Toy

OURS = [
    driver
    for adapter in layout.adapters()
    if is_installed(adapter) and has_drivers(adapter)
    for driver in drivers_of(adapter)
]
DRIVERS = [*OURS, Toy()]


def name(driver):
    return f"{driver.adapter.removeprefix('budgetguard_')}.{driver.name}"


# One way in of each adapter for the largest products.
ONE_OF_EACH = list({driver.adapter: driver for driver in reversed(DRIVERS)}.values())[::-1]
PAIRS = [
    pytest.param(outer, inner, id=f"{name(outer)}-around-{name(inner)}")
    for outer, inner in product(DRIVERS, DRIVERS)
    if outer in ONE_OF_EACH or inner in ONE_OF_EACH
]
EACH = pytest.mark.parametrize("driver", DRIVERS, ids=name)
IN_EVERY_MODE = pytest.mark.parametrize("mode", MODES)


@pytest.mark.sample(11)
@IN_EVERY_MODE
@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_a_run_inside_spends_the_budget_around_it(outer, inner, mode):
    check_nesting(outer, inner, mode)


@pytest.mark.sample(7)
@IN_EVERY_MODE
@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        pytest.param(outer, inner, id=f"{name(outer)}-around-{name(inner)}")
        for outer, inner in product(ONE_OF_EACH, ONE_OF_EACH)
    ],
)
def test_a_guard_of_another_tree_inside_is_charged_beside(outer, inner, mode):
    check_other_tree(outer, inner, mode)


@IN_EVERY_MODE
def test_an_agent_in_a_tool_of_a_plain_loop_stops_at_the_loops_cap(mode):
    (agents,) = (one for one in ONE_OF_EACH if one.adapter == "budgetguard_openai_agents")
    (loop,) = (one for one in ONE_OF_EACH if one.adapter == "budgetguard_loop")
    guard = Guard(Budget(max_model_calls=3))
    done, below = nest(loop, agents, mode, guard, Budget(max_iterations=120))
    done.stopped(StopReason.MAX_MODEL_CALLS, calls=1)
    assert (below.calls, guard.usage.model_calls) == (2, 3)


@pytest.mark.sample(5)
@IN_EVERY_MODE
@EACH
def test_three_deep(driver, mode):
    """A budget around bounds what is two adapters below, and a budget between as well."""
    first, last = ONE_OF_EACH[0], ONE_OF_EACH[-1]
    for around, between, made in ((5, 50, (1, 1, 3)), (50, 3, (2, 1, 2))):
        below = sticky("search")
        inside = Trial(last, mode).scenario(below, Budget(max_iterations=50))
        middle = Script([calls("ask"), says("That is all.")])
        ask = Tool("ask", runs=Nested(last, inside))
        passing = Trial(first, mode).scenario(middle, Budget(max_model_calls=between), ask)
        top = Script([calls("ask"), says("I know enough.")])
        guard = Guard(Budget(max_model_calls=around))
        Trial(driver, mode).run(top, guard, Tool("ask", runs=Nested(first, passing)))
        assert (top.calls, middle.calls, below.calls) == made
        assert guard.usage.model_calls == sum(made)


@pytest.mark.sample(5)
@IN_EVERY_MODE
@EACH
def test_activate_around_a_run_that_has_another_one_inside(driver, mode):
    guard = Guard(Budget(max_model_calls=4))
    with guard.activate():
        inside = Budget(max_iterations=9)
        done, below = nest(driver, ONE_OF_EACH[0], mode, Budget(max_iterations=9), inside)
    done.stopped(StopReason.MAX_MODEL_CALLS, calls=1)
    assert (below.calls, guard.usage.model_calls) == (3, 4)


def runaways(guard, mode):
    """A run of each adapter on one guard, that would never end by itself."""
    return [
        (driver, Trial(driver, mode).scenario(sticky("search"), guard)) for driver in ONE_OF_EACH
    ]


@IN_EVERY_MODE
def test_runs_of_all_adapters_in_threads_share_one_guard_exactly(mode):
    guard = Guard(Budget(max_model_calls=23))
    runs = runaways(guard, mode)
    in_threads(*(lambda one=one: one[0].run(one[1]) for one in runs))
    assert sum(scenario.script.calls for _, scenario in runs) == 23
    assert guard.usage.model_calls == 23


@pytest.mark.parametrize("mode", MODES[1:])
def test_runs_of_all_adapters_in_tasks_share_one_guard_exactly(mode):
    guard = Guard(Budget(max_model_calls=23))
    runs = runaways(guard, mode)

    async def together():
        await asyncio.gather(*(driver.run_async(scenario) for driver, scenario in runs))

    run_in_loop(together())
    assert sum(scenario.script.calls for _, scenario in runs) == 23
    assert guard.usage.model_calls == 23


@IN_EVERY_MODE
def test_runs_of_all_adapters_in_an_activate_block_share_its_guard_exactly(mode):
    guard = Guard(Budget(max_model_calls=23))
    runs = runaways(Budget(max_iterations=99), mode)
    with guard.activate():
        contexts = [copy_context() for _ in runs]
    in_threads(
        *(
            lambda context=context, one=one: context.run(one[0].run, one[1])
            for context, one in zip(contexts, runs, strict=True)
        )
    )
    assert sum(scenario.script.calls for _, scenario in runs) == 23
    assert guard.usage.model_calls == 23
