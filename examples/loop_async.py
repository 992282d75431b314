"""Async loops with scripted models: parallel tools, a sub-agent, a stream, and a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from budgetguard_core import Budget, Outcome
from budgetguard_core.testing.scripted import Answers
from budgetguard_loop import bounded, run_bounded_async, run_bounded_stream, scripted

BOTH: dict[str, dict[str, Any]] = {"weather": {}, "research": {}}


async def weather() -> str:
    return "rain"


async def research() -> Outcome:
    # Never has enough: the model behind every runaway.
    researcher = scripted.scripted_model(Answers([{"weather": {}}]))
    # Inside another run a Budget is an envelope within that run's.
    found = await run_bounded_async(
        researcher, Budget(max_iterations=3), messages="Look closer.", tools={"weather": weather}
    )
    print(f"  the sub-agent: {found.status}, {found.stop_reason}")
    return found


async def talker(_: list[dict[str, Any]]) -> AsyncIterator[str]:
    for word in ("Take ", "a ", "coat"):
        yield word
    await asyncio.Event().wait()  # a provider that hangs


async def main() -> None:
    # In place of an async function that calls a provider's client.
    planner = scripted.scripted_model(Answers([BOTH, "Take a coat."]))
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
                call.settle(planner([{"role": "user", "content": "Go"}]))
    print(f"  {run.outcome.status}: {run.outcome.stop_reason}")


if __name__ == "__main__":
    asyncio.run(main())
