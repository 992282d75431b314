"""The scripted model that users' own tests run their agents with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agents import Agent, function_tool

from budgetguard_core import Budget, StopReason
from budgetguard_core.testing.scripted import Answers
from budgetguard_openai_agents import BudgetHooks, bounded_run_streamed, outcome
from budgetguard_openai_agents.scripted import scripted_model
from openai_agents_runs import MODES, go
from strict_openai_server import check_responses_input

pytestmark = pytest.mark.anyio
modes = pytest.mark.parametrize("mode", MODES)
TEXT = "Two  words,\nand a line.\n"


def search(query: str) -> str:
    """Search."""
    return f"nothing about {query}"


def agent_of(*answers: Any, tools: Any = ()) -> tuple[Agent[Any], Answers]:
    given = Answers(answers)
    found = [function_tool(search), *tools]
    return Agent(name="a", model=scripted_model(given), tools=found), given


@modes
async def test_it_ends_by_itself(mode):
    agent, answers = agent_of({"search": {"query": "x"}}, TEXT)
    result = await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=5)))
    found = outcome(result)
    assert (found.status, result.final_output) == ("completed", TEXT)
    assert answers.calls == found.usage.model_calls == 2
    assert found.usage.tool_calls == 1
    assert (found.usage.input_tokens, found.usage.output_tokens) == (200, 40)
    check_responses_input([{"role": "user", "content": "Go."}, *result.to_input_list()[1:]])


async def test_a_text_is_streamed_in_pieces():
    agent, _ = agent_of(TEXT)
    result = bounded_run_streamed(agent, "Go.", budget=Budget(max_iterations=5))
    events = [event async for event in result.stream_events()]
    raw = [event.data for event in events if event.type == "raw_response_event"]
    deltas = [one.delta for one in raw if one.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == TEXT
    assert raw[-1].type == "response.completed"
    assert [one.sequence_number for one in raw] == list(range(len(raw)))
    names = [event.name for event in events if event.type == "run_item_stream_event"]
    assert names == ["message_output_created"]


@modes
async def test_a_runaway_is_stopped(mode):
    agent, answers = agent_of({"search": {"query": "x"}})
    budget = Budget(max_iterations=3, loop_detection=None)
    result = await go(mode, agent, hooks=BudgetHooks(budget))
    assert outcome(result).stop_reason is StopReason.MAX_ITERATIONS
    assert answers.calls == 3


@modes
async def test_an_answer_may_be_a_failure(mode):
    agent, _ = agent_of(OSError("down"))
    with pytest.raises(OSError, match="down") as left:
        await go(mode, agent, hooks=BudgetHooks(Budget(max_iterations=3)))
    assert outcome(left.value).status == "failed"


@modes
async def test_runs_at_the_same_time_share_no_id(mode):
    agent, _ = agent_of("Hi.")
    results = await asyncio.gather(*(go(mode, agent) for _ in range(5)))
    ids = [item["id"] for result in results for item in result.to_input_list()[1:]]
    assert len(set(ids)) == 5
