"""Scripted Strands agents, and what the tests look at when they are done."""

from __future__ import annotations

import asyncio
from typing import Any

from strands import Agent, tool

from budgetguard_core.testing import Script, calls, check_history
from conformance.budgetguard_strands_driver import ScriptedModel, history_of


class Counter:
    """A tool that answers differently each time, so that no loop is seen."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.tool = tool(name="search", description="Searches.")(self.run)

    def run(self, value: str = "") -> str:
        self.started.append(value)
        return f"result {len(self.started)}"


def sticky(*names: str) -> Script:
    return Script([calls(*(names or ("search",)))])


def made(script: Script, *tools: Any, hooks: Any = (), **options: Any) -> Agent:
    return Agent(
        model=ScriptedModel(script),
        tools=list(tools),
        hooks=list(hooks),
        callback_handler=None,
        **options,
    )


def run(agent: Any, prompt: Any, way: str = "sync", **options: Any) -> tuple[Any, list[Any]]:
    if way == "sync":
        return agent(prompt, **options), []

    async def go():
        if way == "async":
            return await agent.invoke_async(prompt, **options), []
        chunks = [chunk async for chunk in agent.stream_async(prompt, **options)]
        return chunks[-1]["result"], chunks

    return asyncio.run(go())


def is_valid(agent: Agent) -> bool:
    check_history(history_of(agent.messages))
    return True


def results(agent: Agent) -> list[str]:
    return [message.text for message in history_of(agent.messages) if message.role == "tool"]
