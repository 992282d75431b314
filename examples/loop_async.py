"""Async loops with scripted models: parallel tools, a sub-agent, a stream, and a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

from budgetguard_core import Budget, Outcome
from budgetguard_loop import bounded, run_bounded_async, run_bounded_stream

Message: TypeAlias = dict[str, Any]


def asks(*names: str) -> Message:
    calls = [
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in names
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


async def planner(messages: list[Message]) -> Message | str:
    """Stand in for a call of a provider's async client."""
    if messages[-1]["role"] == "user":
        return asks("weather", "research")
    return "Take a coat."


async def researcher(_: list[Message]) -> Message:
    """Never has enough: the model behind every runaway."""
    return asks("weather")


async def weather() -> str:
    return "rain"


async def research() -> Outcome:
    # Inside another run a Budget is an envelope within that run's.
    found = await run_bounded_async(
        researcher, Budget(max_iterations=3), messages="Look closer.", tools={"weather": weather}
    )
    print(f"  the sub-agent: {found.status}, {found.stop_reason}")
    return found


async def talker(_: list[Message]) -> AsyncIterator[str]:
    for word in ("Take ", "a ", "coat"):
        yield word
    await asyncio.Event().wait()  # a provider that hangs


async def main() -> None:
    print("Parallel tools and a sub-agent:")
    outcome = await run_bounded_async(
        planner,
        Budget(max_model_calls=20),
        messages="What should I wear?",
        tools={"weather": weather, "research": research},
    )
    print(f"  {outcome.status}: {outcome.final} ({outcome.usage.model_calls} model calls)")

    print("A stream that hangs:")
    stream = run_bounded_stream(talker, Budget(max_seconds=0.2), messages="What should I wear?")
    async for chunk in stream:
        print(f"  {chunk!r}")
    print(f"  {stream.outcome.status}: {stream.outcome.stop_reason}")

    print("A loop of your own:")
    with bounded(Budget(max_iterations=2)) as run:
        while True:
            with run.model_call() as call:
                call.settle(await planner([{"role": "user", "content": "Go"}]))
    print(f"  {run.outcome.status}: {run.outcome.stop_reason}")


if __name__ == "__main__":
    asyncio.run(main())
