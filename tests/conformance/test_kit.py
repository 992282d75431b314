"""The suite itself: what it finds in histories, scripts and drivers that break the contract."""

from __future__ import annotations

import asyncio
from contextvars import Context
from dataclasses import replace

import pytest

from budgetguard_core import Budget, Guard, Mode
from budgetguard_core.kit import Run, TokenUsage
from budgetguard_core.testing import (
    CLAUSES,
    MODES,
    Agent,
    Call,
    Clause,
    Driver,
    DriverError,
    ManualClock,
    Message,
    Nested,
    NonConformance,
    ProviderError,
    Ran,
    Reply,
    Scenario,
    Scratch,
    Script,
    Tool,
    breakers,
    calls,
    check,
    check_history,
    check_request,
    hang,
    perform,
    run_in_loop,
    says,
)
from budgetguard_core.testing.trial import Trial
from conformance.drivers import drivers_of, is_installed


def asks(*ids):
    return Message(role="assistant", tool_calls=tuple((id_, "search") for id_ in ids))


def answer(id_):
    return Message(role="tool", tool_call_id=id_)


USER = Message(role="user", text="Go.")
END = Message(role="assistant", text="Done.")


@pytest.mark.parametrize(
    "history",
    [
        [],
        [USER, END],
        [Message(role="system"), Message(role="system"), USER, END],
        [USER, asks("a", "b"), answer("b"), answer("a"), END, USER, END],
    ],
)
def test_a_history_that_a_provider_takes(history):
    check_history(history)


@pytest.mark.parametrize(
    ("history", "problem"),
    [
        ([USER, asks("a")], "no result for"),
        ([USER, asks("a"), USER], "before the results"),
        ([USER, asks("a"), answer("a"), answer("a")], "is not open"),
        ([USER, answer("a")], "is not open"),
        ([USER, END, END], "follows another one"),
        ([USER, USER], "follows another one"),
    ],
)
def test_a_history_that_a_provider_refuses(history, problem):
    with pytest.raises(NonConformance, match=problem):
        check_history(history)


def test_a_script_repeats_its_last_reply_under_new_call_ids():
    script = Script([calls("a", Call("b", id="fixed")), calls("c")])
    first, second, third = (script.next(f"prompt {n}") for n in range(3))
    assert first.tool_calls[1].id == "fixed"
    assert {call.name for call in (*second.tool_calls, *third.tool_calls)} == {"c"}
    assert second.tool_calls[0].id != third.tool_calls[0].id
    assert (script.calls, script.sent) == (3, ["prompt 0", "prompt 1", "prompt 2"])


def test_a_script_moves_its_clock():
    clock = ManualClock()
    Script([Reply(text="slow", seconds=2.5)], clock=clock).next("")
    assert clock.monotonic_ns() == 2_500_000_000


def test_a_tool_fails_as_told_and_knows_its_number():
    with pytest.raises(ValueError, match="broken"):
        Tool("search", error=ValueError("broken")).run("")
    tool = Tool("search", lambda number, value: f"{number} {value}")
    assert [tool.run("x"), tool.run("y")] == ["0 x", "1 y"]


def test_tasks_that_are_left_behind_are_named():
    tasks = []

    async def leak():
        tasks.append(asyncio.create_task(hang(), name="left"))

    assert run_in_loop(leak()) == (None, ("left",))


class Unguarded(Driver):
    """A working driver whose guard does nothing. Its models come to an end at some time."""

    adapter = "budgetguard_nothing"

    def __init__(self, driver, clause):
        self.driver = driver
        # Its hung calls hang for ever.
        self.patience = 0.5 if clause.number == 6 else Driver.patience
        self.name = f"{driver.name}, off"
        self.lacks = driver.lacks
        self.subagents = driver.subagents
        self.usage_records = driver.usage_records

    # In a context of its own, where no `activate` block is seen either.

    def run_sync(self, scenario):
        return Context().run(self.driver.run_sync, self.off(scenario))

    async def run_async(self, scenario):
        work = self.driver.run_async(self.off(scenario))
        return await asyncio.create_task(work, context=Context())

    def off(self, scenario):
        # Two agents that talk to each other are never done: one of them has to fail.
        end(scenario.script, says("Done.") if scenario.dialogue is None else FAILS)
        for tool in scenario.tools:
            if tool.agent is not None:
                end(tool.agent.script)
                # Its own budget would hold without the guard around it.
                tool.agent = replace(tool.agent, budget=None)
        for agent in (*scenario.handoffs, scenario.graph, scenario.judge):
            if agent is not None:
                end(agent.script)
        guard = None if scenario.guard is None else Guard(Budget(), mode=Mode.OFF)
        return replace(scenario, guard=guard)


