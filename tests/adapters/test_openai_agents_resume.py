"""Runs that go on from a store, in a new object or process; and tenants that a context names."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from agents import Agent, OpenAIChatCompletionsModel, function_tool
from openai import AsyncOpenAI

from budgetguard_core import (
    Budget,
    ConfigurationError,
    Guard,
    MemoryStore,
    Price,
    PriceBook,
    RunFencedError,
    SqliteStore,
    StopReason,
)
from budgetguard_core.kit import OUTCOME_UNKNOWN, CheckpointError
from budgetguard_core.ledger import Ledger
from budgetguard_core.testing import MODEL, Call
from budgetguard_openai_agents import BudgetHooks, bounded_run, outcome
from conformance.budgetguard_openai_agents_driver import MemorySession
from openai_agents_runs import MODES, agent_of, calls, go, says, script_of, tool, unpaired
from strict_openai_server import NAME, StrictServer

pytestmark = pytest.mark.anyio
modes = pytest.mark.parametrize("mode", MODES)
# A call of the scripted model costs 0.14.
PRICES = PriceBook({MODEL: Price(input=1000, output=2000)})


@modes
async def test_a_run_goes_on_by_its_id(mode, tmp_path):
    store = SqliteStore(tmp_path / "runs.db")
    bodies: list[str] = []
    agent = agent_of(lambda n: calls(Call("act", str(n))), tools=[tool("act", bodies)])
    first = await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=2), store=store))
    run_id = outcome(first).run_id
    hooks = BudgetHooks(Budget(max_iterations=5), store=store, resume=run_id)
    result = await go(mode, agent, "Go on.", hooks=hooks)
    assert outcome(result).run_id == run_id
    assert outcome(result).usage.iterations == 5
    assert outcome(result).earlier_usage.iterations == 2
    assert script_of(agent).calls == len(bodies) == 7
    history = result.to_input_list()
    said = len(first.to_input_list())
    assert history[: said + 1] == [*first.to_input_list(), {"role": "user", "content": "Go on."}]
    assert not unpaired(history)
    # Nobody is asked to say anything.
    hooks = BudgetHooks(Budget(max_iterations=1), store=store, resume=run_id)
    again = await go(mode, agent, [], hooks=hooks)
    assert len(again.to_input_list()) == len(history) + 3


@modes
async def test_a_session_has_the_history_of_a_resumed_run_already(mode, tmp_path):
    store = SqliteStore(tmp_path / "runs.db")
    session = MemorySession("s")
    agent = agent_of(lambda n: calls(Call("act", str(n))), tools=[tool("act", [])])
    hooks = BudgetHooks(Budget(max_iterations=2), store=store)
    first = await go(mode, agent, hooks=hooks, session=session)
    hooks = BudgetHooks(Budget(max_iterations=3), store=store, resume=outcome(first).run_id)
    result = await go(mode, agent, "Go on.", hooks=hooks, session=session)
    stored = await session.get_items()
    assert [item.get("content") for item in stored].count("Go.") == 1
    assert len(stored) == len(result.to_input_list()) == 6 + 1 + 7
    assert not unpaired(stored)


@modes
async def test_what_was_resumed_elsewhere_does_not_go_on(mode, tmp_path):
    """The run looks dead, somebody resumes it, and then it wakes up."""
    store = SqliteStore(tmp_path / "runs.db")
    asleep, woken = asyncio.Event(), asyncio.Event()
    bodies: list[str] = []

    async def act() -> str:
        bodies.append("act")
        asleep.set()
        await woken.wait()
        return f"acted {len(bodies)}"

    agent = agent_of(lambda n: calls("act"), tools=[function_tool(act)])
    guard = Guard(Budget(max_iterations=9), run_id="r")
    sleeping = asyncio.create_task(go(mode, agent, hooks=BudgetHooks(guard, store=store)))
    await asleep.wait()
    other = agent_of(says("Done."))
    hooks = BudgetHooks(Budget(max_iterations=9), store=store, resume="r")
    result = await go(mode, other, [], hooks=hooks)
    assert result.final_output == "Done."
    assert OUTCOME_UNKNOWN in str(result.to_input_list())
    woken.set()
    with pytest.raises(RunFencedError) as left:
        await sleeping
    assert outcome(left.value).status == "failed"
    # It made no further call, and what the other one has saved stays.
    assert script_of(agent).calls == 1
    assert bodies == ["act"]
    assert list(store.load("r").messages) == result.to_input_list()


async def test_a_run_that_cannot_be_found_says_so():
    agent = agent_of(says("Hi."))
    with pytest.raises(ConfigurationError, match="store=None"):
        await bounded_run(agent, "Go.", budget=Budget(), resume="r")
    with pytest.raises(CheckpointError, match="no run 'r'"):
        await bounded_run(agent, "Go.", budget=Budget(), resume="r", store=MemoryStore())
    assert script_of(agent).calls == 0


DIES = """
import asyncio, os, sys
from agents import Agent, OpenAIChatCompletionsModel, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from budgetguard_core import Budget, Guard, SqliteStore
from budgetguard_openai_agents import bounded_run

