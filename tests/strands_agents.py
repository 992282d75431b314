"""Scripted Strands agents, and what the tests look at when they are done."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

from strands import Agent, tool

from budgetguard_core.testing import Script, calls, check_history
from conformance.budgetguard_strands_driver import ScriptedModel, history_of


class Counter:
    """A tool that answers differently each time, so that no loop is seen."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.tool = tool(name="search", description="Searches.")(self.run)
        self._lock = threading.Lock()

    def run(self, value: str = "") -> str:
        # The calls of a batch run in threads: no two of them may have one number.
        with self._lock:
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


class InvalidRequest(Exception):
    """What Bedrock's Converse would refuse."""


def check_request(messages: list[dict[str, Any]]) -> None:
    """Check what Bedrock's Converse checks: roles in turn, and each tool use answered next."""
    # Strands' own window begins with a tool use where it finds no user message.
    if not messages or not (
        messages[0]["role"] == "user" or any("toolUse" in one for one in messages[0]["content"])
    ):
        raise InvalidRequest("the conversation must start with a user message")
    asked: list[str] = []
    before = None
    for place, message in enumerate(messages):
        content = message["content"]
        if message["role"] == before:
            raise InvalidRequest(f"two {before} messages in a row at {place}")
        before = message["role"]
        if not content:
            raise InvalidRequest(f"the content of message {place} is empty")
        if any("text" in block and not block["text"].strip() for block in content):
            raise InvalidRequest(f"a text of message {place} is blank")
        answered = [block["toolResult"]["toolUseId"] for block in content if "toolResult" in block]
        if sorted(answered) != sorted(asked):
            raise InvalidRequest(f"message {place} answers {answered}, asked were {asked}")
        asked = [block["toolUse"]["toolUseId"] for block in content if "toolUse" in block]
        if asked and message["role"] != "assistant":
            raise InvalidRequest(f"a user asks for tools in message {place}")
    if before != "user":
        raise InvalidRequest("the conversation must end with a user message")


def in_new_process(program: str, *arguments: str) -> list[str]:
    """Run a program in a new process, and return the words that it prints.

    Importing the frameworks takes seconds of processor time, and minutes on a busy machine.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


class StrictModel(ScriptedModel):
    """Refuses what Bedrock's Converse would refuse."""

    async def stream(self, messages, *args, **kwargs):
        check_request(messages)
        async for chunk in super().stream(messages, *args, **kwargs):
            yield chunk


def strict(script: Script, *tools: Any, hooks: Any = (), **options: Any) -> Agent:
    agent = made(script, *tools, hooks=hooks, **options)
    agent.model = StrictModel(script)
    return agent