FAILS = Reply(error=ProviderError("nobody listens any more"))


def end(script, last=says("Done.")):  # noqa: B008 - never changed
    """Have a sticky model be done after a while."""
    replies = script._replies
    if not isinstance(replies, Ending):
        script._replies = Ending(replies, last)


class Ending:
    def __init__(self, replies, last):
        self.replies, self.last = replies, last

    def __call__(self, number):
        if number >= 30:
            return self.last
        replies = self.replies
        return replies(number) if callable(replies) else replies[min(number, len(replies) - 1)]


# How each clause fails where no guard holds anything: by its own words, and not by an accident.
MAX_ITERATIONS = "ended completed .* expected .*max_iterations"
REASONS = {
    2: MAX_ITERATIONS,
    3: "ended completed .* expected .*max_tool_calls",
    4: "tool bodies: .*'search', 'search'",
    5: "ended completed .* expected .*max_total_tokens",
    6: "ended completed .* expected .*max_seconds|did not end within",
    7: "ended completed .* expected .*aborted",
    8: "ended completed .* expected .*no_progress",
    9: "ended completed .* expected .*oscillation",
    10: MAX_ITERATIONS,
    11: "ended completed .* expected .*max_tool_calls",
    12: "total_tokens counted: 0, expected 1000",
    13: MAX_ITERATIONS,
    14: MAX_ITERATIONS,
    15: MAX_ITERATIONS,
    16: r"observed: \[\], expected",
    17: "model_calls counted: 0, expected 4",
    18: "ended completed .* expected .*max_model_calls",
    19: "model_calls counted: 0, expected 4",
    20: "ended completed .* expected .*max_model_calls",
    21: MAX_ITERATIONS,
    22: MAX_ITERATIONS,
    23: MAX_ITERATIONS,
    25: MAX_ITERATIONS,
    26: r"model calls around and inside: \(2, 31\)",
    27: "ended completed .* expected .*max_model_calls",
    28: "model_calls counted: 0, expected 2",
    29: r"run_ended events: \[\]",
    30: "has read .* as an answer",
    31: "model_calls counted: 0, expected 4",
    32: "nobody listens any more",
    33: "the request's bound is None",
    35: "input_tokens of .*: 0, expected 100",
    36: "stop reason: 'completed', expected 'max_iterations'",
    37: "ended completed .* expected .*no_progress",
    38: "Max turns .* exceeded",
    39: "Max turns .* exceeded",
    40: "ended completed .* expected .*framework_limit",
    41: "model calls in threads: 93, expected 5",
    42: "the tool's body did not trip the guard",
    44: "ended paused .* expected .*max_tool_calls",
    45: "6 of 6 calls were let in",
    46: r"model calls in the block: \(5, 0\)",
    47: "ended completed .* expected .*velocity",
    48: "ended completed .* expected .*stalled",
    49: "tool bodies: .*'search', 'search'",
    50: "tool_calls counted: 0, expected 2",
    51: "ended completed .* expected .*circuit_open",
    52: r"when it was told: \[\], expected \[20\]",
    53: r"observed: \[\], expected",
    54: "ended completed .* expected .*max_seconds",
    55: MAX_ITERATIONS,
    56: "requests with the words",
    57: "cost_usd counted",
    58: "ended completed .* expected .*max_model_calls",
    59: "ended completed .* expected .*max_model_calls",
}
# They ask that a guard leaves something alone, which one that does nothing does.
TRIVIAL = {
    1: "nothing is added within the caps",
    24: "nothing is said of the budget",
    34: "nothing is kept of a run",
    43: "nothing is added to what is stored",
}


def unguarded(clause):
    """A driver that has what the clause needs; the plain loop needs no framework."""
    adapters = ("budgetguard_loop", "budgetguard_openai_agents")
    found = [d for a in adapters if is_installed(a) for d in drivers_of(a)]
    return next((Unguarded(d, clause) for d in found if clause.lacking(d) is None), None)


def test_every_clause_says_how_it_fails_or_why_it_cannot():
    assert sorted(REASONS | TRIVIAL) == [clause.number for clause in CLAUSES]


