"""A cap that asks a person by an approval of the SDK: `on_trip="ask"`."""

from __future__ import annotations

import asyncio
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from agents import Agent, RunConfig, Runner, RunState, SQLiteSession, function_tool

from budgetguard_core import Budget, StopReason
from budgetguard_core.testing import ManualClock
from budgetguard_core.testing.scripted import Answers
from budgetguard_openai_agents import BudgetHooks, outcome
from budgetguard_openai_agents.scripted import scripted_model

NUMBERS = itertools.count()
SEARCH = {"search": {"query": "a"}}
QUIET = RunConfig(tracing_disabled=True)


@function_tool
def search(query: str) -> str:
    """Search."""
    return f"{query} {next(NUMBERS)}"


@function_tool(needs_approval=True)
def send(query: str) -> str:
    """Send."""
    return query


def _own_loop():
    asyncio.set_event_loop(asyncio.new_event_loop())


class Chat:
    """An agent whose runs go on from a state; saved, as in a process of its own."""

    def __init__(self, answers, budget, *, mode="async", saved=False, tools=(search,), **options):
        self.agent = Agent(name="one", model=scripted_model(Answers(answers)), tools=[*tools])
        self.budget, self.mode, self.saved = budget, mode, saved
        self.clock = options.pop("clock", None)
        self.options = options

    def call(self, given):
        facts = {} if self.clock is None else {"clock": self.clock}
        hooks = BudgetHooks(self.budget, on_trip="ask", **facts)
        options = {"hooks": hooks, "run_config": QUIET, **self.options}
        if self.mode == "sync":
            # In a thread, whose event loop the SDK makes and leaves to it.
            with ThreadPoolExecutor(1, initializer=_own_loop) as pool:
                done = pool.submit(Runner.run_sync, self.agent, given, **options).result()
                pool.submit(lambda: asyncio.get_event_loop().close()).result()
                return done
        return asyncio.run(self._run(given, options))

    async def _run(self, given, options):
        if isinstance(given, dict):
            given = await self._answered(given)
        if self.mode == "async":
            return await Runner.run(self.agent, given, **options)
        result = Runner.run_streamed(self.agent, given, **options)
        async for _ in result.stream_events():
            pass
        return result

    async def _answered(self, given):
        state = given["state"]
        if self.saved:
            state = await RunState.from_string(self.agent, state.to_string())
        for item in state.get_interruptions():
            state.approve(item) if given["yes"] else state.reject(item)
        return state

    def answer(self, result, yes=True):
        given = {"state": result.to_state(), "yes": yes}
        return self.call(asyncio.run(self._answered(given)) if self.mode == "sync" else given)


def asked(result):
    found = [json.loads(one.raw_item.arguments) for one in result.interruptions]
    return [(one["reason"], one["limit"], one["used"]) for one in found if "reason" in one]


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("mode", ["sync", "async", "streamed"])
def test_the_run_waits_for_more_budget_and_goes_on(mode, saved):
    chat = Chat([SEARCH] * 5 + ["Done."], Budget(max_iterations=2), mode=mode, saved=saved)
    result = chat.call("Go.")
    assert (asked(result), result.final_output) == ([("max_iterations", 2, 2)], None)
    assert result.interruptions[0].name == "budget_question"
    assert outcome(result).status == "paused"
    result = chat.answer(result)
    assert asked(result) == [("max_iterations", 4, 4)]
    chat.budget = Budget(max_iterations=40)  # another amount, as an answer
    result = chat.answer(result)
    assert (result.final_output, outcome(result).status) == ("Done.", "completed")
    assert outcome(result).usage.iterations == 6
    kinds = [one["type"] for one in result.to_input_list() if "type" in one]
    assert kinds == ["function_call", "function_call_output"] * 5 + ["message"]


@pytest.mark.parametrize("mode", ["sync", "async", "streamed"])
def test_a_rejection_is_the_end(mode):
    chat = Chat([SEARCH], Budget(max_iterations=2), mode=mode)
    result = chat.answer(chat.call("Go."), yes=False)
    ended = outcome(result)
    assert (ended.status, ended.stop_reason) == ("terminated", StopReason.MAX_ITERATIONS)
    assert (ended.usage.iterations, ended.errors, result.interruptions) == (2, (), [])


def test_while_nobody_answers_no_time_is_charged():
    clock = ManualClock()
    chat = Chat([SEARCH, "Done."], Budget(max_iterations=1, max_seconds=60), clock=clock)
    result = chat.call("Go.")
    clock.advance(10_000)
    result = chat.answer(result)
    assert outcome(result).status == "completed"
    assert outcome(result).usage.seconds < 1


@pytest.mark.parametrize("mode", ["async", "streamed"])
def test_a_batch_of_tools_over_its_cap_asks_and_is_asked_for_again(mode):
    both = [("search", {"query": "a"}), ("search", {"query": "b"})]
    chat = Chat([both, both, both, "Done."], Budget(max_tool_calls=3), mode=mode)
    result = chat.call("Go.")
    assert asked(result) == [("max_tool_calls", 3, 2)]
    result = chat.answer(result)
    assert (result.final_output, outcome(result).usage.tool_calls) == ("Done.", 4)


@pytest.mark.parametrize("mode", ["async", "streamed"])
def test_a_session_holds_each_item_once(mode):
    with closing(SQLiteSession("s")) as session:
        chat = Chat([SEARCH] * 2 + ["Done."], Budget(max_iterations=1), mode=mode, session=session)
        result = chat.answer(chat.answer(chat.call("Go.")))
        stored = asyncio.run(session.get_items())
    assert result.final_output == "Done."
    assert [one.get("type", one.get("role")) for one in stored] == [
        "user",
        *["function_call", "function_call_output"] * 2,
        "message",
    ]


def test_it_waits_beside_approvals_of_the_users_own():
    chat = Chat([{"send": {"query": "a"}}, "Done."], Budget(max_iterations=1), tools=[send])
    result = chat.call("Go.")
    assert [one.name for one in result.interruptions] == ["send"]
    result = chat.answer(result)
    assert asked(result) == [("max_iterations", 1, 1)]
    result = chat.answer(result)
    assert (result.final_output, outcome(result).usage.tool_calls) == ("Done.", 1)


def test_a_batch_over_the_cap_with_an_approval_in_it_asks_for_the_cap_first():
    both = [("send", {"query": "a"}), ("search", {"query": "b"})]
    chat = Chat([both, both, "Done."], Budget(max_tool_calls=1), tools=[send, search])
    result = chat.call("Go.")
    assert asked(result) == [("max_tool_calls", 1, 0)]
    chat.budget = Budget(max_tool_calls=9)
    result = chat.answer(result)
    assert [one.name for one in result.interruptions] == ["send"]
    result = chat.answer(result)
    assert (result.final_output, outcome(result).usage.tool_calls) == ("Done.", 2)


def test_an_agent_within_asks_for_the_caps_around_it():
    inner = Agent(name="helper", model=scripted_model(Answers([SEARCH, "Found."])), tools=[search])
    helper = inner.as_tool("helper", "Help.")
    chat = Chat(
        [{"helper": {"input": "Look."}}, "Done."], Budget(max_model_calls=2), tools=[helper]
    )
    result = chat.call("Go.")
    assert asked(result) == [("max_model_calls", 2, 2)]
    result = chat.answer(result)
    assert (result.final_output, outcome(result).usage.model_calls) == ("Done.", 4)
