"""Runs made of everything at once: kinds of tools, caps, ways in, faults, sessions, moments.

Each goes on after a stop or a question up to three times: by its session, its list or its state.

The model and the bodies of the tools count for themselves. By hand, any number of seeds:
`BUDGETGUARD_SEEDS=5000`.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest
from agents import Agent, ModelBehaviorError, Runner, RunState, UserError, function_tool
from agents.models.fake_id import FAKE_RESPONSES_ID
from openai.types.responses import ResponseFunctionToolCall

from budgetguard_core import Budget, Guard
from budgetguard_core.testing import ManualClock, ProviderError
from budgetguard_openai_agents import BudgetHooks, outcome
from conformance.budgetguard_openai_agents_driver import MemorySession, own_loop
from openai_agents_raw import KINDS, RawModel, call_of, text_item, toolbox
from openai_agents_runs import MODES, go, unpaired
from strict_openai_server import Refused, check_responses_input

pytestmark = pytest.mark.anyio
ENTRIES = (*MODES, "run_sync")
EXTRA = ("broken", "ask", "handoff", "send")
CAPS = (
    {"max_iterations": 3},
    {"max_model_calls": 4},
    {"max_tool_calls": 4},
    {"max_total_tokens": 900},
    {"tool_quotas": {"act": 2, "sql": 1}, "max_iterations": 6},
    {"max_iterations": 9, "max_tool_calls": 9},
)
SEEDS = range(int(os.environ.get("BUDGETGUARD_SEEDS", "75")))


class FuzzModel(RawModel):
    """Fails, aborts the run or hangs at the call that it was told to."""

    fault: tuple[str, int] | None = None
    guard: Guard | None = None
    clock = ManualClock()

    async def _before(self) -> None:
        if self.fault is None or self.fault[1] != self.calls:
            return
        if self.fault[0] == "error":
            self.calls += 1
            raise ProviderError("down")
        # An abort of a run that was stopped already changes nothing.
        if self.fault[0] != "error" and self.guard is not None and self.guard.trip is None:
            if self.fault[0] == "abort":
                self.guard.abort("enough")
            else:
                self.clock.advance(3600)
            self.calls += 1
            await asyncio.get_running_loop().create_future()

    async def get_response(self, *args: Any, **facts: Any) -> Any:
        await self._before()
        return await super().get_response(*args, **facts)

    async def stream_response(self, *args: Any, **facts: Any) -> Any:
        await self._before()
        async for event in super().stream_response(*args, **facts):
            yield event


class Case:
    """One run and those that go on from it, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.bodies: list[str] = []
        # It passes when the test moves the clock, at the moment that was drawn.
        self.clock = ManualClock()
        self.given: Any = "Go."
        self.answers = 0
        self.entry = draw.choice(ENTRIES)
        self.session = MemorySession("s") if draw.random() < 0.6 else None
        self.kinds = draw.sample(KINDS, draw.randint(1, 3))
        extra = [one for one in EXTRA if draw.random() < 0.4]
        box = toolbox(self.bodies)
        self.numbers = iter(range(1000))
        turns = [
            [self._call(draw, [*self.kinds, *extra]) for _ in range(draw.randint(1, 4))]
            for _ in range(draw.randint(1, 6))
        ]
        usage = draw.choice([(60, 20), (60, 20), (0, 0)])
        self.model = FuzzModel(*turns, [text_item("Done.")], usage=usage)
        self.below = FuzzModel(
            [call_of("function", f"b{seed}")], [text_item("Below.")], usage=(60, 20)
        )
        self.model.clock = self.below.clock = self.clock
        kind = draw.choice([None, None, "error", "abort", "deadline"])
        self.model.fault = None if kind is None else (kind, draw.randint(0, 4))
        if draw.random() < 0.3:
            # The tool's own run gets it instead.
            self.below.fault, self.model.fault = self.model.fault, None
        self.renew()
        worker = Agent(name="worker", model=self.below, tools=[box["function"]])
        other = Agent(name="other", model=self.model, tools=[])

        def broken() -> str:
            self.bodies.append("broken")
            raise ValueError("no disk")

        def send() -> str:
            self.bodies.append("send")
            return "sent"

        tools = [box[one] for one in self.kinds if one != "mcp"]
        if "send" in extra:
            tools.append(function_tool(send, needs_approval=True))
        if "broken" in extra:
            tools.append(function_tool(broken))
        if "ask" in extra:
            ask = worker.as_tool(tool_name="ask", tool_description="Ask.")
            tools.append(ask)
        other.tools = list(tools)
        other.mcp_servers = [box["mcp"]] if "mcp" in self.kinds else []
        self.agent = Agent(
            name="main",
            model=self.model,
            tools=tools,
            handoffs=[other] if "handoff" in extra else [],
            mcp_servers=other.mcp_servers,
        )
        other.handoffs = [self.agent] if "handoff" in extra else []

    def _call(self, draw: random.Random, kinds: list[str]) -> Any:
        kind, number = draw.choice(kinds), next(self.numbers)
        if kind in KINDS:
            return call_of(kind, number)
        name = "transfer_to_other" if kind == "handoff" else kind
        arguments = '{"input": "?"}' if kind == "ask" else "{}"
        return ResponseFunctionToolCall(
            call_id=f"c{number}", name=name, arguments=arguments, type="function_call"
        )

    def renew(self) -> None:
        """Begin a run under a fresh guard."""
        self.budget = Budget(**self.draw.choice(CAPS), loop_detection=None, max_seconds=0.05)
        self.guard = self.model.guard = self.below.guard = Guard(self.budget, clock=self.clock)
        self.calls_before = self.model.calls + self.below.calls
        self.bodies_before = len(self.bodies)

    async def goes_on(self, result: Any) -> None:
        """Set what the next run is given."""
        state = None
        if result.interruptions or self.draw.random() < 0.4:
            state = result.to_state()
            for item in result.interruptions:
                answer = state.approve if self.draw.random() < 0.7 else state.reject
                answer(item)
                self.answers += 1
            if self.draw.random() < 0.5:
                state = await RunState.from_string(self.agent, state.to_string())
        if not result.interruptions:
            self.renew()
        told = [*result.to_input_list(), {"role": "user", "content": "Go on."}]
        self.given = state or (told if self.session is None else "Go on.")


