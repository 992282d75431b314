"""Runs of Pydantic AI's agents under a budget: what only this framework has."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading

import pytest
from pydantic import BaseModel
from pydantic_ai import (
    Agent,
    DeferredToolRequests,
    DeferredToolResults,
    ModelRetry,
    NativeOutput,
    PromptedOutput,
    TextOutput,
    Tool,
    ToolOutput,
)
from pydantic_ai import messages as chat
from pydantic_ai.exceptions import ModelHTTPError, UsageLimitExceeded
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.usage import UsageLimits

from budgetguard_core import (
    AdapterError,
    Budget,
    BudgetExceeded,
    FinalizeReserve,
    Guard,
    StopReason,
)
from budgetguard_core.plugs import Plug
from budgetguard_core.testing.scripted import Answers
from budgetguard_pydantic_ai import BudgetCapability, _seams, outcome
from budgetguard_pydantic_ai.scripted import scripted_model
from pydantic_ai_agents import DOORS, checked, endless, model_of, ran


class Report(BaseModel):
    summary: str


class Other(BaseModel):
    words: int


def shout(text: str) -> int:
    return len(text)


TYPED = {
    "a model": Report,
    "an int": int,
    "a list": list[str],
    "one of two": [Report, Other],
    "a union": Report | Other,
    "a tool": ToolOutput(Report, name="answer"),
    "native": NativeOutput(Report),
    "prompted": PromptedOutput(Report),
    "a function of the text": TextOutput(shout),
    "with approvals": [Report, DeferredToolRequests],
}
SEARCH = {"search": {"query": "x"}}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", TYPED)
def test_a_stopped_typed_run_has_no_text_in_a_typed_place(kind, door):
    agent = endless(BudgetCapability(Budget(max_iterations=2)), output_type=TYPED[kind])
    result = ran(agent, door)
    assert result.output is None
    assert outcome(result).stop_reason == "max_iterations"
    checked(result.all_messages())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", [str, [Report, str], [str, DeferredToolRequests], str | Report])
def test_where_a_text_is_an_output_the_stop_is_one(kind, door):
    agent = endless(BudgetCapability(Budget(max_iterations=2)), output_type=kind)
    assert "stopped" in ran(agent, door).output


@pytest.mark.parametrize("door", DOORS)
def test_the_type_of_the_run_wins_over_that_of_the_agent(door):
    agent = endless(BudgetCapability(Budget(max_iterations=2)))
    assert ran(agent, door, output_type=Report).output is None
    agent = endless(BudgetCapability(Budget(max_iterations=2)), output_type=Report)
    assert "stopped" in ran(agent, door, output_type=str).output


@pytest.mark.parametrize("door", DOORS)
def test_a_run_that_may_not_begin_has_the_form_of_a_stopped_one(door):
    guard = Guard(Budget(max_iterations=1))
    ran(endless(BudgetCapability(guard)))
    result = ran(endless(BudgetCapability(guard), output_type=Report), door)
    assert result.output is None


RESERVE = Budget(
    max_total_tokens=4_000, max_iterations=2, finalize_reserve=FinalizeReserve(tokens=2_000)
)


@pytest.mark.parametrize("door", DOORS)
def test_a_typed_last_answer_is_asked_with_its_schema_and_parsed(door):
    answers = (SEARCH, SEARCH, {"final_result": {"summary": "Four pages."}})
    agent = endless(BudgetCapability(RESERVE), answers=answers, output_type=Report)
    result = ran(agent, door)
    assert result.output == Report(summary="Four pages.")
    assert outcome(result).usage.model_calls == 3
    assert "Four pages." in result.all_messages()[-1].text
    checked(result.all_messages())


def test_a_typed_last_answer_of_another_form_is_none():
    agent = endless(BudgetCapability(RESERVE), answers=(SEARCH, SEARCH, "No."), output_type=Report)
    result = ran(agent)
    assert result.output is None
    assert outcome(result).stop_reason == "max_iterations"


@pytest.mark.parametrize("door", [door for door in DOORS if "node.stream" not in door])
@pytest.mark.parametrize(
    "limits",
    [
        UsageLimits(request_limit=2),
        UsageLimits(tool_calls_limit=1),
        UsageLimits(total_tokens_limit=150),
    ],
    ids=["requests", "tool calls", "tokens"],
)
def test_a_limit_of_the_framework_ends_as_framework_limit(limits, door):
    agent = endless(BudgetCapability(Budget(max_iterations=9)))
    result = ran(agent, door, usage_limits=limits)
    assert outcome(result).stop_reason == "framework_limit"
    assert "stopped" in result.output
    checked(result.all_messages())


def test_without_a_budget_the_limits_of_the_framework_raise_as_ever():
    with pytest.raises(UsageLimitExceeded):
        ran(endless(), usage_limits=UsageLimits(request_limit=2))
    with pytest.raises(UsageLimitExceeded, match="50"):
        ran(endless())


def test_the_implied_limit_of_the_framework_does_not_fire_inside_the_caps():
    agent = endless(BudgetCapability(Budget(max_iterations=60)))
    assert outcome(ran(agent)).usage.iterations == 60


@pytest.mark.slow
def test_importing_is_enough_for_a_block():
    program = """
