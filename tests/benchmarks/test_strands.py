"""What the provider costs a cycle and a streamed chunk, beside the same run without it."""

import asyncio

import pytest

pytest.importorskip("strands")

from strands import Agent, tool

from benchmarks.framework_arms import compared, judge
from budgetguard_core import Budget
from budgetguard_core.testing import Call, Reply, Script, calls, says
from budgetguard_strands import BudgetHookProvider
from conformance.budgetguard_strands_driver import ScriptedModel

pytestmark = pytest.mark.benchmark

CYCLES = 20
CHUNKS = 5_000
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


def arms(runner, model):
    """Return the same run bare, bare again, and with the provider."""

    async def through(agent):
        agent.messages.clear()
        agent.event_loop_metrics.traces.clear()
        async for _ in agent.stream_async("Go."):
            pass

    def way(*hooks):
        agent = agent_with(model(), *hooks)
        return lambda: runner.run(through(agent))

    return {"bare": way(), "null": way(), "guard": way(BudgetHookProvider(EVERYTHING))}


def test_a_cycle():
    with asyncio.Runner() as runner:
        ways = arms(runner, lambda: ScriptedModel(Script(replies)))
        times, beyond = compared("a cycle", ways, units=CYCLES, rounds=40)
    assert abs(beyond["null"]) < 60
    assert beyond["guard"] <= 870
    judge(times, "guard", 1.08)


def test_a_streamed_chunk():
    with asyncio.Runner() as runner:
        ways = arms(runner, lambda: Chatty(Script([says("")])))
        times, beyond = compared("a chunk", ways, units=CHUNKS, rounds=20)
    assert abs(beyond["null"]) < 1
    # Four are the two generators of Strands' stage around the stream; two make what the model's
    # own code does between two chunks a part of the run.
    assert beyond["guard"] < 10
    judge(times, "guard", 1.1)