async def ran(case: Case) -> tuple[Any, BaseException | None]:
    """Run the case by its way in."""
    hooks = BudgetHooks(case.guard)
    try:
        if case.entry == "run_sync":
            return await asyncio.to_thread(ran_sync, case, hooks), None
        return await go(case.entry, case.agent, case.given, session=case.session, hooks=hooks), None
    except (ProviderError, ModelBehaviorError, UserError) as error:
        return None, error


def ran_sync(case: Case, hooks: BudgetHooks) -> Any:
    with own_loop():
        return Runner.run_sync(case.agent, case.given, session=case.session, hooks=hooks)


@pytest.mark.sample(11)
@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_comes_together_the_budget_holds(seed):
    case = Case(seed)
    for number in range(4):
        result, raised = await ran(case)
        await check(case, result, raised, is_first=number == 0)
        if result is None or outcome(result).status == "completed":
            return
        await case.goes_on(result)


async def check(case: Case, result: Any, raised: BaseException | None, *, is_first: bool) -> None:
    guard, budget = case.guard, case.budget
    found = outcome(raised if result is None else result)
    calls = case.model.calls + case.below.calls - case.calls_before
    usage = guard.usage
    assert usage.model_calls == calls
    assert calls <= min(budget.max_model_calls or 99, budget.max_iterations or 99)
    # An agent that is a tool has no body that writes itself down.
    begun = len(case.bodies) - case.bodies_before
    if found.status == "paused" and guard.trip is not None:
        # What waits for a person in a run that was stopped meanwhile keeps its place.
        begun += len(result.interruptions)
    assert usage.tool_calls == begun + guard.tool_counts.get("ask", 0)
    assert usage.tool_calls <= (budget.max_tool_calls or 99)
    if budget.max_total_tokens is not None:
        assert usage.total_tokens <= budget.max_total_tokens + 100
    assert usage.reserved_tokens == 0
    # No completed call is made again.
    once = [body for body in case.bodies if body not in ("send", "broken")]
    assert len(once) == len(set(once))
    # What a limit had stopped already is a terminated run, whatever leaves it then.
    assert raised is None or found.status == ("failed" if guard.trip is None else "terminated")
    assert found.status in ("completed", "terminated", "failed", "paused")
    if found.status == "paused":
        assert result.interruptions
        return
    assert not unpaired(found.messages)
    if result is None:
        return
    if found.status == "terminated":
        assert found.stop_reason is not None
    interrupted = [record for record in found.tool_calls if record.status == "interrupted"]
    assert len(guard.open_calls()) == len(interrupted)
    history = result.to_input_list()
    assert not unpaired(history)
    _check(history)
    if case.session is not None:
        stored = await case.session.get_items()
        assert not unpaired(stored)
        _check(stored)
        # Of a run that completed the SDK gives what is new.
        assert len(stored) == len(history) or not is_first


def _check(items: Any) -> None:
    # Items of local tools have forms of their own, and the SDK sends no id that it made up.
    known = [
        {name: value for name, value in one.items() if value != FAKE_RESPONSES_ID}
        for one in items
        if str(one.get("type", "message")).startswith(("func", "mess"))
    ]
    try:
        check_responses_input(known)
    except Refused as why:
        pytest.fail(str(why))