import asyncio
from pydantic_ai import Agent
import budgetguard_pydantic_ai
from budgetguard_core import Budget, Guard
from budgetguard_core.testing.scripted import Answers
from budgetguard_pydantic_ai.scripted import scripted_model

async def main():
    def search(query: str) -> str:
        return query
    model = scripted_model(Answers([{"search": {"query": "x"}}]))
    guard = Guard(Budget(max_iterations=3, loop_detection=None))
    with guard.activate():
        result = await Agent(model, tools=[search]).run("Go.")
    print(guard.usage.iterations, model.answers.calls, len(result.all_messages()))

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", program],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["3", "3", "8"]


def test_without_a_budget_a_run_is_what_it_is_without_us():
    def told(messages):
        return [
            (one.kind, [part.part_kind for part in one.parts], one.metadata) for one in messages
        ]

    bare = ran(endless(answers=(SEARCH, "Done.")))
    ours = ran(endless(BudgetCapability(Budget(max_iterations=5)), answers=(SEARCH, "Done.")))
    assert told(bare.all_messages()) == told(ours.all_messages())
    assert bare.output == ours.output == "Done."
    with pytest.raises(AdapterError, match="without an outcome"):
        outcome(bare)


@pytest.mark.parametrize(
    ("owner", "name"), [(o, n) for o, names in _seams.NEEDED.items() for n in names]
)
def test_a_private_name_that_is_missing_is_named(owner, name, monkeypatch):
    class Without:
        pass

    monkeypatch.setattr(_seams, "NEEDED", {Without: (name,)})
    with pytest.raises(AdapterError, match=name):
        _seams.check()


def approving(*answers, budget, **options):
    done: list[str] = []

    def delete(path: str) -> str:
        done.append(path)
        return f"deleted {path}"

    agent = Agent(
        model_of(*answers),
        tools=[Tool(delete, requires_approval=True)],
        output_type=[str, DeferredToolRequests],
        capabilities=[BudgetCapability(budget, **options)],
    )
    return agent, done


def test_a_paused_run_goes_on_under_its_counters_in_a_new_process():
    ask = {"delete": {"path": "a"}}
    budget = Budget(max_iterations=3, loop_detection=None)
    agent, _ = approving(ask, budget=budget)
    result = ran(agent)
    total = []
    for _ in range(3):
        found = outcome(result)
        total.append((found.status, found.usage.iterations))
        if found.status != "paused":
            break
        waiting = [one.tool_call_id for one in result.output.approvals]
        stored = chat.ModelMessagesTypeAdapter.dump_json(result.all_messages())
        agent, done = approving(ask, budget=budget)
        result = ran(
            agent,
            said=None,
            message_history=chat.ModelMessagesTypeAdapter.validate_json(stored),
            deferred_tool_results=DeferredToolResults(approvals=dict.fromkeys(waiting, True)),
        )
        assert done == ["a"]
    assert total == [("paused", 1), ("paused", 2), ("paused", 3)]
    assert outcome(result).status == "terminated"
    checked(result.all_messages())


