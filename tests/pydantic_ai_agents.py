"""Agents of Pydantic AI for tests: a scripted model, and every way to run one."""

from __future__ import annotations

import asyncio
from itertools import count, pairwise

from pydantic_ai import Agent

from budgetguard_core.testing.scripted import Answers
from budgetguard_pydantic_ai.scripted import scripted_model

DOORS = ("run", "run_sync", "run_stream", "run_stream_events", "iter", "iter, node.stream")
__all__ = ["DOORS", "checked", "endless", "model_of", "ran"]


def model_of(*answers, **options):
    return scripted_model(Answers(answers, **options))


def endless(*capabilities, answers=({"search": {"query": "x"}},), **options):
    """An agent that never ends by itself."""
    pages = count()

    def search(query: str = "") -> str:
        return f"page {next(pages)}"

    options.setdefault("tools", [search])
    return Agent(model_of(*answers), capabilities=[*capabilities], **options)


async def run_async(agent, door, said, **options):
    if door == "run":
        return await agent.run(said, **options)
    if door == "run_stream":
        async with agent.run_stream(said, **options) as result:
            result.output = await result.get_output()
        return result
    if door == "run_stream_events":
        async with agent.run_stream_events(said, **options) as events:
            chunks = [event async for event in events]
        return chunks[-1].result
    async with agent.iter(said, **options) as run:
        async for node in run:
            if door != "iter" and Agent.is_model_request_node(node):
                async with node.stream(run.ctx) as stream:
                    async for _ in stream:
                        pass
    return run.result


def ran(agent, door="run", said="Go.", **options):
    """Run an agent in one of the ways, and return its result."""
    with asyncio.Runner() as runner:
        if door == "run_sync":
            # The framework makes a loop where there is none, and leaves it open.
            asyncio.set_event_loop(runner.get_loop())
            return agent.run_sync(said, **options)
        return runner.run(run_async(agent, door, said, **options))


def checked(messages):
    """Check a history as a strict provider does: each call has its result, at once and once."""
    due: list[str] = []
    for message in messages:
        if message.kind == "response":
            assert not due
            assert message.parts
            due = [part.tool_call_id for part in message.tool_calls]
            continue
        for part in message.parts:
            if part.part_kind in ("tool-return", "retry-prompt") and part.tool_name:
                due.remove(part.tool_call_id)
    assert not due
    roles = [message.kind for message in messages]
    assert all(one != two or one == "request" for one, two in pairwise(roles))