@pytest.mark.sample(7)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: f"{clause.number:02}")
def test_every_clause_fails_without_a_guard(clause, mode):
    driver = unguarded(clause)
    if driver is None or mode not in clause.modes:
        pytest.skip("no driver has what it needs")
    if clause.number in TRIVIAL:
        clause.check(Trial(driver, mode))
        return
    with pytest.raises(NonConformance, match=REASONS[clause.number]):
        clause.check(Trial(driver, mode))


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (breakers._wait_too_long, "ended terminated .velocity.* expected .*max_seconds"),
        (breakers._wait_for_a_token, "the third call started after"),
        (breakers._wait_for_a_slot, r"when each began: \[0, 0, 0\]"),
    ],
)
def test_an_adapter_that_does_not_wait_fails(monkeypatch, part, reason):
    def at_once(_, call):
        return call
        yield

    monkeypatch.setattr(Run, "waited", at_once)
    with pytest.raises(NonConformance, match=reason):
        part(Trial(drivers_of("budgetguard_loop")[0], "async"))


# What the suite says of drivers


class Deaf(Driver):
    """A driver that does not do all of what it is told."""

    adapter = "budgetguard_deaf"
    name = "deaf"
    modes = ("sync",)

    def __init__(self, *parts, deviations=None, raises=None):
        self.parts = parts
        self.deviations = deviations or {}
        self.raises = raises

    def run_sync(self, scenario):
        for part in self.parts:
            getattr(scenario, part)
        for tool in scenario.tools if "tools" in self.parts else ():
            scenario.call(tool)
        scenario.script.next("a prompt")
        if self.raises is not None:
            raise self.raises
        return Ran(history=())

    async def run_async(self, scenario):
        raise NotImplementedError


def given(reply=None, **facts):
    facts = {"guard": None, "mode": "sync", **facts}
    return Scenario(script=Script([reply or says("Done.")]), **facts)


@pytest.mark.parametrize(
    ("facts", "ignored"),
    [
        ({"retries": 2}, "guard, retries"),
        ({"tools": [Tool("a")]}, "guard, tools"),
        ({"user_input": "Hello?"}, "guard, user_input"),
        ({"judge": Agent(name="judge", script=Script([]))}, "guard, judge"),
    ],
)
def test_a_driver_that_ignores_a_part_fails(facts, ignored):
    with pytest.raises(DriverError, match=f"deaf ignores {ignored}, Reply.text, which"):
        perform(Deaf(), given(**facts))
    assert perform(Deaf("guard", *facts), given(Reply(), **facts)).outcome is None


def test_a_driver_that_leaves_early_streams_where_it_is_told_to():
    with pytest.raises(DriverError, match="ignores break_after"):
        perform(Deaf("guard"), given(Reply(), break_after=1))
    perform(Deaf("guard", "break_after"), given(Reply(), break_after=1))


def test_a_driver_that_ignores_a_part_of_a_tool_fails():
    tool = Tool("a", description="Does it.", approval=True, hang=True, agent=SUB_AGENT)
    with pytest.raises(DriverError, match=r"Tool.description, Tool.approval, Tool.agent, Tool.h"):
        perform(Deaf("guard", "tools"), given(Reply(), tools=[tool]))


@pytest.mark.parametrize(
    ("reply", "ignored"),
    [
        (says("Done."), "Reply.text"),
        (calls("a"), "Reply.tool_calls"),
        (Reply(handoff="other"), "Reply.handoff"),
        (Reply(usage=None), "Reply.usage"),
        (Reply(usage=None, record={}), "Reply.record"),
        (Reply(error=ProviderError("down"), text="lost"), "Reply.error"),
        (Reply(hang=True, text="lost"), "Reply.hang"),
    ],
)
def test_a_driver_that_ignores_a_part_of_a_reply_fails(reply, ignored):
    with pytest.raises(DriverError, match=f"deaf ignores {ignored}, which"):
        perform(Deaf("guard"), given(reply))


def test_what_an_earlier_scenario_on_the_same_object_has_used_is_used():
    tools, shared = [Tool("a")], Scratch()
    perform(
        Deaf("guard", "tools", "retries"), given(Reply(), tools=tools, retries=1, shared=shared)
    )
    perform(Deaf("guard"), given(Reply(), tools=tools, retries=1, shared=shared))
    for other in ({"tools": [Tool("a")]}, {"retries": 2}):
        with pytest.raises(DriverError, match=f"ignores {next(iter(other))}, which"):
            perform(Deaf("guard"), given(Reply(), shared=shared, **other))


SUB_AGENT = Agent(name="sub", script=Script([]), tools=[Tool("deep")], budget=Budget())