def test_a_refused_approval_is_no_tool_call():
    agent, done = approving({"delete": {"path": "a"}}, "Then not.", budget=Budget(max_tool_calls=1))
    result = ran(agent)
    waiting = [one.tool_call_id for one in result.output.approvals]
    result = ran(
        agent,
        said=None,
        message_history=result.all_messages(),
        deferred_tool_results=DeferredToolResults(approvals=dict.fromkeys(waiting, False)),
    )
    assert (outcome(result).usage.tool_calls, done, result.output) == (0, [], "Then not.")


def test_retries_of_a_tool_and_of_an_output_are_turns():
    def search(query: str) -> str:
        raise ModelRetry("Another word, please.")

    agent = endless(
        BudgetCapability(Budget(max_iterations=3, loop_detection=None)),
        tools=[Tool(search, max_retries=9)],
    )
    result = ran(agent)
    found = outcome(result)
    assert (found.stop_reason, found.usage.iterations, found.usage.tool_calls) == (
        "max_iterations",
        3,
        3,
    )
    checked(result.all_messages())


def test_each_model_of_a_fallback_is_a_call():
    def dead(messages, info):
        raise ModelHTTPError(503, "dead")

    alive = model_of(SEARCH)
    model = FallbackModel(FunctionModel(dead), FunctionModel(dead), alive)
    agent = endless(BudgetCapability(Budget(max_model_calls=4)))
    result = ran(agent, model=model)
    assert outcome(result).usage.model_calls == 4
    assert alive.answers.calls == 1


def test_turns_on_one_history_are_valid_for_a_strict_provider():
    agent = endless(BudgetCapability(Budget(max_iterations=2)))
    messages = []
    for turn in range(4):
        result = ran(agent, said=f"Turn {turn}.", message_history=messages)
        messages = result.all_messages()
        checked(messages)
        assert outcome(result).usage.iterations == 2
        assert [one.metadata for one in messages if (one.metadata or {}).get("synthetic")]
    further = ran(agent, said=None, message_history=messages)
    checked(further.all_messages())
    assert outcome(further).usage.iterations == 2


@pytest.mark.parametrize("door", DOORS)
def test_a_model_without_a_price_is_not_called_under_a_dollar_cap(door):
    agent = endless(BudgetCapability(Budget(max_cost_usd=1)))
    agent.model = model_of(SEARCH, model="nobody-knows-it")
    result = ran(agent, door)
    assert outcome(result).stop_reason == "unpriced_model"
    assert agent.model.answers.calls == 0


def test_the_outcome_is_on_what_leaves_the_run():
    class Broken(Exception):
        pass

    def search(query: str) -> str:
        raise Broken

    with pytest.raises(Broken) as left:
        ran(endless(BudgetCapability(Budget(max_iterations=3)), tools=[search]))
    assert outcome(left.value).status == "failed"
    with pytest.raises(BudgetExceeded) as stopped:
        ran(endless(BudgetCapability(Budget(max_iterations=1), on_trip="raise")))
    assert outcome(stopped.value).stop_reason == "max_iterations"


def test_concurrent_runs_with_types_of_their_own_do_not_mix():
    async def main():
        agent = endless(BudgetCapability(Budget(max_iterations=3)))
        kinds = [Report, str] * 8
        results = await asyncio.gather(*(agent.run("Go.", output_type=kind) for kind in kinds))
        return [result.output is None for result in results]

    assert asyncio.run(main()) == [True, False] * 8


