"""Agents with a scripted model, and the two ways to run them inside an event loop."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from agents import Agent, FunctionTool, Runner, function_tool

from budgetguard_core.testing import Call, Script, calls, says
from conformance.budgetguard_openai_agents_driver import ScriptedModel

MODES = ("run", "run_streamed")


def agent_of(*replies: Any, tools: Any = (), **options: Any) -> Agent[Any]:
    """Make an agent whose model gives these replies; the last one again and again."""
    script = Script(replies if not callable(replies[0]) else replies[0])
    name = options.pop("name", "main")
    return Agent(name=name, model=ScriptedModel(script), tools=list(tools), **options)


def script_of(agent: Agent[Any]) -> Script:
    model = agent.model
    assert isinstance(model, ScriptedModel)
    return model.script


def tool(name: str, bodies: list[str], result: Any = None, **options: Any) -> FunctionTool:
    """Make a tool that writes its name down when its body starts; each result is a new one."""

    async def body(value: str = "") -> str:
        bodies.append(name)
        return f"{name} {len(bodies)}" if result is None else result

    return function_tool(body, name_override=name, strict_mode=False, **options)


async def go(mode: str, agent: Agent[Any], given: Any = "Go.", **options: Any) -> Any:
    """Run to the end; the events of a stream are in `result.events`."""
    if mode == "run":
        return await Runner.run(agent, given, **options)
    result = Runner.run_streamed(agent, given, **options)
    events = []
    async with aclosing(result.stream_events()) as stream:
        async for event in stream:
            events.append(event)
    result.__dict__["events"] = events
    return result


def kinds(result: Any) -> list[str]:
    """Name the items of the history that a result gives."""
    found = []
    for item in result.to_input_list():
        kind = item.get("type", "message")
        name = item.get("role") if kind == "message" else item["call_id"]
        found.append(f"{kind}:{name}")
    return found


def unpaired(items: Any) -> set[Any]:
    """List the calls without a result and the results without a call."""
    asked = {item["call_id"] for item in items if str(item.get("type", "")).endswith("_call")}
    given = {item["call_id"] for item in items if str(item.get("type", "")).endswith("_output")}
    return asked ^ given


__all__ = [
    "MODES",
    "Call",
    "agent_of",
    "calls",
    "go",
    "kinds",
    "says",
    "script_of",
    "tool",
    "unpaired",
]