def test_a_driver_that_ignores_the_budget_of_a_sub_agent_fails():
    agent = Agent(name="sub", script=Script([Reply()]), tools=[Tool("b")], budget=Budget())
    tool = Tool("a", agent=agent)

    class Asking(Deaf):
        def run_sync(self, scenario):
            scenario.tools[0].agent.script.next("a prompt")
            return super().run_sync(scenario)

    with pytest.raises(DriverError, match=r"ignores Agent.budget, Agent.tools, which"):
        perform(Asking("guard", "tools"), given(Reply(), tools=[tool]))


def test_a_driver_that_ignores_a_part_of_a_nested_run_fails():
    inside = given(Reply(), retries=2)
    tool = Tool("ask", runs=Nested(Deaf("guard"), inside))
    with pytest.raises(DriverError, match=r"ignores retries \(nested\), which"):
        perform(Deaf("guard", "tools"), given(Reply(), tools=[tool]))


class Swallows(Deaf):
    def run_sync(self, scenario):
        try:
            return super().run_sync(scenario)
        except KeyError:
            return Ran(history=())


def test_what_a_nested_driver_raises_is_raised_though_a_framework_swallows_it():
    tool = Tool("ask", runs=Nested(Deaf("guard", raises=KeyError("mine")), given(Reply())))
    with pytest.raises(KeyError, match="mine"):
        perform(Swallows("guard", "tools"), given(Reply(), tools=[tool]))


async def test_a_nested_run_raises_what_the_framework_raised():
    class Raising(Deaf):
        async def run_async(self, scenario):
            if self.raises is not None:
                raise self.raises
            return Ran(history=(), raised=ValueError("of the framework"))

    nested = Nested(Raising(), given())
    with pytest.raises(ValueError, match="of the framework"):
        await nested.run_async()
    assert (len(nested.ran), nested.failures) == (1, [])
    nested = Nested(Raising(raises=KeyError("mine")), given())
    with pytest.raises(KeyError):
        await nested.run_async()
    assert len(nested.failures) == 1


def test_a_deviation_is_satisfied_by_the_contract_alone():
    def fails(at):
        raise NonConformance("it does not hold")

    def breaks(at):
        raise KeyError("the driver is broken")

    driver = Deaf(deviations={2: "It cannot."})
    Clause(2, "it holds", fails).judge(driver, "sync")
    with pytest.raises(KeyError):
        Clause(2, "it holds", breaks).judge(driver, "sync")
    with pytest.raises(DriverError, match=r"clause 2 holds .* Take it out"):
        Clause(2, "it holds", lambda at: None).judge(driver, "sync")


def test_the_report_says_what_fails_and_why():
    with pytest.raises(NonConformance) as raised:
        check(Deaf(raises=KeyError("the driver is broken")), clauses=[2, 22])
    assert str(raised.value).splitlines() == [
        "deaf: 1 of 1 cases fail",
        " 2 sync     fails    exactly `max_iterations` calls reach the model: "
        "KeyError: 'the driver is broken'",
    ]


def test_the_report_shows_a_deviation_with_its_reason():
    (loop,) = (one for one in drivers_of("budgetguard_loop") if 17 in one.deviations)
    cases = check(loop, clauses=[17]).cases
    assert {case.verdict for case in cases} == {"deviates"}
    assert cases[0].detail == loop.deviations[17]


def test_a_run_that_does_not_end_does_not_conform():
    with pytest.raises(NonConformance, match=r"did not end within 0.1 s"):
        run_in_loop(hang(), patience=0.1)

    async def slow():
        raise TimeoutError("of the framework")

    with pytest.raises(TimeoutError, match="of the framework"):
        run_in_loop(slow())


def test_a_reply_is_cut_where_the_bound_of_its_request_is():
    script = Script([Reply(text="0123456789", usage=TokenUsage(5, 100))])
    cut = script.next("", bound=40)
    assert (cut.text, cut.cut, cut.usage) == ("0123", True, TokenUsage(5, 40))
    assert script.next("", bound=100).cut is False
    assert script.bounds == [40, 100]


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ([], "empty"),
        ([END, USER], "begins with"),
        ([USER, END], "ends with"),
        ([USER, Message(role="assistant"), USER], "is empty"),
        ([USER, asks("a"), answer("a"), END, USER, asks("a"), answer("a")], "the same id"),
    ],
)
def test_a_request_that_a_strict_provider_refuses(request_, problem):
    with pytest.raises(NonConformance, match=problem):
        check_request(request_)


def test_a_request_that_a_strict_provider_answers():
    check_request(
        [Message(role="system", text="Be kind."), USER, asks("a", "b"), answer("a"), answer("b")]
    )