def test_counters_of_a_paused_run_are_plain_data():
    agent, _ = approving({"delete": {"path": "a"}}, budget=Budget(max_iterations=3))
    messages = ran(agent).all_messages()
    (kept,) = [
        one.metadata["budgetguard"] for one in messages if "budgetguard" in (one.metadata or {})
    ]
    assert json.loads(json.dumps(kept)) == kept


WITHOUT_BODY = {
    "an unknown tool": ([{"nope": {"a": 1}}], {}),
    "invalid arguments": ([{"search": {"query": [1]}}], {}),
    "invalid output": ([{"final_result": {"x": 1}}], {"output_type": Report}),
    "varied arguments": ([{"nope": {"a": number}} for number in range(30)], {}),
}


# `run_stream` itself raises at the first invalid output: it has no retries.
PRODUCTS = [
    (kind, door)
    for kind in WITHOUT_BODY
    for door in DOORS
    if (kind, door) != ("invalid output", "run_stream")
]


@pytest.mark.parametrize(("kind", "door"), PRODUCTS)
def test_calls_that_are_answered_without_their_body_are_seen_by_loop_detection(kind, door):
    answers, options = WITHOUT_BODY[kind]
    agent = endless(
        BudgetCapability(Budget(max_iterations=30)), answers=answers, retries=50, **options
    )
    result = ran(agent, door)
    found = outcome(result)
    assert (found.stop_reason, found.usage.tool_calls) == ("no_progress", 0)
    assert found.usage.iterations < 10
    checked(result.all_messages())


def test_refusals_of_a_person_are_seen_by_loop_detection_over_pauses():
    agent, _ = approving({"delete": {"path": "a"}}, budget=Budget(max_iterations=30))
    result, rounds = ran(agent), 1
    while outcome(result).status == "paused":
        waiting = [one.tool_call_id for one in result.output.approvals]
        refused = DeferredToolResults(approvals=dict.fromkeys(waiting, False))
        result = ran(
            agent, said=None, message_history=result.all_messages(), deferred_tool_results=refused
        )
        rounds += 1
    assert outcome(result).stop_reason == "no_progress"
    assert rounds < 10


class SlowStore(Plug):
    """Notes the threads that wait for it, as a ledger's answer is waited for."""

    waits = True

    def __init__(self):
        self.threads = []

    def reserve(self, owner, ask):
        self.threads.append(threading.get_ident())
        return True


def test_the_event_loop_does_not_wait_for_a_ledger(monkeypatch):
    store, bodies = SlowStore(), []
    monkeypatch.setattr("budgetguard_core.guard.plugs_of", lambda guard, **_: (store,))
    guard = Guard(Budget(max_tool_calls=2))

    async def search(query: str) -> str:
        bodies.append(query)
        return query

    batch = [("search", {"query": one}) for one in "abc"]
    answers = model_of(batch, "Done.")
    agent = Agent(answers, tools=[search], capabilities=[BudgetCapability(guard)])

    async def main():
        return threading.get_ident(), await agent.run("Go.")

    loop, result = asyncio.run(main())
    assert store.threads
    assert loop not in store.threads
    assert bodies == ["a", "b"]
    assert guard.usage.tool_calls == 2
    assert outcome(result).stop_reason == "max_tool_calls"


def test_without_a_budget_an_agent_has_25_turns():
    assert outcome(ran(endless(BudgetCapability()))).usage.iterations == 25


async def test_an_abort_behind_a_whole_streamed_answer_ends_the_run_at_its_next_step():
    guard = Guard(Budget())
    model = scripted_model(Answers([{"search": {}}]))
    agent = Agent(model, capabilities=[BudgetCapability(guard)])

    @agent.tool_plain
    def search() -> str:
        return "found"

    async with agent.iter("Go.") as run:
        async for node in run:
            if Agent.is_model_request_node(node):
                async with node.stream(run.ctx) as stream:
                    async for _ in stream:
                        pass
                    guard.abort()
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
    assert outcome(run.result).stop_reason is StopReason.ABORTED
    assert guard.usage.model_calls == 1
    assert guard.usage.failed_calls == 0
    assert guard.usage.tool_calls == 0
