"""Each way into a framework, sync, async and streamed, for agents with a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from budgetguard_core import Budget, Outcome

MODES = ("sync", "async", "streamed")
GRAPH_WAYS = ("bounded", "callback", "middleware")
AGENT_WAYS = ("hooks", "bounded_run")


def run_graph(
    way: str,
    mode: str,
    make: Callable[..., Any],
    budget: Budget,
    given: Any,
    config: Any = None,
) -> tuple[Any, Outcome]:
    """Run the agent that `make(middleware)` makes; return its last state and the outcome."""
    from budgetguard_langgraph import BudgetCallback, BudgetMiddleware, bounded

    ended: list[Outcome] = []
    config = dict(config or {})
    if way == "middleware":
        agent = make([BudgetMiddleware(budget, on_outcome=ended.append)])
    elif way == "bounded":
        agent = bounded(make([]), budget, on_outcome=ended.append)
    else:
        agent = make([])
        config["callbacks"] = [BudgetCallback(budget, on_outcome=ended.append)]
    if mode == "sync":
        result = agent.invoke(given, config)
    elif mode == "async":
        result = asyncio.run(agent.ainvoke(given, config))
    else:
        result = list(agent.stream(given, config, stream_mode="values"))[-1]
    return result, ended[-1]


def run_agents(way: str, mode: str, agent: Any, budget: Budget, given: Any, **more: Any) -> Any:
    """Run an agent of the Agents SDK; return its result."""
    from agents import Runner

    from budgetguard_openai_agents import (
        BudgetHooks,
        bounded_run,
        bounded_run_streamed,
        bounded_run_sync,
    )

    if way == "hooks":
        more["hooks"] = BudgetHooks(budget)
        calls = (Runner.run_sync, Runner.run, Runner.run_streamed)
    else:
        more["budget"] = budget
        calls = (bounded_run_sync, bounded_run, bounded_run_streamed)
    call = dict(zip(MODES, calls, strict=True))[mode]
    if mode == "sync":
        try:
            return call(agent, given, **more)
        finally:
            # The SDK leaves it open, for the next call of the thread.
            asyncio.get_event_loop_policy().get_event_loop().close()
            asyncio.set_event_loop(None)

    async def go() -> Any:
        if mode == "async":
            return await call(agent, given, **more)
        result = call(agent, given, **more)
        async for _ in result.stream_events():
            pass
        return result

    return asyncio.run(go())


def run_strands(mode: str, agent: Any, given: Any, **more: Any) -> Any:
    """Run a Strands agent, swarm or graph; return its result."""
    if mode == "sync":
        return agent(given, **more)

    async def go() -> Any:
        if mode == "async":
            return await agent.invoke_async(given, **more)
        return [chunk async for chunk in agent.stream_async(given, **more)][-1]["result"]

    return asyncio.run(go())
