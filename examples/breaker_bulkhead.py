"""At most two browsers at a time; the other calls of the batch wait for a place."""

from __future__ import annotations

import asyncio

from budgetguard_core import Budget
from budgetguard_core.breakers import BulkheadConfig
from budgetguard_core.testing.scripted import Answers
from budgetguard_loop import run_bounded_async, scripted


async def main() -> None:
    running: list[int] = []
    most = 0

    async def browse(page: int) -> str:
        nonlocal most
        running.append(page)
        most = max(most, len(running))
        for _ in range(10):
            await asyncio.sleep(0)
        running.remove(page)
        return f"page {page}"

    places = BulkheadConfig(max_concurrent_calls=2, max_wait_duration=30)
    answers = Answers([[("browse", {"page": page}) for page in range(6)], "Six pages read."])
    outcome = await run_bounded_async(
        scripted.scripted_model(answers),
        Budget(bulkheads={"browse": places}, max_iterations=25),
        messages="Read the six pages.",
        tools={"browse": browse},
    )
    print(f"{outcome.status}: {outcome.usage.tool_calls} pages, at most {most} at a time")


if __name__ == "__main__":
    asyncio.run(main())