set_tracing_disabled(True)
bodies = []

def act() -> str:
    bodies.append("act")
    if len(bodies) == 2:
        os._exit(9)
    return "acted"

async def main(url, path):
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        model = OpenAIChatCompletionsModel("gpt-4o", client)
        agent = Agent(name="main", model=model, tools=[function_tool(act)])
        guard = Guard(Budget(max_iterations=9), run_id="r")
        await bounded_run(agent, "Go.", budget=guard, store=SqliteStore(path))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
async def test_the_run_of_a_process_that_was_killed_goes_on(httpserver, tmp_path):
    server = StrictServer(httpserver)
    server.calls = [("act", "{}")]
    url = httpserver.url_for("/v1")
    path = tmp_path / "runs.db"
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", DIES, url, str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 9, done.stderr
    bodies: list[str] = []
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        model = OpenAIChatCompletionsModel(NAME, client)
        agent = Agent(name="main", model=model, tools=[tool("act", bodies)])
        store = SqliteStore(path)
        budget = Budget(max_iterations=3)
        result = await bounded_run(agent, [], budget=budget, store=store, resume="r")
    found = outcome(result)
    assert found.stop_reason is StopReason.MAX_ITERATIONS
    # Two calls of the model before it was killed, one after.
    assert found.usage.iterations == len(httpserver.log) == 3
    assert bodies == ["act"]
    outputs = [i["output"] for i in result.to_input_list() if "output" in i]
    assert outputs[:2] == ["acted", OUTCOME_UNKNOWN]
    assert server.refusals == []
    json.dumps(result.to_input_list())


# A tenant that the run's context names


@dataclass
class Context:
    tenant: str | None = None


@modes
async def test_two_tenants_of_one_ledger_are_bounded_apart(mode, tmp_path):
    hooks = BudgetHooks(
        Budget(max_iterations=9),
        ledger=Ledger(f"sqlite:///{tmp_path / 'ledger.db'}", daily_model_calls=1000),
        tenant=lambda context: context.tenant,
        price_book=PRICES,
    )
    with hooks.envelope.ledger as ledger:
        ledger.set_ceilings("acme", daily_usd=0.25)
        ledger.set_ceilings("globex", daily_usd=100)
        agent = agent_of(lambda n: calls(Call("act", str(n))), tools=[tool("act", [])])
        for tenant, reason in (
            ("acme", StopReason.TENANT_DAILY),
            ("globex", StopReason.MAX_ITERATIONS),
            ("acme", StopReason.TENANT_DAILY),
        ):
            result = await go(mode, agent, hooks=hooks, context=Context(tenant))
            assert outcome(result).stop_reason is reason


@modes
async def test_a_run_for_nobody_is_not_begun(mode, tmp_path):
    hooks = BudgetHooks(
        Budget(),
        ledger=Ledger(f"sqlite:///{tmp_path / 'ledger.db'}", daily_model_calls=1000),
        tenant=lambda context: context.tenant,
    )
    with hooks.envelope.ledger:
        agent = agent_of(says("Hi."))
        with pytest.raises(ConfigurationError, match="tenant"):
            await go(mode, agent, hooks=hooks)
        assert script_of(agent).calls == 0
