"""What the provider costs a cycle and a streamed chunk, beside the same run without it.

Runs with and without take turns, and each counts with its best turn.
"""

import asyncio
import gc
import time

import pytest

pytest.importorskip("strands")

from strands import Agent, tool

from budgetguard_core import Budget
from budgetguard_core.testing import Call, Reply, Script, calls, says
from budgetguard_strands import BudgetHookProvider
from conformance.budgetguard_strands_driver import ScriptedModel

pytestmark = pytest.mark.benchmark

CYCLES = 40
CHUNKS = 10_000
EVERYTHING = Budget(
    max_iterations=10**9,
    max_model_calls=10**9,
    max_tool_calls=10**9,
    max_total_tokens=10**15,
    max_seconds=10**6,
    tool_quotas={"read_*": 10**9, "*": 10**9},
)


@tool
def read_file(value: str = "") -> str:
    """Reads a file."""
    return f"line {value} of the file"


class Chatty(ScriptedModel):
    """Answers in many chunks."""

    async def stream(self, *args, **kwargs):
        yield {"messageStart": {"role": "assistant"}}
        for _ in range(CHUNKS):
            yield {"contentBlockDelta": {"delta": {"text": "word "}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn"}}


def replies(number: int) -> Reply:
    place = number % CYCLES
    return says("Done.") if place == CYCLES - 1 else calls(Call("read_file", str(place)))


def agent_with(model, *hooks):
    return Agent(model=model, tools=[read_file], hooks=list(hooks), callback_handler=None)


async def seconds(agent):
    agent.messages.clear()
    agent.event_loop_metrics.traces.clear()
    started = time.thread_time()
    async for _ in agent.stream_async("Go."):
        pass
    return time.thread_time() - started


def best_of(agents, rounds):
    async def measure():
        times = [[] for _ in agents]
        for _ in range(rounds):
            for agent, taken in zip(agents, times, strict=True):
                gc.collect()
                gc.disable()
                try:
                    taken.append(await seconds(agent))
                finally:
                    gc.enable()
        return [min(taken) for taken in times]

    return asyncio.run(measure())


def test_a_cycle_costs_at_most_1_1_times_the_same_cycle_without():
    bare, guarded = best_of(
        [
            agent_with(ScriptedModel(Script(replies))),
            agent_with(ScriptedModel(Script(replies)), BudgetHookProvider(EVERYTHING)),
        ],
        rounds=40,
    )
    print(
        f"\na cycle: {bare / CYCLES * 1e6:.0f} us without, {guarded / CYCLES * 1e6:.0f} us with, "
        f"{guarded / bare:.3f} times"
    )
    assert guarded <= 1.1 * bare


def test_a_streamed_chunk_costs_at_most_1_2_times_the_same_chunk_without():
    bare, guarded = best_of(
        [
            agent_with(Chatty(Script([says("")]))),
            agent_with(Chatty(Script([says("")])), BudgetHookProvider(EVERYTHING)),
        ],
        rounds=20,
    )
    print(
        f"\na chunk: {bare / CHUNKS * 1e6:.2f} us without, {guarded / CHUNKS * 1e6:.2f} us with, "
        f"{guarded / bare:.3f} times"
    )
    assert guarded <= 1.2 * bare
