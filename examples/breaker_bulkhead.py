"""At most two browsers at a time; the other calls of the batch wait for a place."""

from __future__ import annotations

import asyncio
from typing import Any

from budgetguard_core import Budget
from budgetguard_core.breakers import BulkheadConfig
from budgetguard_loop import run_bounded_async


def model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Stand in for a model that opens six pages at once."""
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": "Six pages read."}
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "browse", "arguments": f'{{"page": {number}}}'},
        }
        for number in range(6)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


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
    outcome = await run_bounded_async(
        model,
        Budget(bulkheads={"browse": places}, max_iterations=25),
        messages="Read the six pages.",
        tools={"browse": browse},
    )
    print(f"{outcome.status}: {outcome.usage.tool_calls} pages, at most {most} at a time")


if __name__ == "__main__":
    asyncio.run(main())
